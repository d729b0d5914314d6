"""Whether a run of several processes stops, decided by all of them at the same step."""

from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int32


class Votes:
    """Each process casts what it wishes into the step that it starts, whose metrics have the sum:
    everyone reads it behind the same step. That costs no word between the hosts."""

    def __init__(self, mesh: Mesh, wishes: Callable[[], bool]):
        self._wishes = wishes
        self._alone = jax.process_count() == 1
        self._ballots = [] if self._alone else [_ballot(mesh, vote) for vote in (0, 1)]

    def cast(self) -> Int32[Array, " devices"] | None:
        """For the step that is started next."""
        return None if self._alone else self._ballots[bool(self._wishes())]

    def stop(self, counted: float) -> bool:
        """Whether to stop, given the votes in the metrics that were read last."""
        return self._wishes() if self._alone else counted > 0


def _ballot(mesh: Mesh, vote: int) -> Int32[Array, " devices"]:
    # Its parts differ from process to process, so that the value differs as well.
    everywhere = NamedSharding(mesh, P(mesh.axis_names))
    part = lambda index: np.full(1, vote, np.int32)
    return jax.make_array_from_callback((mesh.size,), everywhere, part)
