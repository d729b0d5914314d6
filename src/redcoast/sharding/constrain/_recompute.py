"""A function that computes values again in its backward pass, as a plan decides."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jax.sharding import AbstractMesh, Mesh
from jaxtyping import PyTree

from ...core._frames import hide_frames
from ...core._pytree import join
from ..memory._flat import flatten
from ..memory._rebuild import run_chosen
from ..memory._recompute_solver import RecomputeSolver
from ..memory._summarise import recomputed_lines
from ..program._graph import Value
from ..program._program import follow_program
from ..program._trace import Arrays, Traced, trace_over
from ..tree._leaf_plans import Compute
from ..tree._overrides import spec_parts
from ._shardings import find_shardings


@dataclass(frozen=True)
class Recomputed:
    """`fn(tree, *args)`, whose derivative computes again what `compute.recompute` says.

    Functions that are no losses, such as predictions, are not changed.
    """

    fn: Callable[..., PyTree]
    mesh: Mesh | AbstractMesh
    compute: Compute

    @property
    def __name__(self) -> str:
        return getattr(self.fn, "__name__", type(self.fn).__name__)

    @hide_frames
    def __call__(self, tree: PyTree, *args: PyTree) -> PyTree:
        recompute = self.compute.recompute
        assert recompute is not None
        traced, arrays, solver = self.read(tree, args, recompute.trained)
        if not traced.trains:
            return self.fn(tree, *args)
        results = run_chosen(solver.flat, solver.solve(recompute), arrays)
        return join(results, traced.output)

    def describe(self, tree: PyTree, args: Sequence[PyTree]) -> tuple[str, ...]:
        """The lines of the user's code that are computed again, the costliest first."""
        recompute = self.compute.recompute
        assert recompute is not None
        _, _, solver = self.read(tree, args, recompute.trained)
        return recomputed_lines(solver.solve(recompute))

    def read(
        self, tree: PyTree, args: Sequence[PyTree], trained: Sequence[bool]
    ) -> tuple[Traced, Arrays, RecomputeSolver]:
        """The traced program, the arrays that it is called with, and its solver."""
        traced, arrays = trace_over(self.mesh, self.fn, tree, args)
        # With gradients, since these decide what the backward pass needs.
        program = follow_program(traced, trained)
        shardings = find_shardings(program, self.mesh, self.compute)

        def size_of(value: Value) -> float:
            """The bytes of a value on each device, as activations are constrained."""
            spec = shardings.spec(value, shardings.classes_over_model(value))
            return value.bytes / spec_parts(spec, self.mesh.shape)

        return traced, arrays, RecomputeSolver(flatten(program.scope, size_of))
