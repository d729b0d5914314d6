"""Re-evaluates a jaxpr with the shardings of its activations constrained."""

import functools as ft
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Literal, Var
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ...core._control_flow import (
    Call,
    CallKind,
    Cond,
    ControlFlow,
    Scan,
    While,
    control_flow,
    primitive_name,
)
from ...core._jaxpr import as_traced, bind_again, evaluate_jaxpr, iter_equations
from ...core._markers import gathered_dimension
from ...core._pytree import ARRAYS, join
from .._mesh_axes import parts
from ..operations import Atom, shape_of
from ..operations._rule_table import LARGE_OPERATIONS
from ..operations._scan_over_rows import sums_over_iterations
from ..pipeline._draws import draw_rows
from ..pipeline._run_pipeline import PipelineLayout, run_pipeline
from ..pipeline._stages import Pipeline
from ..program._batch import created_rows
from ..program._loop_weights import gets_copies
from ..program._program import follow_program
from ..program._trace import Arrays, trace_over
from ..program._walk import Scope, outputs_of
from ..solver._layout import STORAGE_AXES
from ..tree._leaf_plans import Compute
from ._bound_equation import BoundEquation, Tables, values_of
from ._copied_weights import apply_copies, copy_weights
from ._custom_rules import (
    Fn,
    is_float0,
    replace_chosen,
    run_custom,
    run_or,
    with_mesh_in_rule,
)
from ._gathered_layers import gather_again
from ._local_choice import REFUSALS, choose_region, has_symbolic_rule, used_results
from ._local_operation import acts_on_parts, run_operation
from ._local_region import keep_ended, waits_for_rows
from ._shardings import Shardings, find_shardings, sharded_dim
from ._split_conv import POOLING, run_local_conv, run_split_pool
from ._split_fft import run_split_fft, writes_slice
from ._split_interpolation import run_split_interpolation
from ._split_lookup import run_split_lookup
from ._split_pad import run_split_pad
from ._split_product import run_split_product
from ._stored_arrays import StoredArrays, spec_of_layers, stored_variables


class CannotRebind(Exception):
    """Raised when an equation cannot be re-bound; `args[0]` is the name of its primitive."""


Handler = Callable[[BoundEquation], Arrays | None]


def run_constrained(
    scope: Scope,
    shardings: Shardings,
    inputs: Sequence[object],
    stored: Sequence[bool] = (),
    specs: Sequence[P | None] = (),
    copies: Mapping[Atom, jax.Array] | None = None,
) -> Arrays:
    """Evaluates a jaxpr with its activations constrained.

    `stored` selects the inputs that are arrays of the model, which are constrained where they are
    used (`_stored_arrays.py`). `specs` are those by which inputs are FSDP-sharded. `copies` has one
    copy of a weight for each shard of the batch.
    """
    jaxpr = scope.jaxpr
    env: dict[Var, Any] = dict(zip(jaxpr.constvars, scope.consts, strict=True))
    env.update(zip(jaxpr.invars, inputs, strict=True))
    spec_of: dict[Atom, P | None] = dict(zip(jaxpr.invars, specs, strict=False))
    arrays = StoredArrays(
        scope, shardings, env, stored_variables(scope, shardings, stored), spec_of
    )
    copies = dict(copies or {})  # with those that equations rearrange
    tables: Tables = {}

    def handle(index: int, equation: JaxprEqn, operands: Arrays) -> Arrays:
        name, flow = equation.primitive.name, control_flow(equation)
        inner = scope.inner.get(index, [])
        if isinstance(flow, Call) and flow.kind is CallKind.OWN_RULES:
            # What replaces transformations of its own has no other form that has the same ones.
            inner = []
        # Arrays of the model are handed on as they are stored, or gathered where they are used.
        if arrays.takes_layers(equation):
            arrays.add_layers(equation)
        elif arrays.is_cast(equation):
            return [arrays.cast(equation, operands)]
        elif not inner:  # loops and calls gather inside
            operands = arrays.gather_all(equation, operands)
        # Activations that products read as a whole, or that stay whole.
        if name in ("dot_general", "conv_general_dilated"):
            for place, atom in enumerate(equation.invars):
                if not isinstance(atom, Literal):
                    value = scope.values[atom]
                    operands[place] = shardings.constrain_operand(operands[place], value)
        if name == "concatenate":
            operands = _keep_whole(equation, scope, shardings, operands)
        if name == "split":
            operands = _keep_split(equation, scope, shardings, operands)
        if isinstance(flow, Call) and inner:
            arrays.add_returned(equation, inner[0])
        bound = BoundEquation(
            equation=equation,
            scope=scope,
            inner=inner,
            shardings=shardings,
            operands=operands,
            stored=arrays.are_stored(equation.invars),
            specs=arrays.specs_of(equation.invars),
            tables=tables,
        )
        try:
            results = _run(bound, flow, copies)
        except CannotRebind:
            raise  # of an equation inside, which is the one to name
        except Exception as error:
            raise CannotRebind(name) from error
        # XLA propagates these through what follows.
        if name in LARGE_OPERATIONS and not (shardings.splits_examples and writes_slice(equation)):
            values = values_of(scope, equation.outvars)
            results = list(map(shardings.constrain, results, values))
        return results

    results = evaluate_jaxpr(jaxpr, env, handle)
    for place, atom in enumerate(jaxpr.outvars):
        if isinstance(atom, Literal):
            results[place] = as_traced(results[place], atom)
    return results


def _keep_whole(equation: JaxprEqn, scope: Scope, shardings: Shardings, operands: Arrays) -> Arrays:
    """Constrains whole arrays that are concatenated into one that is split.

    Without constraints, XLA splits their cotangents like that of the result, and then those of the
    activations that they come from, which are gathered again in the layers.
    """
    parts = values_of(scope, equation.invars)
    is_split = shardings.is_parallel(scope.values[equation.outvars[0]])
    if not is_split or any(map(shardings.is_parallel, parts)):
        return operands
    return list(map(shardings.constrain, operands, parts))


def _keep_split(equation: JaxprEqn, scope: Scope, shardings: Shardings, operands: Arrays) -> Arrays:
    """Gathers an array once that is split into several whole ones, such as the gates of an LSTM.

    Without constraints, XLA splits each of these over the same devices again, and each device sends
    its part of every one to the others.
    """
    (operand,) = values_of(scope, equation.invars)
    parts = values_of(scope, equation.outvars)
    if not shardings.is_parallel(operand) or any(map(shardings.is_parallel, parts)):
        return operands
    whole = shardings.spec(operand, frozenset())
    return [shardings.with_spec(operands[0], whole)]


def _run(bound: BoundEquation, flow: ControlFlow | None, copies: dict[Atom, jax.Array]) -> Arrays:
    equation = bound.equation
    # In a loop, products with weights that it closes over are those with their copies.
    result = apply_copies(bound, copies)
    if result is not None:
        return [result]
    for handle in _HANDLERS.get(primitive_name(equation), ()):
        results = handle(bound)
        if results is not None:
            return results
    results = _on_rows(bound, flow)
    if results is not None:
        return results
    return _run_inner(bound, flow, copies)


def _run_inner(
    bound: BoundEquation, flow: ControlFlow | None, copies: Mapping[Atom, jax.Array]
) -> Arrays:
    """The results of an equation as it is, with what it runs constrained."""
    equation = bound.equation
    match flow:
        case Scan() as scan if bound.inner:
            return _scan(bound, scan)
        case While() as loop if bound.inner:
            return _while(bound, loop)
        case Cond() if bound.inner:
            return _cond(bound)
        case Call() as call if bound.inner and _has_nothing_to_constrain(bound, call):
            return with_mesh_in_rule(equation, bound.shardings.mesh, bound.operands)
        case Call() as call if bound.inner:
            return _call(bound, call, copies)
    return bind_again(equation, bound.operands)  # as it was


def _bits_of_rows(bound: BoundEquation) -> Arrays | None:
    """The random bits that some rows have of those for all rows, in the layers of a pipeline."""
    rows, bits = bound.shardings.row_numbers, bound.shardings.draws.get(id(bound.equation))
    if rows is None or bits is None:
        return None
    return [draw_rows(bound.operands[0], bits, rows, bound.equation.params["bit_width"])]


def _with_layout(bound: BoundEquation) -> Arrays:
    """XLA would gather the operand of a layout: it knows no sharding of one."""
    equation, mesh = bound.equation, bound.shardings.mesh
    spec = bound.shardings.spec(bound.values[0])
    # Inside of `jax.shard_map` the mesh is another than the equation's.
    local = lambda x: equation.primitive.bind(x, **equation.params)
    run = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return [run(bound.operands[0])]


def _own_constraint(bound: BoundEquation) -> Arrays | None:
    """A constraint of the program by axis names alone has no devices yet."""
    sharding, mesh = bound.equation.params["sharding"], bound.shardings.mesh
    if not isinstance(mesh, Mesh) or getattr(sharding, "mesh", None) != mesh.abstract_mesh:
        return None
    sharding = NamedSharding(mesh, sharding.spec)
    return [jax.lax.with_sharding_constraint(bound.operands[0], sharding)]


def _gathered_sequence(bound: BoundEquation) -> Arrays | None:
    d = gathered_dimension(bound.equation)
    if d is None:
        return None
    (operand,), (value,) = bound.operands, bound.values
    if bound.shardings.batch_dim(value) == d:
        return [bound.shardings.gather(operand, value, d)]
    return [operand]


def _on_rows(bound: BoundEquation, flow: ControlFlow | None) -> Arrays | None:
    """The results of an equation that each device runs on its own rows, or None if it does not."""
    equation, scope, shardings = bound.equation, bound.scope, bound.shardings
    # The stages of a pipeline are mapped over axes of the mesh, and `jax.shard_map` over other axes
    # cannot be.
    if shardings.in_pipeline:
        return None
    results = run_operation(bound)
    if results is not None:
        return results
    try:
        choice = choose_region(equation, scope, shardings)
        if choice is None:
            return None
        region, states = choice
        operands = list(bound.operands)
        for place, atom in enumerate(equation.invars):
            if bound.stored[place]:
                operands[place] = shardings.constrain(operands[place], scope.values[atom])
        operands = list(map(as_traced, operands, equation.invars))
        used = used_results(equation, scope.jaxpr)
        if region.forward_only or not has_symbolic_rule(equation):
            return region.run(equation, operands, states, used)
        local = lambda *xs: region.run(equation, xs, states, used)
        gathered = replace(bound, stored=[False] * len(operands), tables={})
        whole = lambda *xs: _run_inner(replace(gathered, operands=list(xs)), flow, {})
        return run_or(local, whole, REFUSALS, operands)
    except REFUSALS:
        return None


def _has_nothing_to_constrain(bound: BoundEquation, call: Call) -> bool:
    """Whether a call has a forward derivative of its own and no contraction, as activations have.

    A backward rule is traced after this function has returned: it must be traced over the mesh.
    """
    if call.kind is not CallKind.CUSTOM_JVP:
        return False
    for equation in iter_equations(bound.inner[0].jaxpr):
        if primitive_name(equation) in LARGE_OPERATIONS:
            return False
        if acts_on_parts(equation) or waits_for_rows(equation):
            return False
    return True


def _call(bound: BoundEquation, call: Call, copies: Mapping[Atom, jax.Array]) -> Arrays:
    equation, shardings, body = bound.equation, bound.shardings, bound.inner[0]
    copies_inside: dict[Atom, jax.Array] = {}
    if gets_copies(equation) is not None:
        for atom, var in zip(equation.invars, body.jaxpr.invars, strict=True):
            if not isinstance(atom, Literal) and atom in copies:
                copies_inside[var] = copies[atom]
    run = _function(body, shardings, bound.stored, bound.specs, copies_inside)
    if call.has_derivative:
        specs = list(map(shardings.spec, values_of(body, body.jaxpr.invars)))
        run_traced_rule = ft.partial(_run_traced_rule, shardings)
        return run_custom(equation, call.kind, run, bound.operands, specs, run_traced_rule)
    if call.kind is CallKind.REMAT:
        run = jax.checkpoint(run, prevent_cse=call.prevent_cse, policy=call.policy)
    return list(run(*bound.operands))


def _function(
    scope: Scope,
    shardings: Shardings,
    stored: Sequence[bool],
    specs: Sequence[P | None],
    copies: Mapping[Atom, jax.Array] | None = None,
) -> Fn:
    return lambda *inputs: run_constrained(scope, shardings, inputs, stored, specs, copies)


def _run_traced_rule(
    shardings: Shardings, fn: Fn, specs: Sequence[P], *inputs: object
) -> tuple[Arrays, list[P], Any]:
    """Runs a function that is not part of the jaxpr, constrained by the specs of its inputs.

    Returns the leaves of `fn(*inputs)`, their specs, and the structure of the result.
    """
    # Derivative rules get zero tangents and numbers too, which are not traced.
    is_array = [isinstance(x, ARRAYS) and not is_float0(x) for x in inputs]
    of_arrays = lambda arrays: fn(*replace_chosen(inputs, is_array, arrays))
    arrays = list(itertools.compress(inputs, is_array))
    traced, arrays = trace_over(shardings.mesh, of_arrays, arrays, ())
    program = follow_program(traced, [False] * traced.arrays)
    model_axes = shardings.compute.model_axes
    nodes: list[int] = []  # the dimensions that are rows of the batch
    dims: list[int | None] = []  # of each array, the one that is tensor-parallel
    for value, spec in zip(program.parameters, itertools.compress(specs, is_array), strict=True):
        dims.append(sharded_dim(spec, model_axes))
        d = sharded_dim(spec, shardings.batch_axes)
        if d is not None:
            nodes.append(value.nodes[d])
    batch = replace(program.batch, of_inputs=tuple(nodes), of_created=())
    if shardings.splits_examples:
        batch = replace(batch, splits_examples=True)
    else:
        # Where rows are split, arrays of as many rows are split with them.
        batch = replace(batch, of_created=created_rows(program.graph, batch))
    program = replace(program, batch=batch)
    compute = Compute(tuple(dims), shardings.batch_axes, model_axes)
    local = find_shardings(program, shardings.mesh, compute)
    results = run_constrained(program.scope, local, arrays)
    result_specs = list(map(local.spec, outputs_of(program.graph, program.scope)))
    leaves, structure = jax.tree.flatten(join(results, traced.output))
    leaf_specs = jax.tree.leaves(join(result_specs, traced.output))
    for place, spec in enumerate(leaf_specs):
        if not isinstance(spec, P):  # the leaf is no array
            leaf_specs[place] = P()
    return leaves, leaf_specs, structure


def _pipelined(bound: BoundEquation, pipeline: Pipeline) -> Arrays:
    """Runs a scan over layers as a pipeline, with one layer constrained for few rows."""
    scan, outside = pipeline.scans[id(bound.equation)], bound.shardings
    compute = replace(outside.compute, batch_axes=())  # a stage has the rows of one shard
    shardings = find_shardings(pipeline.microbatch, outside.mesh, compute)
    specs = list(map(shardings.spec, values_of(scan.body, scan.body.jaxpr.invars)))

    def layer(inputs: Sequence[jax.Array], rows: jax.Array) -> Arrays:
        of_rows = replace(shardings, draws=scan.random_bits, row_numbers=rows)
        return run_constrained(scan.body, of_rows, inputs)

    operands = list(map(as_traced, bound.operands, bound.equation.invars))
    layout = PipelineLayout(pipeline, outside.mesh, outside.batch_axes)
    return run_pipeline(scan, layout, operands, layer, specs)


def _scan(bound: BoundEquation, scan: Scan) -> Arrays:
    equation, shardings, scope = bound.equation, bound.shardings, bound.inner[0]
    if shardings.pipeline is not None and id(equation) in shardings.pipeline.scans:
        return _pipelined(bound, shardings.pipeline)
    consts, init, xs = scan.split(bound.operands)
    stored_consts, _, stored_xs = scan.split(bound.stored)
    _, carry_vars, _ = scan.split(scope.jaxpr.invars)
    values = values_of(scope, carry_vars)
    consts, stored_consts = _gather(scope, shardings, consts, stored_consts)
    is_map = sums_over_iterations(scan) is not None
    if is_map:
        # Of a map in batches of rows, each device gets rows of every batch, or whole batches if it
        # cannot have equal parts of them. XLA would gather these in every iteration.
        for place, atom in enumerate(scan.split(equation.invars)[2]):
            value = bound.scope.value_of(atom)
            if value is not None and not stored_xs[place] and shardings.batch_dim(value) != 0:
                xs[place] = shardings.constrain(xs[place], value)
    # (shards, ...), so that their gradients are summed over devices once, after the loop
    copies = copy_weights(scope, shardings, consts)
    stored = [*stored_consts, *[False] * len(init), *stored_xs]
    # Constants are gathered before the loop, and layers in it.
    specs: list[P | None] = [None] * (len(consts) + len(init))
    for spec, var in zip(scan.split(bound.specs)[2], scan.split(equation.invars)[2], strict=True):
        rank = len(shape_of(var))
        specs.append(spec_of_layers(spec, rank, rank - 1))

    def body(inputs: Arrays) -> Arrays:
        consts, carry, xs = scan.split(inputs)
        inputs = [*consts, *map(shardings.constrain, carry, values), *xs]
        results = run_constrained(scope, shardings, inputs, stored, specs, copies)
        results[: scan.carry] = map(shardings.constrain, results[: scan.carry], values)
        return results

    # Python numbers would be weakly typed in the first iteration alone.
    init = list(map(as_traced, init, carry_vars))
    policy = None
    # With FSDP, layers are sharded in storage over axes that divide the rows of the batch.
    axes = set(STORAGE_AXES).intersection(shardings.batch_axes)
    # Without a loop, the compiler finds that a layer is gathered twice.
    if scan.unroll < scan.length and parts(tuple(axes), shardings.mesh.shape) > 1:
        policy = gather_again(scope, stored, shardings.batch.count)
    if policy is not None:
        body = jax.checkpoint(body, policy=policy, prevent_cse=False)
    results = scan.run(body, consts, init, xs)
    if is_map:
        for place, value in enumerate(bound.results[scan.carry :], scan.carry):
            if shardings.batch_dim(value) != 0:
                results[place] = shardings.constrain(results[place], value)
    return results


def _gather(
    scope: Scope, shardings: Shardings, consts: Sequence[object], stored: Sequence[bool]
) -> tuple[Arrays, list[bool]]:
    """Gathers the constants of a loop before it, and not in every iteration.

    Layers that a scan inside the loop iterates over stay sharded; the scan gathers one at a time.
    Returns the constants, and which of them are still sharded in storage.
    """
    consts, stored = list(consts), list(stored)
    for i, var in enumerate(scope.jaxpr.invars[: len(consts)]):
        value = scope.values[var]
        if stored[i] and shardings.stacks.isdisjoint(value.nodes):
            consts[i], stored[i] = shardings.constrain(consts[i], value), False
    return consts, stored


def _while(bound: BoundEquation, loop: While) -> Arrays:
    shardings, (cond, body) = bound.shardings, bound.inner
    cond_consts, body_consts, init = loop.split(bound.operands)
    stored_cond, stored_body, stored_carry = loop.split(bound.stored)
    carry_vars = body.jaxpr.invars[len(body_consts) :]
    values = values_of(body, carry_vars)
    body_consts, stored_body = _gather(body, shardings, body_consts, stored_body)

    def keep_going(carry: Arrays) -> jax.Array:
        return run_constrained(cond, shardings, [*cond_consts, *carry], stored_cond)[0]

    def step(carry: Arrays) -> Arrays:
        inputs = [*body_consts, *map(shardings.constrain, carry, values)]
        results = run_constrained(body, shardings, inputs, [*stored_body, *stored_carry])
        results = keep_ended(keep_going(carry), results, carry)
        return list(map(shardings.constrain, results, values))

    init = list(map(as_traced, init, carry_vars))
    return jax.lax.while_loop(lambda carry: jnp.any(keep_going(carry)), step, init)


def _cond(bound: BoundEquation) -> Arrays:
    branches = [
        _function(scope, bound.shardings, bound.stored[1:], bound.specs[1:])
        for scope in bound.inner
    ]
    return list(jax.lax.switch(bound.operands[0], branches, *bound.operands[1:]))


# What runs a primitive otherwise than it is, tried in this order. None leaves it to the next, and
# to the usual evaluation after all.
_HANDLERS: dict[str, tuple[Handler, ...]] = {
    "conv_general_dilated": (run_local_conv,),
    "dot_general": (run_split_interpolation, run_split_product),
    "fft": (run_split_fft,),
    "gather": (run_split_interpolation, run_split_lookup),
    "layout_constraint": (_with_layout,),
    "pad": (run_split_pad,),
    "redcoast_mark": (_gathered_sequence,),
    "random_bits": (_bits_of_rows,),
    **dict.fromkeys(POOLING, (run_split_pool,)),
    "sharding_constraint": (_own_constraint,),
}
