"""The best mesh for a training step: every factorisation priced, the best few compiled."""

import functools as ft
from collections.abc import Callable, Sequence
from math import inf
from typing import Any

import equinox as eqx
import optax
from jaxtyping import PyTree

from .._arguments import check_integer
from .._loss import LossFn
from .._sharding.choice.memory import FILLED
from .place import Place, at_hand, elsewhere
from .prices import compile_candidate, price
from .step import Job, Overrides, factorisations, make_job
from .suggestion import Candidate, MeshSuggestion

# Of what the planner estimated, compiled programs took this share of memory at the least.
LEAST_SHARE = 0.8


def suggest_mesh(
    init_fn: Callable[..., Any],
    loss_fn: LossFn,
    batch: PyTree,
    optimizer: optax.GradientTransformation,
    *,
    target: str | None = None,
    compiled: int = 3,
    accumulate: int = 1,
    compute_dtype: Any = None,
    overrides: Overrides = (),
    trainable: PyTree = eqx.is_inexact_array,
) -> MeshSuggestion:
    """Finds the mesh on which a training step is fastest, among those on which it fits.

    Every factorisation of the devices into data x fsdp x model is planned, and priced by the plan:
    arithmetic at the devices' peak rate, and what is sent at that of their links. The best few are
    compiled, with nothing but shapes, and of those that fit the one wins whose compiled program
    takes the least time for both. If none fits, it is the one that needs the least memory.

    **Arguments:**

    - `init_fn`: `init_fn(key)` makes the model; it is only traced.
    - `loss_fn`: `loss_fn(model, batch, key)`, as for [`redcoast.train_step`][].
    - `batch`: PyTree of arrays or `jax.ShapeDtypeStruct`s, batch dimension first: the batch of a
        step, over all devices.
    - `optimizer`: an optax optimizer.
    - `target`: the name of devices that need not be there, such as `"v4:2x2x2"`, `"a100-80gb:8"`,
        or `"cpu:8"`; by default those at hand, of which only the memory is known.
    - `compiled`: how many meshes to compile. If none of them fits, up to as many more are compiled
        until one does, those first that are estimated to need the least memory.
    - `accumulate`, `compute_dtype`, `trainable`: as for [`redcoast.train_step`][].
    - `overrides`: as for [`redcoast.infer_shardings`][].

    **Returns:**

    A mapping with the sizes of `data`, `fsdp` and `model`, ready for
    `redcoast.make_mesh(**suggestion)`; `print` it to see a table of all meshes.

    **Raises:**

    `ValueError` or `TypeError` if an argument cannot work, or the target does not exist; what
    `loss_fn` raises; and what is wrong with the step if it cannot be run on any mesh.

    !!! example

        ```python
        import jax
        import jax.numpy as jnp
        import optax
        import redcoast as rc

        init_fn = lambda key: {"up": jnp.zeros((64, 256)), "down": jnp.zeros((256, 64))}
        loss_fn = lambda p, x, key: jnp.mean((jax.nn.relu(x @ p["up"]) @ p["down"]) ** 2)
        batch = jax.ShapeDtypeStruct((32, 64), jnp.float32)
        found = rc.suggest_mesh(init_fn, loss_fn, batch, optax.adamw(1e-3), target="cpu:4")
        print(found)
        ```
    """
    check_integer("compiled", compiled)
    place = at_hand() if target is None else elsewhere(target)
    job = make_job(
        init_fn,
        loss_fn,
        batch,
        optimizer,
        accumulate=accumulate,
        compute_dtype=compute_dtype,
        overrides=overrides,
        trainable=trainable,
    )
    return suggest(job, place, compiled)


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
    return (min(may, key=_price_of) if may else min(possible, key=_memory_of)).mesh


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
    return min(left, key=_memory_of)


def _price_of(one: Candidate) -> int | float:
    return one.priced_seconds or 0


def _memory_of(one: Candidate) -> int | float:
    return one.estimated_memory or 0


def _rank(one: Candidate) -> tuple[int, int | float]:
    """Those that fit by their time, then those that do not by their memory."""
    return (0, one.seconds or 0) if one.fits else (1, one.peak_memory or 0)
