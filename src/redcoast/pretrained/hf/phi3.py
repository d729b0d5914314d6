"""The settings and tensors of Phi-3 and Phi-4 in Hugging Face's format."""

import math

from ...models._rotary import LongRope
from ...models.phi3 import Phi3Config
from .._settings import Fields, Settings, write_fields
from .._tensors import Tensor
from ._kinds import Kind, kind_of, read_kind, transformer_tensors
from ._rope import PART, rope_of, rotated_part, unread
from ._tables import INTO_HEADS, LLAMA_FIELDS, LLAMA_LAYER, consecutive, gate_and_up

BASE_PREFIX = "model."

_FIELDS = {
    **LLAMA_FIELDS,
    "kv_heads": ("num_key_value_heads", None),
    "window": ("sliding_window", None),
    "residual_dropout": ("resid_pdrop", 0.0),
    "norm_eps": ("rms_norm_eps", 1e-5),
    "context": ("max_position_embeddings", 4096),
    "bos": ("bos_token_id", 1),
    "pad": ("pad_token_id", 32000),
}
_FACTORS = {"short": "short_factor", "long": "long_factor"}


def read(settings: Settings) -> Fields:
    return read_kind(settings, _KINDS)


def _read_rope(c: Settings) -> Fields:
    rope = rope_of(c)
    part = rope.pop(PART, c[PART])
    base = {"rope_base": rope.pop("rope_theta", c["rope_theta"])}
    if part != 1:
        base["rotary_dim"] = int(c["hidden_size"] // c["num_attention_heads"] * part)
    kinds = {rope.pop(name, None) or "default" for name in ("rope_type", "type")} - {"default"}
    if not kinds:
        return base
    # The older names mean the same scaling.
    if not kinds <= {"longrope", "su", "yarn"}:
        raise ValueError(
            f"The rotary embeddings have the types {sorted(kinds)}, but only 'default' and "
            "'longrope' are implemented."
        )
    rope.pop("original_max_position_embeddings", None)  # the outer one counts
    unknown = unread(rope, (*_FACTORS.values(), "factor", "attention_factor"))
    missing = {*_FACTORS.values()} - rope.keys()
    if unknown:
        raise ValueError(f"The setting of rotary embeddings has unknown settings: {unknown}.")
    if missing:
        raise ValueError(f"The setting of rotary embeddings has no {sorted(missing)}.")
    original = c["original_max_position_embeddings"]
    ratio = rope.get("factor") or c["max_position_embeddings"] / original
    factor = rope.get("attention_factor")
    if factor is None:
        # As the scaling of longer texts is defined (<https://arxiv.org/abs/2402.13753>).
        factor = 1.0
        if ratio > 1:
            factor = math.sqrt(1 + math.log(ratio) / math.log(original))
    lists = {field: tuple(rope[name]) for field, name in _FACTORS.items()}
    return base | {"rope_scaling": LongRope(**lists, original=original, factor=factor)}


_KINDS = {
    "phi3": Kind(
        architecture="Phi3",
        free=("rotary_dim", "window"),
        fields=_FIELDS,
        defaults={
            "original_max_position_embeddings": 4096,
            "eos_token_id": 32000,
            "rope_theta": 1e4,
            PART: 1.0,
        },
        only={"full_attn_mod": (1,), "lm_head_bias": (False,), "interpolate_factor": (1,)},
        # It is in the files, but no published implementation applies it.
        ignored="embd_pdrop",
        rope=_read_rope,
    )
}


def write(config: Phi3Config) -> Settings:
    c = config
    kind_of(c, _KINDS)  # rejects options that the files have no setting for
    if c.rope_scaling is not None and not isinstance(c.rope_scaling, LongRope):
        raise ValueError("`rope_scaling` must be a `LongRope`: files of Phi-3 support no other.")
    # As `transformers` 5 writes them, with the base among them.
    rope: Settings = {"rope_type": "default", "rope_theta": c.rope_base}
    original = c.context
    if s := c.rope_scaling:
        original = s.original
        rope |= {"rope_type": "longrope", "attention_factor": s.factor}
        rope |= {name: list(getattr(s, field)) for field, name in _FACTORS.items()}
        rope["original_max_position_embeddings"] = original
    rope[PART] = rotated_part(c.rotated, c.head_dim)
    settings = write_fields(c, _FIELDS)
    return settings | {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "hidden_act": "silu",
        "original_max_position_embeddings": original,
        "rope_parameters": rope,
    }


def tensors(config: Phi3Config) -> dict[str, Tensor]:
    """Q, K and V are in one tensor, and so are gate and up."""
    tables = transformer_tensors(config)
    # The rows are the heads of the queries, then those of the keys, then those of the values.
    heads = {"layers/wq": config.heads, "layers/wk": config.kv_heads, "layers/wv": config.kv_heads}
    tables |= consecutive(heads, "heads", LLAMA_LAYER + "self_attn.qkv_proj.weight", INTO_HEADS)
    return tables | gate_and_up(LLAMA_LAYER + "mlp.gate_up_proj")
