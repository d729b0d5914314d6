"""The most memory that the values of a program take at once, and the operations they come from.

The program is run on buffers without contents: forward, and if it is a loss, backward. XLA writes
what large operations read and return to memory, and fuses the others into those that use them: a
value that is fused has no buffer of its own, but keeps those alive that it is computed from. A
derivative reads the values that it needs again. A rematerialised region keeps its operands alone,
and runs again before its derivative. A loop keeps what the derivative of its body needs, once for
each iteration. `experiments/benchmarks/memory.py` compares the result with compiled programs.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from operator import attrgetter

from jax.extend.core import Literal, Var

from ...core._control_flow import Call, CallKind, Cond, Scan, While, control_flow
from ...core._jaxpr import variables
from ..operations import Atom
from ..program._graph import SourcePath, Value
from ..program._remat import KeepAllBut, Region, find_needed, recomputes_little
from ..program._walk import Scope
from ._buffers import (
    Buffer,
    ModelArray,
    Peak,
    Roots,
    Timeline,
    WrittenBytes,
    argument,
    is_stored,
    parameter_of,
    union,
)
from ._operation_buffers import OperationBuffers
from ._peak_frames import Cotangent, IterationPeaks, PeakFrame, PeakStep
from ._planned_collectives import PartsTogether
from ._residuals import branches_return_operands


def find_peak(
    scope: Scope,
    size_of: Callable[[Value], int | float],
    parameters: Sequence[ModelArray],
    *,
    compiler: str,
    trains: bool,
    gathered_size_of: Callable[[Value], int | float],
    together: Mapping[SourcePath, PartsTogether],
    keeps_gradients: bool = True,
) -> Peak:
    """The peak of a program and, if it is a loss, of its derivative.

    - `size_of`: the bytes of a value on each device.
    - `parameters`: the first inputs, the arrays of the model.
    - `trains`: whether the first result is differentiated.
    - `gathered_size_of`: the bytes of a value on each device while a product reads or writes it;
        with sequence parallelism, more than `size_of`.
    - `together`: the products that read or write parts of other devices, by their places.
    - `keeps_gradients`: whether the gradients are results. Otherwise, each is added to a sum.
    """
    time = Timeline(size_of, compiler, gathered_size_of, keeps_gradients)
    run = _Run(OperationBuffers(time, together))
    frame = PeakFrame(scope, ())
    frame.add_arguments(scope.jaxpr.invars, size_of)
    for var, parameter in zip(scope.jaxpr.invars, parameters, strict=False):
        frame.roots[var] = argument(size_of(scope.values[var]), parameter)
    run.forward(frame)
    results = scope.jaxpr.outvars
    if trains and not isinstance(results[0], Literal):
        grads = run.backward(frame, {results[0]: ()})
        for parameter, grad in zip(parameters, grads, strict=False):
            if parameter not in time.summed:
                # Zeros, of what is not differentiated, are no sum over devices.
                time.add_gradient(parameter, summed=grad is None)
        time.finish()
    time.now += 1
    time.read(frame.of_all(results))
    return time.peak()


@dataclass
class _Run:
    """Runs jaxprs and their derivatives, whose single `operations` are run on buffers."""

    operations: OperationBuffers

    @property
    def time(self) -> Timeline:
        return self.operations.time

    def forward(self, frame: PeakFrame, kept: Mapping[Atom, Roots] | None = None) -> None:
        """Runs a jaxpr whose inputs have buffers. What is in `kept` is not computed again."""
        scope = frame.scope
        uses: Counter[Atom] = Counter()
        for equation in scope.jaxpr.eqns:
            uses.update(variables(equation.invars))
        for equation in scope.jaxpr.eqns:
            if equation.primitive.name == "div":
                # A softmax is computed again from what it is a softmax of.
                for var in variables(equation.invars[:1]):
                    uses[var] = 0
        for var in scope.jaxpr.constvars:
            frame.roots.setdefault(var, argument(self.time.size_of(scope.values[var])))
        for index, equation in enumerate(scope.jaxpr.eqns):
            self.time.now += 1
            if kept and kept.keys() >= set(equation.outvars):
                for var in equation.outvars:
                    frame.roots[var] = kept[var]
                continue
            frame.begins.setdefault(index, self.time.now)
            step = PeakStep(frame, index)
            match step.flow:
                case Call() as call:
                    self._call(step, call)
                case Cond():
                    self._branches(step)
                case Scan() as scan:
                    self._scan(step, scan)
                case While():
                    self._loop(step)
                case None:
                    self.operations.run(step, uses)

    def backward(self, frame: PeakFrame, cotangents: dict[Atom, Roots]) -> list[Cotangent]:
        """Runs the derivative of a jaxpr; returns the cotangents of its inputs."""
        jaxpr = frame.scope.jaxpr
        for index, equation in reversed(list(enumerate(jaxpr.eqns))):
            results = [cotangents.pop(var, None) for var in equation.outvars]
            if set(results) <= {None}:
                continue
            self.time.now += 1
            step = PeakStep(frame, index)
            match step.flow:
                case Call(kind=CallKind.CUSTOM_JVP) | None:
                    grads = self.operations.differentiate(step, results)
                case Call() as call:
                    grads = self._call_back(step, call, results)
                case Scan() as scan:
                    # Gradients of layers are summed over devices one by one, in a loop or to be
                    # stored in parts.
                    is_loop = scan.unroll < scan.length
                    for root in frame.of_all(scan.split(equation.invars)[2]):
                        if root.parameter is not None and (is_loop or root.parameter.gathered):
                            self.time.add_gradient(root.parameter, summed=True)
                    grads = self._loop_back(step, results)
                case Cond() | While():
                    grads = self._loop_back(step, results)
            for atom, roots in zip(equation.invars, grads, strict=True):
                if roots is not None and not isinstance(atom, Literal):
                    cotangents[atom] = self.operations.add(
                        step, atom, cotangents.get(atom, ()), roots
                    )
        return [cotangents.get(var) for var in jaxpr.invars]

    def _call(self, step: PeakStep, call: Call) -> None:
        scope = step.inner[0]
        inside = PeakFrame(scope, step.source)
        is_remat = call.kind is CallKind.REMAT
        for var, atom in zip(scope.jaxpr.invars, step.equation.invars, strict=True):
            inside.roots[var] = step.frame.of(atom)
            # A stored array is gathered where the region uses it.
            if is_remat and not is_stored(inside.roots[var]):
                inside.roots[var] = self.operations.in_memory(step, atom)
        self.forward(inside)
        step.frame.inner[step.index] = [inside]
        is_recomputed = is_remat and self.operations.gathers_again and recomputes_little(call)
        for var, atom in zip(step.equation.outvars, scope.jaxpr.outvars, strict=True):
            step.frame.roots[var] = inside.of(atom)
            if is_recomputed:
                step.frame.recomputed[var] = inside.of_all(scope.jaxpr.invars)

    def _call_back(
        self, step: PeakStep, call: Call, results: Sequence[Cotangent]
    ) -> list[Cotangent]:
        (inside,) = step.frame.inner[step.index]
        jaxpr, values = inside.scope.jaxpr, inside.scope.values
        if call.kind is CallKind.REMAT:
            if self.time.compiler != "cpu":
                # A barrier, which the compiler for CPUs removes, holds the cotangents back until
                # the values are computed again.
                results = self._written(step, results)
            region = Region((False,) * len(jaxpr.outvars), True, call.policy)
            again = _computed_again(inside.scope, region)
            # What is saved, and what only that is computed from, is not computed again.
            kept: dict[Atom, Roots] = {}
            begin = step.frame.begins[step.index]
            for place, equation in enumerate(jaxpr.eqns):
                if place not in again:
                    if isinstance(control_flow(equation), Cond):
                        # A conditional of which only operands are needed returns these here.
                        inside.loops[place] = inside.loops[place][0], self.time.now
                    is_saved = region.keeps(equation)
                    for var in equation.outvars:
                        kept[var] = inside.of(var)
                        if is_saved:
                            kept[var] = self.time.saved(kept[var], values[var], step.source, begin)
            # With the calls and loops that are not computed again.
            inside = replace(inside, roots={}, gathered={})
            for var, atom in zip(jaxpr.invars, step.equation.invars, strict=True):
                inside.roots[var] = step.frame.of(atom)
                for root in inside.roots[var]:
                    root.last = self.time.now  # kept until then, in whatever dtype it is read
            self.forward(inside, kept)
        run = self
        is_plain = call.kind is CallKind.PLAIN or isinstance(call.policy, KeepAllBut)
        if not is_plain:
            run = _Run(replace(self.operations, stacks=False))
        return run.backward(inside, inside.cotangents_of(results))

    def _written(self, step: PeakStep, results: Sequence[Cotangent]) -> list[Cotangent]:
        written: list[Cotangent] = []
        for var, roots in zip(step.equation.outvars, results, strict=True):
            # The gradient of an array that a region hands on is a result of the program.
            is_gradient = any(root.parameter is not None for root in step.frame.of(var))
            if roots is not None and not is_gradient:
                roots = self.operations.one_buffer(step, var, roots)
            written.append(roots)
        return written

    def _branches(self, step: PeakStep) -> None:
        """Runs one branch of several, which take turns with the same memory.

        What their derivatives need, they return, also of operands in some versions of JAX.
        """
        operands = step.equation.invars[1:]
        self.time.read(union(self.operations.in_memory(step, atom) for atom in operands))
        forward: list[Peak] = []
        backward: list[Peak] = []
        saved: list[Sequence[WrittenBytes]] = []
        needed: list[Sequence[bool]] = []
        for branch in step.inner:
            consts, carry = branch.jaxpr.invars, []
            if branches_return_operands():
                consts, carry = [], branch.jaxpr.invars
            operations = OperationBuffers(self.time.empty(), self.operations.together, stacks=True)
            body = _run_body(PeakFrame(branch, step.source), (consts, carry, []), operations)
            forward.append(body.forward)
            backward.append(body.backward)
            saved.append(body.saved)
            needed.append(body.needed)
        body = IterationPeaks(
            max(forward, key=attrgetter("bytes")),
            max(backward, key=attrgetter("bytes")),
            _returned_by_branches(saved),
            tuple(map(any, zip(*needed, strict=True))),  # of each operand, by any of the branches
        )
        step.frame.loops[step.index] = body, self.time.now
        self.time.spike(body.forward)
        self.time.now += 1
        self.operations.write_results(step)

    def _scan(self, step: PeakStep, scan: Scan) -> None:
        frame, scope, size_of = step.frame, step.inner[0], self.time.size_of
        consts, carry, xs = scan.split(step.equation.invars)
        operands = [self.operations.in_memory(step, atom) for atom in (*consts, *carry)]
        slices: list[Roots] = []  # of one iteration
        # XLA for TPU casts stacked matrices that products alone read before a loop.
        casts = self.time.compiler == "tpu" and scan.unroll < scan.length
        for atom, var in zip(xs, scan.split(scope.jaxpr.invars)[2], strict=True):
            roots, layer = frame.of(atom), None
            parameter = parameter_of(roots)
            if parameter is not None:
                # An iteration gathers its own layer alone, and sums its gradient.
                layer = parameter.part(1 / scan.length)
                if scan.unroll >= scan.length and not layer.gathered:
                    # The gradients of all layers are summed after the last.
                    layer = ModelArray()
            else:
                roots = self.operations.in_memory(step, atom)
            operands.append(roots)
            (part,) = argument(size_of(scope.values[var]), layer)
            part.is_layer = casts
            slices.append((part,))
        self.time.read(union(operands))
        inside = PeakFrame(scope, step.source)
        is_loop = scan.unroll < scan.length
        operations = OperationBuffers(self.time.empty(), self.operations.together, stacks=is_loop)
        body = _run_body(
            inside, scan.split(scope.jaxpr.invars), operations, slices, is_loop=is_loop
        )
        if casts:
            # The derivative reads the same copies, in bfloat16.
            copies: list[Buffer] = []
            for atom, (part,) in zip(xs, slices, strict=True):
                if part.read_narrow and not part.read_wide:
                    size = size_of(step.value(atom))
                    if part.parameter is not None and part.is_gathered:
                        size = scan.length * part.parameter.stored
                    copies.append(self.time.write(size / 2, step.source))
            frame.copies[step.index] = tuple(copies)
        self.time.spike(body.forward)
        saved: list[WrittenBytes] = []
        for size, where in body.saved:
            saved.append((size * scan.length, where))
        if scan.unroll >= scan.length:
            # Without a loop, the slices of all iterations are in memory at once, but on GPUs, whose
            # kernels read slices of arguments where they are.
            for atom in xs:
                roots = frame.of(atom)
                is_read = self.time.compiler == "gpu" and any(root.argument_bytes for root in roots)
                if not is_read and not is_stored(roots):
                    saved.append((size_of(step.value(atom)), step.source))
        frame.loops[step.index] = replace(body, saved=tuple(saved)), self.time.now
        self.operations.write_results(step)
        self.time.now += 1
        for var, atom in zip(step.equation.outvars, carry, strict=False):
            # Arguments and gathered arrays are copied, since others read them too.
            is_copied = any(root.argument_bytes or root.stored_in for root in frame.of(atom))
            if not is_copied:
                # The last iteration writes where the first one read.
                (buffer,) = frame.of(var)
                buffer.born = buffer.last = self.time.now

    def _loop(self, step: PeakStep) -> None:
        """A loop of unknown length, perhaps in an operation with its own derivative."""
        operands = [self.operations.in_memory(step, atom) for atom in step.equation.invars]
        self.time.read(union(operands))
        peak = Peak()
        for scope in step.inner:
            run = _Run(replace(self.operations, time=self.time.empty()))
            inside = PeakFrame(scope, step.source)
            inside.add_arguments(scope.jaxpr.invars, self.time.size_of)
            run.forward(inside)
            run.time.read(inside.of_all(scope.jaxpr.outvars))
            peak = max(peak, run.time.peak(), key=lambda peak: peak.bytes)
        self.time.spike(peak)
        # A derivative of its own is assumed to take as much again.
        body = IterationPeaks(peak, Peak((*peak.parts, *peak.parts)))
        step.frame.loops[step.index] = body, self.time.now
        self.operations.write_results(step)

    def _loop_back(self, step: PeakStep, results: Sequence[Cotangent]) -> list[Cotangent]:
        frame, equation = step.frame, step.equation
        body, begin = frame.loops[step.index]
        read = [*equation.invars, *equation.outvars]
        if isinstance(step.flow, Cond):
            read = compress(equation.invars[1:], body.needed)
        if isinstance(step.flow, Scan):
            # Of what it carries, each iteration has kept what it needs.
            consts, _, xs = step.flow.split(equation.invars)
            read = [*consts, *xs]
        self.time.read(frame.of_all(read))
        self.time.read(union((*filter(None, results), frame.copies.get(step.index, ()))))
        if body.saved:
            self.time.write_parts(body.saved).born = begin
        self.time.spike(body.backward)
        grads: list[Cotangent] = []
        for atom in equation.invars:
            if isinstance(atom, Literal) or not step.value(atom).grad:
                grads.append(None)
            else:
                grads.append(self.operations.write_gradient(step, atom))
        return grads


def _run_body(
    frame: PeakFrame,
    inputs: tuple[Sequence[Var], Sequence[Var], Sequence[Var]],
    operations: OperationBuffers,
    slices: Sequence[Roots] = (),
    *,
    is_loop: bool = False,
) -> IterationPeaks:
    """Runs an iteration or a branch once, forward and backward.

    `inputs` are those that all iterations read, those that they carry, and their `slices`.
    """
    jaxpr, values = frame.scope.jaxpr, frame.scope.values
    time = operations.time
    consts, carry, xs = inputs
    frame.add_arguments(consts, time.size_of)
    constant = frozenset(frame.of_all(consts))
    gathers_again = is_loop and any(map(is_stored, slices))
    run = _Run(replace(operations, constant=constant, gathers_again=gathers_again))
    frame.roots.update(zip(xs, slices, strict=True))
    carried: list[Buffer] = []
    for var in carry:
        carried.append(Buffer((), 0, 0, argument_bytes=time.size_of(values[var])))
        frame.roots[var] = (carried[-1],)
    run.forward(frame)
    time.now += 1
    time.read(frame.of_all(jaxpr.outvars))
    middle = time.now
    time.now += 1
    # The cotangents of all results come from outside.
    outside = (Buffer((), time.now, time.now),)
    cotangents: dict[Atom, Roots] = {}
    for var in variables(jaxpr.outvars):
        if values[var].grad:
            cotangents[var] = outside
    grads = run.backward(frame, cotangents)
    # The sum of an FSDP-sharded layer takes the place of its gathered weights.
    if is_loop and not any(parameter.gathered for _, parameter in time.unsummed):
        time.sum_gradients()
    time.now += 1
    time.read(union(filter(None, grads)))
    saved: list[WrittenBytes] = []
    for buffer in time.buffers:
        is_kept = not buffer.reread or (buffer.is_gathered and not is_loop)
        if buffer.born <= middle < buffer.last and is_kept:
            saved += buffer.kept
            if not is_loop:
                buffer.parts = ()  # without a loop, an iteration has no copy of what all keep
    for var, buffer in zip(carry, carried, strict=True):
        if buffer.last > middle:
            saved.append((time.size_of(values[var]), frame.source))
    needed: list[bool] = []
    for var in consts:
        needed.append(any(root.last > middle for root in frame.of(var)))
    forward, backward = time.peak(until=middle), time.peak(middle + 1)
    return IterationPeaks(forward, backward, tuple(saved), tuple(needed))


def _returned_by_branches(saved: Sequence[Sequence[WrittenBytes]]) -> tuple[WrittenBytes, ...]:
    """What a conditional returns for its derivative: arrays of one size share a result."""
    returned: list[WrittenBytes] = []
    for of_branch in saved:
        free = Counter(size for size, _ in returned)
        for size, where in of_branch:
            if free[size]:
                free[size] -= 1
            else:
                returned.append((size, where))
    return tuple(returned)


def _computed_again(scope: Scope, region: Region) -> set[int]:
    """The equations that a region needs results of, or values inside of."""
    grads = [scope.values[var].grad for var in scope.jaxpr.invars]
    needed = find_needed(scope.jaxpr, region, grads)
    again = set(needed.equations)
    if region.policy is not None:
        return again  # the policy may keep the values inside
    for index, inner in scope.inner.items():
        for called in inner:
            inside = needed.inner[index].get(called.jaxpr)
            if inside is not None and _computed_again(called, inside):
                again.add(index)
    return again
