"""Runs a program again with blocks in `jax.checkpoint`, which keep what was decided."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import JaxprEqn, Literal, Var

from ...core._control_flow import consts_of, open_jaxpr
from ...core._jaxpr import as_traced, at_line_of, bind_again, evaluate_jaxpr
from ._blocks import StepBlock
from ._choices import BlockChoice
from ._decide import Decided
from ._flat import Atom, Flat, FlatStep

# The name by which `jax.checkpoint` knows what is kept.
KEPT = "redcoast.kept"
_POLICY = jax.checkpoint_policies.save_only_these_names(KEPT)


def run_decided(flat: Flat, decided: Decided, inputs: Sequence[Any]) -> list[Any]:
    """The results of a program, computed as it was decided."""
    return _run(flat, decided, inputs, prevent_cse=True)


def _run(flat: Flat, decided: Decided, inputs: Sequence[Any], *, prevent_cse: bool) -> list[Any]:
    values: dict[int, Any] = dict(zip(flat.inputs, inputs, strict=True))
    values.update(flat.constants)
    constant = _constant_steps(flat)
    for block, choice in decided:
        steps = flat.steps[block.start : block.stop]
        if steps[0].body is not None and choice.inner:
            results = _run_loop(steps[0], steps[0].body, choice.inner, values)
            values.update(zip(steps[0].outputs, results, strict=True))
        elif not choice.is_again:
            for step in steps:
                _run_step(step, values)
        else:
            _run_again(block, steps, choice, values, constant, prevent_cse=prevent_cse)
    results: list[Any] = []
    for atom in flat.outputs:
        x = _read(values, atom)
        if isinstance(atom, Literal):
            x = as_traced(x, atom)
        results.append(x)
    return results


def _run_again(
    block: StepBlock,
    steps: Sequence[FlatStep],
    choice: BlockChoice,
    values: dict[int, Any],
    constant: dict[int, FlatStep],
    *,
    prevent_cse: bool,
) -> None:
    """Runs a block in `jax.checkpoint`."""
    # Numbers of the program, such as positions, are computed where they are used.
    own = _steps_of_constants(block.inputs, constant)
    inputs = [number for number in block.inputs if number not in constant]

    def run(*arrays: Any) -> list[Any]:
        local = dict(zip(inputs, arrays, strict=True))
        for step in own:
            _run_step(step, local)
        for step in steps:
            _run_keeping(step, choice, local)
        return [local[number] for number in block.outputs]

    run_again = jax.checkpoint(run, policy=_POLICY, prevent_cse=prevent_cse)
    results = run_again(*(values[number] for number in inputs))
    values.update(zip(block.outputs, results, strict=True))


def _run_keeping(step: FlatStep, choice: BlockChoice, values: dict[int, Any]) -> None:
    """Runs a step of a block that is computed again, and names what is kept of its results."""
    kept = choice.kept.intersection(step.outputs)
    if kept and step.uses_result:
        (number,) = step.outputs
        operands = [_read(values, atom) for atom in step.inputs]
        with at_line_of(step.equation):
            values[number] = _with_named_derivative(step.equation)(*operands)
        return
    _run_step(step, values)
    for number in kept:
        values[number] = checkpoint_name(values[number], KEPT)


def _with_named_derivative(equation: JaxprEqn) -> Callable[..., Any]:
    """An operation whose derivative is computed from its result, which gets a name.

    JAX's derivative uses the result before it gets its name, and would compute it again.
    """

    def compute(*operands: Any) -> Any:
        (result,) = bind_again(equation, operands)
        return checkpoint_name(result, KEPT)

    run = jax.custom_jvp(compute)

    @run.defjvp
    def derive(operands: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        result = compute(*operands)  # `jax.checkpoint` sees no names inside of `run`
        bind = lambda *x: bind_again(equation, x)[0]
        program = jax.make_jaxpr(lambda *x: jax.jvp(bind, *x))(operands, tangents)
        jaxpr = open_jaxpr(program)
        variables = (*jaxpr.constvars, *jaxpr.invars)
        inputs = (*consts_of(program), *operands, *tangents)
        env: dict[Var, Any] = dict(zip(variables, inputs, strict=True))
        primal = jaxpr.outvars[0]

        def handle(index: int, inner: JaxprEqn, operands: list[Any]) -> list[Any]:
            if primal not in inner.outvars:
                return bind_again(inner, operands)
            results: list[Any] = [None] * len(inner.outvars)
            results[inner.outvars.index(primal)] = result
            return results

        _, tangent = evaluate_jaxpr(jaxpr, env, handle)
        return result, tangent

    return run


def _constant_steps(flat: Flat) -> dict[int, FlatStep]:
    """The steps that depend on no input, by the values that they write."""
    steps: dict[int, FlatStep] = {}
    for step in flat.steps:
        is_constant = step.is_fused and not step.is_bare
        if is_constant and all(number in steps for number in step.reads):
            steps.update(dict.fromkeys(step.outputs, step))
    return steps


def _steps_of_constants(numbers: Sequence[int], constant: dict[int, FlatStep]) -> list[FlatStep]:
    """The steps that some constants are computed by, in order."""
    steps: dict[FlatStep, None] = {}

    def add(number: int) -> None:
        step = constant.get(number)
        if step is None or step in steps:
            return
        for read in step.reads:
            add(read)
        steps[step] = None

    for number in numbers:
        add(number)
    return list(steps)


def _run_step(step: FlatStep, values: dict[int, Any]) -> None:
    operands = [_read(values, atom) for atom in step.inputs]
    with at_line_of(step.equation):
        results = bind_again(step.equation, operands)
    values.update(zip(step.outputs, results, strict=True))


def _run_loop(
    step: FlatStep, body: Flat, turns: Sequence[Decided], values: dict[int, Any]
) -> list[Any]:
    """Runs a loop whose iterations keep in turn what was decided."""
    scan = step.scan
    assert scan is not None
    # An initial carry may be a number.
    inputs = [_read(values, atom) for atom in step.inputs]
    operands = list(map(as_traced, inputs, step.equation.invars))
    consts, init, xs = scan.split(operands)
    period = len(turns)
    # In a loop of one block, the compiler cannot undo the recomputation: the passes are two loops.
    is_one = period == 1 and len(turns[0]) == 1 and scan.unroll < scan.length

    def iterate(carry: Sequence[Any], xs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        results = _run(body, turns[0], [*consts, *carry, *xs], prevent_cse=not is_one)
        return results[: scan.carry], results[scan.carry :]

    def iterate_in_turn(carry: Sequence[Any], xs: Sequence[Any]) -> tuple[Any, list[Any]]:
        ys: list[Sequence[Any]] = [()] * period
        # The derivative of `split` is exact: it puts the parts side by side.
        parts = [jax.lax.split(x, (1,) * period) for x in xs]
        places = range(period)
        if scan.reverse:
            places = reversed(places)
        for place in places:
            own = [jax.lax.squeeze(part[place], (0,)) for part in parts]
            results = _run(body, turns[place], [*consts, *carry, *own], prevent_cse=True)
            carry, ys[place] = results[: scan.carry], results[scan.carry :]
        return carry, [jnp.stack(of_turns) for of_turns in zip(*ys, strict=True)]

    run = iterate
    if period > 1:
        run = iterate_in_turn
        xs = [x.reshape(-1, period, *x.shape[1:]) for x in xs]
    with at_line_of(step.equation):
        carry, ys = jax.lax.scan(
            run,
            list(init),
            list(xs),
            length=scan.length // period,
            reverse=scan.reverse,
            unroll=max(1, scan.unroll // period),
        )
    if period > 1:
        ys = [y.reshape(-1, *y.shape[2:]) for y in ys]
    return [*carry, *ys]


def _read(values: dict[int, Any], atom: Atom) -> Any:
    if isinstance(atom, Literal):
        return atom.val
    return values[atom]
