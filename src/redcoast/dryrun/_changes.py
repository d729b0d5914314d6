"""The smallest changes with which a step fits that is too large."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from ._compile import Compiled
from ._job import Job
from ._report import Change, DryRun

Run = Callable[[Job, Mapping[str, int]], Compiled]
MESHES = 3  # of others that are compiled


@dataclass(frozen=True)
class Settings:
    """What can be changed of a step without another model, batch or optimizer."""

    mesh: dict[str, int]
    remat: bool
    accumulate: int
    compute_dtype: Any


_FIELDS = [field.name for field in dataclasses.fields(Settings)]


def find_changes(
    make: Callable[..., Job],
    init_fn: Callable[..., Any],
    job: Job,
    run: DryRun,
    others: Sequence[dict[str, int]],
    again: Run,
) -> Iterator[Change]:
    """Single changes that fit, one of each kind; if there are none, several at once.

    `make(init_fn, accumulate=..., compute_dtype=...)` makes another step, `others` are other
    meshes, the likeliest first, and `again` compiles.
    """
    now = Settings(run.mesh, False, job.accumulate, job.compute_dtype)

    def tried(settings: Settings) -> Change | None:
        changed = rematerialised(init_fn) if settings.remat else init_fn
        options = {"accumulate": settings.accumulate, "compute_dtype": settings.compute_dtype}
        try:
            found = again(make(changed, **options), settings.mesh)
        # An override, say, does not divide on that mesh; or the compiler fails.
        except (ValueError, RuntimeError):
            return None
        if found.refused or found.peak > run.memory["usable"]:
            return None
        dtype = None if settings.compute_dtype is None else jnp.dtype(settings.compute_dtype).name
        of = (settings.mesh, settings.remat, settings.accumulate, dtype)
        return Change(_words(now, settings), found.peak, *of)

    kinds = _kinds(now, job, others)
    single = [first(map(tried, options)) for options in kinds]
    if any(single):
        yield from filter(None, single)
    elif (change := _together(now, kinds, tried)) is not None:
        yield change


def first(found: Iterable[Change | None]) -> Change | None:
    return next(filter(None, found), None)


def _kinds(now: Settings, job: Job, others: Sequence[dict[str, int]]) -> list[list[Settings]]:
    """Of each kind of change, the smaller before the larger."""
    change = dataclasses.replace
    found = [[change(now, mesh=sizes) for sizes in others[:MESHES]]]
    if can_rematerialise(job.state.model):
        found.append([change(now, remat=True)])
    shards = now.mesh["data"] * now.mesh["fsdp"]
    counts = [now.accumulate * 2**n for n in range(1, 4)]
    # Microbatches that do not divide over the devices would be computed whole on each.
    counts = [count for count in counts if job.rows % (count * shards) == 0]
    found.append([change(now, accumulate=count) for count in counts])
    if now.compute_dtype is None or jnp.dtype(now.compute_dtype).itemsize > 2:
        found.append([change(now, compute_dtype=jnp.bfloat16)])
    return [options for options in found if options]


def _together(
    now: Settings, kinds: list[list[Settings]], tried: Callable[[Settings], Change | None]
) -> Change | None:
    """Several changes: more and more of them, and then without those that are not needed."""
    settings, made, found = now, [], None
    for options in kinds:
        name = next(f for f in _FIELDS if getattr(options[0], f) != getattr(now, f))
        # Of meshes the likeliest is the first; of numbers of microbatches the last saves most.
        settings = _with(settings, options[0 if name == "mesh" else -1], name)
        made.append((name, options))
        if len(made) > 1 and (found := tried(settings)) is not None:
            break
    if found is None:
        return None
    for name, options in made:
        # Without the last of them it did not fit.
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
    """Whether a model of `redcoast.models` in it could compute more of its layers again."""
    return any(_keeps_some(module) for module in _modules(model))


def rematerialised(init_fn: Callable[..., Any]) -> Callable[..., Any]:
    """Makes the same model with `remat="full"` in its configuration."""

    def init(key: Any) -> PyTree:
        # A copy, since modules cannot be changed from outside: only what was just made is.
        model = jax.tree.map(lambda x: x, init_fn(key))
        for module in _modules(model):
            if _keeps_some(module):
                config = dataclasses.replace(module.config, remat="full")
                object.__setattr__(module, "config", config)
        return model

    return init


def _keeps_some(module: Any) -> bool:
    config = getattr(module, "config", None)
    return dataclasses.is_dataclass(config) and getattr(config, "remat", "full") != "full"


def _modules(tree: Any) -> Iterator[Any]:
    """All Equinox modules in a tree, outer ones first."""
    if isinstance(tree, eqx.Module):
        yield tree
        inside = [getattr(tree, field.name, None) for field in dataclasses.fields(tree)]
    elif isinstance(tree, dict):
        inside = list(tree.values())
    else:
        inside = list(tree) if isinstance(tree, list | tuple) else []
    for one in inside:
        yield from _modules(one)
