"""The settings and tensors of Mamba-2 in Hugging Face's format."""

import math

from ...models.mamba2 import Mamba2Config
from .._settings import Fields, Settings, read_settings, write_fields
from .._tensors import Tensor
from ._tables import EMBED, TURNED, VECTOR, consecutive, own_head, under

BASE_PREFIX = "backbone."

_FIELDS = {
    "vocab": "vocab_size",
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_heads",
    "head_size": "head_dim",
    "state": "state_size",
    "groups": ("n_groups", 8),
    "taps": ("conv_kernel", 4),
    "chunk": ("chunk_size", 256),
    "norm_eps": ("layer_norm_epsilon", 1e-5),
    "wide_residual": ("residual_in_fp32", True),
    "tied": ("tie_word_embeddings", False),
    "bos": ("bos_token_id", 0),
    "pad": ("pad_token_id", 1),
}
# Settings of the initialisation, sizes that follow from others, and settings that published files
# have and `transformers` does not read.
_IGNORED = """
    time_step_rank time_step_min time_step_max time_step_floor time_step_scale
    rescale_prenorm_residual intermediate_size rms_norm norm_before_gate use_mambapy layer_types
"""


def read(settings: Settings) -> Fields:
    declared = (settings.get(name) for name in ("num_heads", "head_dim", "hidden_size"))
    sizes = [value for value in declared if type(value) is int and value > 0]
    expand: float = 2
    if len(sizes) == 3:
        heads, head_dim, width = sizes
        expand = heads * head_dim / width
    only = {
        "model_type": ("mamba2",),
        "hidden_act": ("silu",),
        "use_bias": (False,),
        "use_conv_bias": (True,),
        # A file of `transformers` stores infinity in one of these forms.
        "time_step_limit": ([0.0, math.inf], [0.0, "Infinity"], [0.0, {"__float__": "Infinity"}]),
        "expand": (expand,),
    }
    options = {"only": only, "ignored": _IGNORED}
    _, fields = read_settings(settings, _FIELDS, {"eos_token_id": 2}, **options)
    return fields


def write(config: Mamba2Config) -> Settings:
    c = config
    settings = write_fields(c, _FIELDS)
    settings |= {"architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2"}
    settings |= {"hidden_act": "silu", "use_bias": False, "use_conv_bias": True}
    return settings | {"expand": c.inner // c.width}


def tensors(config: Mamba2Config) -> dict[str, Tensor]:
    """Several arrays share a tensor."""
    c, layer = config, "backbone.layers.{layer}."
    mixer, small = layer + "mixer.", c.groups * c.state
    table = {
        "embed": Tensor("backbone.embeddings.weight", EMBED),
        "layers/norm": Tensor(layer + "norm.weight", VECTOR),
        "layers/steps_bias": Tensor(mixer + "dt_bias", "heads -> heads"),
        "layers/log_decay": Tensor(mixer + "A_log", "heads -> heads"),
        "layers/skip": Tensor(mixer + "D", "heads -> heads"),
        "layers/inner_norm": Tensor(mixer + "norm.weight", VECTOR),
        "layers/down": Tensor(mixer + "out_proj.weight", TURNED),
        "norm": Tensor("backbone.norm_f.weight", VECTOR),
    }
    # The rows of `in_proj`, in this order: z, x, B, C and dt of the paper.
    sizes = {"gate": c.inner, "x": c.inner, "b": small, "c": small, "steps": c.heads}
    table |= under("layers/", consecutive(sizes, "outputs", mixer + "in_proj.weight", TURNED))
    # The convolution is over x, B and C.
    kernels = {"conv_x": c.inner, "conv_b": small, "conv_c": small}
    biases = {"conv_x_bias": c.inner, "conv_b_bias": small, "conv_c_bias": small}
    kernel, bias = "channels 1 taps -> taps channels", "channels -> channels"
    table |= under("layers/", consecutive(kernels, "channels", mixer + "conv1d.weight", kernel))
    table |= under("layers/", consecutive(biases, "channels", mixer + "conv1d.bias", bias))
    return table | own_head(c)
