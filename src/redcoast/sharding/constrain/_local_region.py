"""Runs operations on each row of a batch by the device that has the row, and without communication.

XLA partitions a loop whose number of iterations depends on data so that all devices agree on the
condition in every iteration, and it gathers operands of operations that it cannot partition. Here
the equation is evaluated in `jax.shard_map` over the axes of the batch, with the rows that each
device has. The other axes are left to XLA: if they were manual too, `jax.shard_map` would scale the
cotangents of what is replicated over them, and add sums over them.
"""

import functools as ft
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import JaxprEqn, Var
from jax.sharding import AbstractMesh, Mesh, use_abstract_mesh
from jax.sharding import PartitionSpec as P

from ...core._control_flow import (
    AnyJaxpr,
    Call,
    CallKind,
    Cond,
    LinearSolve,
    Scan,
    While,
    consts_of,
    control_flow,
    is_callback,
    open_jaxpr,
    primitive_name,
)
from ...core._jaxpr import (
    as_traced,
    bind_again,
    bind_local,
    evaluate_jaxpr,
    is_inexact,
    struct_of,
)
from ...core._mapped_callbacks import independent_levels
from ...core._pallas import independent_dims, of_fewer
from ...core._tracing import traced_over
from .._mesh_axes import parts, used_axes
from ..operations import Atom
from ..operations._batched_rules import OF_ANY_ROW
from ..operations._rule import OPERAND_SIZES, RESULT_SIZES, at_places, shape_of
from ..program._local_states import (
    CALLBACK,
    CONDITIONS,
    OWN,
    SUM,
    VMAPPED_SIZE,
    LocalStates,
    LocalStep,
    NotLocal,
    State,
    carried_over_rows,
    check_becomes,
    equations_inside,
    has_own_rules,
    have_rows,
    is_identity,
    is_over_rows,
    is_vmapped,
    of_row_states,
    shift_all,
)
from ..program._trace import Arrays
from ._custom_rules import (
    PullBack,
    partial_jvp,
    partial_vjp,
    pull_back,
    replace_chosen,
    zero_tangent,
)
from ._local_operation import PALLAS, acts_on_parts
from ._own_rules import bind_replaced, with_all_axes

# JAX can only lower these if all axes of the mesh are manual.
_NEED_ALL_AXES = frozenset(["io_callback", "pallas_call"])
# What these do is seen outside of the program, as often as it is done.
_SEEN_OUTSIDE = frozenset(["debug_callback", "debug_print", "io_callback"])
_WITH_SIZES = frozenset(["broadcast_in_dim", "reshape", "slice", "dynamic_slice", "gather"])


class RuleError(NotLocal):
    """Raised if a derivative rule cannot be traced; `cause` is the error of the rule."""

    def __init__(self, cause: Exception):
        message = str(cause).partition("\n")[0].rstrip(".")
        super().__init__(f"a derivative rule raises `{type(cause).__name__}: {message}`")
        self.cause = cause


@dataclass(frozen=True)
class LocalRegion:
    """The devices that the rows of a batch are divided over: those along `axes` of the mesh.

    Operands may be sharded over the axes `sharded` too. `forward_only` is whether what runs has no
    reverse-mode derivative: a `while`, or calls of the host, in a loop or not. With `of_row`, this
    is inside of a scan over rows, whose body each device runs for one of its rows.
    """

    mesh: Mesh | AbstractMesh
    axes: tuple[str, ...]
    sharded: tuple[str, ...] = ()
    forward_only: bool = False
    of_row: bool = False

    @ft.cached_property
    def states(self) -> LocalStates:
        count = parts(self.axes, self.mesh.shape)
        return LocalStates(count, expand=self.forward_only, of_row=self.of_row)

    def is_worth_it(self, equation: JaxprEqn, states: Sequence[State]) -> bool:
        """Whether the devices might communicate about rows otherwise. Raises `NotLocal`."""
        flow = control_flow(equation)
        if isinstance(flow, Scan):
            return is_over_rows(flow, states) or asks_any_row(equation)
        if not isinstance(flow, While):
            return have_rows(states)
        _, condition = self.states.loop(flow, states)
        if condition is not None:
            return True
        # All devices run as many iterations. Activations that are sharded over other axes would not
        # be constrained, and each device would draw the random numbers of all rows from one key.
        for inner in equations_inside(equation):
            is_one_key = primitive_name(inner) == "random_bits" and not shape_of(inner.invars[0])
            if self.axes and is_one_key:
                return False
        return not self.sharded

    def run(
        self,
        equation: JaxprEqn,
        operands: Sequence[object],
        states: Sequence[State],
        used: Sequence[bool],
    ) -> Arrays:
        """The results of an equation, each with its rows divided like the operands' rows.

        `states` are the states of the operands. `used` selects the results that are used; others
        may have wrong values. Raises `NotLocal`.
        """
        results, synchronised = self.results(equation, states, used)
        # What follows evaluates the equation with the rows of one device.
        evaluate = _Evaluation(self, synchronised)

        def local(*inputs: jax.Array) -> tuple[jax.Array, ...]:
            parts = evaluate.equation(equation, list(zip(inputs, states, strict=True)))
            arrays: Arrays = []
            for (x, _), state in zip(parts, results, strict=True):
                if state is SUM:
                    x = jax.lax.psum(x, self.axes)
                arrays.append(x)
            return tuple(arrays)

        run = jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=tuple(map(self._spec, equation.invars, states)),
            out_specs=tuple(map(self._spec, equation.outvars, results)),
            axis_names=self._manual_axes(equation),
            check_vma=False,
        )
        return list(jax.jit(run)(*operands))

    def results(
        self, equation: JaxprEqn, states: Sequence[State], used: Sequence[bool]
    ) -> tuple[Sequence[State], bool]:
        """The states of the results of an equation, and whether all devices run as many iterations
        of it. Raises `NotLocal`."""
        results = self.states.step(equation, states).results
        flow = control_flow(equation)
        self._manual_axes(equation)
        synchronised = isinstance(flow, While) and OWN in itertools.compress(results, used)
        if isinstance(flow, While) and synchronised:
            results = self.states.loop(flow, states)[0].results
        if OWN in itertools.compress(results, used):
            raise NotLocal("a result differs from device to device")
        if not CONDITIONS.isdisjoint(itertools.compress(results, used)):
            raise NotLocal("a result is a condition of all rows")
        return results, synchronised

    def _manual_axes(self, equation: JaxprEqn) -> frozenset[str]:
        sizes = self.mesh.shape
        others = set(used_axes(tuple(sizes), sizes)).difference(self.axes)
        free: set[str] = set()
        if self.forward_only:
            # Without a reverse-mode derivative, further axes cost nothing, and XLA cannot use them.
            free = others - {*self.sharded}
        inside = set(map(primitive_name, equations_inside(equation)))
        if free and not inside.isdisjoint(_SEEN_OUTSIDE):
            raise NotLocal("devices that have the same rows would call a function on the host")
        needs_all = not inside.isdisjoint(_NEED_ALL_AXES)
        if free == others and (self.forward_only or needs_all):
            return frozenset(self.mesh.axis_names)
        if needs_all:
            raise NotLocal(
                "its weights are sharded, and a kernel or a call of the host in it are not"
            )
        return frozenset(self.axes) | free

    def _spec(self, atom: Atom, state: State) -> P:
        entries: list[tuple[str, ...] | None] = [None] * len(shape_of(atom))
        if isinstance(state, int):
            entries[state] = self.axes
        return P(*entries)

    def evaluate(self, jaxpr: AnyJaxpr, inputs: Sequence[Any]) -> Arrays:
        """Evaluates a jaxpr of what a device has, inside of the region."""
        opened = open_jaxpr(jaxpr)
        of_inputs, of_outputs = [OWN] * len(opened.invars), [OWN] * len(opened.outvars)
        return _Evaluation(self).as_function(jaxpr, of_inputs, of_outputs)(*inputs)

    def convert(self, x: Any, state: State, target: State) -> Any:
        """What a device needs of an array, from what it has of it."""
        check_becomes(state, target)
        if state == target or target is OWN or target in CONDITIONS:
            return x
        if isinstance(target, int):
            size = x.shape[target] // self.states.count
            first = jax.lax.axis_index(self.axes) * size
            return jax.lax.dynamic_slice_in_dim(x, first, size, target)
        # The first device adds what all have, so that it is added once.
        is_first = jax.lax.axis_index(self.axes) == 0
        return jnp.where(is_first, x, jnp.zeros((), jnp.result_type(x)))

    def shape(self, atom: Atom, state: State) -> tuple[int, ...]:
        """The shape of what a device has of an array."""
        shape = list(shape_of(atom))
        if isinstance(state, int):
            shape[state] //= self.states.count
        return tuple(shape)


LocalArray = tuple[Any, State]  # what a device has of an array, and what it is


@dataclass(frozen=True)
class _Rule:
    """A derivative rule for all rows, with what a device has of its inputs and outputs."""

    jaxpr: AnyJaxpr
    inputs: Sequence[State]
    outputs: Sequence[State]


@dataclass(frozen=True)
class _Evaluation:
    """Evaluates jaxprs inside of a region.

    With `synchronised`, the region is a loop of as many iterations on all devices.
    """

    region: LocalRegion
    synchronised: bool = False

    def jaxpr(self, jaxpr: AnyJaxpr, inputs: Sequence[LocalArray]) -> list[LocalArray]:
        opened = open_jaxpr(jaxpr)
        env: dict[Var, LocalArray] = {}
        for var, x in zip(opened.constvars, consts_of(jaxpr), strict=True):
            env[var] = (_bare(x), None)
        env.update(zip(opened.invars, inputs, strict=True))
        nested = _Evaluation(self.region)

        def handle(index: int, equation: JaxprEqn, operands: list[LocalArray]) -> list[LocalArray]:
            return nested.equation(equation, operands)

        results = evaluate_jaxpr(opened, env, handle, lambda literal: (literal.val, None))
        for place, atom in enumerate(opened.outvars):
            x, state = results[place]
            # A literal is a Python number, or one of NumPy.
            results[place] = (jnp.asarray(x, struct_of(atom).dtype), state)
        return results

    def as_function(
        self, jaxpr: AnyJaxpr, states: Sequence[State], results: Sequence[State]
    ) -> Callable[..., Arrays]:
        """A function of what a device has, with the states of its inputs and of its results."""

        def run(*inputs: object) -> Arrays:
            arrays = self.jaxpr(jaxpr, list(zip(inputs, states, strict=True)))
            return self._convert(arrays, results)

        return run

    def _convert(self, arrays: Sequence[LocalArray], targets: Sequence[State]) -> Arrays:
        pairs = zip(arrays, targets, strict=True)
        return [self.region.convert(x, state, target) for (x, state), target in pairs]

    def equation(self, equation: JaxprEqn, operands: Sequence[LocalArray]) -> list[LocalArray]:
        step = self.region.states.step(equation, [state for _, state in operands])
        inputs = self._convert(operands, step.operands)
        flow = self.region.states.flow(equation)
        match flow:
            case While():
                results = self._while(equation, flow, inputs, step)
            case Scan():
                results = self._scan(equation, flow, inputs, step)
            case Cond():
                branches = [
                    self.as_function(branch, step.operands[1:], step.results)
                    for branch in flow.branches
                ]
                results = list(jax.lax.switch(inputs[0], branches, *inputs[1:]))
            case Call():
                results = self._call(equation, flow, inputs, step)
            case LinearSolve():
                results = self._solve(flow, inputs, step)
            case _:
                results = self._operation(equation, inputs, step)
        shapes = map(self.region.shape, equation.outvars, step.results)
        if list(map(jnp.shape, results)) != list(shapes):
            raise NotLocal(f"`{primitive_name(equation)}` changes what its rows are")
        return list(zip(results, step.results, strict=True))

    def _operation(self, equation: JaxprEqn, inputs: Arrays, step: LocalStep) -> Arrays:
        states, results, count = step.operands, step.results, self.region.states.count
        if is_identity(equation):
            return inputs
        if is_callback(equation) and equation.outvars:
            shapes = list(map(self.region.shape, equation.outvars, results))
            return _call_host(equation, inputs, shapes)
        params: dict[str, object] = {}
        if equation.primitive.name in _WITH_SIZES:
            for key in RESULT_SIZES & equation.params.keys():
                params[key] = self.region.shape(equation.outvars[0], results[0])
            for key in OPERAND_SIZES & equation.params.keys():
                # Along the dimensions of the first operand: all rows become those of a device.
                whole, rows = shape_of(equation.invars[0]), states[0]
                sizes = list(equation.params[key])
                if isinstance(rows, int) and sizes[rows] == whole[rows]:
                    sizes[rows] //= count
                params[key] = tuple(sizes)
        if equation.primitive.name == PALLAS:
            # The numbers of devices that dimensions of its grid are divided over.
            counts: dict[int, int] = {}
            dims = independent_dims(equation) or ()
            for of_grid, state in zip(dims, (*states, *results), strict=False):
                if isinstance(state, int) and (dim := of_grid[state]) is not None:
                    counts[dim] = count
            if counts:
                params |= of_fewer(equation, counts)
        if is_vmapped(equation) and 0 in results:
            params[VMAPPED_SIZE] = equation.params[VMAPPED_SIZE] // count
        if has_own_rules(equation):
            # Its derivative rules are traced with what a device has.
            return bind_replaced(
                equation, inputs, params, replace(self.region, of_row=True).evaluate
            )
        return bind_local(equation, inputs, params)

    def _while(self, equation: JaxprEqn, flow: While, inputs: Arrays, step: LocalStep) -> Arrays:
        cond_consts, body_consts, init = flow.split(inputs)
        cond_states, body_states, carry = flow.split(step.operands)
        init = list(map(as_traced, init, equation.invars[-len(init) :]))

        def keep_going(state: Arrays) -> jax.Array:
            inputs = zip((*cond_consts, *state), (*cond_states, *carry), strict=True)
            return self.jaxpr(flow.cond, list(inputs))[0][0]

        def body(state: Arrays) -> Arrays:
            inputs = zip((*body_consts, *state), (*body_states, *carry), strict=True)
            results = self._convert(self.jaxpr(flow.body, list(inputs)), carry)
            return keep_ended(keep_going(state), results, state)

        more = lambda state: jnp.any(keep_going(state))
        # Each device ends when its own rows are done.
        if not self.synchronised:
            return jax.lax.while_loop(more, body, init)
        # Devices whose rows are done go on until those of all devices are, so that what counts
        # iterations is the same on all. They know how many there are only after their own.
        count = lambda state: (state[0] + 1, body(state[1]))
        own, state = jax.lax.while_loop(lambda state: more(state[1]), count, (jnp.int32(0), init))
        last = jax.lax.pmax(own, self.region.axes)
        return jax.lax.while_loop(lambda state: state[0] < last, count, (own, state))[1]

    def _scan(self, equation: JaxprEqn, flow: Scan, inputs: Arrays, step: LocalStep) -> Arrays:
        consts, init, xs = flow.split(inputs)
        init = list(map(as_traced, init, flow.split(equation.invars)[1]))
        if is_over_rows(flow, step.operands):
            # Over the rows of a device, of which each iteration needs one.
            of_row = _Evaluation(replace(self.region, of_row=True))
            outputs: Sequence[State] = [OWN] * len(open_jaxpr(flow.body).outvars)
            body = of_row.as_function(flow.body, of_row_states(flow), outputs)
            flow = replace(flow, length=flow.length // self.region.states.count)
        else:
            _, outputs = self.region.states.scan(flow, step.operands)
            const_states, _, x_states = flow.split(step.operands)
            row_states = shift_all(x_states, -1)
            body_states = (*const_states, *outputs[: flow.carry], *row_states)
            body = self.as_function(flow.body, body_states, outputs)
        return flow.run(lambda inputs: body(*inputs), consts, init, xs)

    def _call(self, equation: JaxprEqn, flow: Call, inputs: Arrays, step: LocalStep) -> Arrays:
        run = self.as_function(flow.jaxpr, step.operands, step.results)
        match flow.kind:
            case CallKind.REMAT:
                run = jax.checkpoint(run, prevent_cse=flow.prevent_cse, policy=flow.policy)
            case CallKind.CUSTOM_VJP | CallKind.OWN_RULES if self.region.forward_only:
                run = _without_derivative(run)
            case CallKind.CUSTOM_JVP | CallKind.OWN_RULES:
                run = self._with_jvp(equation, run, step)
            case CallKind.CUSTOM_VJP:
                run = self._with_vjp(equation, flow, run, step)
        return list(run(*inputs))

    def _with_jvp(
        self, equation: JaxprEqn, run: Callable[..., Arrays], step: LocalStep
    ) -> Callable[..., Arrays]:
        """A function with the forward-mode derivative of an equation, which is traced for all
        rows."""
        avals = list(map(struct_of, equation.invars))
        moved = list(map(is_inexact, map(struct_of, equation.outvars)))

        def trace_push(moving: Sequence[bool]) -> _Rule:
            def push(primals: Arrays, tangents: Arrays) -> tuple[Arrays, Arrays]:
                out, out_tangents = partial_jvp(equation, moving, primals, tangents)
                return out, list(itertools.compress(out_tangents, moved))

            jaxpr, _ = self._trace_rule(
                equation, push, avals, list(itertools.compress(avals, moving))
            )
            inputs = [*step.operands, *itertools.compress(step.operands, moving)]
            return _Rule(jaxpr, inputs, [*step.results, *itertools.compress(step.results, moved)])

        custom = jax.custom_jvp(run)
        try:
            # Integers have no tangents. If the rule combines rows, the region is not used.
            self._run_rule(trace_push(list(map(is_inexact, avals))))
        except RuleError as error:
            flow = control_flow(equation)
            if isinstance(flow, Call) and flow.kind is CallKind.OWN_RULES:
                raise NotLocal("it has a reverse-mode derivative alone") from error

        def rule(primals: Sequence[object], tangents: Sequence[object]) -> tuple[Arrays, Arrays]:
            # A rule may stop gradients of what is not differentiated, as one of Equinox's does.
            moving = [not isinstance(tangent, SymbolicZero) for tangent in tangents]
            try:
                run_rule = self._run_rule(trace_push(moving))
            except RuleError as error:
                # The function refuses to be differentiated, as it does without a mesh.
                raise error.cause from None
            arrays = run_rule(*primals, *itertools.compress(tangents, moving))
            out, pushed = arrays[: len(moved)], arrays[len(moved) :]
            return out, replace_chosen(list(map(zero_tangent, out)), moved, pushed)

        custom.defjvp(rule, symbolic_zeros=True)
        return custom

    def _with_vjp(
        self, equation: JaxprEqn, flow: Call, run: Callable[..., Arrays], step: LocalStep
    ) -> Callable[..., Arrays]:
        """A function with the reverse-mode derivative of a `custom_vjp`, which is traced for all
        rows."""
        results = list(map(struct_of, equation.outvars))

        def trace_forward(perturbed: Sequence[bool]) -> tuple[_Rule, PullBack]:
            original = lambda *xs: bind_again(equation, xs)
            forward = lambda *primals: partial_vjp(original, perturbed, primals)
            jaxpr, (_, pull) = self._trace_rule(equation, forward, *map(struct_of, equation.invars))
            outputs = self.region.states.of_jaxpr(jaxpr, step.operands)
            return _Rule(jaxpr, step.operands, [*step.results, *outputs[len(results) :]]), pull

        def trace_backward(
            forward: _Rule, pull: PullBack, used: Sequence[bool]
        ) -> tuple[_Rule, Arrays]:
            chosen = list(itertools.compress(results, used))
            pull_used = lambda pull, cotangents: pull_back(pull, results, used, cotangents)
            jaxpr, pulled = self._trace_rule(equation, pull_used, pull, chosen)
            of_results = map(self._of_cotangent, itertools.compress(step.results, used))
            inputs = [*forward.outputs[len(results) :], *of_results]
            # Operands that are not differentiated, and integers, have no cotangents.
            operands = itertools.compress(step.operands, [x is not None for x in pulled])
            return _Rule(jaxpr, inputs, list(map(self._of_cotangent, operands))), pulled

        def forward_rule(*primals: Any) -> tuple[Arrays, PullBack]:
            forward, pull = trace_forward([primal.perturbed for primal in primals])
            arrays = self._run_rule(forward)(*[primal.value for primal in primals])

            def backward(residuals: Arrays, cotangents: Arrays) -> Arrays:
                used = [not isinstance(x, SymbolicZero) for x in cotangents]
                rule, pulled = trace_backward(forward, pull, used)
                local = self._run_rule(rule)(*residuals, *itertools.compress(cotangents, used))
                return replace_chosen(pulled, [x is not None for x in pulled], local)

            residuals = arrays[len(results) :]
            return arrays[: len(results)], jax.tree_util.Partial(backward, residuals)

        if not flow.symbolic_zeros:
            # Such rules do not depend on what is differentiated. If they combine rows, or cannot be
            # traced, the region is not used.
            forward, pull = trace_forward([is_inexact(struct_of(x)) for x in equation.invars])
            rule, _ = trace_backward(forward, pull, list(map(is_inexact, results)))
            self._run_rule(forward)
            self._run_rule(rule)
        custom = jax.custom_vjp(run)
        custom.defvjp(
            forward_rule, lambda pull, cotangents: tuple(pull(cotangents)), symbolic_zeros=True
        )
        return custom

    def _trace_rule(
        self, equation: JaxprEqn, rule: Callable[..., Any], *inputs: Any
    ) -> tuple[AnyJaxpr, Any]:
        """The jaxpr of a derivative rule of an equation for all rows, and what it returns."""
        try:
            # Without the axes of the region, as rules expect.
            with (
                traced_over(self.region.mesh),
                use_abstract_mesh(equation.ctx.cur_abstract_mesh),
            ):
                return jax.make_jaxpr(rule, return_shape=True)(*inputs)
        except Exception as error:
            raise RuleError(error) from error

    def _run_rule(self, rule: _Rule) -> Callable[..., Arrays]:
        """What a device runs of a derivative rule. Raises `NotLocal` if the rule combines rows."""
        states = self.region.states.of_jaxpr(rule.jaxpr, rule.inputs)
        for state, target in zip(states, rule.outputs, strict=True):
            check_becomes(state, target)
        return self.as_function(rule.jaxpr, rule.inputs, rule.outputs)

    def _of_cotangent(self, state: State) -> State:
        """What a device has of the cotangent of an array, from what it has of the array."""
        if self.region.of_row:
            return OWN
        if state in CONDITIONS:
            raise NotLocal("a derivative rule has a condition of all rows")
        # Each device adds to the cotangent of what all have, and all have that of a sum.
        if state is None:
            return SUM
        if state is SUM:
            return None
        return state

    def _solve(self, flow: LinearSolve, inputs: Arrays, step: LocalStep) -> Arrays:
        states, results = step.operands, step.results

        def function(part: tuple[AnyJaxpr, Sequence[int]]) -> Callable[..., Arrays]:
            jaxpr, places = part
            consts = at_places(inputs, places)
            run = self.as_function(jaxpr, [*at_places(states, places), *results], results)
            return lambda *xs: run(*consts, *jax.tree.leaves(xs))

        parts = flow.functions
        matvec, solve = function(parts["matvec"]), function(parts["solve"])
        options: dict[str, Any] = {}
        if "transpose_solve" in parts:
            transposed = function(parts["transpose_solve"])
            options["transpose_solve"] = lambda _, b: transposed(*b)
        options["symmetric"] = flow.symmetric
        right_side = inputs[len(inputs) - len(results) :]
        solution = jax.lax.custom_linear_solve(
            matvec, list(right_side), lambda _, b: solve(*b), **options
        )
        return list(solution)


def _without_derivative(run: Callable[..., Arrays]) -> Callable[..., Arrays]:
    """A function without a forward-mode derivative, as a `custom_vjp` is one.

    It is only evaluated in loops without a reverse-mode derivative.
    """

    def backward(residuals: None, cotangents: Arrays) -> NoReturn:
        raise NotImplementedError(
            "Reverse-mode differentiation does not work for `jax.lax.while_loop`."
        )

    custom = jax.custom_vjp(run)
    custom.defvjp(lambda *xs: (run(*xs), None), backward)
    return custom


def _call_host(equation: JaxprEqn, inputs: Arrays, results: Sequence[tuple[int, ...]]) -> Arrays:
    """Calls a function on the host, with results of these shapes, but of one rank.

    JAX gives all results the sharding of the first one if it compiles for TPUs, and refuses others
    than of its rank.
    """
    avals, call = equation.params["result_avals"], equation.params["callback"]
    rank = max(map(len, results))
    shapes = [(1,) * (rank - len(shape)) + shape for shape in results]

    def of_one_rank(*arrays: object) -> list[np.ndarray]:
        return list(map(np.reshape, call(*arrays), shapes))

    avals = tuple(aval.update(shape=shape) for aval, shape in zip(avals, shapes, strict=True))
    changes = {"callback": of_one_rank, "result_avals": avals}
    # JAX can only lower it with all axes.
    run = with_all_axes(lambda *xs: tuple(bind_local(equation, xs, changes)))
    return list(map(jnp.reshape, run(*inputs), results))


def waits_for_rows(equation: JaxprEqn) -> bool:
    """Whether devices may wait for each other in an equation although rows are independent."""
    match control_flow(equation):
        case While() | LinearSolve():
            return True
        case Scan() as scan:
            return asks_any_row(equation) or carried_over_rows(scan) is not None
        case Cond():
            return CALLBACK in map(primitive_name, equations_inside(equation))
    if independent_levels(equation):
        return True
    return is_vmapped(equation) and any(map(_is_hard, equations_inside(equation)))


def asks_any_row(equation: JaxprEqn) -> bool:
    """Whether an equation asks if something holds for any row, such as to raise an error."""
    return not OF_ANY_ROW.isdisjoint(map(primitive_name, equations_inside(equation)))


def _is_hard(equation: JaxprEqn) -> bool:
    """Whether devices communicate about rows in an equation of a primitive of Equinox."""
    is_loop = isinstance(control_flow(equation), While)
    return is_loop or is_callback(equation) or acts_on_parts(equation)


def keep_ended(is_active: jax.Array, new: Arrays, old: Arrays) -> Arrays:
    """What a loop carries: under `vmap`, a row that is not active keeps its last value."""
    if not is_active.ndim:
        return new
    carry: Arrays = []
    for x, y in zip(new, old, strict=True):
        # (rows, 1, ...) for (rows, ...)
        mask = jnp.expand_dims(is_active, tuple(range(is_active.ndim, x.ndim)))
        carry.append(jax.lax.select(jnp.broadcast_to(mask, x.shape), x, y))
    return carry


def _bare(x: object) -> object:
    """A constant without its sharding, which has other axes outside of the region."""
    if not isinstance(x, jax.Array) or isinstance(x, Tracer):
        return x
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return x
    return np.asarray(x)
