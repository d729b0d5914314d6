"""Learns continuous actions by DDPG (Lillicrap et al., 2016, arXiv:1509.02971).

The replay buffer is on the devices. A lane, which is an environment with its own transitions, stays
on one device, and each lane gives as many transitions to a minibatch.
"""

import functools as ft
from dataclasses import dataclass, field
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import tyro
from _common import Run, exit_if_stopped, report, start
from _environments import ENVIRONMENTS, HostLanes, mean_return, rollout, sizes, start_lanes
from _learner import mesh_of, on_one_device, prepare, run_learner, scan_steps
from _plots import plot_metric
from _replay import add, empty_buffer, sample
from _usage import refuse

import redcoast as rc


@dataclass(frozen=True)
class Config:
    environment: str = "Pendulum-v1"  # any of gymnasium with continuous actions
    on_device: bool = False  # use the environment in JAX: acting and learning are one program
    lanes: int = 8  # number of environments that are stepped side by side
    rollout: int = 8  # steps of each environment in a step of the run
    updates: int = 32  # number of updates in a step of the run
    batch_size: int = 128  # number of transitions in an update
    buffer: int = 16000  # number of the newest transitions that are kept
    warmup: int = 15  # number of steps of the run with random actions
    noise: float = 0.1  # deviation of the noise that is added to actions of the range -1 to 1
    discount: float = 0.98  # by which a reward counts less for each step that it is later
    decay: float = 0.99  # of the moving averages that are the target networks
    width: int = 128  # width of the hidden layers
    steps: int = 250  # number of steps of the run
    learning_rate: float = 1e-3  # learning rate of both networks
    episodes: int = 100  # number of episodes after training, of which the mean return is reported
    run: tyro.conf.OmitArgPrefixes[Run] = field(default_factory=Run)


def main(c: Config) -> None:
    size, count = sizes(c.environment, discrete=False, on_device=c.on_device)
    if c.batch_size % c.lanes or c.buffer % (c.lanes * c.rollout):
        refuse("--batch-size must be divisible by --lanes, and --buffer by lanes x rollout.")
    run = start(c, "ddpg")
    host = HostLanes(c.environment, c.lanes, c.run.seed)
    optimizer = optax.adam(c.learning_rate)
    functions = ft.partial(init_fn, c, size, count), optimizer, loss_fn
    buffer = empty_buffer(
        c.lanes,
        c.buffer // c.lanes,
        observation=(size,),
        action=(count,),
        reward=(),
        next_observation=(size,),
        terminated=(),
    )
    minibatch = jax.eval_shape(lambda key: sample(buffer, c.batch_size // c.lanes, key), run.key)
    minibatch["target"] = minibatch["reward"]
    train, plan, loss = prepare(run, *functions, minibatch)
    fit = ft.partial(rc.train_step, loss_fn=loss, optimizer=optimizer)
    mesh = mesh_of(plan)

    def step(state, transitions: Any = None, finished: Any = None):
        lanes, model = state["lanes"], state["train"].model
        act_key, learn_key = jax.random.split(jax.random.fold_in(run.key, state["train"].step))
        if c.on_device:
            policy = ft.partial(explore, c, model, state["buffer"]["added"])
            lanes, transitions = rollout(
                ENVIRONMENTS[c.environment], policy, lanes, act_key, c.rollout
            )
            finished = lanes["finished"]
        buffer = add(state["buffer"], transitions)
        update = ft.partial(learn, c, fit, buffer)
        networks = {name: state[name] for name in ("train", "target")}
        networks, metrics = scan_steps(update, networks, jax.random.split(learn_key, c.updates))
        metrics = jax.tree.map(jnp.mean, metrics) | {"return": jnp.mean(finished)}
        return networks | {"buffer": buffer, "lanes": lanes}, metrics

    def collect(state, number):
        if c.on_device:
            return ()
        model, added = on_one_device((state["train"].model, state["buffer"]["added"]), mesh)
        key = jax.random.fold_in(run.key, number)
        return host.rollout(ft.partial(explore, c, model, added), key, c.rollout), host.finished

    copy = jax.tree.map(lambda x: jnp.copy(x) if eqx.is_array(x) else x, train.model)
    state = {"train": train, "target": copy, "buffer": buffer, "lanes": {}}
    if c.on_device:
        state["lanes"] = start_lanes(ENVIRONMENTS[c.environment], run.key, c.lanes)
    rows = rc.batch_shardings({name: state[name] for name in ("buffer", "lanes")}, mesh)
    shardings = {"train": plan.shardings, "target": plan.shardings.model} | rows
    state, steps = run_learner(c, run, step, state, shardings, plan=plan, collect=collect)

    exit_if_stopped(steps, c.steps)
    plot_metric(run.directory, "return")
    model = on_one_device(state["train"].model, mesh)
    act = eqx.filter_jit(lambda x, key: actions(model, x))
    found = mean_return(c.environment, act, episodes=c.episodes, key=run.key)
    report(run.directory, mean_return=found)


def init_fn(c, size, count, key):
    actor_key, critic_key = jax.random.split(key)
    return {
        "actor": eqx.nn.MLP(size, count, c.width, 2, final_activation=jnp.tanh, key=actor_key),
        "critic": eqx.nn.MLP(size + count, "scalar", c.width, 2, key=critic_key),
    }


def actions(model, observations):
    """The actions, from -1 to 1, for observations with any leading dimensions."""
    return jnp.vectorize(model["actor"], signature="(n)->(m)")(observations)


def values(model, observations, actions):
    inputs = jnp.concatenate([observations, actions], axis=-1)
    return jnp.vectorize(model["critic"], signature="(n)->()")(inputs)


def loss_fn(model, batch, key):
    observation = batch["observation"]
    errors = values(model, observation, batch["action"]) - batch["target"]
    # The actor's loss has no gradient for the critic.
    value = values(rc.stop_gradient(model), observation, actions(model, observation))
    return jnp.mean(errors**2) - jnp.mean(value), {"value": jnp.mean(value)}


@eqx.filter_jit
def explore(c, model, added, observations, key):
    """Acts with noise; at random as long as the buffer has few transitions."""
    chosen = actions(model, observations)
    noise_key, random_key = jax.random.split(key)
    noisy = chosen + c.noise * jax.random.normal(noise_key, chosen.shape)
    random = jax.random.uniform(random_key, chosen.shape, minval=-1, maxval=1)
    return jnp.clip(jnp.where(added < c.warmup * c.rollout, random, noisy), -1, 1)


def learn(c, fit, buffer, networks, key):
    """Updates the networks, and lets the target networks follow them."""
    batch, target = sample(buffer, c.batch_size // c.lanes, key), networks["target"]
    after = batch["next_observation"]
    future = (1 - batch["terminated"]) * values(target, after, actions(target, after))
    train, metrics = fit(
        networks["train"], batch | {"target": batch["reward"] + c.discount * future}
    )
    return {"train": train, "target": rc.moving_average(target, train.model, c.decay)}, metrics


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
