"""Checks of the arguments of a plan."""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from ..core._errors import check_functions, check_integer, check_mesh, wrong_type
from ..core._target import target
from ..distributed._mesh import AXES, PIPE
from .solver._hardware import FILLED, Hardware
from .tree._leaf_plans import HOST


def mesh_or_ambient(mesh: Mesh | AbstractMesh | None) -> Mesh | AbstractMesh:
    if mesh is None:
        mesh = jax.sharding.get_mesh()
    else:
        check_mesh(mesh)
    # JAX returns an empty mesh where none is set.
    if mesh is None or mesh.empty:
        raise ValueError(
            "The mesh is missing: pass mesh=rc.make_mesh(), or set the ambient mesh with "
            "jax.set_mesh(rc.make_mesh())."
        )
    missing = [axis for axis in AXES if axis not in mesh.axis_names]
    if missing:
        raise ValueError(
            f"The mesh has the axes {tuple(mesh.axis_names)} and lacks {', '.join(missing)}; one "
            "from rc.make_mesh() always has 'data', 'fsdp' and 'model', of size 1 where not used."
        )
    return mesh


def check_function(
    fn: Callable[..., PyTree] | None, args: Sequence[PyTree], about_program: Mapping[str, bool]
) -> None:
    """Raises an error unless `fn` is a function of `args`, or None.

    `about_program` are the arguments that have no meaning without it, and whether each is given.
    """
    if fn is not None:
        check_functions(fn=fn)
        if args and isinstance(args[0], str | bytes):
            raise TypeError(
                "There is text at args[0], where the batch is. Encode text with the model's "
                "tokenizer."
            )
        return
    # Nothing is ignored silently.
    for name, is_given in about_program.items():
        if is_given:
            raise ValueError(f"`{name}` needs a function whose program is planned: pass `fn` too.")


def check_microbatches(microbatches: int | None, mesh: Mesh | AbstractMesh) -> None:
    if microbatches is None:
        return
    check_integer("microbatches", microbatches)
    if mesh.shape.get(PIPE, 1) == 1:
        raise ValueError(
            f"`microbatches={microbatches}` needs a pipeline, and the mesh has none. Use "
            "`make_mesh(pipe=...)`, or `accumulate` for microbatches one after the other."
        )


def check_memory(memory: object) -> None:
    """Raises an error unless `memory` is a positive number of bytes, `"auto"` or `None`."""
    if memory is None or (isinstance(memory, str) and memory == "auto"):
        return
    # For Python, `True` is an integer. NumPy's numbers are real numbers too.
    if isinstance(memory, bool) or not isinstance(memory, int | float | np.integer | np.floating):
        words = (
            "the bytes of each device that a step may take, such as 16e9, or "
            '"auto", or None to recompute nothing'
        )
        raise wrong_type("memory", memory, words)
    if not 0 < memory < float("inf"):
        raise ValueError(
            f"`memory` is {memory}. It must be a positive number of bytes of each device, such as "
            '16e9; None recomputes nothing, and "auto" uses what the devices report.'
        )


def memory_limit(
    memory: int | float | Literal["auto"] | None, hardware: Hardware
) -> int | float | None:
    """The bytes of each device that a step may take; None if that is not limited."""
    if memory != "auto":
        return memory
    if hardware.memory is None:
        return None
    return FILLED * hardware.memory


def has_own_memory(mesh: Mesh | AbstractMesh) -> bool:
    """Whether the devices have memory other than the host's, as CPUs have not.

    JAX knows no memories of devices that a program is only compiled for.
    """
    knows_memories = NamedSharding(mesh, P(), memory_kind=HOST).memory_kind is not None
    return knows_memories and target().platform != "cpu"
