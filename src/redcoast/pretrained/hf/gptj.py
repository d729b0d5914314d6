"""The settings and tensors of GPT-J in Hugging Face's format."""

from ...models.gptj import GPTJConfig
from .._settings import Fields, Settings, write_fields
from .._tensors import Tensor
from ._tables import EMBED, OUT_PROJ, attention, dense, norm, own_head
from .gpt2 import GPT2_FIELDS, read_gpt2

BASE_PREFIX = "transformer."
# Causal masks, the score of masked tokens, and the rotary angles.
BUFFERS = (r"^(transformer\.)?h\.\d+\.attn\.(bias|masked_bias|embed_positions)$",)

_FIELDS = {
    **GPT2_FIELDS,
    "rotary_dim": ("rotary_dim", 64),
    "context": ("n_positions", 2048),
    "tied": ("tie_word_embeddings", False),
    "embed_dropout": ("embd_pdrop", 0.0),
    "residual_dropout": ("resid_pdrop", 0.0),
    "attention_dropout": ("attn_pdrop", 0.0),
}


def read(settings: Settings) -> Fields:
    only = {
        "model_type": ("gptj",),
        "rotary": (True,),
        "scale_attn_weights": (True,),
        "add_cross_attention": (False,),
    }
    fields = read_gpt2(settings, _FIELDS, only=only, ignored="is_decoder")
    # Null is no number of features that are rotated.
    if fields["rotary_dim"] is None:
        raise ValueError("`rotary_dim` must be a number of features, but is None.")
    return fields


def write(config: GPTJConfig) -> Settings:
    kind = {"architectures": ["GPTJForCausalLM"], "model_type": "gptj"}
    return write_fields(config, _FIELDS) | kind


def tensors(config: GPTJConfig) -> dict[str, Tensor]:
    layer = "transformer.h.{layer}."
    return {
        "embed": Tensor("transformer.wte.weight", EMBED),
        # One norm for attention and network, which run side by side.
        **norm("layers/norm", layer + "ln_1"),
        **attention("layers/", layer + "attn.", OUT_PROJ),
        **dense("layers/up", layer + "mlp.fc_in"),
        **dense("layers/down", layer + "mlp.fc_out"),
        **norm("norm", "transformer.ln_f"),
        "head_bias": Tensor("lm_head.bias", "vocab -> vocab"),
        **own_head(config),
    }
