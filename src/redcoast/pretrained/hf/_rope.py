"""The settings of `config.json` for the scaling of rotary embeddings."""

from typing import Any

from ...models._rotary import RopeScaling


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
    rope = c["rope_parameters"] or c["rope_scaling"] or {}
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
