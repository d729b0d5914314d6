"""The settings of `config.json` for the scaling of rotary embeddings."""

import math
from collections.abc import Iterable

from ...models._rotary import LongRope, RopeScaling, Yarn
from .._neutral import is_neutral
from .._settings import Fields, Settings

_ORIGINAL = "original_max_position_embeddings"
PART = "partial_rotary_factor"  # of the features of a head
_YARN = {
    "factor": "factor",
    "original": _ORIGINAL,
    "fast": "beta_fast",
    "slow": "beta_slow",
    "rounded": "truncate",
    "amplitude": "attention_factor",
}
# The settings that have the others.
ROPE = dict.fromkeys(("rope_scaling", "rope_parameters"))
# Settings of rotary embeddings and of their scaling. Qwen's sections for images have no effect on
# texts.
_OF_OTHER_KINDS = frozenset(
    """
    rope_type type rope_theta factor original_max_position_embeddings beta_fast beta_slow truncate
    attention_factor low_freq_factor high_freq_factor finetuned mscale mscale_all_dim
    short_factor long_factor mrope_section mrope_interleaved
    """.split()  # noqa: SIM905
)


def rope_of(c: Settings) -> Settings:
    """Returns the settings of rotary embeddings: `rope_scaling`, if both it and `rope_parameters`,
    its newer name, are given."""
    older, newer = c["rope_scaling"], c["rope_parameters"] or {}
    if not older:
        return dict(newer)
    # `rope_scaling` never has these.
    shared = newer.keys() & {"rope_theta", PART}
    return {name: newer[name] for name in shared} | older


def unread(rope: Settings, read: Iterable[str]) -> list[str]:
    """Returns the settings of rotary embeddings that might change results and are not read.

    Settings of other kinds of scaling are excluded, because `transformers` ignores them too.
    """
    names = rope.keys() - {*read} - _OF_OTHER_KINDS
    return sorted(name for name in names if not is_neutral(name, rope[name]))


def kind_of_rope(rope: Settings) -> str:
    # For tokens of text, the three positions of Qwen's models are equal.
    for name in ("rope_type", "type"):
        kind = rope.get(name) or "default"
        if kind not in ("default", "mrope"):
            return kind
    return "default"


def read_rope(rope: Settings | None, *, context: int | None = None) -> RopeScaling | None:
    """Reads `rope_scaling`, or `rope_parameters`, of a `config.json`. `context` is the default
    number of tokens for the scaling, if the file does not state it."""
    rope = {name: value for name, value in (rope or {}).items() if value is not None}
    kind = kind_of_rope(rope)
    names = {"factor": "factor"}
    if kind == "llama3":
        names |= {"low_freq_factor": "low", "high_freq_factor": "high", _ORIGINAL: "original"}
    # Dynamic scaling depends on the length that the model was trained with.
    kinds = ["default", "linear", "llama3", *["dynamic"] * (context is not None)]
    if kind not in kinds:
        raise ValueError(
            f"The setting `rope_scaling` has the type {kind!r}, but only "
            f"{', '.join(map(repr, kinds[:-1]))} and {kinds[-1]!r} are implemented for this model."
        )
    if unknown := unread(rope, names):
        raise ValueError(f"`rope_scaling` has unknown settings: {unknown}.")
    if kind == "default":
        return None
    if context is not None:
        rope.setdefault(_ORIGINAL, context)
    if missing := names.keys() - rope.keys():
        raise ValueError(f"`rope_scaling` of the type {kind!r} needs {sorted(missing)}.")
    fields = {field: rope[name] for name, field in names.items()}
    if kind == "dynamic":  # whatever other settings there are, as in `transformers`
        fields["original"] = context
    return RopeScaling(kind, **fields)  # pyright: ignore[reportArgumentType]


def read_rope_settings(c: Settings) -> Fields:
    """Reads the base and the scaling, which versions of `transformers` store in two places."""
    rope, context = rope_of(c), c["max_position_embeddings"]
    if kind_of_rope(rope) != "yarn":
        base = rope.get("rope_theta") or c["rope_theta"]
        return {"rope_base": base, "rope_scaling": read_rope(rope, context=context)}
    rope[_ORIGINAL] = rope.get(_ORIGINAL) or context
    rope["factor"] = rope.get("factor") or context / rope[_ORIGINAL]
    return read_yarn(c | {"rope_scaling": rope}, {}, ("mscale", "mscale_all_dim"), scores=False)


def read_partial_rope(c: Settings, default: float) -> Fields:
    """Reads the rotary embeddings of a model that rotates a part of each head's features."""
    rope = rope_of(c)
    part = rope.pop(PART, None) or c[PART] or default
    size = c["head_dim"] or c["hidden_size"] // max(c["num_attention_heads"], 1)
    fields = read_rope_settings(c | {"rope_parameters": rope, "rope_scaling": None})
    return fields | {"rotary_dim": int(size * part)}


def write_rope(scaling: RopeScaling | Yarn | LongRope | None, context: int) -> Settings:
    """Returns the setting `rope_scaling` of a `config.json`, if embeddings are scaled."""
    if isinstance(scaling, LongRope):
        raise ValueError("`rope_scaling` is a `LongRope`, which only files of Phi-3 support.")
    if scaling is None:
        return {}
    if isinstance(scaling, Yarn):
        return {"rope_scaling": write_yarn(scaling)}
    settings = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "llama3":
        settings |= {"low_freq_factor": scaling.low, "high_freq_factor": scaling.high}
        settings |= {_ORIGINAL: scaling.original}
    if scaling.kind == "dynamic" and scaling.original != context:
        raise ValueError(
            f"The `original` length of dynamic rotary embeddings is {scaling.original}, and "
            f"`context` is {context}, but a file has one number for both. Make them equal."
        )
    return {"rope_scaling": settings}


def read_yarn(
    c: Settings, default: Settings, scales: tuple[str, ...] = (), *, scores: bool = True
) -> Fields:
    """Reads the base and the scaling of a model whose rotary embeddings may be scaled by YaRN.

    `scales` are the names of two numbers that determine the size of the embeddings. The second also
    scales the scores of attention, if `scores`.
    """
    rope = rope_of(c) or dict(default)
    base = rope.get("rope_theta") or c["rope_theta"]
    kind = kind_of_rope(rope)
    if kind == "default":
        return {"rope_base": base, "rope_scaling": None}
    if kind != "yarn":
        raise ValueError(
            f"The rotary embeddings have the type {kind!r}, but only 'default' and 'yarn' are "
            "implemented for this model."
        )
    factors = [rope.pop(name, None) or 0.0 for name in scales]  # `mscale` and `mscale_all_dim`
    if unknown := unread(rope, _YARN.values()):
        raise ValueError(f"The rotary embeddings have unknown settings: {unknown}.")
    if missing := {_YARN["factor"], _YARN["original"]} - rope.keys():
        raise ValueError(f"Rotary embeddings of the type 'yarn' need {sorted(missing)}.")
    # Zero means the default, as in `transformers`.
    for name in ("beta_fast", "beta_slow"):
        rope[name] = rope.get(name) or None
    fields = {field: rope[name] for field, name in _YARN.items() if rope.get(name) is not None}
    amplitude = _yarn_amplitude(fields["factor"], 1)
    if factors and all(factors):
        # DeepSeek divides by a second such number, which scales the scores instead.
        first, second = factors
        amplitude = _yarn_amplitude(fields["factor"], first)
        amplitude /= _yarn_amplitude(fields["factor"], second)
    fields.setdefault("amplitude", amplitude)
    settings: Settings = {"rope_base": base, "rope_scaling": Yarn(**fields)}
    if factors and scores:
        settings["score_scaling"] = factors[1]
    return settings


def _yarn_amplitude(factor: int | float, scale: int | float) -> float:
    """How YaRN scales the embeddings (<https://arxiv.org/abs/2309.00071>)."""
    return 0.1 * scale * math.log(max(factor, 1)) + 1


def write_yarn(scaling: Yarn) -> Settings:
    """The inverse of `read_yarn`, without the base."""
    return {"rope_type": "yarn"} | {name: getattr(scaling, x) for x, name in _YARN.items()}


def rotated_part(rotated: int, head_dim: int) -> float:
    """Returns `partial_rotary_factor`, the part of the features of a head that are rotated."""
    # Files store a ratio, and `transformers` rounds its product with the head size down.
    part = rotated / head_dim
    if int(head_dim * part) != rotated:
        raise ValueError(
            f"A `rotary_dim` of {rotated} cannot be saved: the file stores its ratio to the head "
            f"size {head_dim}, from which rounding gives {rotated - 1}."
        )
    return part
