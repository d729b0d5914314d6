"""The settings and tensors of GLM-4's mixtures of experts in Hugging Face's format."""

from ...models.glm4_moe import Glm4MoeConfig
from .._settings import Fields, Settings, read_settings, write_fields
from .._tensors import Tensor
from ._mixtures import DENSE_LAYERS, MIXTURE_FIELDS, OF_TRAINING, mixture_tensors
from ._rope import PART, ROPE, read_partial_rope, rotated_part, write_rope
from ._tables import PROJ, attention, qk_norms

BASE_PREFIX = "model."
# The layer that predicts a further token, in the files of GLM-4.5 and 4.6, and of GLM-4.5-Air.
BUFFERS = (r"^model\.layers\.92\.", r"^model\.layers\.46\.")

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
    # Two settings have other names in some versions of `transformers`.
    names = {"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"}
    defaults = {PART: None, DENSE_LAYERS: 1, "eos_token_id": None, **ROPE}
    only = {"model_type": ("glm4_moe",), "hidden_act": ("silu",)}
    options = {"only": only, "ignored": OF_TRAINING, "renamed": names}
    c, fields = read_settings(settings, _FIELDS, defaults, **options)
    fields["dense_layers"] = c[DENSE_LAYERS]
    # Half of the features of a head are rotated, unless the file says otherwise.
    return fields | read_partial_rope(c, 0.5)


def write(config: Glm4MoeConfig) -> Settings:
    c = config
    settings = write_fields(c, _FIELDS) | {"head_dim": c.head_dim}
    settings |= {"architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe"}
    settings |= {"hidden_act": "silu", DENSE_LAYERS: c.dense_layers}
    settings |= {PART: rotated_part(c.rotated, c.head_dim)}
    return settings | write_rope(c.rope_scaling, c.context)


def tensors(config: Glm4MoeConfig) -> dict[str, Tensor]:
    def of_attention(leaf: str, name: str) -> dict[str, Tensor]:
        # The output matrix has no bias.
        table = attention(leaf, name, PROJ, biases="qkv" * config.qkv_bias)
        return table | qk_norms(leaf, name, "qk" * config.qk_norm)

    return mixture_tensors(config, of_attention)
