"""A program as one list of steps, with the values that each needs for its derivative.

Calls that change nothing, as of a function under `jax.jit`, are replaced by what they call.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import compress
from math import prod

from jax.extend.core import JaxprEqn, Literal, Var

from ...core._control_flow import Call, CallKind, ControlFlow, Scan, control_flow, primitive_name
from ...core._jaxpr import multiply_adds, variables
from ..operations import fixed_operands, is_linear
from ..operations._rule_table import (
    COSTLY,
    CUMULATIVE,
    FROM_RESULT,
    LARGE_OPERATIONS,
    REDUCTIONS,
    VIEWS,
)
from ..program._graph import Value, have_grad
from ..program._walk import ASSUMED_TRIPS, Scope
from ..solver._hardware import Hardware, all_reduce
from ..solver._residuals import residuals_in

Atom = int | Literal  # the number of a value, or a number of the program
SizeOf = Callable[[Value], int | float]

# Only the ratios of speeds decide what is recomputed, and they differ little between devices.
_DEVICE = Hardware()
# The part of the memory traffic of an operation that it costs if XLA fuses it into others.
_FUSED_TRAFFIC = 0.005
# The derivative is computed from the operands and the result.
_FROM_BOTH = (CUMULATIVE - {"cumsum"}) | {"pow", "reduce_max", "reduce_min", "reduce_prod", "rsqrt"}
# The same elements, which XLA computes again wherever they are read. A barrier is no such value.
_VIEWS = (VIEWS - {"optimization_barrier"}) | {"bitcast_convert_type", "iota", "transpose"}
# XLA does not compute these again in the backward pass by itself.
_COSTLY = COSTLY | {"random_bits", "random_gamma", "threefry2x32"}


@dataclass(eq=False)
class FlatStep:
    """An equation, with the values that it reads and writes.

    - `seconds`, `flops`: what it takes to compute it again on a device; `flops` are those of
        products and convolutions.
    - `needs`: the values that its derivative needs.
    - `residuals`: the values that JAX keeps for it, if the step is of a loop that is divided: the
        loop stacks them, and computes none of them again. Some are no results of a step.
    - `is_fused`: whether XLA can fuse it into what reads its results.
    - `is_free`: whether XLA computes it again by itself: it is fused, and no product reads it from
        memory.
    - `hides`: whether its derivative needs values inside of it, which cannot be kept alone.
    - `is_bare`: whether it cannot be computed again, as a callback.
    - `loop`: the loop that it is, if it is differentiated and divided itself.
    """

    equation: JaxprEqn
    inputs: list[Atom]
    outputs: list[int]
    seconds: float = 0.0
    flops: float = 0.0
    needs: frozenset[int] = frozenset()
    residuals: frozenset[int] = frozenset()
    is_fused: bool = False
    is_free: bool = False
    hides: bool = False
    is_bare: bool = False
    loop: "FlatLoop | None" = None

    @property
    def uses_result(self) -> bool:
        """Whether it is an operation whose derivative is computed from its result."""
        return primitive_name(self.equation) in FROM_RESULT | _FROM_BOTH

    @property
    def reads(self) -> list[int]:
        """The values among its inputs."""
        return _values_in(self.inputs)


def _values_in(atoms: Iterable[Atom]) -> list[int]:
    return [atom for atom in atoms if isinstance(atom, int)]


@dataclass(eq=False)
class Flat:
    """A program as steps in order. `inputs` and `outputs` are its own; `sizes` has the bytes of
    each value on a device, and `constants` the values of its closed-over arrays."""

    inputs: list[int] = field(default_factory=list)
    outputs: list[Atom] = field(default_factory=list)
    steps: list[FlatStep] = field(default_factory=list)
    sizes: list[float] = field(default_factory=list)
    constants: dict[int, object] = field(default_factory=dict)

    def new(self, size: int | float) -> int:
        self.sizes.append(float(size))
        return len(self.sizes) - 1

    def bytes_of(self, numbers: Iterable[int]) -> float:
        """The bytes of values on a device."""
        return sum(map(self.sizes.__getitem__, numbers), 0.0)


@dataclass(frozen=True)
class FlatLoop:
    """A scan, with the program of an iteration."""

    scan: Scan
    body: Flat


def flatten(scope: Scope, size_of: SizeOf, *, divides_loops: bool = True) -> Flat:
    """The steps of a program. `size_of` gives the bytes of a value on each device.

    With `divides_loops`, a differentiated scan has the steps of an iteration.
    """
    flat = Flat()
    names: dict[Var, Atom] = {}
    for var in scope.jaxpr.invars:
        number = flat.new(size_of(scope.values[var]))
        names[var] = number
        flat.inputs.append(number)
    reader = _Reader(flat, size_of, divides_loops)
    flat.outputs = reader.read(scope, names)
    # What a product or another large operation reads is in memory. XLA computes again by itself
    # what it fuses into others, unless it is read from memory.
    read: set[int] = set()
    for step in reversed(flat.steps):
        name = primitive_name(step.equation)
        is_read = not read.isdisjoint(step.outputs)
        is_large = not step.is_fused and name not in REDUCTIONS | _COSTLY
        if is_large or (name in _VIEWS and is_read):
            read.update(step.reads)
        step.is_free = step.is_fused and (name in _VIEWS or not is_read)
    return flat


@dataclass(eq=False)
class _Reader:
    flat: Flat
    size_of: SizeOf
    divides_loops: bool

    def read(self, scope: Scope, names: dict[Var, Atom]) -> list[Atom]:
        """Appends the steps of a program, whose inputs have `names`; returns its outputs."""
        for var, constant in zip(scope.jaxpr.constvars, scope.consts, strict=False):
            number = self.flat.new(self.size_of(scope.values[var]))
            self.flat.constants[number] = constant
            names[var] = number
        for index, equation in enumerate(scope.jaxpr.eqns):
            inputs = _numbered(equation.invars, names)
            flow = control_flow(equation)
            inner = scope.inner.get(index, [])
            if isinstance(flow, Call) and flow.kind is CallKind.PLAIN and inner:
                (called,) = inner
                of_call = dict(zip(called.jaxpr.invars, inputs, strict=True))
                results = self.read(called, of_call)
                names.update(zip(equation.outvars, results, strict=True))
                continue
            outputs: list[int] = []
            for var in equation.outvars:
                outputs.append(self.flat.new(self.size_of(scope.values[var])))
            names.update(zip(equation.outvars, outputs, strict=True))
            self.flat.steps.append(self._step(scope, index, flow, inputs, outputs))
        return _numbered(scope.jaxpr.outvars, names)

    def _step(
        self,
        scope: Scope,
        index: int,
        flow: ControlFlow | None,
        inputs: list[Atom],
        outputs: list[int],
    ) -> FlatStep:
        equation = scope.jaxpr.eqns[index]
        step = FlatStep(equation, inputs, outputs, is_bare=bool(equation.effects))
        step.seconds, step.flops = cost_of_equation(scope, index, self.size_of)
        name, inner = primitive_name(equation), scope.inner.get(index, [])
        is_cheap = not inner and name not in LARGE_OPERATIONS | REDUCTIONS | _COSTLY
        step.is_fused = is_cheap and scope.rules.get(index) is not None
        if not have_grad(map(scope.values.__getitem__, equation.outvars)):
            return step
        step.needs = frozenset(_needs(scope, index, flow, step))
        if not self.divides_loops:
            step.residuals = frozenset(self._residuals(scope, index, step))
        is_jvp = isinstance(flow, Call) and flow.kind in (CallKind.CUSTOM_JVP, CallKind.REMAT)
        step.hides = bool(inner) and not is_jvp
        if isinstance(flow, Scan) and inner and self.divides_loops and not step.is_bare:
            step.loop = FlatLoop(flow, flatten(inner[0], self.size_of, divides_loops=False))
        return step

    def _residuals(self, scope: Scope, index: int, step: FlatStep) -> list[int]:
        """What JAX keeps for the derivative of a step; some of it has no variable."""
        residuals = residuals_in(scope, index)
        if residuals is None:
            return list(step.needs)
        equation = step.equation
        numbers: dict[Var, Atom] = {}
        atoms = (*equation.invars, *equation.outvars)
        for atom, number in zip(atoms, (*step.inputs, *step.outputs), strict=True):
            if isinstance(atom, Var):
                numbers[atom] = number
        kept = _values_in(map(numbers.__getitem__, variables(residuals.atoms)))
        for size in residuals.sizes(scope, self.size_of):
            kept.append(self.flat.new(size))
        return kept


def _numbered(atoms: Sequence[Var | Literal], names: dict[Var, Atom]) -> list[Atom]:
    """Variables as the numbers of their values, and literals as they are."""
    numbered: list[Atom] = []
    for atom in atoms:
        if isinstance(atom, Var):
            atom = names[atom]
        numbered.append(atom)
    return numbered


def _needs(scope: Scope, index: int, flow: ControlFlow | None, step: FlatStep) -> list[int]:
    """The values that the derivative of a step needs."""
    equation, rule = scope.jaxpr.eqns[index], scope.rules.get(index)
    varied = list(map(scope.varies, equation.invars))
    if flow is None and rule is not None and is_linear(rule, varied):
        return _values_in(compress(step.inputs, fixed_operands(rule, varied)))
    name = primitive_name(equation)
    if name in FROM_RESULT:
        return step.outputs
    if flow is None and (rule is None or name in _FROM_BOTH):
        return [*step.reads, *step.outputs]
    return step.reads


def cost_of_equation(scope: Scope, index: int, size_of: SizeOf) -> tuple[float, float]:
    """The seconds that an equation takes on a device, and the operations of its products."""
    equation, inner = scope.jaxpr.eqns[index], scope.inner.get(index, [])
    if inner:
        seconds = flops = 0.0
        for body in inner:
            for place in range(len(body.jaxpr.eqns)):
                more, operations = cost_of_equation(body, place, size_of)
                seconds += more
                flops += operations
        times = ASSUMED_TRIPS
        match control_flow(equation):
            case Scan() as scan:
                times = scan.length
            case Call():
                times = 1
        return times * seconds, times * flops
    name = primitive_name(equation)
    if name in _VIEWS:
        return 0.0, 0.0
    operands = list(filter(None, map(scope.value_of, equation.invars)))
    results = list(map(scope.values.__getitem__, equation.outvars))
    written = sum(map(size_of, results), 0.0)
    traffic = written + sum(map(size_of, operands), 0.0)
    count = multiply_adds(equation)
    if count is None:
        is_fused = name not in LARGE_OPERATIONS and scope.rules.get(index) is not None
        if is_fused:
            traffic *= _FUSED_TRAFFIC
        return traffic / _DEVICE.memory_bandwidth, 0.0
    # The numbers of devices that the operands and the result are split over.
    devices = partial(_devices, size_of=size_of)
    of_operands = max(map(devices, operands), default=1.0)
    of_result = devices(results[0])
    flops = 2.0 * count / max(of_operands, of_result)
    seconds = flops / _DEVICE.flops
    if of_operands > of_result:
        # Each device has sums over its part, which are added.
        seconds += all_reduce(2, written) / _DEVICE.model_bandwidth
    return seconds, flops


def _devices(value: Value, size_of: SizeOf) -> float:
    """The number of devices that a value is split over."""
    if not prod(value.shape):
        return 1.0
    return max(1.0, value.bytes / max(1.0, size_of(value)))
