"""The settings and tensors of DeepSeek-V3 and Kimi-K2 in Hugging Face's format."""

import functools as ft

from ...models.deepseek_v3 import DeepseekV3Config
from .._settings import Fields, Settings, read_settings, write_fields
from .._tensors import Tensor
from ._mixtures import DENSE_LAYERS, MIXTURE_FIELDS, OF_TRAINING, mixture_tensors
from ._rope import ROPE, read_yarn, write_yarn
from ._tables import OUT_OF_HEADS, TURNED, VECTOR, consecutive, under

BASE_PREFIX = "model."
KINDS = ("deepseek_v3", "kimi_k2")
# The layer that predicts a further token, in the published files.
BUFFERS = (r"^model\.layers\.61\.",)

_FIELDS = {
    **MIXTURE_FIELDS,
    "q_rank": ("q_lora_rank", 1536),
    "kv_rank": "kv_lora_rank",
    "plain_size": "qk_nope_head_dim",
    "rope_size": "qk_rope_head_dim",
    "value_size": "v_head_dim",
    "rope_pairs": ("rope_interleave", True),
    "context": ("max_position_embeddings", 4096),
    "bos": ("bos_token_id", 0),
}


def read(settings: Settings) -> Fields:
    defaults = {DENSE_LAYERS: 3, "eos_token_id": 1, **ROPE}
    only = {
        "model_type": KINDS,
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "moe_layer_freq": (1,),
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
        # All heads share one latent, from which each has its own keys and values.
        "num_key_value_heads": (settings.get("num_attention_heads"), None),
    }
    options = {"only": only, "ignored": OF_TRAINING + "head_dim qk_head_dim"}
    options["renamed"] = {"num_local_experts": "n_routed_experts"}
    c, fields = read_settings(settings, _FIELDS, defaults, **options)
    fields["dense_layers"] = c[DENSE_LAYERS]
    return fields | read_yarn(c, {}, ("mscale", "mscale_all_dim"))


def write(config: DeepseekV3Config) -> Settings:
    c = config
    settings = write_fields(c, _FIELDS)
    settings |= {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
    settings |= {"hidden_act": "silu", "attention_bias": False, "num_key_value_heads": c.heads}
    settings |= {DENSE_LAYERS: c.dense_layers}
    if c.rope_scaling is None:
        return settings
    rope = write_yarn(c.rope_scaling) | {"mscale_all_dim": c.score_scaling}
    return settings | {"rope_scaling": rope}


def tensors(config: DeepseekV3Config) -> dict[str, Tensor]:
    return mixture_tensors(config, ft.partial(_attention, config))


def _attention(c: DeepseekV3Config, leaf: str, attention: str) -> dict[str, Tensor]:
    queries = "(heads qk_size) inputs -> inputs heads qk_size"
    table = {
        "kv_norm": Tensor(attention + "kv_a_layernorm.weight", VECTOR),
        "wo": Tensor(attention + "o_proj.weight", OUT_OF_HEADS),
    }
    if c.q_rank is None:
        table["wq"] = Tensor(attention + "q_proj.weight", queries)
    else:
        table["q_down"] = Tensor(attention + "q_a_proj.weight", TURNED)
        table["q_norm"] = Tensor(attention + "q_a_layernorm.weight", VECTOR)
        table["wq"] = Tensor(attention + "q_b_proj.weight", queries)
    # The rows of this tensor are the latent of keys and values, and then the rotated part of the
    # keys, which all heads share.
    down = {"kv_down": c.kv_rank, "k_rope": c.rope_size}
    table |= consecutive(down, "outputs", attention + "kv_a_proj_with_mqa.weight", TURNED)
    # For each head, its keys without rotation, and then its values.
    up, pattern = (
        {"wk": c.plain_size, "wv": c.value_size},
        "(heads part) latent -> latent heads part",
    )
    table |= consecutive(up, "part", attention + "kv_b_proj.weight", pattern)
    return under(leaf, table)
