"""The settings and tensors of Gemma 4 in Hugging Face's format."""

from ...models.gemma4 import Gemma4Config
from .._settings import Fields, Settings, read_fields, read_settings, write_fields
from .._tensors import Tensor
from ._rope import PART, kind_of_rope, rotated_part, unread
from ._tables import (
    LLAMA_FIELDS,
    PROJ,
    TURNED,
    VECTOR,
    attention,
    fused,
    layers_with,
    llama_ends,
    qk_norms,
    under,
    weights,
)
from ._windows import GLOBAL, LOCAL, all_but_last_of, read_windows, write_windows

BASE_PREFIX = "model."

_FIELDS = {
    **LLAMA_FIELDS,
    "kv_heads": "num_key_value_heads",
    "head_dim": ("head_dim", 256),
    "tied": ("tie_word_embeddings", True),
    "window": ("sliding_window", 512),
    "keys_are_values": ("attention_k_eq_v", False),
    "shared_layers": ("num_kv_shared_layers", 0),
    "wide_shared": ("use_double_wide_mlp", False),
    "logit_cap": ("final_logit_softcapping", None),
    "context": ("max_position_embeddings", 131072),
    "bos": ("bos_token_id", 2),
    "pad": ("pad_token_id", 0),
}
# Settings of the embeddings of each layer, and of experts, which only some models have.
_INPUTS = {"layer_size": "hidden_size_per_layer_input", "layer_vocab": "vocab_size_per_layer_input"}
_EXPERTS = {
    "experts": "num_experts",
    "chosen": "top_k_experts",
    "expert_hidden": "moe_intermediate_size",
}
_FAR = {"global_head_dim": "head_dim", "global_kv_heads": "num_key_value_heads"}
_GELU = "gelu_pytorch_tanh"
# Rotary embeddings if the file does not say.
_ROPE = {
    LOCAL: {"rope_type": "default", "rope_theta": 1e4},
    GLOBAL: {"rope_type": "proportional", "rope_theta": 1e6, PART: 0.25},
}


def read(settings: Settings) -> Fields:
    defaults = {
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262144,
        "enable_moe_block": False,
        **dict.fromkeys(_EXPERTS.values()),
        "global_head_dim": 512,
        "num_global_key_value_heads": None,
        "per_layer_config": None,
        "layer_types": None,
        "eos_token_id": 1,
        "rope_parameters": None,
    }
    only = {
        "model_type": ("gemma4_text",),
        "hidden_activation": (_GELU,),
        "attention_bias": (False,),
        # Images alone are seen in both directions.
        "use_bidirectional_attention": ("vision", None),
    }
    c, fields = read_settings(settings, _FIELDS, defaults, only=only)
    # Five of six layers have a window, unless the file says otherwise.
    local = all_but_last_of(6, c["num_hidden_layers"])[:-1]
    if c["layer_types"]:
        local = read_windows(c["layer_types"][:-1])
    local = (*local, False)  # the last has no window, whatever the file says
    fields["local"] = local
    if c["hidden_size_per_layer_input"]:
        fields |= read_fields(c, _INPUTS)
    if c["enable_moe_block"]:
        fields |= read_fields(c, _EXPERTS)
    far = _far(c, local)
    return fields | far | _rope(c, far["global_head_dim"])


def _far(c: Settings, local: tuple[bool, ...]) -> Fields:
    """Reads the heads of layers without a window, from either of the places of versions."""
    if c["per_layer_config"] is None:
        fields = {"global_head_dim": c["global_head_dim"], "global_kv_heads": None}
        # The number counts only where keys are values.
        if c["attention_k_eq_v"]:
            fields["global_kv_heads"] = c["num_global_key_value_heads"]
        return fields
    layers = {int(number): settings for number, settings in c["per_layer_config"].items()}
    first = layers.get(local.index(False), {})
    for number, has_window in enumerate(local):
        settings = layers.pop(number, {})
        expected = first
        if has_window:
            expected = {}
        if settings != expected:
            layers[number] = settings
    if layers or first.keys() - {*_FAR.values()}:
        raise ValueError(
            f"`per_layer_config` gives layers other settings than {[*_FAR.values()]} of those of "
            f"the type {GLOBAL!r}, all alike, which is not implemented."
        )
    return {
        "global_head_dim": first.get("head_dim") or c["head_dim"],
        "global_kv_heads": first.get("num_key_value_heads"),
    }


def _rope(c: Settings, head_dim: int) -> Fields:
    """Reads the rotary embeddings of both kinds of layers."""
    rope = c["rope_parameters"] or _ROPE
    if not {LOCAL, GLOBAL} & rope.keys():
        raise ValueError(f"`rope_parameters` must have entries {LOCAL!r} and {GLOBAL!r}.")
    near, far = rope.get(LOCAL) or _ROPE[LOCAL], rope.get(GLOBAL) or _ROPE[GLOBAL]
    _check_rope(near, LOCAL, ("default",))
    _check_rope(far, GLOBAL, ("default", "proportional"))
    # The part of the features of a head that are rotated.
    part = 1.0
    if kind_of_rope(far) == "proportional":
        part = far.get(PART) or 1.0
    return {
        "local_rope_base": near.get("rope_theta", 1e4),
        "rope_base": far.get("rope_theta", 1e4),
        # Even, since numbers are rotated in pairs.
        "rotary_dim": 2 * int(part * head_dim // 2),
    }


def _check_rope(rope: Settings, name: str, kinds: tuple[str, ...]) -> None:
    kind = kind_of_rope(rope)
    factor = rope.get("factor")
    if kind not in kinds or factor not in (None, 1) or unread(rope, (PART,)):
        raise ValueError(
            f"`rope_parameters` of {name!r} are {dict(rope)}, but only the types "
            f"{' and '.join(map(repr, kinds))} without a factor are implemented."
        )


def write(config: Gemma4Config) -> Settings:
    c = config
    settings = write_fields(c, _FIELDS)
    settings |= {"architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text"}
    settings |= {"hidden_activation": _GELU, "layer_types": write_windows(c.local)}
    settings |= {"hidden_size_per_layer_input": 0, "enable_moe_block": c.experts is not None}
    if c.layer_size is not None:
        # The table of the layers' embeddings may have fewer rows than the one of tokens.
        rows = c.layer_vocab or c.vocab
        settings |= {_INPUTS["layer_size"]: c.layer_size, _INPUTS["layer_vocab"]: rows}
    if c.experts is not None:
        settings |= write_fields(c, _EXPERTS)
    settings |= {"global_head_dim": c.global_head_dim}
    if c.keys_are_values:
        settings |= {"num_global_key_value_heads": c.far_kv_heads}
    near = {"rope_type": "default", "rope_theta": c.local_rope_base}
    part = rotated_part(c.rotated, c.global_head_dim)
    far = {"rope_type": "proportional", "rope_theta": c.rope_base, PART: part}
    return settings | {"rope_parameters": {LOCAL: near, GLOBAL: far}}


def tensors(config: Gemma4Config) -> dict[str, Tensor]:
    c, table = config, llama_ends(config)
    if c.layer_size is not None:
        table |= {
            "layer_embed": Tensor(
                "model.embed_tokens_per_layer.weight",
                "vocab (layers size) -> vocab layers size",
                layers=c.layers,
            ),
            "layer_project": Tensor(
                "model.per_layer_model_projection.weight",
                "(layers size) width -> width layers size",
                layers=c.layers,
            ),
            "layer_norm": Tensor("model.per_layer_projection_norm.weight", "size -> size"),
        }
    for kind in dict.fromkeys(c.kinds):
        layer = layers_with(kind, c.kinds)
        # Layers that share the keys and values of an earlier layer have neither.
        letters, norms = "qo", "q"
        if not kind.endswith("shared"):
            letters, norms = "qko", "qk"
        if kind == "near" or (kind == "far" and not c.keys_are_values):
            letters += "v"
        # Each kind of layer has arrays of its own, stacked over the layers of this kind.
        name = layer + "self_attn."
        of_kind = attention("", name, PROJ, letters=letters) | qk_norms("", name, norms)
        table |= under(f"{kind}/", of_kind | _rest(c, layer))
    return table


def _rest(c: Gemma4Config, layer: str) -> dict[str, Tensor]:
    """The norms of a layer, its network and experts, and what adds the embeddings of the layer."""
    names = {
        "attention_norm": "input_layernorm",
        "attention_post_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    }
    matrices = {"gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"}
    table = {"scalar": Tensor(layer + "layer_scalar", "size -> size")}
    if c.layer_size is not None:
        names["input_post_norm"] = "post_per_layer_input_norm"
        matrices |= {"input_gate": "per_layer_input_gate", "input_out": "per_layer_projection"}
    if c.experts is not None:
        names |= {
            "dense_post_norm": "post_feedforward_layernorm_1",
            "experts_norm": "pre_feedforward_layernorm_2",
            "experts_post_norm": "post_feedforward_layernorm_2",
        }
        matrices["router"] = "router.proj"
        table["router_scale"] = Tensor(layer + "router.scale", VECTOR)
        table["expert_scale"] = Tensor(layer + "router.per_expert_scale", "experts -> experts")
        both = "experts (part outputs) inputs -> experts inputs outputs"
        table |= fused(("expert_gate", "expert_up"), layer + "experts.gate_up_proj", both)
        down = "experts outputs inputs -> experts inputs outputs"
        table["expert_down"] = Tensor(layer + "experts.down_proj", down)
    return table | weights(layer, names, VECTOR) | weights(layer, matrices, TURNED)


def unused(config: Gemma4Config) -> tuple[str, ...]:
    """Keys and values that published files have for layers that take the ones of another layer."""
    if config.shared_layers == 0:
        return ()
    # The last layers share.
    numbers = "|".join(map(str, range(config.layers - config.shared_layers, config.layers)))
    return (rf"^model\.layers\.({numbers})\.self_attn\.([kv]_proj|[kv]_norm)\.",)
