"""The most memory that the values of a program take at once, and the operations they come from.

The program is run on buffers without contents: forward, and if it is a loss, backward. XLA writes
what large operations read and return to memory, and fuses the others into those that use them: a
value that is fused has no buffer of its own, but keeps those alive that it is computed from. A
derivative reads the values that it needs again. A rematerialised region keeps its operands alone,
and runs again before its derivative. A loop keeps what the derivative of its body needs, once for
each iteration. `experiments/benchmarks/memory.py` compares the result with compiled programs.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

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
from ..operations import fixed_operands, is_linear
from ..operations._rule_table import COSTLY, VIEWS
from ..program._graph import Source, Value
from ..program._remat import Region, find_needed
from ..program._walk import Scope
from ._buffers import Buffer, ModelArray, Part, Peak, Roots, Timeline, argument, union
from ._memory_access import WRITTEN, is_copied, is_product, reads_narrow, squares, uses_memory


@dataclass(frozen=True)
class _Body:
    """The peaks in an iteration of a loop, and what each iteration keeps for its derivative."""

    forward: Peak
    backward: Peak
    saved: tuple[Part, ...] = ()


@dataclass
class _Values:
    """The buffers of a jaxpr's values, and by equation, what its inner jaxprs have."""

    roots: dict[Any, Roots] = field(default_factory=dict)
    inner: dict[int, "list[_Values]"] = field(default_factory=dict)
    loops: dict[int, tuple[_Body, int]] = field(default_factory=dict)  # and the time
    copies: dict[int, Roots] = field(default_factory=dict)  # of what a loop reads of its operands
    # Operands of products that are gathered from parts of the sequence.
    gathered: dict[Any, Roots] = field(default_factory=dict)

    def of(self, atom: Any) -> Roots:
        """The buffers of a variable; a literal has none."""
        if isinstance(atom, Literal):
            return ()
        return self.roots.get(atom, ())


# The buffers of a cotangent; None where it is zero.
_Cotangent = Roots | None


def find_peak(
    scope: Scope,
    size_of: Callable[[Value], int | float],
    parameters: Sequence[ModelArray],
    *,
    compiler: str,
    trains: bool = False,
    gathered_size_of: Callable[[Value], int | float] | None = None,
) -> Peak:
    """The peak of a program and, if it is a loss, of its derivative.

    **Arguments:**

    - `scope`: the values of the program.
    - `size_of`: the bytes of a value on each device.
    - `parameters`: the first inputs, the arrays of the model.
    - `compiler`: the compiler, as in [`Hardware`][redcoast.Hardware].
    - `trains`: whether the first result is differentiated.
    - `gathered_size_of`: the bytes of a value on each device while a product reads or writes it;
        with sequence parallelism, more than `size_of`.
    """
    run = _Run(Timeline(size_of, compiler, gathered_size_of or size_of))
    values = _Values()
    for place, var in enumerate(scope.jaxpr.invars):
        parameter = None
        if place < len(parameters):
            parameter = parameters[place]
        values.roots[var] = argument(size_of(scope.values[var]), parameter)
    run.forward(scope, values, ())
    results = scope.jaxpr.outvars
    if trains and not isinstance(results[0], Literal):
        run.backward(scope, values, {results[0]: ()}, ())
        run.time.finish(parameters)
    run.time.now += 1
    run.time.read(union(map(values.of, results)))
    return run.time.peak()


@dataclass
class _Run:
    """Runs jaxprs and their derivatives on buffers."""

    time: Timeline

    @property
    def compiler(self) -> str:
        return self.time.compiler

    def forward(
        self, scope: Scope, values: _Values, source: Source, kept: dict[Any, Roots] | None = None
    ) -> None:
        """Runs a jaxpr whose inputs are in `values`. What is in `kept` is not computed again."""
        atoms = (atom for equation in scope.jaxpr.eqns for atom in equation.invars)
        uses = Counter(atom for atom in atoms if not isinstance(atom, Literal))
        for equation in scope.jaxpr.eqns:
            if equation.primitive.name == "div" and not isinstance(equation.invars[0], Literal):
                # A softmax is computed again from what it is a softmax of.
                uses[equation.invars[0]] = 0
        for var in scope.jaxpr.constvars:
            values.roots.setdefault(var, argument(self.time.size_of(scope.values[var])))
        for index, equation in enumerate(scope.jaxpr.eqns):
            self.time.now += 1
            if kept and all(var in kept for var in equation.outvars):
                values.roots.update((var, kept[var]) for var in equation.outvars)
                continue
            inside = (*source, equation)
            match _flow(scope, index):
                case Call() as call:
                    self._call(scope, values, index, call, inside)
                case Cond():
                    self._branches(scope, values, index, inside)
                case Scan() as scan:
                    self._scan(scope, values, index, scan, inside)
                case While():
                    self._loop(scope, values, index, inside)
                case None:
                    self._operation(scope, values, index, uses, inside)

    def backward(
        self, scope: Scope, values: _Values, cotangents: dict[Any, Roots], source: Source
    ) -> list[_Cotangent]:
        """Runs the derivative of a jaxpr; returns the cotangents of its inputs."""
        for index, equation in reversed(list(enumerate(scope.jaxpr.eqns))):
            results = [cotangents.pop(var, None) for var in equation.outvars]
            if all(roots is None for roots in results):
                continue
            self.time.now += 1
            inside = (*source, equation)
            match _flow(scope, index):
                case Call(kind=CallKind.CUSTOM_JVP):
                    grads = self._operation_back(scope, values, index, results, inside)
                case Call() as call:
                    grads = self._call_back(scope, values, index, call, results, inside)
                case Cond():
                    grads = self._branches_back(scope, values, index, results, inside)
                case Scan() as scan:
                    _, _, xs = scan.split(equation.invars)
                    if scan.unroll < scan.length:
                        self._sum_layers(values, xs)
                    grads = self._loop_back(scope, values, index, results, inside)
                case While():
                    grads = self._loop_back(scope, values, index, results, inside)
                case None:
                    grads = self._operation_back(scope, values, index, results, inside)
            for atom, roots in zip(equation.invars, grads, strict=True):
                if roots is not None and not isinstance(atom, Literal):
                    others = cotangents.get(atom, ())
                    cotangents[atom] = self._add(others, roots, scope.values[atom], inside)
        return [cotangents.get(var) for var in scope.jaxpr.invars]

    def _add(self, one: Roots, other: Roots, value: Value, source: Source) -> Roots:
        """Adds two cotangents of a value; `one` is that of all its later uses."""
        both = union((one, other))
        if self.compiler != "cpu" and one and len(both) > 2:
            # Otherwise each sum of a residual connection would read those of all later layers.
            return (self.time.fuse(both, value, source),)
        return both

    def _read_from(self, values: _Values, atom: Any) -> Roots:
        """The buffers that an operation reads a value from."""
        return self.time.written(values.of(atom))

    def _read_again(self, values: _Values, atom: Any) -> Roots:
        """The buffers that a derivative reads a value from: what was gathered is kept."""
        if not isinstance(atom, Literal) and atom in values.gathered:
            return values.gathered[atom]
        return self._read_from(values, atom)

    def _in_memory(self, scope: Scope, values: _Values, atom: Any, source: Source) -> Roots:
        """Puts a value into memory, where later operations find it."""
        if isinstance(atom, Literal):
            return ()
        roots = self.time.in_memory(values.of(atom), scope.values[atom], source)
        values.roots[atom] = roots
        return roots

    def _write_results(
        self, scope: Scope, values: _Values, equation: JaxprEqn, source: Source
    ) -> None:
        for var in equation.outvars:
            size = self.time.size_of(scope.values[var])
            values.roots[var] = (self.time.write(size, source),)

    def _operand(
        self, scope: Scope, values: _Values, equation: JaxprEqn, atom: Any, source: Source
    ) -> Roots:
        """Puts an operand of a large operation into memory; that of a product is gathered there."""
        roots = self._in_memory(scope, values, atom, source)
        if isinstance(atom, Literal) or not is_product(equation):
            return roots
        size = self.time.gathered_size_of(scope.values[atom])
        if size == self.time.size_of(scope.values[atom]):
            return roots
        if atom not in values.gathered:
            self.time.read(roots)
            self.time.now += 1
            values.gathered[atom] = (self.time.write(size, source),)
        return values.gathered[atom]

    def _write_sums(self, value: Value, source: Source) -> None:
        """Writes a product as a whole, before its sum over devices is divided among them."""
        size = self.time.gathered_size_of(value)
        if size == self.time.size_of(value):
            return
        self.time.write(size, source)
        if self.compiler == "cpu":
            # Without a reduce-scatter, the sum is there as a whole too.
            self.time.write(size, source)

    def _operation(
        self, scope: Scope, values: _Values, index: int, uses: Counter[Any], source: Source
    ) -> None:
        equation = scope.jaxpr.eqns[index]
        name = primitive_name(equation)
        if uses_memory(scope, index):
            operands = [self._operand(scope, values, equation, x, source) for x in equation.invars]
            narrow = self.compiler == "tpu" and reads_narrow(equation)
            self.time.read(union(operands), narrow=narrow)
            for atom, roots in zip(equation.invars, operands, strict=True):
                if is_copied(equation, atom):
                    values.roots[atom] = (self.time.fuse(roots, scope.values[atom], source),)
                    self.time.read(values.roots[atom], narrow=narrow)
            self._write_results(scope, values, equation, source)
            if is_product(equation):
                self._write_sums(scope.values[equation.outvars[0]], source)
            return
        operands = union(self._read_from(values, atom) for atom in equation.invars)
        is_kept = name in COSTLY and self.compiler != "tpu"
        if squares(equation):
            # What is squared and summed, as by a norm, is kept for its other uses.
            is_kept = len(operands) > 1 and self.compiler == "cpu"
        if name in VIEWS:
            # The same value, which is in memory once if both are.
            operands = values.of(equation.invars[0])
        for var in equation.outvars:
            value = scope.values[var]
            is_shared = is_kept and uses[var] > 1 - value.grad
            values.roots[var] = operands
            if name in WRITTEN or is_shared:
                values.roots[var] = (self.time.fuse(operands, value, source),)

    def _operation_back(
        self,
        scope: Scope,
        values: _Values,
        index: int,
        results: Sequence[_Cotangent],
        source: Source,
    ) -> list[_Cotangent]:
        equation, rule = scope.jaxpr.eqns[index], scope.rules.get(index)
        operands = [
            None if isinstance(atom, Literal) else scope.values[atom] for atom in equation.invars
        ]
        varied = [value is not None and value.grad for value in operands]
        needed = [*equation.invars, *equation.outvars]
        if rule is not None and is_linear(rule, varied):
            fixed = zip(equation.invars, fixed_operands(rule, varied), strict=True)
            needed = [atom for atom, is_fixed in fixed if is_fixed]
        is_large = uses_memory(scope, index)
        narrow = self.compiler == "tpu" and reads_narrow(equation)
        given = []
        for var, roots in zip(equation.outvars, results, strict=True):
            if roots is not None and is_large:
                roots = self._as_buffer(roots, scope.values[var], source)
            given.append(roots or ())
        read = union((*given, *(self._read_again(values, atom) for atom in needed)))
        # A broadcast array has a sum as its cotangent.
        is_written = is_large or primitive_name(equation) == "broadcast_in_dim"
        grads: list[_Cotangent] = []
        self.time.now += 1
        for atom, value, varies in zip(equation.invars, operands, varied, strict=True):
            if value is None or not varies:
                grads.append(None)
            elif is_written:
                self.time.read(read, narrow=narrow)
                grads.append(self._write_gradient(values.of(atom), value, equation, source))
            else:
                grads.append(read)
        return grads

    def _sum_layers(self, values: _Values, xs: Sequence[Any]) -> None:
        """A loop sums the gradients of FSDP-sharded layers over devices one by one."""
        for atom in xs:
            for root in values.of(atom):
                if root.parameter is not None and root.parameter.gathered:
                    self.time.add_gradient(root.parameter, summed=True)

    def _as_buffer(self, roots: Roots, value: Value, source: Source) -> Roots:
        """The one buffer of a cotangent."""
        if len(roots) == 1 and roots[0].bytes == self.time.size_of(value):
            return roots
        return (self.time.fuse(roots, value, source),)

    def _write_gradient(
        self, roots: Roots, value: Value, equation: JaxprEqn, source: Source
    ) -> Roots:
        """Writes the cotangent of a value; that of an array of the model is a result.

        That of an operand of a product has its full size until it is summed over devices,
        together with those of other products.
        """
        if len(roots) == 1 and roots[0].parameter is not None:
            self.time.add_gradient(roots[0].parameter, source)
            return ()
        size = self.time.size_of(value)
        if is_product(equation):
            size = self.time.gathered_size_of(value)
        return (self.time.write(size, source),)

    def _call(self, scope: Scope, values: _Values, index: int, call: Call, source: Source) -> None:
        equation, inner = scope.jaxpr.eqns[index], scope.inner[index][0]
        is_remat = call.kind is CallKind.REMAT
        inside = _Values()
        for var, atom in zip(inner.jaxpr.invars, equation.invars, strict=True):
            roots = values.of(atom)
            if is_remat:
                roots = self._in_memory(scope, values, atom, source)
            inside.roots[var] = roots
        self.forward(inner, inside, source)
        values.inner[index] = [inside]
        for var, atom in zip(equation.outvars, inner.jaxpr.outvars, strict=True):
            values.roots[var] = inside.of(atom)

    def _call_back(
        self,
        scope: Scope,
        values: _Values,
        index: int,
        call: Call,
        results: Sequence[_Cotangent],
        source: Source,
    ) -> list[_Cotangent]:
        equation, inner = scope.jaxpr.eqns[index], scope.inner[index][0]
        (inside,) = values.inner[index]
        if call.kind is CallKind.REMAT:
            wanted = (False,) * len(inner.jaxpr.outvars)
            grads = [inner.values[var].grad for var in inner.jaxpr.invars]
            region = Region(wanted, True, call.policy)
            again = find_needed(inner.jaxpr, region, grads).equations
            # What is saved, and what only that is computed from, is not computed again.
            kept: dict[Any, Roots] = {}
            for place, each in enumerate(inner.jaxpr.eqns):
                if place not in again:
                    kept.update((var, inside.of(var)) for var in each.outvars)
            # With the calls and loops that are not computed again.
            inside = _Values(
                inner=dict(inside.inner), loops=dict(inside.loops), copies=dict(inside.copies)
            )
            for var, atom in zip(inner.jaxpr.invars, equation.invars, strict=True):
                inside.roots[var] = values.of(atom)
                self.time.read(inside.roots[var])
            self.forward(inner, inside, source, kept)
        return self.backward(inner, inside, _of_results(inner, results), source)

    def _branches(self, scope: Scope, values: _Values, index: int, source: Source) -> None:
        equation = scope.jaxpr.eqns[index]
        values.inner[index] = []
        for branch in scope.inner[index]:
            inside = _Values()
            for var, atom in zip(branch.jaxpr.invars, equation.invars[1:], strict=True):
                inside.roots[var] = self._in_memory(scope, values, atom, source)
            self.forward(branch, inside, source)
            values.inner[index].append(inside)
        self._write_results(scope, values, equation, source)

    def _branches_back(
        self,
        scope: Scope,
        values: _Values,
        index: int,
        results: Sequence[_Cotangent],
        source: Source,
    ) -> list[_Cotangent]:
        # All branches keep what their derivatives need, whichever runs.
        grads: list[_Cotangent] = []
        for branch, inside in zip(scope.inner[index], values.inner[index], strict=True):
            grads = self.backward(branch, inside, _of_results(branch, results), source)
        return [None, *grads]

    def _scan(self, scope: Scope, values: _Values, index: int, scan: Scan, source: Source) -> None:
        equation, inner = scope.jaxpr.eqns[index], scope.inner[index][0]
        consts, carry, xs = scan.split(equation.invars)
        operands = [self._in_memory(scope, values, atom, source) for atom in (*consts, *carry)]
        slices: list[Roots] = []
        for atom, var in zip(xs, scan.split(inner.jaxpr.invars)[2], strict=True):
            parameter = _layer(values.of(atom), scan.length)
            roots = values.of(atom)
            if parameter is None:
                roots = self._in_memory(scope, values, atom, source)
            operands.append(roots)
            slices.append(argument(self.time.size_of(inner.values[var]), parameter))
        self.time.read(union(operands))
        body = _run_body(inner, scan, slices, self.time.empty(), source)
        if self.compiler == "tpu" and scan.unroll < scan.length:
            values.copies[index] = self._copy_layers(scope, xs, slices, source)
        self.time.spike(body.forward)
        saved = [(size * scan.length, where) for size, where in body.saved]
        if scan.unroll >= scan.length:
            # Without a loop, the slices of all iterations are in memory at once.
            saved += [(self.time.size_of(scope.values[atom]), source) for atom in xs]
        values.loops[index] = replace(body, saved=tuple(saved)), self.time.now
        self._write_results(scope, values, equation, source)

    def _copy_layers(
        self, scope: Scope, xs: Sequence[Any], slices: Sequence[Roots], source: Source
    ) -> Roots:
        """XLA for TPU copies stacked matrices before a loop, in bfloat16.

        There is one copy for the loop, and one in another layout for its derivative.
        """
        copies: list[Buffer] = []
        for atom, roots in zip(xs, slices, strict=True):
            if all(root.read_narrow and not root.read_wide for root in roots):
                copies.append(self.time.write(self.time.size_of(scope.values[atom]), source))
        return tuple(copies)

    def _loop(self, scope: Scope, values: _Values, index: int, source: Source) -> None:
        """A loop of unknown length, perhaps in an operation with its own derivative."""
        equation = scope.jaxpr.eqns[index]
        operands = [self._in_memory(scope, values, atom, source) for atom in equation.invars]
        self.time.read(union(operands))
        peak = Peak()
        for inner in scope.inner[index]:
            run, inside = _Run(self.time.empty()), _Values()
            inside.roots.update(_arguments(inner, inner.jaxpr.invars, self.time.size_of))
            run.forward(inner, inside, source)
            run.time.read(union(map(inside.of, inner.jaxpr.outvars)))
            peak = max(peak, run.time.peak(), key=lambda one: one.bytes)
        self.time.spike(peak)
        # A derivative of its own is assumed to take as much again.
        values.loops[index] = _Body(peak, Peak((*peak.parts, *peak.parts))), self.time.now
        self._write_results(scope, values, equation, source)

    def _loop_back(
        self,
        scope: Scope,
        values: _Values,
        index: int,
        results: Sequence[_Cotangent],
        source: Source,
    ) -> list[_Cotangent]:
        equation = scope.jaxpr.eqns[index]
        body, begin = values.loops[index]
        operands = [values.of(atom) for atom in (*equation.invars, *equation.outvars)]
        given = [roots or () for roots in results]
        self.time.read(union((*operands, *given, values.copies.get(index, ()))))
        if body.saved:
            self.time.write_parts(body.saved).born = begin
        self.time.spike(body.backward)
        grads: list[_Cotangent] = []
        for atom in equation.invars:
            if isinstance(atom, Literal) or not scope.values[atom].grad:
                grads.append(None)
                continue
            value = scope.values[atom]
            grads.append(self._write_gradient(values.of(atom), value, equation, source))
        return grads


def _run_body(
    inner: Scope,
    scan: Scan,
    slices: Sequence[Roots],
    time: Timeline,
    source: Source,
) -> _Body:
    """Runs the body of a scan once, forward and backward."""
    run, values, size_of = _Run(time), _Values(), time.size_of
    consts, carry, xs = scan.split(inner.jaxpr.invars)
    values.roots.update(_arguments(inner, consts, size_of))
    values.roots.update(zip(xs, slices, strict=True))
    values.roots.update((var, (Buffer((), 0, 0),)) for var in carry)
    carried = [values.roots[var][0] for var in carry]
    run.forward(inner, values, source)
    time.now += 1
    time.read(union(map(values.of, inner.jaxpr.outvars)))
    forward, middle = time.peak(), time.now
    time.now += 1
    given = [(Buffer((), time.now, time.now),)] * len(inner.jaxpr.outvars)
    cotangents = _of_results(inner, given)
    differentiated = {var: roots for var, roots in cotangents.items() if inner.values[var].grad}
    grads = run.backward(inner, values, differentiated, source)
    time.now += 1
    time.read(union(roots or () for roots in grads))
    kept = [one for one in time.buffers if one.born <= middle < one.last and not one.reread]
    saved = [part for buffer in kept for part in buffer.kept]
    for var, buffer in zip(carry, carried, strict=True):
        if buffer.last > middle:
            saved.append((size_of(inner.values[var]), source))
    return _Body(forward, time.peak(middle + 1), tuple(saved))


def _layer(roots: Roots, length: int) -> ModelArray | None:
    """What a loop reads of an array of the model in each iteration, if it reads one."""
    if len(roots) != 1 or roots[0].parameter is None:
        return None
    return ModelArray(roots[0].parameter.gathered / length)


def _arguments(
    inner: Scope, variables: Sequence[Any], size_of: Callable[[Value], int | float]
) -> dict[Any, Roots]:
    return {var: argument(size_of(inner.values[var])) for var in variables}


def _of_results(inner: Scope, cotangents: Sequence[_Cotangent]) -> dict[Any, Roots]:
    """The cotangents of a jaxpr's results, by variable."""
    found: dict[Any, Roots] = {}
    for atom, roots in zip(inner.jaxpr.outvars, cotangents, strict=True):
        if roots is not None and not isinstance(atom, Literal):
            found[atom] = union((found.get(atom, ()), roots))
    return found


def _flow(scope: Scope, index: int) -> Call | Cond | Scan | While | None:
    """How an equation runs the jaxprs that were followed in it, if any were."""
    inner = scope.inner.get(index)
    if not inner:
        return None
    match control_flow(scope.jaxpr.eqns[index]):
        case Call(jaxpr=jaxpr, kind=CallKind.CUSTOM_VJP) as call:
            flows = [control_flow(equation) for equation in inner[0].jaxpr.eqns]
            if any(isinstance(flow, Scan | While) for flow in flows):
                # The derivative is unknown, and runs a loop too.
                return While(jaxpr, jaxpr, 0, 0)
            return call
        case Call() | Cond() | Scan() | While() as flow:
            return flow
    return None
