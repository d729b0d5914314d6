"""The settings of `config.json` for the scaling of rotary embeddings."""

import math
from collections.abc import Mapping
from typing import Any

from ...models._rotary import RopeScaling, Yarn

_YARN = {
    "factor": "factor",
    "original": "original_max_position_embeddings",
    "fast": "beta_fast",
    "slow": "beta_slow",
    "rounded": "truncate",
    "amplitude": "attention_factor",
}


def rope_of(c: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings of rotary embeddings: `rope_scaling`, if both it and `rope_parameters`,
    its newer name, are given."""
    older, newer = c["rope_scaling"] or {}, c["rope_parameters"] or {}
    shared = {
        name: newer[name] for name in ("rope_theta", "partial_rotary_factor") if name in newer
    }
    return shared | older if older else dict(newer)


def read_rope(settings: dict[str, Any] | None) -> RopeScaling | None:
    """Reads `rope_scaling`, or `rope_parameters`, of a `config.json`."""
    settings = {k: v for k, v in (settings or {}).items() if k != "rope_theta"}
    kinds = [settings.pop(name, "default") for name in ("rope_type", "type")]
    kind = next((kind for kind in kinds if kind != "default"), "default")
    names = {"factor": "factor"}
    if kind == "llama3":
        names |= {"low_freq_factor": "low", "high_freq_factor": "high"}
        names |= {"original_max_position_embeddings": "original"}
    if kind not in ("default", "linear", "llama3"):
        raise ValueError(
            f"The setting `rope_scaling` has the type {kind!r}, but only 'default', 'linear' and "
            "'llama3' are implemented."
        )
    if unknown := settings.keys() - names.keys():
        raise ValueError(f"`rope_scaling` has unknown settings: {sorted(unknown)}.")
    if kind == "default":
        return None
    if missing := names.keys() - settings.keys():
        raise ValueError(f"`rope_scaling` of the type {kind!r} needs {sorted(missing)}.")
    return RopeScaling(kind, **{names[name]: value for name, value in settings.items()})


def read_rope_settings(c: dict[str, Any]) -> dict[str, Any]:
    """Reads the base and the scaling from either of the places where versions store them."""
    rope = rope_of(c)
    return {"rope_base": rope.get("rope_theta", c["rope_theta"]), "rope_scaling": read_rope(rope)}


def write_rope(scaling: RopeScaling | None) -> dict[str, Any]:
    """Returns the setting `rope_scaling` of a `config.json`, if embeddings are scaled."""
    if scaling is None:
        return {}
    settings = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "llama3":
        settings |= {"low_freq_factor": scaling.low, "high_freq_factor": scaling.high}
        settings |= {"original_max_position_embeddings": scaling.original}
    return {"rope_scaling": settings}


def read_yarn(
    c: dict[str, Any], default: Mapping[str, Any], scales: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Reads the base and the scaling of a model whose rotary embeddings may be scaled by YaRN.

    `scales` are the names of two numbers that the size of the embeddings follows from, of which the
    second also scales the scores of attention.
    """
    rope = rope_of(c) or dict(default)
    base = rope.pop("rope_theta", c["rope_theta"])
    kinds = {rope.pop(name, "default") for name in ("rope_type", "type")} - {"default"}
    if not kinds:
        return {"rope_base": base, "rope_scaling": None}
    if kinds != {"yarn"}:
        raise ValueError(
            f"The rotary embeddings have the types {sorted(kinds)}, but only 'default' and 'yarn' "
            "are implemented for this model."
        )
    given = [rope.pop(name, None) or 0.0 for name in scales]
    if unknown := rope.keys() - {*_YARN.values()}:
        raise ValueError(f"The rotary embeddings have unknown settings: {sorted(unknown)}.")
    if missing := {_YARN["factor"], _YARN["original"]} - rope.keys():
        raise ValueError(f"Rotary embeddings of the type 'yarn' need {sorted(missing)}.")
    fields = {field: rope[name] for field, name in _YARN.items() if rope.get(name) is not None}
    size = lambda scale: 0.1 * scale * math.log(max(fields["factor"], 1)) + 1
    both = given and all(given)
    fields.setdefault("amplitude", size(given[0]) / size(given[1]) if both else size(1))
    found = {"rope_base": base, "rope_scaling": Yarn(**fields)}
    return found | ({"score_scaling": given[1]} if given else {})


def write_yarn(scaling: Yarn) -> dict[str, Any]:
    """The inverse of `read_yarn`, without the base."""
    return {"rope_type": "yarn"} | {name: getattr(scaling, x) for x, name in _YARN.items()}
