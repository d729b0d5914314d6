"""The settings and tensors of GPT-J in Hugging Face's format."""

from typing import Any

from ...models.gptj import GPTJConfig
from .._settings import REQUIRED, published_ids, read_settings, rename, token_ids
from .._tensors import Tensor

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
    fields = {field: c[name] for field, name in _NAMES.items()}
    hidden = 4 * c["n_embd"] if c["n_inner"] is None else c["n_inner"]
    return fields | {"hidden": hidden, "eos": token_ids(c["eos_token_id"])}


def write(config: GPTJConfig) -> dict[str, Any]:
    c = config
    settings = {name: getattr(c, field) for field, name in _NAMES.items()}
    settings |= published_ids(eos=c.eos, bos=c.bos, pad=c.pad)
    return settings | {"architectures": ["GPTJForCausalLM"], "model_type": "gptj"}


def tensors(config: GPTJConfig) -> dict[str, Tensor]:
    """Maps each array to its published tensors."""
    layer = "transformer.h.{layer}."
    into = "(heads head_dim) width -> width heads head_dim"
    out = "width (heads head_dim) -> heads head_dim width"
    turned = "outputs inputs -> inputs outputs"
    found = {
        "embed": Tensor("transformer.wte.weight", "vocab width -> vocab width"),
        "layers/norm": Tensor(layer + "ln_1.weight", "width -> width"),
        "layers/norm_shift": Tensor(layer + "ln_1.bias", "width -> width"),
        "layers/wq": Tensor(layer + "attn.q_proj.weight", into),
        "layers/wk": Tensor(layer + "attn.k_proj.weight", into),
        "layers/wv": Tensor(layer + "attn.v_proj.weight", into),
        "layers/wo": Tensor(layer + "attn.out_proj.weight", out),
        "layers/up": Tensor(layer + "mlp.fc_in.weight", turned),
        "layers/up_bias": Tensor(layer + "mlp.fc_in.bias", "hidden -> hidden"),
        "layers/down": Tensor(layer + "mlp.fc_out.weight", turned),
        "layers/down_bias": Tensor(layer + "mlp.fc_out.bias", "width -> width"),
        "norm": Tensor("transformer.ln_f.weight", "width -> width"),
        "norm_shift": Tensor("transformer.ln_f.bias", "width -> width"),
        "head_bias": Tensor("lm_head.bias", "vocab -> vocab"),
    }
    if not config.tied:
        found["head"] = Tensor("lm_head.weight", turned)
    return found


def duplicates(config: GPTJConfig) -> dict[str, str]:
    """Maps the names under which a file may hold a tensor again to the tensor's own name."""
    return {"lm_head.weight": "transformer.wte.weight"} if config.tied else {}
