"""The buffers that single operations and their derivatives read and write."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from operator import attrgetter

from jax.extend.core import JaxprEqn, Literal

from ...core._control_flow import primitive_name
from ...core._jaxpr import variables
from ..operations import Atom, fixed_operands, is_linear
from ..operations._rule_table import COSTLY, FROM_RESULT, VIEWS
from ..program._graph import SourcePath, Value, path_of
from ._buffers import Buffer, Roots, Timeline, argument, is_stored, parameter_of, union
from ._memory_access import (
    WRITTEN,
    copied_operands,
    copies_cotangent,
    has_outer_gradient,
    is_product_or_convolution,
    reads_narrow,
    squares,
)
from ._peak_frames import Cotangent, PeakStep
from ._planned_collectives import PartsTogether
from ._residuals import Residuals, residuals_in

# The cotangents of their operands are that of the result, in another shape at most.
_SAME_COTANGENT = VIEWS | {"add", "add_any", "convert_element_type", "transpose"}


@dataclass(frozen=True)
class OperationBuffers:
    """Runs operations and their derivatives on buffers.

    With `stacks`, they are of an iteration of a loop, which stacks what JAX keeps for derivatives.
    Values that only these `constant` buffers decide are the same in all iterations. `together` are
    operations that read or write parts of split examples, or rows, of several devices. With
    `gathers_again`, a policy gathers weights again for the derivative of an iteration, and computes
    again what small rematerialised regions return.
    """

    time: Timeline
    together: Mapping[SourcePath, PartsTogether]
    stacks: bool = False
    constant: frozenset[Buffer] = frozenset()
    gathers_again: bool = False

    def in_memory(self, step: PeakStep, atom: Atom) -> Roots:
        """Puts an operand into memory, where later operations find it."""
        if isinstance(atom, Literal):
            return ()
        frame = step.frame
        frame.roots[atom] = self.time.in_memory(frame.of(atom), step.value(atom), step.source)
        return frame.roots[atom]

    def write_results(self, step: PeakStep) -> None:
        for var in step.equation.outvars:
            size = self.time.size_of(step.value(var))
            step.frame.roots[var] = (self.time.write(size, step.source),)

    def run(self, step: PeakStep, uses: Counter[Atom]) -> None:
        """Runs an operation, whose operands and results are used so often."""
        if step.uses_memory:
            self._run_large(step)
        else:
            self._run_fused(step, uses)

    def _run_large(self, step: PeakStep) -> None:
        frame, equation = step.frame, step.equation
        operands = [self._operand(step, atom) for atom in equation.invars]
        narrow, together = self._reads_narrow(equation), self._together(step)
        parts = self._gather_parts(step, together)
        self.time.read(union((*operands, *parts)), narrow=narrow)
        for place in copied_operands(step.rule):
            atom = equation.invars[place]
            if not isinstance(atom, Literal):
                copy = self.time.fuse(operands[place], step.value(atom), step.source)
                frame.roots[atom] = (copy,)
                self.time.read(frame.roots[atom], narrow=narrow)
        if together.of_result > 1:
            size = self.time.size_of(step.value(equation.outvars[0]))
            self._sum_parts(step, together.of_result * size)
        self.write_results(step)
        if not is_product_or_convolution(equation):
            return
        # A product is written as a whole, before its sum over devices is divided among them.
        size = self._whole_size(step.value(equation.outvars[0]))
        if size is not None:
            self.time.write(size, step.source)
            if self.time.compiler == "cpu":
                # Without a reduce-scatter, the sum is there as a whole too.
                self.time.write(size, step.source)

    def _run_fused(self, step: PeakStep, uses: Counter[Atom]) -> None:
        """Runs an operation that is fused into those that use its results."""
        frame, equation = step.frame, step.equation
        name, compiler = primitive_name(equation), self.time.compiler
        is_strided = compiler == "cpu" and equation.params.get("strides") is not None
        if is_strided and not any(root.argument_bytes for root in frame.of(equation.invars[0])):
            self.in_memory(step, equation.invars[0])  # what is read row by row is written once
        operands = union(map(self.time.written, map(frame.of, equation.invars)))
        is_kept = name in COSTLY and compiler != "tpu"
        if squares(equation):
            # What is squared and summed, as by a norm, is kept for its other uses.
            is_kept = len(operands) > 1 and compiler == "cpu"
            # Unless it is larger than what it is computed from, as gradients of single examples.
            size = self.time.size_of(step.value(equation.invars[0]))
            is_kept = is_kept and size <= sum(map(attrgetter("size"), operands))
        if name in VIEWS:
            # The same value, which is in memory once if both are.
            operands = frame.of(equation.invars[0])
            if is_stored(operands):
                operands = self._slice(step, operands[0])
        for var in equation.outvars:
            value = step.value(var)
            # A derivative is one more use.
            is_shared = is_kept and uses[var] > 1 - value.grad
            frame.roots[var] = operands
            if name not in VIEWS:
                frame.roots[var] = self.time.computed(operands)
            # The sum of padded arrays is a concatenation, as in `jax.lax.associative_scan`.
            terms = variables(equation.invars)
            is_joined = name == "add" and len(terms) == 2 and frame.padded.issuperset(terms)
            if name in WRITTEN or is_shared or is_joined:
                frame.roots[var] = (self.time.fuse(operands, value, step.source),)

    def _operand(self, step: PeakStep, atom: Atom) -> Roots:
        """Puts an operand of a large operation into memory; that of a product is gathered there."""
        roots = self.in_memory(step, atom)
        if isinstance(atom, Literal) or not is_product_or_convolution(step.equation):
            return roots
        size = self._whole_size(step.value(atom))
        if size is None:
            return roots
        gathered = step.frame.gathered
        if atom not in gathered:
            gathered[atom] = self._gather(step, roots, size)
        return gathered[atom]

    def _together(self, step: PeakStep) -> PartsTogether:
        return self.together.get(path_of(step.source), PartsTogether())

    def _gather_parts(self, step: PeakStep, together: PartsTogether) -> list[Roots]:
        """Gathers operands of a product of split examples from several devices."""
        gathered: list[Roots] = []
        for place, count in together.of_operands.items():
            atom = step.equation.invars[place]
            size = count * self.time.size_of(step.value(atom))
            gathered.append(self._gather(step, step.frame.of(atom), size))
        return gathered

    def _sum_parts(self, step: PeakStep, size: int | float) -> None:
        """Writes a sum of parts as a whole, of which each device gets a part afterwards."""
        terms = self.time.write(size, step.source)
        self.time.now += 1
        self.time.read((terms,))
        if self.time.compiler == "cpu":
            # Without a reduce-scatter, the sum is there as a whole too.
            self.time.write(size, step.source)
            self.time.now += 1

    def _whole_size(self, value: Value) -> int | float | None:
        """The bytes of a value that products read and write as a whole, and that has parts of the
        sequence otherwise; None of another one."""
        size = self.time.gathered_size_of(value)
        if size == self.time.size_of(value):
            return None
        return size

    def _gather(self, step: PeakStep, roots: Roots, size: int | float) -> Roots:
        self.time.read(roots)
        self.time.now += 1
        return (self.time.write(size, step.source),)

    def _reads_narrow(self, equation: JaxprEqn) -> bool:
        return self.time.compiler == "tpu" and reads_narrow(equation)

    def _slice(self, step: PeakStep, whole: Buffer) -> Roots:
        """A slice of a stored array, which is gathered alone."""
        size = self.time.size_of(step.value(step.equation.outvars[0]))
        if size >= whole.argument_bytes or whole.parameter is None:
            return (whole,)
        (part,) = argument(size, whole.parameter.part(size / whole.argument_bytes))
        part.stored_in, part.is_layer = whole, whole.is_layer
        return (part,)

    def differentiate(self, step: PeakStep, results: Sequence[Cotangent]) -> list[Cotangent]:
        """Runs the derivative of an operation; returns the cotangents of its operands."""
        equation, scope = step.equation, step.frame.scope
        varied = list(map(scope.varies, equation.invars))
        residuals = self._residuals(step, varied)
        read: list[Roots] = []
        for size in residuals.sizes(scope, self.time.size_of):
            read.append((self._write_stacked(step, size),))
        together = self._together(step)
        cotangent: Roots = ()  # a product has one result
        for var, roots in zip(equation.outvars, results, strict=True):
            if roots is None:
                continue
            if step.uses_memory:
                roots = self.one_buffer(step, var, roots)
            read.append(roots)
            cotangent = roots
            if together.of_result > 1:
                size = together.of_result * self.time.size_of(step.value(var))
                read.append(self._gather(step, roots, size))
            size = self._whole_size(step.value(var))
            if size is not None and is_product_or_convolution(equation):
                read.append(self._gather(step, roots, size))
        for atom in residuals.atoms:
            read.append(self._kept(step, atom))
        read += self._gather_parts(step, together)
        # A broadcast array has a sum as its cotangent.
        is_written = step.uses_memory or primitive_name(equation) == "broadcast_in_dim"
        # Others compute a cotangent of the same size that is another value.
        is_same = primitive_name(equation) in _SAME_COTANGENT
        grads: list[Cotangent] = []
        self.time.now += 1
        for place, (atom, varies) in enumerate(zip(equation.invars, varied, strict=True)):
            is_parameter = parameter_of(step.frame.of(atom)) is not None
            if not varies:
                grads.append(None)
            elif is_written and (is_parameter or not has_outer_gradient(step.rule, place)):
                operands = union(read)
                if self.time.compiler == "cpu" and is_product_or_convolution(equation):
                    operands = self._for_gradient(step, place, operands, cotangent)
                self.time.read(operands, narrow=self._reads_narrow(equation))
                if place in together.of_operands:
                    size = self.time.size_of(step.value(atom))
                    self._sum_parts(step, together.of_operands[place] * size)
                grads.append(self.write_gradient(step, atom))
                groups = equation.params.get("feature_group_count", 1)
                if groups > 1 and place == 1 and self.time.compiler == "cpu":
                    # The compiler for CPUs computes the gradients for all groups of inputs with all
                    # groups of results, and selects those that are asked for from a copy.
                    size = groups * self.time.size_of(step.value(atom))
                    self.time.write(2 * size, step.source)
            elif is_same:
                grads.append(union(read))
            else:
                grads.append(self.time.computed(union(read)))
        return grads

    def _for_gradient(self, step: PeakStep, place: int, operands: Roots, cotangent: Roots) -> Roots:
        """What is in memory while XLA for CPU computes the gradient of an operand of a product.

        The cotangent may be copied for it. What the last gradient of an array of the model is
        computed from is still there: XLA computes the next cotangent before it.
        """
        in_memory = [operands, self.time.postponed]
        if copies_cotangent(step.rule, place):
            value = step.value(step.equation.outvars[0])
            in_memory.append((self.time.fuse(cotangent, value, step.source),))
        self.time.postponed = ()
        parameter = parameter_of(step.frame.of(step.equation.invars[place]))
        # In a loop over layers, their gradients are summed over devices one by one.
        is_summed = parameter is not None and parameter.gathered > 0 and self.gathers_again
        if parameter is not None and not is_summed:
            self.time.postponed = operands
        return union(in_memory)

    def _residuals(self, step: PeakStep, varied: Sequence[bool]) -> Residuals:
        """What the derivative of an operation reads of its operands and results."""
        equation, rule = step.equation, step.rule
        if self.stacks:
            residuals = residuals_in(step.frame.scope, step.index)
            if residuals is not None:
                return residuals
        if rule is not None and is_linear(rule, varied):
            return Residuals(list(compress(equation.invars, fixed_operands(rule, varied))))
        if primitive_name(equation) in FROM_RESULT:
            return Residuals(equation.outvars)
        return Residuals([*equation.invars, *equation.outvars])

    def _kept(self, step: PeakStep, atom: Atom) -> Roots:
        """The buffers in which a derivative finds a value."""
        frame = step.frame
        if not isinstance(atom, Literal) and atom in frame.gathered:
            return frame.gathered[atom]  # what was gathered is kept
        if isinstance(atom, Literal) or not self.stacks:
            return self.time.written(frame.of(atom))
        if atom in frame.recomputed and atom not in frame.stacked:
            again = self.time.fuse(frame.recomputed[atom], step.value(atom), step.source)
            frame.stacked[atom] = (again,)
        if atom not in frame.stacked:
            roots = self.time.written(frame.of(atom))
            if not self.constant.issuperset(roots):
                begin = frame.begins[step.index]
                roots = self.time.saved(roots, step.value(atom), step.source, begin)
            frame.stacked[atom] = roots
        return frame.stacked[atom]

    def _write_stacked(self, step: PeakStep, size: int | float) -> Buffer:
        """Writes what an iteration of a loop keeps, while it runs."""
        buffer = self.time.write(size, step.source)
        buffer.born = step.frame.begins[step.index]
        return buffer

    def write_gradient(self, step: PeakStep, atom: Atom) -> Roots:
        """Writes the cotangent of an operand; that of an array of the model is a result.

        That of an operand of a product has its full size until it is summed over devices,
        together with those of other products.
        """
        parameter = parameter_of(step.frame.of(atom))
        size = self.time.size_of(step.value(atom))
        if parameter is not None:
            self.time.use_gradient(parameter, size, step.source)
            return ()
        if is_product_or_convolution(step.equation):
            size = self.time.gathered_size_of(step.value(atom))
        return (self.time.write(size, step.source),)

    def one_buffer(self, step: PeakStep, var: Atom, roots: Roots) -> Roots:
        """Writes a cotangent, unless it is one buffer already."""
        if self.time.is_one_buffer(roots, self.time.size_of(step.value(var))):
            return roots
        # XLA computes gradients last: what one has read is not written over.
        is_read = len(roots) == 1 and roots[0].last > roots[0].born
        buffer = self.time.fuse(roots, step.value(var), step.source)
        if is_read:
            self.time.read(roots)
        return (buffer,)

    def add(self, step: PeakStep, atom: Atom, later: Roots, roots: Roots) -> Roots:
        """Adds two cotangents of a value, of which one is that of all its later uses."""
        both = union((later, roots))
        if self.time.compiler != "cpu" and later and len(both) > 2:
            # Otherwise each sum of a residual connection would read those of all later layers.
            return (self.time.fuse(both, step.value(atom), step.source),)
        return both
