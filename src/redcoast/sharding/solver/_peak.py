"""The most memory that the values of a program take at once, and the operations they come from.

The program is run on buffers without contents: forward, and if it is a loss, backward. XLA writes
what large operations read and return to memory, and fuses the others into those that use them: a
value that is fused has no buffer of its own, but keeps those alive that it is computed from. A
derivative reads the values that it needs again. A rematerialised region keeps its operands alone,
and runs again before its derivative. A loop keeps what the derivative of its body needs, once for
each iteration. `experiments/benchmarks/memory.py` compares the result with compiled programs.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import compress

from jax.extend.core import JaxprEqn, Literal

from ...core._control_flow import (
    Call,
    CallKind,
    Cond,
    Scan,
    While,
    control_flow,
    primitive_name,
)
from ...core._jaxpr import variables
from ..operations import Atom, fixed_operands, is_linear
from ..operations._rule_table import COSTLY, FROM_RESULT, VIEWS
from ..program._graph import Source, Value
from ..program._remat import KeepAllBut, Region, find_needed
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
    union,
)
from ._memory_access import WRITTEN, is_copied, is_product, reads_narrow, squares, uses_memory
from ._residuals import residuals_in


@dataclass(frozen=True)
class _Body:
    """The peaks in an iteration of a loop, and what each iteration keeps for its derivative."""

    forward: Peak
    backward: Peak
    saved: tuple[WrittenBytes, ...] = ()


@dataclass
class _Frame:
    """A jaxpr that runs, with the buffers of its values.

    `source` are the equations around it. By the index of an equation, `inner` has the frames of the
    jaxprs that it runs, `loops` what a loop keeps and when it began, `copies` what it copies of its
    operands, and `begins` when it first ran. `gathered` are operands of products, gathered from
    parts of the sequence, and `stacked` what a loop keeps of a value for each iteration.
    """

    scope: Scope
    source: Source
    roots: dict[Atom, Roots] = field(default_factory=dict)
    inner: dict[int, "list[_Frame]"] = field(default_factory=dict)
    loops: dict[int, tuple[_Body, int]] = field(default_factory=dict)
    copies: dict[int, Roots] = field(default_factory=dict)
    begins: dict[int, int] = field(default_factory=dict)
    gathered: dict[Atom, Roots] = field(default_factory=dict)
    stacked: dict[Atom, Roots] = field(default_factory=dict)

    def of(self, atom: Atom) -> Roots:
        """The buffers of a variable; a literal has none."""
        if isinstance(atom, Literal):
            return ()
        return self.roots.get(atom, ())

    def add_arguments(self, atoms: Iterable[Atom], size_of: Callable[[Value], int | float]) -> None:
        for var in atoms:
            self.roots[var] = argument(size_of(self.scope.values[var]))


@dataclass(frozen=True)
class _Step:
    """An equation of a jaxpr that runs, or whose derivative does."""

    frame: _Frame
    index: int

    @cached_property
    def equation(self) -> JaxprEqn:
        return self.frame.scope.jaxpr.eqns[self.index]

    @cached_property
    def source(self) -> Source:
        return (*self.frame.source, self.equation)

    @property
    def inner(self) -> list[Scope]:
        return self.frame.scope.inner[self.index]

    @property
    def uses_memory(self) -> bool:
        return uses_memory(self.frame.scope, self.index)

    def value(self, atom: Atom) -> Value:
        return self.frame.scope.values[atom]

    @property
    def flow(self) -> Call | Cond | Scan | While | None:
        """How the equation runs the jaxprs that were followed in it, if any were."""
        inner = self.frame.scope.inner.get(self.index)
        if not inner:
            return None
        match control_flow(self.equation):
            case Call(jaxpr=jaxpr, kind=CallKind.CUSTOM_VJP) as call:
                flows = map(control_flow, inner[0].jaxpr.eqns)
                if any(isinstance(flow, Scan | While) for flow in flows):
                    # The derivative is unknown, and runs a loop too.
                    return While(jaxpr, jaxpr, 0, 0)
                return call
            case Call() | Cond() | Scan() | While() as flow:
                return flow
        return None


# The buffers of a cotangent; None where it is zero.
_Cotangent = Roots | None


def find_peak(
    scope: Scope,
    size_of: Callable[[Value], int | float],
    parameters: Sequence[ModelArray],
    *,
    compiler: str,
    trains: bool,
    gathered_size_of: Callable[[Value], int | float],
) -> Peak:
    """The peak of a program and, if it is a loss, of its derivative.

    - `size_of`: the bytes of a value on each device.
    - `parameters`: the first inputs, the arrays of the model.
    - `trains`: whether the first result is differentiated.
    - `gathered_size_of`: the bytes of a value on each device while a product reads or writes it;
        with sequence parallelism, more than `size_of`.
    """
    run = _Run(Timeline(size_of, compiler, gathered_size_of))
    frame = _Frame(scope, ())
    frame.add_arguments(scope.jaxpr.invars, size_of)
    for var, parameter in zip(scope.jaxpr.invars, parameters, strict=False):
        frame.roots[var] = argument(size_of(scope.values[var]), parameter)
    run.forward(frame)
    results = scope.jaxpr.outvars
    if trains and not isinstance(results[0], Literal):
        run.backward(frame, {results[0]: ()})
        run.time.finish(parameters)
    run.time.now += 1
    run.time.read(union(map(frame.of, results)))
    return run.time.peak()


@dataclass
class _Run:
    """Runs jaxprs and their derivatives on buffers.

    With `stacks`, they are of an iteration of a loop, which stacks what JAX keeps for derivatives.
    Values that only these `constant` buffers decide are the same in all iterations.
    """

    time: Timeline
    stacks: bool = False
    constant: frozenset[Buffer] = frozenset()

    @property
    def compiler(self) -> str:
        return self.time.compiler

    def forward(self, frame: _Frame, kept: Mapping[Atom, Roots] | None = None) -> None:
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
            step = _Step(frame, index)
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
                    self._operation(step, uses)

    def backward(self, frame: _Frame, cotangents: dict[Atom, Roots]) -> list[_Cotangent]:
        """Runs the derivative of a jaxpr; returns the cotangents of its inputs."""
        jaxpr = frame.scope.jaxpr
        for index, equation in reversed(list(enumerate(jaxpr.eqns))):
            results = [cotangents.pop(var, None) for var in equation.outvars]
            if set(results) <= {None}:
                continue
            self.time.now += 1
            step = _Step(frame, index)
            match step.flow:
                case Call(kind=CallKind.CUSTOM_JVP) | None:
                    grads = self._operation_back(step, results)
                case Call() as call:
                    grads = self._call_back(step, call, results)
                case Cond():
                    # All branches keep what their derivatives need, whichever runs.
                    grads: list[_Cotangent] = []
                    for inside in frame.inner[index]:
                        grads = self.backward(inside, _of_results(inside.scope, results))
                    grads = [None, *grads]  # the number of the branch has no derivative
                case Scan() as scan:
                    if scan.unroll < scan.length:
                        # A loop sums the gradients of layers over devices one by one.
                        for root in union(map(frame.of, scan.split(equation.invars)[2])):
                            if root.parameter is not None:
                                self.time.add_gradient(root.parameter, summed=True)
                    grads = self._loop_back(step, results)
                case While():
                    grads = self._loop_back(step, results)
            for atom, roots in zip(equation.invars, grads, strict=True):
                if roots is not None and not isinstance(atom, Literal):
                    cotangents[atom] = self._add(step, atom, cotangents.get(atom, ()), roots)
        return [cotangents.get(var) for var in jaxpr.invars]

    def _add(self, step: _Step, atom: Atom, later: Roots, roots: Roots) -> Roots:
        """Adds two cotangents of a value, of which one is that of all its later uses."""
        both = union((later, roots))
        if self.compiler != "cpu" and later and len(both) > 2:
            # Otherwise each sum of a residual connection would read those of all later layers.
            return (self.time.fuse(both, step.value(atom), step.source),)
        return both

    def _in_memory(self, step: _Step, atom: Atom) -> Roots:
        """Puts an operand into memory, where later operations find it."""
        if isinstance(atom, Literal):
            return ()
        frame = step.frame
        frame.roots[atom] = self.time.in_memory(frame.of(atom), step.value(atom), step.source)
        return frame.roots[atom]

    def _write_results(self, step: _Step) -> None:
        for var in step.equation.outvars:
            size = self.time.size_of(step.value(var))
            step.frame.roots[var] = (self.time.write(size, step.source),)

    def _operand(self, step: _Step, atom: Atom) -> Roots:
        """Puts an operand of a large operation into memory; that of a product is gathered there."""
        roots = self._in_memory(step, atom)
        if isinstance(atom, Literal) or not is_product(step.equation):
            return roots
        size = self.time.gathered_size_of(step.value(atom))
        if size == self.time.size_of(step.value(atom)):
            return roots
        gathered = step.frame.gathered
        if atom not in gathered:
            self.time.read(roots)
            self.time.now += 1
            gathered[atom] = (self.time.write(size, step.source),)
        return gathered[atom]

    def _write_sums(self, step: _Step) -> None:
        """Writes a product as a whole, before its sum over devices is divided among them."""
        value = step.value(step.equation.outvars[0])
        size = self.time.gathered_size_of(value)
        if size == self.time.size_of(value):
            return
        self.time.write(size, step.source)
        if self.compiler == "cpu":
            # Without a reduce-scatter, the sum is there as a whole too.
            self.time.write(size, step.source)

    def _reads_narrow(self, equation: JaxprEqn) -> bool:
        return self.compiler == "tpu" and reads_narrow(equation)

    def _operation(self, step: _Step, uses: Counter[Atom]) -> None:
        frame, equation = step.frame, step.equation
        name = primitive_name(equation)
        if step.uses_memory:
            operands = [self._operand(step, atom) for atom in equation.invars]
            narrow = self._reads_narrow(equation)
            self.time.read(union(operands), narrow=narrow)
            for atom, roots in zip(equation.invars, operands, strict=True):
                if is_copied(equation, atom):
                    frame.roots[atom] = (self.time.fuse(roots, step.value(atom), step.source),)
                    self.time.read(frame.roots[atom], narrow=narrow)
            self._write_results(step)
            if is_product(equation):
                self._write_sums(step)
            return
        operands = union(map(self.time.written, map(frame.of, equation.invars)))
        is_kept = name in COSTLY and self.compiler != "tpu"
        if squares(equation):
            # What is squared and summed, as by a norm, is kept for its other uses.
            is_kept = len(operands) > 1 and self.compiler == "cpu"
        if name in VIEWS:
            # The same value, which is in memory once if both are.
            operands = frame.of(equation.invars[0])
            if is_stored(operands):
                operands = self._part(step, operands[0])
        for var in equation.outvars:
            value = step.value(var)
            # A derivative is one more use.
            is_shared = is_kept and uses[var] > 1 - value.grad
            frame.roots[var] = operands
            if name not in VIEWS:
                frame.roots[var] = self.time.computed(operands)
            if name in WRITTEN or is_shared:
                frame.roots[var] = (self.time.fuse(operands, value, step.source),)

    def _part(self, step: _Step, whole: Buffer) -> Roots:
        """A slice of a stored array, which is gathered alone."""
        size = self.time.size_of(step.value(step.equation.outvars[0]))
        if size >= whole.given or whole.parameter is None:
            return (whole,)
        return argument(size, whole.parameter.part(size / whole.given))

    def _operation_back(self, step: _Step, results: Sequence[_Cotangent]) -> list[_Cotangent]:
        frame, equation = step.frame, step.equation
        rule = frame.scope.rules.get(step.index)
        operands = list(map(frame.scope.value_of, equation.invars))
        varied = [value is not None and value.grad for value in operands]
        needed: Sequence[Atom] = [*equation.invars, *equation.outvars]
        read: list[Roots] = []
        residuals = None
        if self.stacks:
            residuals = residuals_in(frame.scope, step.index)
        if residuals is not None:
            needed = residuals.atoms
            for size in residuals.sizes(frame.scope, self.time.size_of):
                read.append((self._write_stacked(step, size),))
        elif rule is not None and is_linear(rule, varied):
            needed = list(compress(equation.invars, fixed_operands(rule, varied)))
        elif primitive_name(equation) in FROM_RESULT:
            needed = list(equation.outvars)
        for var, roots in zip(equation.outvars, results, strict=True):
            if roots is None:
                continue
            if step.uses_memory:
                roots = self._one_buffer(step, var, roots)
            read.append(roots)
            if is_product(equation):
                read += self._gathered_cotangent(step, var, roots)
        for atom in needed:
            if not isinstance(atom, Literal) and atom in frame.gathered:
                read.append(frame.gathered[atom])  # what was gathered is kept
            elif self.stacks and not isinstance(atom, Literal):
                read.append(self._stacked(step, atom))
            else:
                read.append(self.time.written(frame.of(atom)))
        # A broadcast array has a sum as its cotangent.
        is_written = step.uses_memory or primitive_name(equation) == "broadcast_in_dim"
        grads: list[_Cotangent] = []
        self.time.now += 1
        for atom, varies in zip(equation.invars, varied, strict=True):
            if not varies:
                grads.append(None)
            elif is_written:
                self.time.read(union(read), narrow=self._reads_narrow(equation))
                grads.append(self._write_gradient(step, atom))
            else:
                grads.append(union(read))
        return grads

    def _stacked(self, step: _Step, atom: Atom) -> Roots:
        """What a loop keeps of a value for its derivative."""
        frame = step.frame
        if atom not in frame.stacked:
            roots = self.time.written(frame.of(atom))
            if not self.constant.issuperset(roots):
                begin = frame.begins[step.index]
                roots = self.time.saved(roots, step.value(atom), step.source, begin)
            frame.stacked[atom] = roots
        return frame.stacked[atom]

    def _write_stacked(self, step: _Step, size: int | float) -> Buffer:
        """Writes what a loop keeps beside the operands and results of an operation."""
        buffer = self.time.write(size, step.source)
        buffer.born = step.frame.begins[step.index]
        return buffer

    def _write_gradient(self, step: _Step, atom: Atom) -> Roots:
        """Writes the cotangent of an operand; that of an array of the model is a result.

        That of an operand of a product has its full size until it is summed over devices,
        together with those of other products.
        """
        roots = step.frame.of(atom)
        if len(roots) == 1 and roots[0].parameter is not None:
            self.time.add_gradient(roots[0].parameter, step.source)
            return ()
        size = self.time.size_of(step.value(atom))
        if is_product(step.equation):
            size = self.time.gathered_size_of(step.value(atom))
        return (self.time.write(size, step.source),)

    def _one_buffer(self, step: _Step, var: Atom, roots: Roots) -> Roots:
        """Writes a cotangent, unless it is one buffer already."""
        if len(roots) == 1 and roots[0].bytes == self.time.size_of(step.value(var)):
            return roots
        return (self.time.fuse(roots, step.value(var), step.source),)

    def _behind_barrier(self, step: _Step, results: Sequence[_Cotangent]) -> list[_Cotangent]:
        """Writes the cotangents of what is computed again, which a barrier holds back until then.

        The compiler for CPUs removes the barrier.
        """
        written: list[_Cotangent] = []
        for var, roots in zip(step.equation.outvars, results, strict=True):
            if roots is not None:
                roots = self._one_buffer(step, var, roots)
            written.append(roots)
        return written

    def _gathered_cotangent(self, step: _Step, var: Atom, roots: Roots) -> list[Roots]:
        """Gathers the cotangent of a product whose result has parts of the sequence."""
        size = self.time.gathered_size_of(step.value(var))
        if size == self.time.size_of(step.value(var)):
            return []
        self.time.read(roots)
        self.time.now += 1
        return [(self.time.write(size, step.source),)]

    def _call(self, step: _Step, call: Call) -> None:
        scope = step.inner[0]
        inside = _Frame(scope, step.source)
        for var, atom in zip(scope.jaxpr.invars, step.equation.invars, strict=True):
            inside.roots[var] = step.frame.of(atom)
            # A stored array is gathered where the region uses it.
            if call.kind is CallKind.REMAT and not is_stored(inside.roots[var]):
                inside.roots[var] = self._in_memory(step, atom)
        self.forward(inside)
        step.frame.inner[step.index] = [inside]
        for var, atom in zip(step.equation.outvars, scope.jaxpr.outvars, strict=True):
            step.frame.roots[var] = inside.of(atom)

    def _call_back(
        self, step: _Step, call: Call, results: Sequence[_Cotangent]
    ) -> list[_Cotangent]:
        (inside,) = step.frame.inner[step.index]
        jaxpr, values = inside.scope.jaxpr, inside.scope.values
        if call.kind is CallKind.REMAT:
            if self.compiler != "cpu":
                results = self._behind_barrier(step, results)
            grads = [values[var].grad for var in jaxpr.invars]
            region = Region((False,) * len(jaxpr.outvars), True, call.policy)
            again = find_needed(jaxpr, region, grads).equations
            # What is saved, and what only that is computed from, is not computed again.
            kept: dict[Atom, Roots] = {}
            begin = step.frame.begins[step.index]
            for place, equation in enumerate(jaxpr.eqns):
                if place not in again:
                    is_saved = region.keeps(equation)
                    for var in equation.outvars:
                        kept[var] = inside.of(var)
                        if is_saved:
                            kept[var] = self.time.saved(kept[var], values[var], step.source, begin)
            # With the calls and loops that are not computed again.
            inside = replace(inside, roots={}, gathered={})
            for var, atom in zip(jaxpr.invars, step.equation.invars, strict=True):
                inside.roots[var] = step.frame.of(atom)
                self.time.read(inside.roots[var])
            self.forward(inside, kept)
        run = self
        is_plain = call.kind is CallKind.PLAIN or isinstance(call.policy, KeepAllBut)
        if not is_plain:
            run = replace(self, stacks=False)
        return run.backward(inside, _of_results(inside.scope, results))

    def _branches(self, step: _Step) -> None:
        frames: list[_Frame] = []
        for branch in step.inner:
            inside = _Frame(branch, step.source)
            for var, atom in zip(branch.jaxpr.invars, step.equation.invars[1:], strict=True):
                inside.roots[var] = self._in_memory(step, atom)
            self.forward(inside)
            frames.append(inside)
        step.frame.inner[step.index] = frames
        self._write_results(step)

    def _scan(self, step: _Step, scan: Scan) -> None:
        frame, scope, size_of = step.frame, step.inner[0], self.time.size_of
        consts, carry, xs = scan.split(step.equation.invars)
        operands = [self._in_memory(step, atom) for atom in (*consts, *carry)]
        slices: list[Roots] = []  # of one iteration
        for atom, var in zip(xs, scan.split(scope.jaxpr.invars)[2], strict=True):
            roots, layer = frame.of(atom), None
            if len(roots) == 1 and roots[0].parameter is not None:
                # An iteration gathers its own layer alone, and sums its gradient.
                layer = roots[0].parameter.part(1 / scan.length)
                if scan.unroll >= scan.length and not layer.gathered:
                    # The gradients of all layers are summed after the last.
                    layer = ModelArray()
            else:
                roots = self._in_memory(step, atom)
            operands.append(roots)
            slices.append(argument(size_of(scope.values[var]), layer))
        self.time.read(union(operands))
        body = _run_body(_Frame(scope, step.source), scan, slices, self.time.empty())
        if self.compiler == "tpu" and scan.unroll < scan.length:
            # XLA for TPU copies stacked matrices before a loop, in bfloat16. There is one copy for
            # the loop, and one in another layout for its derivative.
            copies: list[Buffer] = []
            for atom, roots in zip(xs, slices, strict=True):
                if all(root.read_narrow and not root.read_wide for root in roots):
                    copies.append(self.time.write(size_of(step.value(atom)), step.source))
            frame.copies[step.index] = tuple(copies)
        self.time.spike(body.forward)
        saved: list[WrittenBytes] = []
        for size, where in body.saved:
            saved.append((size * scan.length, where))
        if scan.unroll >= scan.length:
            # Without a loop, the slices of all iterations are in memory at once.
            for atom in xs:
                saved.append((size_of(step.value(atom)), step.source))
        frame.loops[step.index] = replace(body, saved=tuple(saved)), self.time.now
        self._write_results(step)

    def _loop(self, step: _Step) -> None:
        """A loop of unknown length, perhaps in an operation with its own derivative."""
        operands = [self._in_memory(step, atom) for atom in step.equation.invars]
        self.time.read(union(operands))
        peak = Peak()
        for scope in step.inner:
            run, inside = _Run(self.time.empty()), _Frame(scope, step.source)
            inside.add_arguments(scope.jaxpr.invars, self.time.size_of)
            run.forward(inside)
            run.time.read(union(map(inside.of, scope.jaxpr.outvars)))
            peak = max(peak, run.time.peak(), key=lambda peak: peak.bytes)
        self.time.spike(peak)
        # A derivative of its own is assumed to take as much again.
        body = _Body(peak, Peak((*peak.parts, *peak.parts)))
        step.frame.loops[step.index] = body, self.time.now
        self._write_results(step)

    def _loop_back(self, step: _Step, results: Sequence[_Cotangent]) -> list[_Cotangent]:
        frame, equation = step.frame, step.equation
        body, begin = frame.loops[step.index]
        read = [*map(frame.of, (*equation.invars, *equation.outvars)), *filter(None, results)]
        self.time.read(union((*read, frame.copies.get(step.index, ()))))
        if body.saved:
            self.time.write_parts(body.saved).born = begin
        self.time.spike(body.backward)
        grads: list[_Cotangent] = []
        for atom in equation.invars:
            if isinstance(atom, Literal) or not step.value(atom).grad:
                grads.append(None)
            else:
                grads.append(self._write_gradient(step, atom))
        return grads


def _run_body(frame: _Frame, scan: Scan, slices: Sequence[Roots], time: Timeline) -> _Body:
    """Runs the body of a scan once, forward and backward."""
    jaxpr, values = frame.scope.jaxpr, frame.scope.values
    consts, carry, xs = scan.split(jaxpr.invars)
    frame.add_arguments(consts, time.size_of)
    constant = frozenset(union(map(frame.of, consts)))
    run = _Run(time, stacks=scan.unroll < scan.length, constant=constant)
    frame.roots.update(zip(xs, slices, strict=True))
    carried: list[Buffer] = []
    for var in carry:
        carried.append(Buffer((), 0, 0))
        frame.roots[var] = (carried[-1],)
    run.forward(frame)
    time.now += 1
    time.read(union(map(frame.of, jaxpr.outvars)))
    forward, middle = time.peak(), time.now
    time.now += 1
    # The cotangents of all results come from outside.
    outside = (Buffer((), time.now, time.now),)
    cotangents: dict[Atom, Roots] = {}
    for var in variables(jaxpr.outvars):
        if values[var].grad:
            cotangents[var] = outside
    grads = run.backward(frame, cotangents)
    # The sum of an FSDP-sharded layer takes the place of its gathered weights.
    if run.stacks and not any(parameter.gathered for _, parameter in time.waiting):
        time.sum_gradients()
    time.now += 1
    time.read(union(filter(None, grads)))
    saved: list[WrittenBytes] = []
    for buffer in time.buffers:
        if buffer.born <= middle < buffer.last and not buffer.reread:
            saved += buffer.kept
    for var, buffer in zip(carry, carried, strict=True):
        if buffer.last > middle:
            saved.append((time.size_of(values[var]), frame.source))
    return _Body(forward, time.peak(middle + 1), tuple(saved))


def _of_results(scope: Scope, cotangents: Sequence[_Cotangent]) -> dict[Atom, Roots]:
    """The cotangents of a jaxpr's results, by variable."""
    by_variable: dict[Atom, Roots] = {}
    for atom, roots in zip(scope.jaxpr.outvars, cotangents, strict=True):
        if roots is not None and not isinstance(atom, Literal):
            by_variable[atom] = union((by_variable.get(atom, ()), roots))
    return by_variable
