"""Checksums of a few examples, by which a resumed run knows whether it reads the same data."""

import logging

from ._sources import Indexed, fetch
from ._stream_state import example_checksum

logger = logging.getLogger("redcoast")
_MOST = 8  # examples that are compared
_SHARE = 0.75  # of them differ, where all are in another order


def fingerprint(dataset: Indexed, length: int) -> list[int] | None:
    """Checksums of examples at places all over the dataset; `None` if one cannot be read now."""
    # Without duplicates, which a short dataset has.
    places = dict.fromkeys(i * length // _MOST for i in range(_MOST))
    try:
        return [example_checksum(example) for example in fetch(dataset, list(places))]
    except Exception:  # it is raised again when a batch needs this example
        return None


def warn_of_other_examples(
    before: list[int] | None, now: list[int] | None, again: list[int] | None
) -> None:
    """Warns if most examples are not those that a run was started with.

    `again` are the checksums of a second reading: an example that is augmented differs in each.
    """
    if not before or not now or len(before) != len(now) or now != again:
        return
    differ = sum(old != new for old, new in zip(before, now, strict=True))
    if differ < _SHARE * len(now):
        return
    logger.warning(
        "`examples` have another order than when the run was started, or are different: of %d that "
        "were compared, %d differ. The run goes on with them, so some may be seen twice in this "
        "epoch and others not at all. Shuffle them with a seed, or leave that to `fit`, which "
        "shuffles in each epoch; for other data, choose another directory.",
        *(len(now), differ),
    )
