"""The smallest changes with which a step fits that is too large."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from .compiled import Compiled
from .result import Change, DryRun
from .step import Job, factorisations

Run = Callable[[Job, Mapping[str, int]], Compiled]


@dataclass(frozen=True)
class Settings:
    """What can be changed of a step without another model, batch or optimizer."""

    mesh: dict[str, int]
    remat: bool
    accumulate: int
    compute_dtype: Any


def find_changes(
    make: Callable[..., Job], init_fn: Callable[..., Any], job: Job, run: DryRun, again: Run
) -> Iterator[Change]:
    """Single changes that fit, one of each kind; if there are none, several at once.

    `make(init_fn, accumulate=..., compute_dtype=...)` makes another step, and `again` compiles it.
    """
    now = Settings(run.mesh, False, job.accumulate, job.compute_dtype)
    usable = run.memory["usable"]
    seen: list[Settings] = []

    def tried(settings: Settings) -> Change | None:
        changed = rematerialised(init_fn) if settings.remat else init_fn
        options = {"accumulate": settings.accumulate, "compute_dtype": settings.compute_dtype}
        try:
            found = again(make(changed, **options), settings.mesh)
        except ValueError:  # an override, say, does not divide on that mesh
            return None
        if found.refused or found.peak > usable:
            return None
        return Change(
            _words(now, settings),
            found.peak,
            settings.mesh,
            settings.remat,
            settings.accumulate,
            None if settings.compute_dtype is None else str(jnp.dtype(settings.compute_dtype)),
        )

    fits = False
    for options in _single(now, job, init_fn):
        for settings in options:
            seen.append(settings)
            if (change := tried(settings)) is not None:
                fits = True
                yield change
                break
    if not fits:
        together = (change for settings in _several(now, seen) if (change := tried(settings)))
        yield from [change for _, change in zip(range(1), together, strict=False)]


def _single(now: Settings, job: Job, init_fn: Callable[..., Any]) -> Iterator[list[Settings]]:
    """Of each kind of change, the smaller before the larger."""
    change = dataclasses.replace
    yield [change(now, mesh=sizes) for sizes in _split_further(now.mesh)]
    if can_rematerialise(job.state.model):
        yield [change(now, remat=True)]
    shards = now.mesh["data"] * now.mesh["fsdp"]
    counts = [now.accumulate * 2**n for n in range(1, 4)]
    # Microbatches that do not divide over the devices would be computed whole on each.
    yield [change(now, accumulate=count) for count in counts if job.rows % (count * shards) == 0]
    if now.compute_dtype is None:
        yield [change(now, compute_dtype=jnp.bfloat16)]


def _split_further(mesh: Mapping[str, int]) -> list[dict[str, int]]:
    """Meshes of as many devices that split the model further: `data` as it halves, on `fsdp`."""
    devices = mesh["data"] * mesh["fsdp"] * mesh["model"]
    less = [sizes for sizes in factorisations(devices) if sizes["data"] < mesh["data"]]
    further = [sizes for sizes in less if sizes["model"] == mesh["model"]]
    whole = [
        sizes
        for sizes in factorisations(devices)
        if sizes["data"] == 1 and sizes["model"] == 2 * mesh["model"]
    ]
    return sorted(further, key=lambda sizes: -sizes["data"])[:3] + whole


def _several(now: Settings, seen: list[Settings]) -> Iterator[Settings]:
    """The furthest of each kind of change, one after the other on top of those before."""
    furthest: dict[str, Settings] = {}
    for settings in seen:
        for field in dataclasses.fields(settings):
            if getattr(settings, field.name) != getattr(now, field.name):
                furthest[field.name] = settings
    settings = now
    for count, name in enumerate(furthest):
        settings = dataclasses.replace(settings, **{name: getattr(furthest[name], name)})
        if count:
            yield settings


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
    """Whether a model of `redcoast.models` in it keeps all that its layers compute."""
    return any(_keeps_all(module) for module in _modules(model))


def rematerialised(init_fn: Callable[..., Any]) -> Callable[..., Any]:
    """Makes the same model with `remat="full"` in its configuration."""

    def init(key: Any) -> PyTree:
        # A copy, since modules cannot be changed from outside: only what was just made is.
        model = jax.tree.map(lambda x: x, init_fn(key))
        for module in _modules(model):
            if _keeps_all(module):
                config = dataclasses.replace(module.config, remat="full")
                object.__setattr__(module, "config", config)
        return model

    return init


def _keeps_all(module: Any) -> bool:
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
