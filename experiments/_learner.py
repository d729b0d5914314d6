"""The loop of experiments whose data comes from the learner, such as reinforcement learning."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from _common import Started, print_once
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PRNGKeyArray, PyTree

import redcoast as rc


class Keys(NamedTuple):
    """The keys of a run, one for each purpose, so that none is used twice."""

    init: PRNGKeyArray  # the networks
    envs: PRNGKeyArray  # the initial states of the environments
    acting: PRNGKeyArray  # actions in training
    learning: PRNGKeyArray  # the choice of transitions
    test: PRNGKeyArray  # the episodes after training


def split_keys(run: Started) -> Keys:
    """Splits the key of a run by purpose."""
    return Keys(*jax.random.split(run.key, len(Keys._fields)))


def prepare(
    run: Started,
    init_fn: PyTree,
    optimizer: optax.GradientTransformation,
    loss_fn: Callable[..., Any],
    batch: PyTree,
    **options: Any,
) -> tuple[rc.TrainState, rc.Plan, Callable[..., Any]]:
    """Creates the state of a network, or of what a function of a key returns, on the mesh of the
    run; also returns its plan, and the loss with the plan's constraints."""
    print_once(f"Run directory: {run.directory}")
    mesh = run.mesh
    if isinstance(mesh, str):  # "auto"
        mesh = rc.make_mesh(**rc.suggest_mesh(init_fn, loss_fn, batch, optimizer, **options))
    options |= {"key": split_keys(run).init, "mesh": mesh}
    state, _, plan = rc.prepare(init_fn, optimizer, loss_fn, batch, **options)
    return state, plan, plan.constrain(loss_fn)


def run_learner(
    c: Any,
    run: Started,
    step: Callable[..., tuple[PyTree, dict[str, Any]]],
    state: PyTree,
    shardings: PyTree,
    *,
    plan: rc.Plan,
    collect: Callable[[PyTree, int], tuple[Any, ...]] = lambda state, number: (),
) -> tuple[PyTree, int]:
    """Does the iterations of a run, which is resumed and stopped as by `fit`.

    - `step`: `step(state, *inputs) -> (state, metrics)` is one iteration, which is compiled.
    - `state`: the state at the start, which is replaced if the run is resumed.
    - `plan`: the plan of a network, for `plan.txt`.
    - `collect`: `collect(state, number)` returns the inputs of iteration `number`, counted from 1,
        such as transitions of environments on the host.

    Returns the state, and the number of iterations that were done.
    """
    compiled, number = rc.compile_step(step, shardings), 0
    checkpoints = rc.Checkpoints(run.directory, every=max(1, c.steps // 10))
    with rc.stop_on_signal(mesh=mesh_of(plan)) as stopping, rc.Checkpointer(checkpoints) as saver:
        state, restored = eqx.filter_shard(state, shardings), saver.restore(state, shardings)
        print_once(f"{plan}")
        if restored:
            state, number = restored.state, restored.step
            print_once(f"Resumed at step {number}.")
        info = rc.RunInfo(
            directory=run.directory,
            resumed=bool(restored),
            plan=f"{plan}\n\n{plan.table()}",
            config=asdict(c),
            step=number,
            steps=c.steps,
        )
        with rc.metrics_reader(run.log, info) as reader:
            while number < c.steps:
                number += 1
                state, metrics = compiled(state, *collect(state, number))
                reader.push(number, metrics)
                stop = stopping()
                if stop or number == c.steps or saver.wants(number):
                    reader.flush()
                    saver.save(number, state)
                if stop:
                    break
    return state, number


def mesh_of(plan: rc.Plan) -> Mesh:
    """The mesh of a plan, which has devices."""
    assert isinstance(plan.mesh, Mesh)
    return plan.mesh


def on_one_device(model: PyTree, mesh: Mesh) -> PyTree:
    """Copies a model to one device of this process.

    A call for a few observations costs about six times less on one device than on eight.
    """
    arrays, static = eqx.partition(model, eqx.is_array)
    arrays = jax.device_put(arrays, NamedSharding(mesh, P()))
    return eqx.combine(jax.tree.map(lambda x: x.addressable_data(0), arrays), static)


def copy_arrays(model: PyTree) -> PyTree:
    """Copies a model, such as for target networks, which would be donated with it otherwise."""
    arrays, static = eqx.partition(model, eqx.is_array)
    return eqx.combine(jax.tree.map(jnp.copy, arrays), static)


def scan_steps(
    step: Callable[[PyTree, Any], tuple[PyTree, Any]], state: PyTree, inputs: PyTree
) -> tuple[PyTree, Any]:
    """Scans `step(state, input) -> (state, output)` over the leading dimension of `inputs`; the
    state may have leaves that are not arrays."""
    arrays, static = eqx.partition(state, eqx.is_array)

    def body(arrays: PyTree, inputs: Any) -> tuple[PyTree, Any]:
        after, output = step(eqx.combine(arrays, static), inputs)
        return eqx.filter(after, eqx.is_array), output

    arrays, outputs = jax.lax.scan(body, arrays, inputs)
    return eqx.combine(arrays, static), outputs
