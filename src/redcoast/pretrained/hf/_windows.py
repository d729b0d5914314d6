"""The setting `layer_types`: which layers have a sliding window."""

from collections.abc import Sequence

LOCAL, GLOBAL = "sliding_attention", "full_attention"


def read_windows(kinds: Sequence[str]) -> tuple[bool, ...]:
    """Returns for each layer whether it has a window."""
    if odd := {*kinds} - {LOCAL, GLOBAL}:
        raise ValueError(
            f"`layer_types` has {sorted(odd)}, but only {[LOCAL, GLOBAL]} are implemented."
        )
    return tuple(kind == LOCAL for kind in kinds)


def all_but_last_of(period: int, layers: int) -> tuple[bool, ...]:
    """Returns for each layer whether it has a window, if the last of each `period` has none."""
    return tuple((layer + 1) % period != 0 for layer in range(layers))


def write_windows(local: Sequence[bool]) -> list[str]:
    return [LOCAL if has_window else GLOBAL for has_window in local]
