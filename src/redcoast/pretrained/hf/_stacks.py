"""The settings and tensors of an encoder and a decoder, which BART and Whisper share."""

from ...models import BartConfig, WhisperConfig
from .._settings import Settings
from .._tensors import Tensor
from ._tables import OUT_PROJ, attention, dense, norm

STACK_FIELDS = {
    "vocab": "vocab_size",
    "width": "d_model",
    "layers": "encoder_layers",
    "decoder_layers": "decoder_layers",
    "heads": "encoder_attention_heads",
    "hidden": "encoder_ffn_dim",
    "activation": ("activation_function", "gelu"),
    "dropout": ("dropout", 0.0),
    "attention_dropout": ("attention_dropout", 0.0),
    "activation_dropout": ("activation_dropout", 0.0),
    "decoder_start": "decoder_start_token_id",
    "bos": "bos_token_id",
    "pad": "pad_token_id",
}
# Other names that `transformers` has for these settings.
OTHER_STACK_NAMES = {
    "hidden_size": "d_model",
    "num_attention_heads": "encoder_attention_heads",
    "num_hidden_layers": "encoder_layers",
}


def only_stacks(settings: Settings) -> dict[str, tuple[object, ...]]:
    """Returns the settings of which only some values are implemented."""
    return {
        # A decoder alone, and a head of its own, are not implemented.
        "is_encoder_decoder": (True,),
        "tie_word_embeddings": (True,),
        # The configuration has one number for both stacks.
        "decoder_attention_heads": (settings.get("encoder_attention_heads"),),
        "decoder_ffn_dim": (settings.get("encoder_ffn_dim"),),
        **dict.fromkeys(("encoder_layerdrop", "decoder_layerdrop"), (0.0, None)),
    }


def write_stacks(config: BartConfig | WhisperConfig) -> Settings:
    return {
        "is_encoder_decoder": True,
        "tie_word_embeddings": True,
        "decoder_attention_heads": config.heads,
        "decoder_ffn_dim": config.hidden,
    }


def stack_tensors(stack: str, biases: str) -> dict[str, Tensor]:
    """Returns the positions and the layers of the encoder or the decoder. `biases` has the letters
    of the projections that have biases."""
    layer, leaf = f"model.{stack}.layers.{{layer}}.", stack + "/layers/"
    positions = f"model.{stack}.embed_positions.weight"
    table = {
        f"{stack}/position_embed": Tensor(positions, "positions width -> positions width"),
        **norm(leaf + "mlp_norm", layer + "final_layer_norm"),
        **dense(leaf + "up", layer + "fc1"),
        **dense(leaf + "down", layer + "fc2"),
    }
    # The decoder attends to itself, and then to what the encoder returned.
    parts = {"attention": "self_attn"}
    if stack == "decoder":
        parts["cross"] = "encoder_attn"
    for part, module in parts.items():
        name = layer + module
        table |= attention(f"{leaf}{part}/", name + ".", OUT_PROJ, biases=biases)
        table |= norm(f"{leaf}{part}/norm", name + "_layer_norm")
    return table
