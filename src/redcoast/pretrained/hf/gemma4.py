"""The settings and tensors of Gemma 4 in Hugging Face's format."""

from collections.abc import Mapping
from typing import Any

from ...models.gemma4 import Gemma4Config
from .._settings import defaults_of, read_fields, read_settings, write_fields
from .._tensors import Tensor
from ._rope import kind_of_rope, rotated_part, unread
from ._tables import LLAMA_FIELDS, PROJ, TURNED, VECTOR, attention, llama_ends, tied_head
from ._windows import GLOBAL, LOCAL, read_windows, write_windows

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
_INPUTS = {
    "layer_size": "hidden_size_per_layer_input",
    "layer_vocab": "vocab_size_per_layer_input",
}
_EXPERTS = {
    "experts": "num_experts",
    "chosen": "top_k_experts",
    "expert_hidden": "moe_intermediate_size",
}
_FAR = {"global_head_dim": "head_dim", "global_kv_heads": "num_key_value_heads"}
_GELU = "gelu_pytorch_tanh"
_PART = "partial_rotary_factor"
# Rotary embeddings if the file does not say.
_ROPE = {
    LOCAL: {"rope_type": "default", "rope_theta": 1e4},
    GLOBAL: {"rope_type": "proportional", "rope_theta": 1e6, _PART: 0.25},
}


def read(settings: dict[str, Any]) -> dict[str, Any]:
    defaults = {
        **defaults_of(_FIELDS),
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
    c = read_settings(settings, defaults, only)
    count = c["num_hidden_layers"]
    kinds = c["layer_types"] or [GLOBAL if (i + 1) % 6 == 0 else LOCAL for i in range(count)]
    kinds = [*kinds[:-1], GLOBAL]  # the last has no window, whatever the file says
    fields = read_fields(c, _FIELDS) | {"local": read_windows(kinds)}
    if c["hidden_size_per_layer_input"]:
        fields |= {field: c[name] for field, name in _INPUTS.items()}
    if c["enable_moe_block"]:
        fields |= {field: c[name] for field, name in _EXPERTS.items()}
    far = _far(c, kinds)
    return fields | far | _rope(c, far["global_head_dim"])


def _far(c: dict[str, Any], kinds: list[str]) -> dict[str, Any]:
    """Reads the heads of layers without a window, from either of the places of versions."""
    layers = c["per_layer_config"]
    if layers is None:
        heads = c["num_global_key_value_heads"] if c["attention_k_eq_v"] else None
        return {"global_head_dim": c["global_head_dim"], "global_kv_heads": heads}
    layers = {int(number): of_layer for number, of_layer in layers.items()}  # "05" is layer 5
    numbers = [i for i, kind in enumerate(kinds) if kind == GLOBAL]
    far = [layers.get(i, {}) for i in numbers]
    alike = all(each == far[0] for each in far)
    if layers.keys() - {*numbers} or not alike or far[0].keys() - {*_FAR.values()}:
        raise ValueError(
            f"`per_layer_config` gives layers other settings than {[*_FAR.values()]} of those of "
            f"the type {GLOBAL!r}, all alike, which is not implemented."
        )
    fields = {field: far[0].get(name) for field, name in _FAR.items()}
    return fields | {"global_head_dim": fields["global_head_dim"] or c["head_dim"]}


def _rope(c: dict[str, Any], head_dim: int) -> dict[str, Any]:
    """Reads the rotary embeddings of both kinds of layers."""
    rope = c["rope_parameters"] or _ROPE
    if not {LOCAL, GLOBAL} & rope.keys():
        raise ValueError(f"`rope_parameters` must have entries {LOCAL!r} and {GLOBAL!r}.")
    near, far = (rope.get(kind) or _ROPE[kind] for kind in (LOCAL, GLOBAL))
    _check_rope(near, LOCAL, ("default",))
    _check_rope(far, GLOBAL, ("default", "proportional"))
    part = far.get(_PART) or 1.0 if kind_of_rope(far) == "proportional" else 1.0
    return {
        "local_rope_base": near.get("rope_theta", 1e4),
        "rope_base": far.get("rope_theta", 1e4),
        "rotary_dim": 2 * int(part * head_dim // 2),
    }


def _check_rope(rope: Mapping[str, Any], name: str, kinds: tuple[str, ...]) -> None:
    kind = kind_of_rope(rope)
    factor = rope.get("factor")
    if kind not in kinds or factor not in (None, 1) or unread(rope, (_PART,)):
        raise ValueError(
            f"`rope_parameters` of {name!r} are {dict(rope)}, but only the types "
            f"{' and '.join(map(repr, kinds))} without a factor are implemented."
        )


def write(config: Gemma4Config) -> dict[str, Any]:
    c = config
    settings = write_fields(c, _FIELDS)
    settings |= {"architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text"}
    settings |= {"hidden_activation": _GELU, "layer_types": write_windows(c.local)}
    settings |= {"hidden_size_per_layer_input": 0, "enable_moe_block": c.experts is not None}
    if c.layer_size is not None:
        rows = c.vocab if c.layer_vocab is None else c.layer_vocab
        settings |= {_INPUTS["layer_size"]: c.layer_size, _INPUTS["layer_vocab"]: rows}
    if c.experts is not None:
        settings |= {name: getattr(c, field) for field, name in _EXPERTS.items()}
    settings |= {"global_head_dim": c.global_head_dim}
    if c.keys_are_values:
        settings |= {"num_global_key_value_heads": c.far_kv_heads}
    near = {"rope_type": "default", "rope_theta": c.local_rope_base}
    part = rotated_part(c.rotated, c.global_head_dim)
    far = {"rope_type": "proportional", "rope_theta": c.rope_base, _PART: part}
    return settings | {"rope_parameters": {LOCAL: near, GLOBAL: far}}


def tensors(config: Gemma4Config) -> dict[str, Tensor]:
    """Maps each array to its published tensors."""
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
        numbers = [str(i) for i, other in enumerate(c.kinds) if other == kind]
        layer = f"model.layers.{{layer:{','.join(numbers)}}}."
        of_layer = _attention(c, kind, layer) | _rest(c, layer)
        table |= {f"{kind}/{leaf}": tensor for leaf, tensor in of_layer.items()}
    return table


def _attention(c: Gemma4Config, kind: str, layer: str) -> dict[str, Tensor]:
    letters = "qo" if kind.endswith("shared") else "qko"
    letters += "v" if kind == "near" or (kind == "far" and not c.keys_are_values) else ""
    name = layer + "self_attn."
    table = attention("", name, {letter: PROJ[letter] for letter in letters})
    for letter in "qk" if "k" in letters else "q":
        weight = f"{name}{letter}_norm.weight"
        table[f"{letter}_norm"] = Tensor(weight, "head_dim -> head_dim")
    return table


def _rest(c: Gemma4Config, layer: str) -> dict[str, Tensor]:
    """The norms of a layer, its network and experts, and what adds the embeddings of the layer."""
    names = {
        "attention_norm": "input_layernorm",
        "attention_post_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    }
    matrices = {part: f"mlp.{part}_proj" for part in ("gate", "up", "down")}
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
        for i, leaf in enumerate(("expert_gate", "expert_up")):
            table[leaf] = Tensor(layer + "experts.gate_up_proj", both, part=(i, 2))
        down = "experts outputs inputs -> experts inputs outputs"
        table["expert_down"] = Tensor(layer + "experts.down_proj", down)
    table |= {leaf: Tensor(f"{layer}{name}.weight", VECTOR) for leaf, name in names.items()}
    return table | {x: Tensor(f"{layer}{name}.weight", TURNED) for x, name in matrices.items()}


def unused(config: Gemma4Config) -> tuple[str, ...]:
    """Keys and values that published files have for layers that take the ones of another layer."""
    first = config.layers - config.shared_layers
    numbers = "|".join(str(layer) for layer in range(first, config.layers))
    return (rf"^model\.layers\.({numbers})\.self_attn\.([kv]_proj|[kv]_norm)\.",) if numbers else ()


duplicates = tied_head("model.embed_tokens.weight")
