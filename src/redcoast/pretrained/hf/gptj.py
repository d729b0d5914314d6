"""The settings and tensors of GPT-J in Hugging Face's format."""

from typing import Any

from ...models.gptj import GPTJConfig
from .._settings import REQUIRED, read_fields, read_settings, rename, write_fields
from .._tensors import Tensor
from ._tables import EMBED, OUT_OF_HEADS, TURNED, VECTOR, attention, norm, own_head, tied_head

BASE_PREFIX = "transformer."
# Causal masks, the score of masked tokens, and the rotary angles.
BUFFERS = (r"^(transformer\.)?h\.\d+\.attn\.(bias|masked_bias|embed_positions)$",)

_NAMES = {
    "vocab": "vocab_size",
    "width": "n_embd",
    "layers": "n_layer",
    "heads": "n_head",
    "hidden": "n_inner",
    "rotary_dim": "rotary_dim",
    "activation": "activation_function",
    "norm_eps": "layer_norm_epsilon",
    "tied": "tie_word_embeddings",
    "embed_dropout": "embd_pdrop",
    "residual_dropout": "resid_pdrop",
    "attention_dropout": "attn_pdrop",
    "context": "n_positions",
    "bos": "bos_token_id",
    "pad": "pad_token_id",
}
_OTHER_NAMES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
# Settings of heads that are not implemented, and of old versions of `transformers`.
_IGNORED = """
    summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout
    n_ctx is_decoder decoder_start_token_id
"""


def read(settings: dict[str, Any]) -> dict[str, Any]:
    defaults = {
        **dict.fromkeys(_NAMES.values(), REQUIRED),
        "n_inner": None,
        "rotary_dim": 64,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": False,
        **dict.fromkeys(("embd_pdrop", "resid_pdrop", "attn_pdrop"), 0.0),
        "n_positions": 2048,
        **dict.fromkeys(("bos_token_id", "eos_token_id"), 50256),
        "pad_token_id": None,
    }
    only = {
        "model_type": ("gptj",),
        "rotary": (True,),
        "scale_attn_weights": (True,),
        **dict.fromkeys(("is_encoder_decoder", "add_cross_attention"), (False,)),
    }
    settings = rename(settings, _OTHER_NAMES)
    c = read_settings(settings, defaults, only, tuple(_IGNORED.split()))
    if c["rotary_dim"] is None:
        raise ValueError("`rotary_dim` must be a number of features, but is None.")
    hidden = 4 * c["n_embd"] if c["n_inner"] is None else c["n_inner"]
    return read_fields(c, _NAMES) | {"hidden": hidden}


def write(config: GPTJConfig) -> dict[str, Any]:
    c = config
    settings = write_fields(c, _NAMES)
    return settings | {"architectures": ["GPTJForCausalLM"], "model_type": "gptj"}


def tensors(config: GPTJConfig) -> dict[str, Tensor]:
    """Maps each array to its published tensors."""
    layer = "transformer.h.{layer}."
    return {
        "embed": Tensor("transformer.wte.weight", EMBED),
        **norm("layers/norm", layer + "ln_1"),
        **attention(layer + "attn.{part}_proj.weight", *"qkv"),
        "layers/wo": Tensor(layer + "attn.out_proj.weight", OUT_OF_HEADS),
        "layers/up": Tensor(layer + "mlp.fc_in.weight", TURNED),
        "layers/up_bias": Tensor(layer + "mlp.fc_in.bias", "hidden -> hidden"),
        "layers/down": Tensor(layer + "mlp.fc_out.weight", TURNED),
        "layers/down_bias": Tensor(layer + "mlp.fc_out.bias", VECTOR),
        **norm("norm", "transformer.ln_f"),
        "head_bias": Tensor("lm_head.bias", "vocab -> vocab"),
        **own_head(config),
    }


duplicates = tied_head("transformer.wte.weight")
