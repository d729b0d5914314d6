"""A program as one list of steps, with the values that each needs for its derivative.

Calls that change nothing, as of a function under `jax.jit`, are replaced by what they call.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod

from jax.extend.core import JaxprEqn, Literal, Var

from ...core._control_flow import Call, CallKind, ControlFlow, Scan, control_flow, primitive_name
from ...core._multiply_adds import multiply_adds
from ..operations import Rule, fixed_operands, is_linear
from ..operations._rule_table import CONSTRAINED, REDUCTIONS
from ..program._graph import Value
from ..program._walk import ASSUMED_TRIPS, Scope
from ..solver._hardware import Hardware, all_reduce

Atom = int | Literal  # the number of a value, or a number of the program
SizeOf = Callable[[Value], int | float]

# Only the ratios of speeds decide what is recomputed, and they differ little between devices.
_DEVICE = Hardware()
# The part of their memory traffic that operations cost which XLA fuses into what is beside them.
_FUSED_TRAFFIC = 0.005
# The derivative is computed from the result alone.
_FROM_RESULT = frozenset(["cbrt", "exp", "exp2", "expm1", "logistic", "sqrt", "tanh"])
# The derivative is computed from the operands and the result.
_FROM_BOTH = frozenset(
    [
        "cumlogsumexp",
        "cummax",
        "cummin",
        "cumprod",
        "pow",
        "reduce_max",
        "reduce_min",
        "reduce_prod",
        "rsqrt",
    ]
)
_VIEWS = frozenset(
    """
    bitcast_convert_type copy copy_p expand_dims iota name reshape sharding_constraint squeeze
    stop_gradient transpose
    """.split()  # noqa: SIM905
)
# XLA does not compute these again in the backward pass by itself.
_COSTLY = frozenset(
    """
    cos erf erf_inv exp exp2 expm1 log log1p log2 logistic pow random_bits random_gamma sin sqrt tan
    tanh threefry2x32
    """.split()  # noqa: SIM905
)


@dataclass(eq=False)
class FlatStep:
    """An equation, with the values that it reads and writes.

    - `seconds`, `flops`: what it takes to compute it again on a device; `flops` are those of
        products and convolutions.
    - `needs`: the values that its derivative needs.
    - `is_fused`: whether XLA can fuse it into what reads its results.
    - `is_free`: whether XLA computes it again by itself: it is fused, and no product reads it from
        memory.
    - `hides`: whether its derivative needs values inside of it, which cannot be kept alone.
    - `is_bare`: whether it cannot be computed again, as a callback.
    - `body`: the program of an iteration, if it is a differentiated loop that is divided itself.
    """

    equation: JaxprEqn
    inputs: list[Atom]
    outputs: list[int]
    seconds: float = 0.0
    flops: float = 0.0
    needs: frozenset[int] = frozenset()
    is_fused: bool = False
    is_free: bool = False
    hides: bool = False
    is_bare: bool = False
    body: "Flat | None" = None
    scan: Scan | None = None

    @property
    def uses_result(self) -> bool:
        """Whether it is an operation whose derivative is computed from its result."""
        return primitive_name(self.equation) in _FROM_RESULT | _FROM_BOTH

    @property
    def reads(self) -> list[int]:
        return [atom for atom in self.inputs if isinstance(atom, int)]


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


def flatten(scope: Scope, size_of: SizeOf) -> Flat:
    """The steps of a program. `size_of` gives the bytes of a value on each device."""
    return _flatten(scope, size_of, divides_loops=True)


def _flatten(scope: Scope, size_of: SizeOf, *, divides_loops: bool) -> Flat:
    flat = Flat()
    names: dict[Var, Atom] = {}
    for var in scope.jaxpr.invars:
        names[var] = flat.new(size_of(scope.values[var]))
        flat.inputs.append(len(flat.sizes) - 1)
    reader = _Reader(flat, size_of, divides_loops)
    reader.read(scope, names)
    flat.outputs = [reader.atom(names, atom) for atom in scope.jaxpr.outvars]
    _find_free(flat)
    return flat


def _find_free(flat: Flat) -> None:
    """Marks the steps that XLA computes again by itself.

    What a product or another large operation reads is in memory.
    """
    read: set[int] = set()
    for step in reversed(flat.steps):
        name = primitive_name(step.equation)
        is_read = not read.isdisjoint(step.outputs)
        if (not step.is_fused and name not in REDUCTIONS | _COSTLY) or (name in _VIEWS and is_read):
            read.update(step.reads)
        step.is_free = step.is_fused and (name in _VIEWS or not is_read)


@dataclass(eq=False)
class _Reader:
    flat: Flat
    size_of: SizeOf
    divides_loops: bool

    def atom(self, names: dict[Var, Atom], atom: Var | Literal) -> Atom:
        if isinstance(atom, Literal):
            return atom
        return names[atom]

    def read(self, scope: Scope, names: dict[Var, Atom]) -> None:
        """Appends the steps of a program, whose inputs have `names`."""
        for var, constant in zip(scope.jaxpr.constvars, scope.consts, strict=False):
            number = self.flat.new(self.size_of(scope.values[var]))
            self.flat.constants[number] = constant
            names[var] = number
        for index, equation in enumerate(scope.jaxpr.eqns):
            inputs = [self.atom(names, atom) for atom in equation.invars]
            flow = control_flow(equation)
            inner = scope.inner.get(index, [])
            if isinstance(flow, Call) and flow.kind is CallKind.PLAIN and inner:
                (called,) = inner
                of_call = dict(zip(called.jaxpr.invars, inputs, strict=True))
                self.read(called, of_call)
                results = [self.atom(of_call, atom) for atom in called.jaxpr.outvars]
                names.update(zip(equation.outvars, results, strict=True))
                continue
            outputs: list[int] = []
            for var in equation.outvars:
                outputs.append(self.flat.new(self.size_of(scope.values[var])))
            names.update(zip(equation.outvars, outputs, strict=True))
            self.flat.steps.append(self._step(scope, index, flow, inputs, outputs))

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
        is_cheap = not inner and name not in CONSTRAINED | REDUCTIONS | _COSTLY
        step.is_fused = is_cheap and scope.rules.get(index) is not None
        if not any(scope.values[var].grad for var in equation.outvars):
            return step
        step.needs = frozenset(_needs(scope, index, flow, step))
        is_jvp = isinstance(flow, Call) and flow.kind in (CallKind.CUSTOM_JVP, CallKind.REMAT)
        step.hides = bool(inner) and not is_jvp
        if isinstance(flow, Scan) and inner and self.divides_loops and not step.is_bare:
            step.body = _flatten(inner[0], self.size_of, divides_loops=False)
            step.scan = flow
        return step


def _needs(scope: Scope, index: int, flow: ControlFlow | None, step: FlatStep) -> list[int]:
    """The values that the derivative of a step needs."""
    equation, rule = scope.jaxpr.eqns[index], scope.rules.get(index)
    values = [scope.value_of(atom) for atom in equation.invars]
    varied = [value is not None and value.grad for value in values]
    if flow is None and rule is not None and is_linear(rule, varied):
        return _fixed(rule, varied, step)
    name = primitive_name(equation)
    if name in _FROM_RESULT:
        return step.outputs
    if flow is None and (rule is None or name in _FROM_BOTH):
        return [*step.reads, *step.outputs]
    return step.reads


def _fixed(rule: Rule, varied: Sequence[bool], step: FlatStep) -> list[int]:
    needed: list[int] = []
    for atom, is_fixed in zip(step.inputs, fixed_operands(rule, varied), strict=True):
        if is_fixed and isinstance(atom, int):
            needed.append(atom)
    return needed


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
        times = _times(control_flow(equation))
        return times * seconds, times * flops
    values = [scope.value_of(atom) for atom in equation.invars]
    operands = [value for value in values if value is not None]
    results = [scope.values[var] for var in equation.outvars]
    written = sum(map(size_of, results), 0.0)
    name = primitive_name(equation)
    if name in _VIEWS:
        return 0.0, 0.0
    traffic = written + sum(map(size_of, operands), 0.0)
    count = multiply_adds(equation)
    if count is None:
        is_fused = name not in CONSTRAINED and scope.rules.get(index) is not None
        if is_fused:
            traffic *= _FUSED_TRAFFIC
        return traffic / _DEVICE.memory_bandwidth, 0.0
    shares = [_devices(value, size_of) for value in operands]
    flops = 2.0 * count / max([*shares, _devices(results[0], size_of)])
    seconds = flops / _DEVICE.flops
    if max(shares, default=1) > _devices(results[0], size_of):
        # Each device has sums over its part, which are added.
        seconds += all_reduce(2, written) / _DEVICE.model_bandwidth
    return seconds, flops


def _times(flow: ControlFlow | None) -> int:
    if isinstance(flow, Scan):
        return flow.length
    if isinstance(flow, Call):
        return 1
    return ASSUMED_TRIPS


def _devices(value: Value, size_of: SizeOf) -> float:
    """The number of devices that a value is split over."""
    if not prod(value.shape):
        return 1.0
    return max(1.0, value.bytes / max(1.0, size_of(value)))
