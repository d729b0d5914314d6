"""Finds the smallest changes that make a training step fit in memory."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from ..data._per_batch import has_per_batch
from ._compile_job import Compiled
from ._job import Job
from ._report import Change, DryRun

MESHES = 3  # the number of other meshes to compile


@dataclass(frozen=True)
class Settings:
    """The settings of a step that can change while model, batch and optimizer stay the same."""

    mesh: dict[str, int]
    remat: bool
    accumulate: int
    compute_dtype: Any


def find_changes(
    make: Callable[..., Job],
    init_fn: Callable[..., Any],
    job: Job,
    run: DryRun,
    others: Sequence[dict[str, int]],
    again: Callable[[Job, Mapping[str, int]], Compiled],
) -> Iterator[Change]:
    """Yields single changes that make the step fit, one of each kind, or else a combination of
    them.

    **Arguments:**

    - `make`: `make(init_fn, accumulate=..., compute_dtype=...)` makes the changed step.
    - `init_fn`: makes the model.
    - `job`, `run`: the step that does not fit, and its dry run.
    - `others`: the sizes of other meshes, the most promising first.
    - `again`: compiles a step on a mesh.
    """
    now = Settings(run.mesh, False, job.accumulate, job.compute_dtype)

    def tried(settings: Settings) -> Change | None:
        changed = rematerialised(init_fn) if settings.remat else init_fn
        options = {"accumulate": settings.accumulate, "compute_dtype": settings.compute_dtype}
        try:
            found = again(make(changed, **options), settings.mesh)
        # For example, an override does not divide on that mesh, or the compiler fails.
        except (ValueError, RuntimeError):
            return None
        if found.refused or found.peak > run.memory["usable"]:
            return None
        dtype = None if settings.compute_dtype is None else jnp.dtype(settings.compute_dtype).name
        of = (settings.mesh, settings.remat, settings.accumulate, dtype)
        return Change(_words(now, settings), found.peak, *of)

    kinds = _kinds(now, job, others)
    single = [next(filter(None, map(tried, options)), None) for options in kinds]
    if any(single):
        yield from filter(None, single)
    elif (change := _together(now, kinds, tried)) is not None:
        yield change


def _kinds(now: Settings, job: Job, others: Sequence[dict[str, int]]) -> list[list[Settings]]:
    """The changes of each kind, smaller ones first."""
    change = dataclasses.replace
    found = [[change(now, mesh=sizes) for sizes in others[:MESHES]]]
    if can_rematerialise(job.state.model):
        found.append([change(now, remat=True)])
    shards = now.mesh["data"] * now.mesh["fsdp"]
    counts = [now.accumulate * 2**n for n in range(1, 4)]
    # Microbatches that do not divide over the devices would be replicated.
    divides = lambda count: job.rows % (count * shards) == 0 and not has_per_batch(job.batch)
    counts = list(filter(divides, counts))
    found.append([change(now, accumulate=count) for count in counts])
    if now.compute_dtype is None or jnp.dtype(now.compute_dtype).itemsize > 2:
        found.append([change(now, compute_dtype=jnp.bfloat16)])
    return [options for options in found if options]


def _together(
    now: Settings, kinds: list[list[Settings]], tried: Callable[[Settings], Change | None]
) -> Change | None:
    """Adds one kind of change after another until the step fits, then drops unnecessary changes."""
    settings, made, found = now, [], None
    for options in kinds:
        fields = [field.name for field in dataclasses.fields(Settings)]
        name = next(f for f in fields if getattr(options[0], f) != getattr(now, f))
        # The first mesh is the most promising; the last number of microbatches saves the most.
        settings = _with(settings, options[0 if name == "mesh" else -1], name)
        made.append((name, options))
        if len(made) > 1 and (found := tried(settings)) is not None:
            break
    if found is None:
        return None
    for name, options in made:
        # The last change cannot be dropped: without it the step did not fit.
        less_of_it = [now] * (name != made[-1][0]) + options[:-1] * (name != "mesh")
        for less in less_of_it:
            if (better := tried(_with(settings, less, name))) is not None:
                settings, found = _with(settings, less, name), better
                break
    return found


def _with(settings: Settings, other: Settings, name: str) -> Settings:
    return dataclasses.replace(settings, **{name: getattr(other, name)})


def _words(now: Settings, settings: Settings) -> str:
    words = []
    if settings.mesh != now.mesh:
        words.append("mesh " + ", ".join(f"{axis}={n}" for axis, n in settings.mesh.items()))
    if settings.remat:
        words.append('remat="full" in the model')
    if settings.accumulate != now.accumulate:
        words.append(f"accumulate={settings.accumulate}")
    if settings.compute_dtype != now.compute_dtype:
        words.append(f"compute_dtype={jnp.dtype(settings.compute_dtype).name}")
    return " and ".join(words)


def can_rematerialise(model: PyTree) -> bool:
    """Whether the tree contains a model of `redcoast.models` with less than `remat="full"`."""
    return next(_keeping_some(model), None) is not None


def rematerialised(init_fn: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `init_fn` so that the model's configuration has `remat="full"`."""

    def init(key: Any) -> PyTree:
        # Modules are frozen. A copy is changed, so that no module outside is affected.
        model = jax.tree.map(lambda x: x, init_fn(key))
        for module in _keeping_some(model):
            config = dataclasses.replace(module.config, remat="full")
            object.__setattr__(module, "config", config)
        return model

    return init


def _keeping_some(tree: Any) -> Iterator[Any]:
    """The modules in a tree whose configuration has less than `remat="full"`, outermost first."""
    if isinstance(tree, eqx.Module):
        config = getattr(tree, "config", None)
        if dataclasses.is_dataclass(config) and getattr(config, "remat", "full") != "full":
            yield tree
        inside = [getattr(tree, field.name, None) for field in dataclasses.fields(tree)]
    elif isinstance(tree, dict):
        inside = list(tree.values())
    else:
        inside = list(tree) if isinstance(tree, list | tuple) else []
    for one in inside:
        yield from _keeping_some(one)
