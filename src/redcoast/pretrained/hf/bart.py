"""The settings and tensors of BART in Hugging Face's format."""

from ...models.bart import BartConfig
from .._settings import Fields, Settings, read_settings, rename, write_fields
from .._tensors import Tensor
from ._stacks import OTHER_STACK_NAMES, STACK_FIELDS, only_stacks, stack_tensors, write_stacks
from ._tables import EMBED, norm

BASE_PREFIX = "model."
BUFFERS = (r"^(model\.)?(encoder|decoder)\.version$",)
# Files of the base model lack it, and in all others it is zero unless a user has set it.
ZEROS = ("final_logits_bias",)

_FIELDS = {
    **STACK_FIELDS,
    "positions": ("max_position_embeddings", 1024),
    "scale_embedding": ("scale_embedding", False),
    "dropout": ("dropout", 0.1),
    "decoder_start": ("decoder_start_token_id", 2),
    "bos": ("bos_token_id", 0),
    "pad": ("pad_token_id", 1),
}
# Settings of generation and of distillation.
_IGNORED = """
    save_step replacing_rate force_bos_token_to_be_generated student_encoder_layers
    student_decoder_layers
"""
# Settings of other families that once shared the implementation of BART.
_NEVER = """
    normalize_before add_final_layer_norm add_bias_logits static_position_embeddings
    do_blenderbot_90_layernorm is_decoder
"""


def read(settings: Settings) -> Fields:
    # Files have both names of a size, or either.
    settings = rename(settings, OTHER_STACK_NAMES)
    only = {
        "model_type": ("bart",),
        **only_stacks(settings),
        "normalize_embedding": (True,),
        "extra_pos_embeddings": (2,),
        **dict.fromkeys(_NEVER.split(), (False,)),
    }
    _, fields = read_settings(settings, _FIELDS, {"eos_token_id": 2}, only=only, ignored=_IGNORED)
    return fields


def write(config: BartConfig) -> Settings:
    kind = {"architectures": ["BartForConditionalGeneration"], "model_type": "bart"}
    return write_fields(config, _FIELDS) | write_stacks(config) | kind


def tensors(config: BartConfig) -> dict[str, Tensor]:
    table = {
        "embed": Tensor("model.shared.weight", EMBED),
        "logits_bias": Tensor("final_logits_bias", "1 vocab -> vocab"),
    }
    for stack in ("encoder", "decoder"):
        table |= stack_tensors(stack, "qkvo")
        table |= norm(f"{stack}/embed_norm", f"model.{stack}.layernorm_embedding")
    return table


def duplicates(config: BartConfig) -> dict[str, str]:
    # Encoder, decoder and head share one table, which files may hold four times.
    names = ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight")
    return dict.fromkeys((*names, "lm_head.weight"), "model.shared.weight")
