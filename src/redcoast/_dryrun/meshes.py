"""The best mesh for a training step: every factorisation priced, the best few compiled."""

import functools as ft
from collections.abc import Callable, Sequence
from math import inf

from .._sharding.choice.memory import FILLED
from .place import Place
from .prices import compile_candidate, price
from .step import Job, factorisations
from .suggestion import Candidate, MeshSuggestion

# Of what the planner estimated, compiled programs took this share of memory at the least.
LEAST_SHARE = 0.8


def suggest(job: Job, place: Place, compiled: int) -> MeshSuggestion:
    """Prices all meshes, compiles the best, and says which it is."""
    priced = [price(job, place, sizes) for sizes in factorisations(len(place.devices))]
    return choose(priced, ft.partial(compile_candidate, job, place), place, compiled)


def cheapest(job: Job, place: Place) -> dict[str, int]:
    """The sizes of the mesh that the planner prices cheapest, of those that fit by its estimate;
    if none does, of that which needs the least memory."""
    priced = [price(job, place, sizes) for sizes in factorisations(len(place.devices))]
    possible = _tried(priced)
    if not possible:
        raise _impossible(priced[0])
    usable = inf if place.usable is None else FILLED * place.usable
    may = [one for one in possible if _memory_of(one) <= usable]
    return (min(may, key=_price_of) if may else min(possible, key=_need_of)).mesh


def likely(job: Job, place: Place) -> list[dict[str, int]]:
    """The sizes of the meshes on which the step may fit, those first that are priced cheapest of
    those which do by the planner's estimate, then those that need the least memory."""
    priced = [price(job, place, sizes) for sizes in factorisations(len(place.devices))]
    usable = inf if place.usable is None else FILLED * place.usable
    fits = lambda one: _memory_of(one) <= usable
    order = lambda one: (0, _price_of(one)) if fits(one) else (1, _need_of(one))
    return [one.mesh for one in sorted(_tried(priced), key=order)]


def _impossible(one: Candidate) -> ValueError:
    return ValueError(f"The step cannot be run on any mesh. On {one.mesh}: {one.error}")


def choose(
    priced: Sequence[Candidate],
    compiling: Callable[[Candidate], Candidate],
    place: Place,
    compiled: int,
) -> MeshSuggestion:
    """The best of some meshes, of which up to twice `compiled` are compiled by `compiling`."""
    left, done = [one for one in priced if one.error is None], []
    while left and not _enough(done, compiled):
        following = _following(left, done, place.usable, compiled)
        left.remove(following)
        done.append(compiling(following))
    wrong = [one for one in (*priced, *done) if one.error is not None]
    tried = sorted(_tried(done), key=_rank)
    if not tried:
        raise _impossible(wrong[0])
    best, ordered = tried[0], (*tried, *sorted(left, key=_price_of), *wrong)
    return MeshSuggestion(
        best.mesh, bool(best.fits), place.name, place.usable, ordered, place.notes
    )


def _tried(done: Sequence[Candidate]) -> list[Candidate]:
    return [one for one in done if one.error is None]


def _enough(done: Sequence[Candidate], compiled: int) -> bool:
    tried = _tried(done)
    found = any(one.fits for one in tried)
    return len(tried) >= (compiled if found else 2 * compiled)


def _following(
    left: Sequence[Candidate], done: Sequence[Candidate], usable: int | None, compiled: int
) -> Candidate:
    """Which mesh to compile next: the cheapest that may fit, or else that needs least memory."""
    tried = _tried(done)
    shares = [
        one.peak_memory / one.estimated_memory
        for one in tried
        if one.peak_memory and one.estimated_memory
    ]
    share = min(shares, default=LEAST_SHARE)
    may = [one for one in left if usable is None or share * _memory_of(one) <= usable]
    if may and len(tried) < compiled:
        return min(may, key=_price_of)
    return min(left, key=_need_of)


def _price_of(one: Candidate) -> tuple[int | float, bool]:
    return one.priced_seconds or 0, not one.usual


def _need_of(one: Candidate) -> tuple[int | float, bool]:
    return _memory_of(one), not one.usual


def _memory_of(one: Candidate) -> int | float:
    return one.estimated_memory or 0


def _rank(one: Candidate) -> tuple[int, int | float]:
    """Those that fit by their time, then those that do not by their memory."""
    return (0, one.seconds or 0) if one.fits else (1, one.peak_memory or 0)
