"""The setting `layer_types`: which layers have a sliding window, or linear attention."""

from collections.abc import Sequence

from .._settings import Settings

# The values in files.
LOCAL, GLOBAL = "sliding_attention", "full_attention"


def read_windows(kinds: Sequence[str], local: str = LOCAL) -> tuple[bool, ...]:
    """Returns for each layer whether it is `local`, not global: whether it has a window."""
    if odd := {*kinds} - {local, GLOBAL}:
        raise ValueError(
            f"`layer_types` has {sorted(odd)}, but only {[local, GLOBAL]} are implemented."
        )
    return tuple(kind == local for kind in kinds)


def all_but_last_of(period: int, layers: int) -> tuple[bool, ...]:
    """Returns for each layer whether it is local, if the last of each `period` is global."""
    return tuple((layer + 1) % period != 0 for layer in range(layers))


def local_layers(c: Settings, period: int, local: str = LOCAL) -> tuple[bool, ...]:
    """Returns for each layer whether it is local: as the file says it, or by default all but the
    last of each `period`."""
    if c["layer_types"]:
        return read_windows(c["layer_types"], local)
    return all_but_last_of(period, c["num_hidden_layers"])


def write_windows(is_local: Sequence[bool], local: str = LOCAL) -> list[str]:
    # The inverse of `read_windows`.
    kinds = {True: local, False: GLOBAL}
    return [kinds[has_window] for has_window in is_local]
