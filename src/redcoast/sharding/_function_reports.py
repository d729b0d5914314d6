"""What the report of a plan says of a function, and the loops over its layers, without a plan.

This is imported where a function is examined, so that importing redcoast stays cheap.
"""

from collections.abc import Callable, Mapping, Sequence

from jax.sharding import AbstractMesh, Mesh
from jaxtyping import PyTree

from .pipeline._stages import layer_scans
from .program._program import Program, follow_program
from .program._trace import trace_over
from .report._coupling import find_coupling
from .report._data import Coupling
from .report._masks import find_shared_masks
from .report._promotion import find_promotions
from .report._sums import find_sums
from .tree._state_plans import model_of


def examples_coupled(
    fn: Callable[..., PyTree], tree: PyTree, args: Sequence[PyTree], mesh: Mesh | AbstractMesh
) -> Coupling | None:
    """The first operation by which the examples of a batch depend on each other, if any."""
    return find_coupling(_trace_frozen(fn, tree, args, mesh))


def batch_faults(
    fn: Callable[..., PyTree], tree: PyTree, args: Sequence[PyTree], mesh: Mesh | AbstractMesh
) -> tuple[Mapping[str, str], tuple[str, ...], tuple[str, ...]]:
    """What a plan's report of a function has as `summed`, `shared_masks` and `promotions`."""
    program = _trace_frozen(fn, tree, args, mesh)
    return find_sums(program), find_shared_masks(program), find_promotions(program)


def layer_loops(
    fn: Callable[..., PyTree], tree: PyTree, args: Sequence[PyTree], mesh: Mesh | AbstractMesh
) -> list[tuple[int, int]]:
    """The lengths of the scans of a function over arrays of the tree, which can be stages, and how
    many layers an iteration of the compiled loop has."""
    scans = layer_scans(_trace_frozen(fn, tree, args, mesh))
    return [(scan.loop.length, scan.loop.unroll) for scan in scans]


def _trace_frozen(
    fn: Callable[..., PyTree], tree: PyTree, args: Sequence[PyTree], mesh: Mesh | AbstractMesh
) -> Program:
    """What a function computes, without gradients."""
    # What is examined, as which examples are related, does not depend on what is trained.
    traced, _ = trace_over(mesh, fn, model_of(tree), args)
    return follow_program(traced, [False] * traced.arrays)
