"""Constrains the activations of a function to the shardings of a plan."""

import functools as ft
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jaxtyping import PyTree

from ...core._axis_types import call_on_auto_axes, has_explicit_axes
from ...core._control_flow import open_jaxpr
from ...core._frames import hide_frames, warn
from ...core._jaxpr import iter_equations
from ...core._pytree import join
from ...core._tracing import needs_ambient_mesh, traced_over
from ...distributed._mesh import PIPE, batch_shards
from .._mesh_axes import parts, used_axes
from ..pipeline._stages import NoPipeline, pipeline_of
from ..program._program import Program, follow_program
from ..program._trace import Traced, trace_over
from ..solver._split_examples import (
    apply_split,
    constrained_split,
    example_parts,
    is_inside,
    needs_split,
    split_tokens,
    trace_in_parts,
)
from ..tree._leaf_plans import Compute
from ..tree._overrides import axes_of_spec
from ._interpreter import CannotRebind, run_constrained
from ._recompute import Recomputed
from ._shardings import Shardings, find_shardings
from ._split_conv import is_grouped


class Unconstrained(UserWarning):
    """A function runs without constraints on its activations."""


@dataclass(frozen=True)
class Constrained:
    """`fn(tree, *args)` with its activations sharded to match the arrays of the tree.

    `specs` are those of the arrays of the tree. Instances with equal functions and plans are equal,
    so that compiled programs are reused.
    """

    fn: Callable[..., PyTree]
    mesh: Mesh | AbstractMesh
    compute: Compute
    specs: tuple[PartitionSpec, ...] = ()

    @hide_frames
    def __call__(self, tree: PyTree, *args: PyTree) -> PyTree:
        # Under a `jax.jit` of the caller's own, arrays keep the mesh that they were put on.
        if has_explicit_axes((tree, args)):
            return call_on_auto_axes(self, self._out_spec(args), tree, *args)
        if self.compute.recompute is None:
            return self._constrained(tree, *args)
        # What is recomputed is decided on the function without constraints, as in the plan.
        again = Recomputed(self.fn, self.mesh, self.compute)
        if self.mesh.size == 1:
            return again(tree, *args)
        compute = replace(self.compute, recompute=None)
        return replace(self, fn=again, compute=compute)(tree, *args)

    def _out_spec(self, args: Sequence[PyTree]) -> Callable[[jax.ShapeDtypeStruct], PartitionSpec]:
        """A function that gives the spec of a result: rows of the batch are split, nothing else."""
        shapes = map(jnp.shape, filter(eqx.is_array_like, jax.tree.leaves(args[:1])))
        # Results of as many rows as the batch are taken for its predictions.
        rows = {shape[0] for shape in shapes if shape}
        axes = self.compute.batch_axes
        count = parts(axes, self.mesh.shape)

        def out_spec(result: jax.ShapeDtypeStruct) -> PartitionSpec:
            is_batch = result.ndim > 0 and result.shape[0] in rows
            if is_batch and axes and result.shape[0] % count == 0:
                return PartitionSpec(axes)
            return PartitionSpec()

        return out_spec

    def _constrained(self, tree: PyTree, *args: PyTree) -> PyTree:
        try:
            traced, arrays = trace_over(self.mesh, self.fn, tree, args)
        except Exception as error:
            traced, arrays, reason = None, [], type(error).__name__
        else:
            reason = ""
        if traced is None:
            # If the function itself is wrong, this raises its own error, which is not to be chained
            # to the one above.
            result = self._plain(tree, *args)
            self._warn(f"the function cannot be traced ({reason})")
            return result
        # The plan knows arrays by their place alone, so that another tree would be sharded wrongly.
        if traced.arrays != len(self.compute.dims):
            raise ValueError(
                f"The function was constrained by a plan for a tree with {len(self.compute.dims)} "
                f"arrays, but was called with a tree of {traced.arrays}. Plan the tree that it is "
                "called with: `plan_shardings(tree, mesh, fn=fn, args=args)`."
            )
        program = self._split(follow_program(traced, [False] * traced.arrays), tree, args)
        traced = program.traced
        shardings = self._shardings_of(program, tree, args)
        # Arrays of the model are constrained where they are used, and the batch at once.
        first = slice(traced.arrays, traced.arrays + traced.batch)
        inputs = open_jaxpr(traced.jaxpr).invars
        values = [program.scope.values[var] for var in inputs]
        arrays[first] = map(shardings.constrain, arrays[first], values[first])
        specs: list[PartitionSpec | None] = [None] * traced.arrays
        for place, spec in enumerate(self.specs):
            if not set(axes_of_spec(spec)).isdisjoint(shardings.batch_axes):
                specs[place] = spec
                # As it is stored, until it is gathered: its gradient is reduce-scattered before
                # anything reads it, such as the norm of the gradient.
                arrays[place] = shardings.with_spec(arrays[place], spec)
        stored = [True] * traced.arrays
        try:
            results = run_constrained(program.scope, shardings, arrays, stored, specs)
        except CannotRebind as error:
            self._check_right_without_constraints(error, traced, shardings)
            self._warn(f"its `{error}` cannot be re-evaluated", custom="custom_" in str(error))
            return self._plain(tree, *args)
        return join(results, traced.output)

    def _check_right_without_constraints(
        self, error: CannotRebind, traced: Traced, shardings: Shardings
    ) -> None:
        # With one of the two sizes 1, no axis is unused, and the compiler is right.
        risky = self.mesh.shape["model"] > 1 and batch_shards(self.mesh) > 1
        if risky and any(map(is_grouped, iter_equations(traced.jaxpr))):
            raise RuntimeError(
                f"The function cannot be constrained, because its `{error}` cannot be "
                "re-evaluated. Without constraints, the gradients of its grouped convolutions "
                "may be wrong because of a defect of the XLA compiler. Use a mesh with model=1."
            ) from error
        sizes = self.mesh.shape
        if shardings.splits_examples and len(used_axes(tuple(sizes), sizes)) > 1:
            names = [equation.primitive.name for equation in iter_equations(traced.jaxpr)]
            if "conv_general_dilated" in names:
                raise RuntimeError(
                    "The function cannot be constrained, because its "
                    f"`{error}` cannot be re-evaluated. Without constraints, its convolutions "
                    "along split dimensions may be wrong because of a defect of the XLA compiler. "
                    "Use a mesh with one axis, or a batch whose rows divide."
                ) from error
        if shardings.pipeline is not None:
            raise RuntimeError(
                f"The function cannot be run as a pipeline, because its `{error}` cannot be "
                "re-evaluated for several stages at once. Use a mesh without `pipe`."
            ) from error

    def _split(self, program: Program, tree: PyTree, args: Sequence[PyTree]) -> Program:
        """The program with its examples split, if the rows of this batch cannot be or the program
        asks for it."""
        compute, sizes = self.compute, self.mesh.shape
        if not compute.splits_examples:
            return program
        count, frozen = parts(compute.batch_axes, sizes), [False] * len(program.parameters)
        places = itertools.chain.from_iterable(places for _, places in compute.split)
        # Only a batch with few rows is split inside of its examples, unless a constraint of the
        # program asks for it. The batch of the plan may have had fewer rows than this one.
        for_few_rows = is_inside(places) or not compute.split
        rows_suffice = for_few_rows and not needs_split(program, count)
        if rows_suffice and not constrained_split(program, sizes):
            return program

        def trace() -> Program:
            return follow_program(self._trace(tree, args), frozen)

        if compute.split:
            again = trace_in_parts(example_parts(compute.split, sizes), trace)
            split = apply_split(again, compute.split, sizes)
            if split is not None:
                return split
        split = split_tokens(program, count, trace)
        if not split.batch.splits_examples:
            return program
        return split

    def _shardings_of(self, program: Program, tree: PyTree, args: Sequence[PyTree]) -> Shardings:
        """The shardings of the program, with its pipeline if it has one."""
        shardings = find_shardings(program, self.mesh, self.compute)
        # A prediction is computed by all devices, which gather one layer after the other.
        if self.mesh.shape.get(PIPE, 1) == 1 or not program.traced.trains:
            return shardings
        why = ""
        trace = ft.partial(self._trace, tree)  # of the arguments after the tree
        called = (trace, args, self.mesh.shape, shardings.batch_axes)
        # Another batch, as in evaluation, may need another number of microbatches.
        for count in dict.fromkeys((self.compute.microbatches, None)):
            try:
                return replace(shardings, pipeline=pipeline_of(program, *called, count))
            except NoPipeline as error:
                why = str(error)
        warn(
            f"{self._name} is not run as a pipeline: every stage computes all layers. {why} "
            "Results are the same."
        )
        return shardings

    def _trace(self, tree: PyTree, args: Sequence[PyTree]) -> Traced:
        traced, _ = trace_over(self.mesh, self.fn, tree, args)
        return traced

    def _plain(self, tree: PyTree, *args: PyTree) -> PyTree:
        # Traced on its own first, so that nothing of an attempt that fails is in the program.
        trace = ft.partial(eqx.filter_eval_shape, self.fn, tree, *args)
        with traced_over(self.mesh, ambient=needs_ambient_mesh(self.mesh, trace)):
            return self.fn(tree, *args)

    def _warn(self, why: str, *, custom: bool = False) -> None:
        sizes = {axis: size for axis, size in self.mesh.shape.items() if size > 1}
        # Where all arrays are replicated, only the batch is split, which the compiler does as well.
        if set(sizes) <= {"data"} and set(self.compute.dims) <= {None}:
            return
        mesh = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
        otherwise = (
            " Otherwise, compare the time of a step with that of a method that JAX differentiates "
            "itself, such as `diffrax.DirectAdjoint()`: this operation has derivatives of its own."
        )
        warn(
            f"The activations of {self._name} are not constrained on the mesh {mesh}, because "
            f"{why}. Results are the same, but the compiler chooses the shardings, and a step may "
            "communicate more than the plan says. A mesh with `data` alone is not affected: use it "
            f"if the model fits on one device.{otherwise * custom}",
            Unconstrained,
        )

    @property
    def _name(self) -> str:
        return getattr(self.fn, "__name__", type(self.fn).__name__)
