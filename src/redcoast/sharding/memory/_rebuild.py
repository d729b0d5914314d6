"""Runs a program again with blocks in `jax.checkpoint`, which keep what was chosen."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import filterfalse

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import JaxprEqn, Literal, Var

from ...core._control_flow import consts_of, open_jaxpr
from ...core._jaxpr import as_traced, at_line_of, bind_again, evaluate_jaxpr
from ..program._remat import KeepAllBut, gather_of
from ..program._trace import Arrays
from ._block_policies import BlockPolicies, BlockPolicy
from ._flat import Flat, FlatLoop, FlatStep
from ._partition import StepBlock

# The name by which `jax.checkpoint` knows what is kept.
KEPT = "redcoast.kept"
_POLICY = jax.checkpoint_policies.save_only_these_names(KEPT)

_Values = dict[int, object]  # the arrays and numbers of a program


@dataclass
class _Group:
    """What one iteration of a loop gets for several former ones, stacked."""

    array: jax.Array


@dataclass(frozen=True)
class _OfGroup:
    """One layer of a group, which is taken where it is used: a loop keeps its operands anyway."""

    group: _Group
    place: int

    def take(self, array: jax.Array) -> jax.Array:
        return jax.lax.index_in_dim(array, self.place, keepdims=False)


def run_chosen(
    flat: Flat,
    chosen: BlockPolicies,
    inputs: Sequence[object],
    *,
    prevent_cse: bool = True,
    policy: KeepAllBut | None = None,
) -> Arrays:
    """The results of a program, computed as chosen.

    `prevent_cse` is that of `jax.checkpoint`. `policy` is that of blocks which recompute nothing;
    without one, they are not in `jax.checkpoint`.
    """
    values: _Values = dict(zip(flat.inputs, inputs, strict=True))
    values.update(flat.constants)
    run = _Run(flat, prevent_cse)
    for block, block_policy in chosen:
        step = block.steps[0]
        if block.loop is not None and block_policy.inner:
            results = _run_loop(step, block.loop, block_policy.inner, values)
            values.update(zip(step.outputs, results, strict=True))
        elif block_policy.recomputes:
            run.again(block, block_policy, values, _POLICY)
        elif policy is not None and any(step.needs for step in block.steps):
            # A loop would keep the gathered weights of all layers.
            run.again(block, block_policy, values, policy)
        else:
            for step in block.steps:
                _run_step(step, values)
    results: Arrays = []
    for atom in flat.outputs:
        if isinstance(atom, Literal):
            results.append(as_traced(atom.val, atom))
        else:
            results.append(_read(values, atom))
    return results


@dataclass(frozen=True)
class _Run:
    """Runs blocks of a program in `jax.checkpoint`."""

    flat: Flat
    prevent_cse: bool

    def again(
        self,
        block: StepBlock,
        block_policy: BlockPolicy,
        values: _Values,
        policy: Callable[..., bool],
    ) -> None:
        # Numbers of the program, such as positions, are computed where they are used.
        constant = self._constant
        inputs = list(filterfalse(constant.__contains__, block.inputs))
        own: dict[FlatStep, None] = {}
        for number in block.inputs:
            self._add_steps_of(number, own)
        outside = list(map(values.__getitem__, inputs))
        groups = [x.group for x in outside if isinstance(x, _OfGroup)]

        def run(*arrays: jax.Array) -> tuple[Arrays, Arrays]:
            local: _Values = {}
            passed: Arrays = []
            for number, x, array in zip(inputs, outside, arrays, strict=True):
                local[number] = array
                if isinstance(x, _OfGroup):
                    local[number] = x.take(array)
                    passed.append(array)
            for step in own:
                _run_step(step, local)
            for step in block.steps:
                _run_keeping(step, block_policy, local)
            return list(map(local.__getitem__, block.outputs)), passed

        run_again = jax.checkpoint(run, policy=policy, prevent_cse=self.prevent_cse)
        results, passed = run_again(*map(_whole, outside))
        # The next block gets the groups from this one. So its gradients are complete before this
        # one's are computed, and the compiler does not wait to send those of several layers at
        # once.
        for group, array in zip(groups, passed, strict=True):
            group.array = array
        values.update(zip(block.outputs, results, strict=True))

    @cached_property
    def _constant(self) -> dict[int, FlatStep]:
        """The steps that depend on no input, by the values that they write."""
        steps: dict[int, FlatStep] = {}
        for step in self.flat.steps:
            if step.is_fused and not step.is_bare and steps.keys() >= set(step.reads):
                steps.update(dict.fromkeys(step.outputs, step))
        return steps

    def _add_steps_of(self, number: int, steps: dict[FlatStep, None]) -> None:
        """Adds the steps that a constant is computed by, in order; none for another value."""
        step = self._constant.get(number)
        if step is None or step in steps:
            return
        for read in step.reads:
            self._add_steps_of(read, steps)
        steps[step] = None


def _run_keeping(step: FlatStep, block_policy: BlockPolicy, values: _Values) -> None:
    """Runs a step of a block that is computed again, and names what is kept of its results."""
    kept = block_policy.kept.intersection(step.outputs)
    if kept and step.uses_result:
        (number,) = step.outputs
        operands = _operands(step, values)
        with at_line_of(step.equation):
            values[number] = _with_named_derivative(step.equation)(*operands)
        return
    _run_step(step, values)
    for number in kept:
        values[number] = checkpoint_name(values[number], KEPT)


def _with_named_derivative(equation: JaxprEqn) -> Callable[..., jax.Array]:
    """An operation whose derivative is computed from its result, which gets a name.

    JAX's derivative uses the result before it gets its name, and would compute it again.
    """

    def compute(*operands: object) -> jax.Array:
        (result,) = bind_again(equation, operands)
        return checkpoint_name(result, KEPT)

    run = jax.custom_jvp(compute)

    @run.defjvp
    def derive(
        operands: Sequence[jax.Array], tangents: Sequence[jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        result = compute(*operands)  # `jax.checkpoint` sees no names inside of `run`
        bind = lambda *x: bind_again(equation, x)[0]
        program = jax.make_jaxpr(lambda *x: jax.jvp(bind, *x))(operands, tangents)
        jaxpr = open_jaxpr(program)
        variables = (*jaxpr.constvars, *jaxpr.invars)
        inputs = (*consts_of(program), *operands, *tangents)
        env: dict[Var, jax.Array] = dict(zip(variables, inputs, strict=True))
        primal = jaxpr.outvars[0]

        # The derivative with the named result in place of the one that it would compute.
        def handle(index: int, inner: JaxprEqn, operands: Arrays) -> Arrays:
            if primal not in inner.outvars:
                return bind_again(inner, operands)
            results: Arrays = [None] * len(inner.outvars)
            results[inner.outvars.index(primal)] = result
            return results

        _, tangent = evaluate_jaxpr(jaxpr, env, handle)
        return result, tangent

    return run


def _run_step(step: FlatStep, values: _Values) -> None:
    operands = _operands(step, values)
    with at_line_of(step.equation):
        results = bind_again(step.equation, operands)
    values.update(zip(step.outputs, results, strict=True))


def _run_loop(
    step: FlatStep, loop: FlatLoop, turns: Sequence[BlockPolicies], values: _Values
) -> Arrays:
    """Runs a loop whose iterations keep in turn what was chosen."""
    scan, body, period = loop.scan, loop.body, len(turns)
    # An initial carry may be a number.
    operands = list(map(as_traced, _operands(step, values), step.equation.invars))
    consts, init, xs = scan.split(operands)
    policy = KeepAllBut(frozenset(gather_of(x.shape[1:]) for x in xs))
    # In a loop of one block, the compiler cannot undo the recomputation: the passes are two loops.
    is_one = period == 1 and len(turns[0]) == 1 and scan.unroll < scan.length

    def iterate_in_turn(inputs: Arrays) -> Arrays:
        consts, carry, xs = scan.split(inputs)
        ys: list[Arrays] = [[]] * period
        groups = list(map(_Group, xs))  # (period, ...)
        places = range(period)
        if scan.reverse:
            places = reversed(places)
        for place in places:
            own = [_OfGroup(group, place) for group in groups]
            inputs = [*consts, *carry, *own]
            results = run_chosen(body, turns[place], inputs, policy=policy)
            carry, ys[place] = results[: scan.carry], results[scan.carry :]
        return [*carry, *map(jnp.stack, zip(*ys, strict=True))]

    if period == 1:
        options = {"prevent_cse": not is_one, "policy": policy}
        iterate = lambda inputs: run_chosen(body, turns[0], inputs, **options)
        with at_line_of(step.equation):
            return scan.run(iterate, consts, init, xs)
    fewer = replace(scan, length=scan.length // period, unroll=max(1, scan.unroll // period))
    xs = [x.reshape(-1, period, *x.shape[1:]) for x in xs]  # (length / period, period, ...)
    with at_line_of(step.equation):
        results = fewer.run(iterate_in_turn, consts, init, xs)
    ys = [y.reshape(-1, *y.shape[2:]) for y in results[scan.carry :]]
    return [*results[: scan.carry], *ys]


def _operands(step: FlatStep, values: _Values) -> Arrays:
    """What a step reads."""
    operands: Arrays = []
    for atom in step.inputs:
        if isinstance(atom, Literal):
            operands.append(atom.val)
        else:
            operands.append(_read(values, atom))
    return operands


def _read(values: _Values, number: int) -> object:
    x = values[number]
    if isinstance(x, _OfGroup):
        return x.take(x.group.array)
    return x


def _whole(x: object) -> object:
    if isinstance(x, _OfGroup):
        return x.group.array
    return x
