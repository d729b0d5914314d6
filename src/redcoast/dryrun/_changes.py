"""Finds the smallest changes that make a training step fit in memory."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray, PyTree

from ..data._per_batch import has_per_batch
from ..train._precision import ComputeDtype
from ._compile_job import Compiled, show_sizes
from ._job import Job
from ._report import Change, DryRun

MESHES = 3  # the number of other meshes to compile


@dataclass(frozen=True)
class Settings:
    """The settings of a step that can change while model, batch and optimizer stay the same."""

    mesh: dict[str, int]
    remat: bool
    accumulate: int
    compute_dtype: ComputeDtype


def find_changes(
    make: Callable[..., Job],
    init_fn: Callable[..., PyTree],
    job: Job,
    run: DryRun,
    others: Sequence[dict[str, int]],
    again: Callable[[Job, Mapping[str, int]], Compiled],
) -> Iterator[Change]:
    """Yields single changes that make the step fit, one of each kind, or else a combination of
    them.

    - `make`: `make(init_fn, accumulate=..., compute_dtype=...)` makes the changed step.
    - `others`: the sizes of other meshes, the most promising first.
    """
    now = Settings(run.mesh, False, job.training.accumulate, job.training.compute_dtype)

    def compile_with(settings: Settings) -> Change | None:
        """The change to these settings, if it is enough."""
        changed = init_fn
        if settings.remat:
            changed = rematerialised(init_fn)
        options = {"accumulate": settings.accumulate, "compute_dtype": settings.compute_dtype}
        try:
            compiled = again(make(changed, **options), settings.mesh)
        # For example, an override does not divide on that mesh, or the compiler fails.
        except (ValueError, RuntimeError):
            return None
        if compiled.refused or compiled.peak > run.memory["usable"]:
            return None
        dtype = None
        if settings.compute_dtype is not None:
            dtype = jnp.dtype(settings.compute_dtype).name
        words = []
        if settings.mesh != now.mesh:
            words.append(f"mesh {show_sizes(settings.mesh)}")
        if settings.remat:
            words.append('remat="full" in the model')
        if settings.accumulate != now.accumulate:
            words.append(f"accumulate={settings.accumulate}")
        if settings.compute_dtype != now.compute_dtype:
            words.append(f"compute_dtype={dtype}")
        return Change(
            what=" and ".join(words),
            peak=compiled.peak,
            mesh=settings.mesh,
            remat=settings.remat,
            accumulate=settings.accumulate,
            compute_dtype=dtype,
        )

    kinds = _kinds(now, job, others)
    # Of each kind, the smallest change that is enough alone.
    single: list[Change] = []
    for options in kinds.values():
        for settings in options:
            change = compile_with(settings)
            if change is not None:
                single.append(change)
                break
    if single:
        yield from single
        return
    combination = _together(now, kinds, compile_with)
    if combination is not None:
        yield combination


def _kinds(now: Settings, job: Job, others: Sequence[dict[str, int]]) -> dict[str, list[Settings]]:
    """By the setting that changes, the possible changes, smaller ones first."""
    values: dict[str, Sequence[Any]] = {"mesh": others[:MESHES]}
    if can_rematerialise(job.state.model):
        values["remat"] = [True]
    # Such an array belongs to the batch as a whole, which is then not divided.
    if not has_per_batch(job.batch):
        # Microbatches that do not divide over the devices would be replicated.
        shards = now.mesh["data"] * now.mesh["fsdp"]
        counts = [2 * now.accumulate, 4 * now.accumulate, 8 * now.accumulate]
        values["accumulate"] = [count for count in counts if job.rows % (count * shards) == 0]
    # `None` computes in the model's own dtype, which is float32 by default.
    if now.compute_dtype is None or jnp.dtype(now.compute_dtype).itemsize > 2:
        values["compute_dtype"] = [jnp.bfloat16]
    kinds: dict[str, list[Settings]] = {}
    for name, options in values.items():
        if options:
            kinds[name] = [dataclasses.replace(now, **{name: value}) for value in options]
    return kinds


def _together(
    now: Settings,
    kinds: dict[str, list[Settings]],
    compile_with: Callable[[Settings], Change | None],
) -> Change | None:
    """Adds one kind of change after another until the step fits, then drops unnecessary changes."""
    settings, sufficient = now, None
    changed: list[str] = []
    for name, options in kinds.items():
        # The last number of microbatches saves the most; the first mesh is the most promising.
        most = options[-1]
        if name == "mesh":
            most = options[0]
        settings = _with(settings, most, name)
        changed.append(name)
        if len(changed) == 1:
            continue  # single changes have been tried
        sufficient = compile_with(settings)
        if sufficient is not None:
            break
    if sufficient is None:
        return None
    for name in changed:
        smaller: list[Settings] = []
        # The last change cannot be dropped: without it the step did not fit.
        if name != changed[-1]:
            smaller.append(now)
        if name != "mesh":
            smaller += kinds[name][:-1]
        for less in smaller:
            change = compile_with(_with(settings, less, name))
            if change is not None:
                settings, sufficient = _with(settings, less, name), change
                break
    return sufficient


def _with(settings: Settings, other: Settings, name: str) -> Settings:
    return dataclasses.replace(settings, **{name: getattr(other, name)})


def can_rematerialise(model: PyTree) -> bool:
    """Whether the tree contains a model of `redcoast.models` with less than `remat="full"`."""
    return next(_keeping_some(model), None) is not None


def rematerialised(init_fn: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Wraps `init_fn` so that the model's configuration has `remat="full"`."""

    def init(key: PRNGKeyArray) -> PyTree:
        # Modules are frozen. A copy is changed, so that no module outside is affected.
        model = jax.tree.map(lambda x: x, init_fn(key))
        for module in _keeping_some(model):
            config = dataclasses.replace(module.config, remat="full")
            object.__setattr__(module, "config", config)
        return model

    return init


def _keeping_some(tree: PyTree) -> Iterator[PyTree]:
    """The modules in a tree whose configuration has less than `remat="full"`, outermost first."""
    if isinstance(tree, eqx.Module):
        config = getattr(tree, "config", None)
        if dataclasses.is_dataclass(config) and getattr(config, "remat", "full") != "full":
            yield tree
    node = jax.tree_util.default_registry.flatten_one_level(tree)
    if node is not None:  # no leaf
        children, _ = node
        for child in children:
            yield from _keeping_some(child)
