"""The settings and tensors of GLM-4's mixtures of experts in Hugging Face's format."""

from ...models.glm4_moe import Glm4MoeConfig
from .._settings import Fields, Settings, read_settings, write_fields
from .._tensors import Tensor
from ._mixtures import DENSE_LAYERS, MIXTURE_FIELDS, OF_TRAINING, mixture_tensors
from ._rope import ROPE, read_rope_settings, rope_of, rotated_part, write_rope
from ._tables import PROJ, attention

BASE_PREFIX = "model."
# The layer that predicts a further token, in the files of GLM-4.5 and 4.6, and of GLM-4.5-Air.
BUFFERS = (r"^model\.layers\.92\.", r"^model\.layers\.46\.")

_PART = "partial_rotary_factor"
_FIELDS = {
    **MIXTURE_FIELDS,
    "kv_heads": ("num_key_value_heads", 8),
    "head_size": ("head_dim", None),
    "experts": ("n_routed_experts", 128),
    "chosen": ("num_experts_per_tok", 8),
    "shared": ("n_shared_experts", 1),
    "groups": ("n_group", 1),
    "chosen_groups": ("topk_group", 1),
    "route_scale": ("routed_scaling_factor", 1.0),
    "qkv_bias": ("attention_bias", False),
    "qk_norm": ("use_qk_norm", False),
    "norm_eps": ("rms_norm_eps", 1e-5),
    "context": ("max_position_embeddings", 131072),
}


def read(settings: Settings) -> Fields:
    names = {"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"}
    defaults = {_PART: None, DENSE_LAYERS: 1, "eos_token_id": None, **ROPE}
    only = {"model_type": ("glm4_moe",), "hidden_act": ("silu",)}
    options = {"only": only, "ignored": OF_TRAINING, "renamed": names}
    c, fields = read_settings(settings, _FIELDS, defaults, **options)
    fields["dense_layers"] = c[DENSE_LAYERS]
    rope = rope_of(c)
    part = rope.pop(_PART, None) or c[_PART] or 0.5
    size = c["head_dim"] or c["hidden_size"] // max(c["num_attention_heads"], 1)
    fields |= read_rope_settings(c | {"rope_parameters": rope, "rope_scaling": None})
    return fields | {"rotary_dim": int(size * part)}


def write(config: Glm4MoeConfig) -> Settings:
    c = config
    settings = write_fields(c, _FIELDS) | {"head_dim": c.head_dim}
    settings |= {"architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe"}
    settings |= {"hidden_act": "silu", DENSE_LAYERS: c.dense_layers}
    settings |= {_PART: rotated_part(c.rotated, c.head_dim)}
    return settings | write_rope(c.rope_scaling, c.context)


def tensors(config: Glm4MoeConfig) -> dict[str, Tensor]:
    return mixture_tensors(config, lambda leaf, name: _attention(config, leaf, name))


def _attention(c: Glm4MoeConfig, leaf: str, name: str) -> dict[str, Tensor]:
    table = attention(leaf, name, PROJ, biases="qkv" if c.qkv_bias else "")
    for letter in "qk" * c.qk_norm:
        norm = Tensor(f"{name}{letter}_norm.weight", "head_dim -> head_dim")
        table[f"{leaf}{letter}_norm"] = norm
    return table
