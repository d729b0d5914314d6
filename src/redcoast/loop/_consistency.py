"""Checks that all processes run the same program on the same data."""

import functools as ft
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import jax
from jaxtyping import PRNGKeyArray, PyTree

from ..core._program_lines import describe_array
from ..data._batches import Batches
from ..data._collate import CollateFn, describe_batch
from ..data._loading import count_in_epoch
from ..distributed._agreement import Listing, agree, checksum, program_listing, tree_listing
from ..sharding import Plan
from ..tracking._loggers import code_version
from ..train._compile import CompiledStep
from ..train._loss import LossFn
from ..train._start import is_init_fn
from ..train._step import TrainState
from ._evaluation import Evaluation
from ._first_examples import first_examples, first_training_examples

# JAX's settings that change a program, or how it runs.
_SETTINGS = (
    "jax_debug_infs",
    "jax_debug_nans",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_disable_jit",
    "jax_enable_x64",
    "jax_threefry_partitionable",
)


def check_agreement(
    plan: Plan,
    model: PyTree,
    state: TrainState,
    step: Callable[[], CompiledStep],
    data: Batches,
    collate_fn: CollateFn | None,
    loss_fn: LossFn,
    evaluation: Evaluation | None,
    key: PRNGKeyArray,
    **values: Any,
) -> None:
    """Raises `ValueError` on all processes if they are about to run different programs or data.

    The error names what differs, and the value in each process.

    **Arguments:**

    - `plan`: how the program is sharded.
    - `model`, `key`: the initial model and key. If `model` is a function, its code is compared.
    - `state`, `step`: the abstract state, and a function that returns the compiled step, whose
        program is compared.
    - `collate_fn`, `loss_fn`: the code of these functions is compared.
    - `data`, `evaluation`: the number of their examples, the shapes of a batch, and some collated
        examples are compared.
    - `values`: other values by name, of types that JSON supports.
    """
    if jax.process_count() == 1:
        return
    functions: dict[str, Any] = {"collate_fn": collate_fn, "loss_fn": loss_fn}
    functions |= {"init_fn": model} if is_init_fn(model) else {}
    lengths = {"examples": data.length}
    examples: dict[str, Listing] = {}
    if not data.is_split:
        examples["the first examples"] = first_training_examples(data)
    if evaluation is not None:
        own = {f"Evaluation.{x.name}": getattr(evaluation, x.name) for x in fields(evaluation)}
        lengths["Evaluation.examples"] = count_in_epoch(own.pop("Evaluation.examples"))
        functions |= {x: own.pop(x) for x in list(own) if x.endswith("_fn")}
        values |= own
        examples["the first examples of the evaluation"] = first_examples(
            evaluation.examples,
            evaluation.collate_fn,
            batch_size=evaluation.batch_size,
            mesh=data.mesh,
            name="Evaluation.examples",
        )
    values["mesh"] = dict(data.mesh.shape)
    is_first_full = data.rows_left is None or data.rows_left >= data.batch_size
    listings = {"the values of the initial model": tree_listing(model), **examples}
    if is_first_full:
        traced = step().trace(state, data.spec)
        listings["the program of the step"] = program_listing(traced.jaxpr)
    agree(
        {
            **{f"the version of {name}": text for name, text in code_version().items()},
            **{f"JAX's setting {name}": str(getattr(jax.config, name, "")) for name in _SETTINGS},
            **{f"`{name}`": value for name, value in values.items()},
            **{f"the number of `{name}`": length for name, length in lengths.items()},
            "`key`": describe_array(key),
            "the devices of `mesh`": checksum(str([x.id for x in data.mesh.devices.flat]).encode()),
            "what `collate_fn` returns": describe_batch(data.spec),
            **{f"the code of `{name}`": _code(fn) for name, fn in functions.items()},
            "the plan of the model": checksum(plan.table().encode()),
        },
        listings,
    )


def _code(fn: Any) -> str | None:
    """A checksum of a function's code, not including the functions that it calls."""
    while isinstance(fn, ft.partial):
        fn = fn.func
    code = getattr(fn, "__code__", None)
    return None if code is None else checksum(b"".join(_instructions(code)))


def _instructions(code: Any) -> Iterator[bytes]:
    yield code.co_code
    yield " ".join(code.co_names).encode()
    for constant in code.co_consts:
        if hasattr(constant, "co_code"):
            yield from _instructions(constant)
        elif isinstance(constant, int | float | complex | str | bytes | None):
            yield repr(constant).encode()
