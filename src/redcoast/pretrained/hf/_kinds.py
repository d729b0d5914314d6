"""Tables of the types of `Transformer`: their options, settings and tensors."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from ...models._transformer import TransformerConfig
from .._settings import FieldNames, Fields, Implemented, Settings, read_settings, write_fields
from .._tensors import Tensor
from ._rope import ROPE, read_rope_settings, write_rope
from ._tables import (
    HEADS_BIAS,
    LLAMA_FIELDS,
    LLAMA_LAYER,
    VECTOR,
    llama_attention,
    llama_ends,
    llama_mlp,
    qk_norms,
)

TRANSFORMER_FIELDS = {
    **LLAMA_FIELDS,
    "kv_heads": ("num_key_value_heads", None),
    "head_size": ("head_dim", None),
    "rope_base": ("rope_theta", 10000.0),
    "context": ("max_position_embeddings", 2048),
}
WINDOW_FIELDS = TRANSFORMER_FIELDS | {"window": ("sliding_window", None)}
# The options by which types of model differ. Not all options are among them, since all types have
# some, such as a dropout rate of attention.
_OPTIONS = """
    head_size rotary_dim rope_layers query_growth window local local_rope_base qkv_bias qk_norm
    output_norms embed_scale residual_scale score_factor logit_divisor experts weights_sum_to_one
""".split()  # noqa: SIM905
_DEFAULTS = {f.name: f.default for f in fields(TransformerConfig) if f.name in _OPTIONS}


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A type of model.

    - `architecture`: the name of its class, without a suffix for the task.
    - `options`: the options that all its models have.
    - `free`: the options that each of them may have.
    - `named`: whether a configuration is of this type only if its `kind` says so, because another
      type has the same options in other files.
    - `fields`: the names of the settings of its fields, and their default values.
    - `defaults`: further settings that are read, and default values that differ.
    - `only`, `ignored`, `renamed`: arguments of `read_settings`.
    - `rope`: reads the rotary embeddings from the settings.
    - `more`: returns further fields of the configuration from the settings.
    - `written`: returns further settings from the configuration.
    """

    architecture: str
    options: Mapping[str, object] = field(default_factory=dict)
    free: tuple[str, ...] = ()
    named: bool = False
    fields: FieldNames = field(default_factory=lambda: TRANSFORMER_FIELDS)
    defaults: Mapping[str, object] = field(default_factory=dict)
    only: Implemented = field(default_factory=dict)
    ignored: str = ""
    renamed: Mapping[str, str] = field(default_factory=dict)
    rope: Callable[[Settings], Fields] = read_rope_settings
    more: Callable[[Settings], Fields] = lambda settings: {}
    written: Callable[[Any], Settings] = lambda config: {}


Kinds = Mapping[str, Kind]


def read_kind(settings: Settings, kinds: Kinds) -> Fields:
    """Reads the settings of one of several types of model, by default of the first."""
    kind = kinds.get(settings.get("model_type", ""), next(iter(kinds.values())))
    # A type's own defaults and values replace those that all types share.
    defaults = {"eos_token_id": None, **ROPE, **kind.defaults}
    only = {
        "model_type": tuple(kinds),
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "rope_interleaved": (False,),
        **kind.only,
    }
    options = {"only": only, "ignored": kind.ignored, "renamed": kind.renamed}
    c, values = read_settings(settings, kind.fields, defaults, **options)
    # Without the setting, each head has its own keys and values.
    if values["kv_heads"] is None:
        values["kv_heads"] = values["heads"]
    return values | kind.rope(c) | dict(kind.options) | kind.more(c)


def write_kind(config: TransformerConfig, kinds: Kinds) -> Settings:
    """The inverse of `read_kind`."""
    c = config
    name = kind_of(c, kinds)
    kind = kinds[name]
    settings = write_fields(c, kind.fields)
    settings |= {"architectures": [f"{kind.architecture}ForCausalLM"], "model_type": name}
    settings |= {"hidden_act": "silu", "head_dim": c.head_dim}
    return settings | write_rope(c.rope_scaling, c.context) | kind.written(c)


def kind_of(config: TransformerConfig, kinds: Kinds) -> str:
    """Returns the type of model that has these options."""
    if config.kind is not None and config.kind not in kinds:
        raise ValueError(f"`kind` must be one of {', '.join(kinds)}, but is {config.kind}.")
    candidates = dict(kinds)
    if config.kind is not None:
        candidates = {config.kind: kinds[config.kind]}
    for name, kind in candidates.items():
        # Its files could also be of another type with these options.
        if kind.named and config.kind is None:
            continue
        fixed = {**_DEFAULTS, **kind.options}
        # The first type that has these options, and may have the others that are set.
        if all(getattr(config, x) == fixed[x] for x in _OPTIONS if x not in kind.free):
            return name
    options = {x: getattr(config, x) for x in _OPTIONS if getattr(config, x) != _DEFAULTS[x]}
    sentences = [f"No published architecture has this combination of options: {_show(options)}."]
    for kind in candidates.values():
        fixed = _show(kind.options) or "none of them"
        free = " and ".join(map("`{}`".format, kind.free)) or "no other"
        sentences.append(f"{kind.architecture} has {fixed}, and may have {free}.")
    raise ValueError(" ".join(sentences))


def _show(options: Mapping[str, object]) -> str:
    return " and ".join(f"`{name}={value}`" for name, value in options.items())


def transformer_tensors(config: TransformerConfig) -> dict[str, Tensor]:
    # The output matrix has no bias, even in types whose other matrices have one.
    biases = ""
    if config.qkv_bias:
        biases = "qkv"
    tables = llama_attention(biases) | llama_mlp()
    if config.qk_norm:
        # OLMo normalises queries and keys over all heads together, and Qwen3 each head.
        pattern = "head_dim -> head_dim"
        if config.output_norms:
            pattern = HEADS_BIAS
        tables |= qk_norms("layers/", LLAMA_LAYER + "self_attn.", pattern=pattern)
    if config.output_norms:
        names = {"attention_norm": "post_attention", "mlp_norm": "post_feedforward"}
        for leaf, name in names.items():
            tables[f"layers/{leaf}"] = Tensor(f"{LLAMA_LAYER}{name}_layernorm.weight", VECTOR)
    return tables | llama_ends(config)
