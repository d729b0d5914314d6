"""Whether a device can run a part of a program with its own rows alone, and what it then has.

The rows of a batch are divided over devices in blocks. `LocalStates` follows them through a jaxpr
by the table of operations. For each array it says what a device has: rows along one dimension, the
whole array, or a `DevicePart`. It refuses a jaxpr in which rows depend on those of other devices.
"""

import functools as ft
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import jax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jax.sharding import AxisType, use_abstract_mesh

from ...core._control_flow import (
    AnyJaxpr,
    Call,
    CallKind,
    Cond,
    ControlFlow,
    LinearSolve,
    Scan,
    While,
    control_flow,
    inner_jaxprs,
    open_jaxpr,
    primitive_name,
)
from ...core._jaxpr import is_inexact, struct_of
from ..operations import Dimension, Factor, Rule, rule_of
from ..operations._batched_rules import OF_ANY_ROW
from ..operations._elementwise_rules import IDENTITIES, PAIRWISE, ROUNDING
from ..operations._rule import at_places
from ..operations._scan_over_rows import sums_over_iterations


class NotLocal(Exception):
    """Raised if rows depend on the rows of other devices; `args[0]` says where."""


class DevicePart(Enum):
    """What a device has of an array without rows, where it is not the same on all devices."""

    SUM = "a part of a sum over all devices"
    OWN = "a value that follows from the rows of the device"
    ANY = "whether something holds for any row, of those of the device"
    ALL = "whether something holds for each row, of those of the device"


SUM, OWN, ANY, ALL = DevicePart.SUM, DevicePart.OWN, DevicePart.ANY, DevicePart.ALL
CONDITIONS = frozenset([ANY, ALL])
# The dimension whose rows are divided over the devices. None: all devices have the same array.
State = int | DevicePart | None
States = tuple[State, ...]

# The parameter with the size of the axis that a primitive of Equinox is vmapped over.
VMAPPED_SIZE = "__axis_size"
# The parameters of Equinox's primitives whose operands are the arrays of a PyTree.
_FILTERED = frozenset(["flatten", "static", "treedef"])
# These have no meaning for one row: they depend on the devices that arrays are on.
_NOT_OF_ROW = frozenset(
    """
    axis_index inspect_sharding partition_id relayout rng_uniform shard_map sharding_constraint
    """.split()  # noqa: SIM905
)
# Nor can these run for the rows of a device together: the host sees them.
_NOT_INSIDE = _NOT_OF_ROW | {"debug_callback", "debug_print", "io_callback"}
# A function of what is the same for all rows, such as the number of an error.
CALLBACK = "pure_callback"
# What a reduction of conditions over rows gives, and what answers for the rows of one device are
# enough for, such as to raise an error.
_REDUCED_TO = {"reduce_or": ANY, "reduce_and": ALL}
_ANSWERED_BY = {"unvmap_any": ANY, "unvmap_all": ALL}
_NEGATED = {ANY: ALL, ALL: ANY}
# These act on a condition as a reduction to it does.
_OF_CONDITIONS = {ANY: frozenset(["or", "reduce_or"]), ALL: frozenset(["and", "reduce_and"])}
_WITH_SAME = frozenset(["and", "or"])  # with what all devices have, any condition stays one
_ARRANGED = frozenset(
    ["broadcast_in_dim", "copy", "expand_dims", "reshape", "squeeze", "transpose"]
)
# The primitives of Equinox that can be lowered inside of `jax.shard_map`, and differentiated there.
_DIFFERENTIABLE = frozenset(["maybe_set"])


@dataclass(frozen=True)
class LocalStep:
    """An equation on one device: what it needs of its operands, and what it has of its results."""

    operands: States
    results: States


class LocalStates:
    """Follows the rows of a batch that is divided over `count` devices.

    With `expand`, primitives of Equinox are replaced by what they run, without their derivatives.
    With `of_row`, the jaxpr is one that runs for each row alone, as that of `jax.lax.map` over the
    rows. It may do anything with the row, whose state is `OWN`.
    """

    def __init__(self, count: int, *, expand: bool = False, of_row: bool = False):
        self.count, self.expand, self.of_row = count, expand, of_row
        # By the `id` of a jaxpr or an equation, which are kept so that no other has the same.
        self._known: dict[tuple[int, States], tuple[Jaxpr, States]] = {}

    def of_jaxpr(self, jaxpr: AnyJaxpr, inputs: Sequence[State]) -> States:
        """The states of the outputs of a jaxpr. Raises `NotLocal`."""
        opened = open_jaxpr(jaxpr)
        key = (id(opened), tuple(inputs))
        if key not in self._known:
            env: dict[Var, State] = dict.fromkeys(opened.constvars)
            env.update(zip(opened.invars, inputs, strict=True))
            for equation in opened.eqns:
                step = self.step(equation, _read(env, equation.invars))
                env.update(zip(equation.outvars, step.results, strict=True))
            self._known[key] = opened, tuple(_read(env, opened.outvars))
        return self._known[key][1]

    def step(self, equation: JaxprEqn, states: Sequence[State]) -> LocalStep:
        """The states of an equation. Raises `NotLocal`."""
        flow = self.flow(equation)
        match flow:
            case While():
                return self._while(equation, flow, states)
            case Scan():
                return self._scan(flow, states)
            case Cond():
                return self._cond(equation, flow, states)
            case Call():
                return LocalStep(tuple(states), self.of_jaxpr(flow.jaxpr, states))
            case LinearSolve():
                return self._linear_solve(equation, flow, states)
        name = primitive_name(equation)
        not_inside = _NOT_INSIDE
        if self.of_row:
            not_inside = _NOT_OF_ROW
        if name in not_inside or _moves(equation):
            raise NotLocal(f"`{name}` is applied")
        if any(str(effect).startswith("Ordered") for effect in equation.effects):
            raise NotLocal(f"`{name}` is called in the order of the rows")
        if has_own_rules(equation) and expansion(equation) is None:
            raise NotLocal(f"`{name}` has derivative rules of its own")
        if self.of_row:
            # Whatever it does, only what it does with the row differs from device to device.
            result: State = None
            if OWN in states:
                result = OWN
            return LocalStep(tuple(states), (result,) * len(equation.outvars))
        if OWN not in states:
            return self._operation(equation, states)
        # What differs from device to device is treated as if all devices had the same, and then
        # everything that follows from it differs too.
        step = self._operation(equation, _replace_all(states, OWN, None))
        if SUM in step.results:
            raise NotLocal(f"`{name}` sums values that differ between devices")
        if not CONDITIONS.isdisjoint(step.results):
            raise NotLocal(f"`{name}` combines conditions that differ from device to device")
        operands = list(step.operands)
        for place, state in enumerate(states):
            if state is OWN and operands[place] is None:
                operands[place] = OWN
        results = _replace_all(step.results, None, OWN)
        return LocalStep(tuple(operands), tuple(results))

    def flow(self, equation: JaxprEqn) -> ControlFlow | None:
        """What an equation runs."""
        expanded = None
        if self.expand:
            expanded = expansion(equation)
        if expanded is None:
            return control_flow(equation)
        return Call(expanded, CallKind.PLAIN)

    def loop(self, loop: While, states: Sequence[State]) -> tuple[LocalStep, State]:
        """The states of a `while` after any number of iterations, and that of its condition."""
        cond_consts, body_consts, carry = loop.split(tuple(states))
        # States only grow, from what all devices have to rows, so that this ends.
        while True:
            after = self.of_jaxpr(loop.body, (*body_consts, *carry))
            (condition,) = self.of_jaxpr(loop.cond, (*cond_consts, *carry))
            joined = tuple(map(join_states, carry, after))
            if isinstance(condition, int):
                # Under `vmap`, a row that has stopped keeps its value.
                joined = tuple(join_states(state, condition) for state in joined)
            if joined == carry:
                break
            carry = joined
        if condition is SUM:
            raise NotLocal("the condition of `while` is a sum over rows")
        if condition in CONDITIONS:
            raise NotLocal("the condition of `while` is one of all rows")
        return LocalStep((*cond_consts, *body_consts, *carry), carry), condition

    def _while(self, equation: JaxprEqn, flow: While, states: Sequence[State]) -> LocalStep:
        step, condition = self.loop(flow, states)
        if condition is not OWN:
            return step
        # The number of iterations differs from device to device.
        return LocalStep(step.operands, _differing(step.results, _of_operands(equation)))

    def scan(self, flow: Scan, states: Sequence[State]) -> tuple[States, States]:
        """The states of the operands of a scan, and of the outputs of its body."""
        consts, carry, xs = flow.split(tuple(states))
        row_states = shift_all(xs, -1)
        while True:
            outputs = self.of_jaxpr(flow.body, (*consts, *carry, *row_states))
            joined = tuple(map(join_states, carry, outputs[: len(carry)]))
            if joined == carry:
                return (*consts, *carry, *xs), (*carry, *outputs[len(carry) :])
            carry = joined

    def _scan(self, flow: Scan, states: Sequence[State]) -> LocalStep:
        if is_over_rows(flow, states):
            # Its iterations are independent, each for one row.
            consts, carry, xs = flow.split(tuple(states))
            of_carry = carried_over_rows(flow)
            if of_carry is None:
                raise NotLocal("`scan` goes from row to row")
            if set(consts) | set(carry) > {None} or not set(xs) <= {0, None}:
                raise NotLocal("`scan` combines rows with other rows")
            # Its body may do anything with a row, but for what has no meaning for one.
            inside = LocalStates(self.count, expand=self.expand, of_row=True)
            inside.of_jaxpr(flow.body, of_row_states(flow))
            ys: States = (0,) * (len(open_jaxpr(flow.body).outvars) - len(carry))
            return LocalStep((*consts, *of_carry, *[0] * len(xs)), (*of_carry, *ys))
        operands, outputs = self.scan(flow, states)
        stacked = shift_all(outputs[flow.carry :], 1)
        return LocalStep(operands, (*outputs[: flow.carry], *stacked))

    def _cond(self, equation: JaxprEqn, flow: Cond, states: Sequence[State]) -> LocalStep:
        index, *operands = states
        if index is SUM or index in CONDITIONS or isinstance(index, int):
            raise NotLocal("`cond` chooses a branch by rows")
        results: list[State] = [None] * len(equation.outvars)
        for branch in flow.branches:
            results = list(map(join_states, results, self.of_jaxpr(branch, operands)))
        if index is OWN:
            if SUM in results:
                raise NotLocal("a sum over rows has different terms on each device")
            return LocalStep(tuple(states), _differing(results, _of_operands(equation)))
        return LocalStep(tuple(states), tuple(results))

    def _linear_solve(
        self, equation: JaxprEqn, flow: LinearSolve, states: Sequence[State]
    ) -> LocalStep:
        """The systems of different rows are independent."""
        if len(flow.places) - len(flow.functions["solve"][1]) != len(equation.outvars):
            raise NotLocal("`custom_linear_solve` returns more than solutions")
        results = self.of_jaxpr(flow.solve, at_places(states, flow.places))
        operands = list(states)
        # With rows in the matrices alone, each row has a right side of its own.
        operands[len(states) - len(results) :] = results
        if results != self.of_jaxpr(flow.solve, at_places(operands, flow.places)):
            raise NotLocal("`custom_linear_solve` combines rows with other rows")
        return LocalStep(tuple(operands), results)

    def _operation(self, equation: JaxprEqn, states: Sequence[State]) -> LocalStep:
        name, count = primitive_name(equation), len(equation.outvars)
        rule = rule_of(equation)
        is_known = name == CALLBACK or is_identity(equation) or has_own_rules(equation)
        if rule is None and not is_known:
            raise NotLocal(f"`{name}` is not known to keep rows apart")
        # Without rows, every device computes the same.
        if set(states) <= {None}:
            return LocalStep(tuple(states), (None,) * count)
        if name in PAIRWISE or is_identity(equation):
            return LocalStep(tuple(states), tuple(states))
        if not CONDITIONS.isdisjoint(states):
            return LocalStep(tuple(states), (_of_condition(name, states),) * count)
        if name in OF_ANY_ROW and SUM not in states:
            return LocalStep(tuple(states), (OWN,) * count)
        if rule is None:
            raise NotLocal(f"`{name}` is applied to rows")
        if SUM in states:
            return _of_sum(equation, rule, states)
        # The factor that the rows of all operands are the blocks of.
        factors: set[Factor] = set()
        for dimensions, state in zip(rule.operands, states, strict=True):
            if isinstance(state, int):
                factors.add(self._slowest(name, rule, dimensions[state]))
        if len(factors) > 1:
            raise NotLocal(f"`{name}` combines rows with other rows")
        factor = factors.pop()
        operands = [self._place(name, rule, factor, dimensions) for dimensions in rule.operands]
        if factor in rule.reduced and name in _REDUCED_TO and is_condition(equation):
            return LocalStep(tuple(operands), (_REDUCED_TO[name],))
        if factor in rule.reduced:
            return _summed(name, rule, operands, count)
        if not rule.is_carried(factor):
            raise NotLocal(f"`{name}` is applied along rows")
        results = [self._place(name, rule, factor, dimensions) for dimensions in rule.results]
        if None in results:
            raise NotLocal(f"`{name}` does not keep rows apart")
        return LocalStep(tuple(operands), tuple(results))

    def _slowest(self, name: str, rule: Rule, dimension: Dimension) -> Factor:
        """The factor whose blocks the devices have, if they divide a dimension."""
        factor = next(factor for factor in dimension if rule.sizes[factor] > 1)
        if rule.sizes[factor] % self.count:
            raise NotLocal(f"`{name}` does not keep the elements of a row together")
        return factor

    def _place(
        self, name: str, rule: Rule, factor: Factor, dimensions: Sequence[Dimension]
    ) -> State:
        """The dimension that is divided like the rows, if an array has one."""
        places = [d for d, dimension in enumerate(dimensions) if factor in dimension]
        if len(places) > 1:
            raise NotLocal(f"`{name}` combines rows with other rows")
        if not places:
            return None
        if self._slowest(name, rule, dimensions[places[0]]) != factor:
            raise NotLocal(f"`{name}` does not keep the elements of a row together")
        return places[0]


def is_over_rows(flow: Scan, states: Sequence[State]) -> bool:
    """Whether a scan goes over rows that are divided over the devices."""
    _, _, xs = flow.split(tuple(states))
    return 0 in xs


def of_row_states(flow: Scan) -> list[State]:
    """The states of the inputs of the body of a scan over rows."""
    states: list[State] = [None] * flow.consts
    # Of a sum over rows, an iteration has what was added so far.
    states += _replace_all(carried_over_rows(flow) or (), SUM, OWN)
    return states + [OWN] * (len(open_jaxpr(flow.body).invars) - len(states))


def carried_over_rows(flow: Scan) -> States | None:
    """What a scan over rows carries: sums over all rows, and what all devices have.

    None if an iteration depends on another one.
    """
    sums = sums_over_iterations(flow)
    if sums is None:
        return None
    states: list[State] = [None] * len(sums)
    for place, is_sum in enumerate(sums):
        if is_sum:
            states[place] = SUM
    return tuple(states)


def is_vmapped(equation: JaxprEqn) -> bool:
    """Whether this is a primitive of Equinox under `vmap`."""
    return primitive_name(equation) == "vprim" and VMAPPED_SIZE in equation.params


def has_own_rules(equation: JaxprEqn) -> bool:
    """Whether this is a primitive of Equinox with derivative rules that run something else.

    It cannot be lowered inside of `jax.shard_map`, which changes types of arrays: its parameters
    may have the types that arrays have outside.
    """
    if is_vmapped(equation):
        return equation.params["prim"].name not in _DIFFERENTIABLE
    return _FILTERED.issubset(equation.params)


# Programs are followed several times, and what an equation runs is traced once.
@ft.lru_cache(maxsize=256)
def expansion(equation: JaxprEqn) -> AnyJaxpr | None:
    """What a primitive of Equinox runs, which it only says when it is lowered.

    None for other primitives.
    """
    is_filtered = _FILTERED.issubset(equation.params)
    # Without `vmap`, as for times that all rows share, it has a primitive of its own.
    is_alone = equation.primitive.name in _DIFFERENTIABLE
    if not is_vmapped(equation) and not is_filtered and not is_alone:
        return None
    run = ft.partial(equation.primitive.impl, **equation.params)
    try:
        with use_abstract_mesh(equation.ctx.cur_abstract_mesh):
            return jax.make_jaxpr(run)(*map(struct_of, equation.invars))
    except Exception:  # it is implemented by XLA, or on the host
        return None


def equations_inside(equation: JaxprEqn) -> Iterator[JaxprEqn]:
    """All equations that an equation runs."""
    jaxprs: list[AnyJaxpr] = [*inner_jaxprs(equation)]
    expanded = expansion(equation)
    if expanded is not None:
        jaxprs.append(expanded)
    for jaxpr in jaxprs:
        for inner in open_jaxpr(jaxpr).eqns:
            yield inner
            yield from equations_inside(inner)


def _moves(equation: JaxprEqn) -> bool:
    """Whether an equation changes where an array is."""
    match equation.primitive.name:
        case "device_put":
            return any(place is not None for place in equation.params["devices"])
        case "reshard":
            return not is_identity(equation)
    return False


def is_identity(equation: JaxprEqn) -> bool:
    """Whether this is a `reshard` over axes that XLA shards, as JAX adds them to literals."""
    if equation.primitive.name != "reshard":
        return False
    types = equation.params["dst_sharding"].mesh.axis_types
    return all(axis_type is AxisType.Auto for axis_type in types)


def shift_all(states: Sequence[State], by: int) -> list[State]:
    """The states of arrays with more or fewer dimensions before the one of the rows."""
    shifted = list(states)
    for place, state in enumerate(states):
        if isinstance(state, int):
            shifted[place] = state + by
    return shifted


def have_rows(states: Sequence[State]) -> bool:
    """Whether the rows of an array are divided over the devices."""
    return any(isinstance(state, int) for state in states)


def _replace_all(states: Sequence[State], old: State, new: State) -> list[State]:
    replaced = list(states)
    for place, state in enumerate(states):
        if state == old:
            replaced[place] = new
    return replaced


def _read(env: Mapping[Var, State], atoms: Sequence[Var | Literal]) -> list[State]:
    """The states of variables and literals; all devices have the same literals."""
    return [None if isinstance(atom, Literal) else env[atom] for atom in atoms]


def _differing(states: Sequence[State], operands: Sequence[int | None]) -> States:
    """The states of results that devices compute in their own way, but for those that are operands.

    They come from a branch that each device has chosen, or from a loop that each has ended.
    """
    results = []
    for state, operand in zip(states, operands, strict=True):
        if operand is None and (state is SUM or state in CONDITIONS):
            raise NotLocal("a sum over rows has different terms on each device")
        if operand is None and state is None:
            state = OWN
        results.append(state)
    return tuple(results)


def join_states(first: State, second: State) -> State:
    """The state of an array that has one state or the other.

    What all devices have becomes rows, or a part of a sum, of which other devices have zero. Of
    what a device has in its own way, its rows are those that belong to it.
    """
    if first == second or second is None:
        return first
    if first is None or (first is OWN and isinstance(second, int)):
        return second
    if second is OWN and isinstance(first, int):
        return first
    raise NotLocal("rows change their place")


def check_becomes(state: State, target: State) -> None:
    """Raises `NotLocal` if a device cannot bring an array from one state to another by itself."""
    is_same = state == target
    is_part = isinstance(target, int) and not isinstance(state, int) and state is not SUM
    if not is_same and not is_part and not (isinstance(target, DevicePart) and state is None):
        raise NotLocal("a derivative rule combines rows with other rows")


def _of_sum(equation: JaxprEqn, rule: Rule, states: Sequence[State]) -> LocalStep:
    """The sum of what devices add is only that of all rows in a linear function."""
    name = primitive_name(equation)
    sums = frozenset(place for place, state in enumerate(states) if state is SUM)
    group = next((group for group in rule.linear if sums <= group), None)
    rounds = False
    if name in ROUNDING:
        # To an integer, or to fewer digits.
        before, after = struct_of(equation.invars[0]), struct_of(equation.outvars[0])
        rounds = not is_inexact(after) or after.dtype.itemsize < before.dtype.itemsize
    if group is None or rounds or have_rows(states):
        raise NotLocal(f"`{name}` is applied to a sum over rows, and is not linear")
    # Of several terms, each is added by one device.
    operands: list[State] = [None] * len(states)
    for place in group:
        operands[place] = SUM
    return LocalStep(tuple(operands), (SUM,) * len(equation.outvars))


def is_condition(equation: JaxprEqn) -> bool:
    """Whether an equation combines true and false, and not the bits of numbers."""
    return struct_of(equation.outvars[0]).dtype == bool


def _of_condition(name: str, states: Sequence[State]) -> State:
    """What a device has of a result of a condition of all rows."""
    (condition, *others) = CONDITIONS.intersection(states)
    if others or not set(states) <= {condition, None}:
        raise NotLocal(f"`{name}` combines a condition of all rows with rows")
    if _ANSWERED_BY.get(name) is condition:
        return OWN
    if name == "not":
        return _NEGATED[condition]
    with_same = name in _WITH_SAME and None in states
    if with_same or name in _ARRANGED | _OF_CONDITIONS[condition]:
        return condition
    raise NotLocal(f"`{name}` is applied to a condition of all rows")


def _summed(name: str, rule: Rule, operands: list[State], count: int) -> LocalStep:
    if not rule.sums:
        raise NotLocal(f"`{name}` reduces over rows")
    carriers = {place for place, state in enumerate(operands) if state is not None}
    for group in rule.linear:
        # What is added to the sum, such as an array that is scattered to, is added once.
        if group & carriers:
            for place in group - carriers:
                operands[place] = SUM
    return LocalStep(tuple(operands), (SUM,) * count)


def _passed_through(jaxpr: AnyJaxpr) -> tuple[int | None, ...]:
    """For each output of a jaxpr the number of the input that it is; None if it is computed."""
    opened = open_jaxpr(jaxpr)
    sources = {var: place for place, var in enumerate(opened.invars)}

    def source_of(atom: Var | Literal) -> int | None:
        if isinstance(atom, Literal):
            return None
        return sources.get(atom)

    for equation in opened.eqns:
        for var, place in zip(equation.outvars, _of_operands(equation), strict=True):
            if place is not None:
                source = source_of(equation.invars[place])
                if source is not None:
                    sources[var] = source
    return tuple(map(source_of, opened.outvars))


def _of_operands(equation: JaxprEqn) -> Sequence[int | None]:
    """For each result of an equation the operand that it is."""
    if equation.primitive.name in IDENTITIES:
        return range(len(equation.outvars))
    match control_flow(equation):
        case Call() as call if call.kind is not CallKind.OWN_RULES:
            return _passed_through(call.jaxpr)
        case Cond() as cond:
            operands: list[int | None] = [None] * len(equation.outvars)
            of_results = zip(*map(_passed_through, cond.branches), strict=True)
            for place, (first, *others) in enumerate(of_results):
                if first is not None and set(others) <= {first}:
                    operands[place] = first + 1  # the first operand is the number of the branch
            return operands
        case Scan() as scan:
            outputs = _passed_through(scan.body)[: scan.carry]
            unchanged = _unchanged(outputs, scan.consts, 0)
            return [*unchanged, *[None] * (len(equation.outvars) - scan.carry)]
        case While() as loop:
            return _unchanged(_passed_through(loop.body), loop.body_consts, loop.cond_consts)
    return [None] * len(equation.outvars)


def _unchanged(outputs: Sequence[int | None], consts: int, before: int) -> list[int | None]:
    """The carried values that a body with `consts` constants returns as they are, as operands of a
    loop that has `before` other operands first."""
    operands: list[int | None] = [None] * len(outputs)
    for place, output in enumerate(outputs, consts):
        if output == place:
            operands[place - consts] = before + place
    return operands
