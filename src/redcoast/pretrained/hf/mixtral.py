"""The settings and tensors of Mixtral and Qwen3-MoE in Hugging Face's format."""

from ...models.mixtral import MixtralConfig
from .._settings import Fields, Settings
from .._tensors import Tensor
from ._kinds import WINDOW_FIELDS, Kind, read_kind, transformer_tensors, write_kind
from ._tables import GATED, LLAMA_LAYER, TURNED, under, weights

BASE_PREFIX = "model."

_FIELDS = {
    **WINDOW_FIELDS,
    "experts": ("num_local_experts", 8),
    "chosen": ("num_experts_per_tok", 2),
    "router_loss_weight": ("router_aux_loss_coef", 0.001),
}


def _window(c: Settings) -> Fields:
    # A Qwen3-MoE states a window even if it does not use it.
    if c["use_sliding_window"]:
        return {}
    return {"window": None}


KINDS = {
    "mixtral": Kind(
        architecture="Mixtral",
        free=("head_size", "window", "experts"),
        fields=_FIELDS,
        defaults={
            "num_key_value_heads": 8,
            "rope_theta": 1e6,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 131072,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        only={"router_jitter_noise": (0.0,)},
        ignored="max_window_layers",
    ),
    "qwen3_moe": Kind(
        architecture="Qwen3Moe",
        options={"qk_norm": True},
        free=("head_size", "window", "experts", "weights_sum_to_one"),
        fields={
            **_FIELDS,
            "hidden": "moe_intermediate_size",
            "experts": ("num_experts", 128),
            "weights_sum_to_one": ("norm_topk_prob", False),
        },
        defaults={
            "num_key_value_heads": 4,
            "num_experts_per_tok": 8,
            "sliding_window": 4096,
            "max_position_embeddings": 32768,
            "use_sliding_window": False,
        },
        only={"decoder_sparse_step": (1,), "mlp_only_layers": ([], None)},
        # The first is the size of dense layers, and there are none.
        ignored="intermediate_size max_window_layers",
        renamed={"num_local_experts": "num_experts"},
        more=_window,
        written=lambda c: {
            "use_sliding_window": bool(c.window),
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
    ),
}


def read(settings: Settings) -> Fields:
    return read_kind(settings, KINDS)


def write(config: MixtralConfig) -> Settings:
    return write_kind(config, KINDS)


def tensors(config: MixtralConfig) -> dict[str, Tensor]:
    moe = LLAMA_LAYER + "block_sparse_moe."
    # `w1` to `w3` are the names of the first LLaMA.
    names = {"gate": "w1", "up": "w3", "down": "w2"}
    if config.qk_norm:
        moe = LLAMA_LAYER + "mlp."
        names = GATED
    tables = transformer_tensors(config)
    tables["layers/router"] = Tensor(moe + "gate.weight", TURNED)
    return tables | under("layers/", weights(moe + "experts.{expert}.", names, TURNED))
