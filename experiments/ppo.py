"""Learns to act by proximal policy optimisation (PPO, Schulman et al., 2017, arXiv:1707.06347)."""

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
from _learner import mesh_of, on_one_device, prepare, run_learner
from _plots import plot_metric
from _usage import refuse

import redcoast as rc

TRAINABLE = {"networks": eqx.is_inexact_array, "scales": False}


@dataclass(frozen=True)
class Config:
    environment: str = "CartPole-v1"  # any of gymnasium with discrete actions, such as Acrobot-v1
    on_device: bool = False  # use the environment in JAX: acting and learning are one program
    lanes: int = 16  # number of environments that are stepped side by side
    rollout: int = 512  # steps of each environment between updates
    epochs: int = 4  # passes over the transitions in an update
    minibatches: int = 16  # number of minibatches in a pass
    clip: float = 0.2  # limit of the change of a probability and, in deviations, of a value
    discount: float = 0.995  # by which a reward counts less for each step that it is later
    trace: float = 0.95  # lambda of generalised advantage estimation
    entropy: float = 0.01  # weight of the policy's entropy
    width: int = 64  # width of the hidden layers
    steps: int = 40  # number of updates
    learning_rate: float = 1e-3  # learning rate at the start, from which it decays to zero
    episodes: int = 100  # number of episodes after training, of which the mean return is reported
    run: tyro.conf.OmitArgPrefixes[Run] = field(default_factory=Run)


def main(c: Config) -> None:
    size, actions = sizes(c.environment, discrete=True, on_device=c.on_device)
    if c.rollout % c.minibatches:
        refuse(f"--rollout {c.rollout} is not divisible by --minibatches {c.minibatches}.")
    run = start(c, "ppo")
    host = HostLanes(c.environment, c.lanes, c.run.seed)
    rate = optax.linear_schedule(c.learning_rate, 0, c.steps * c.epochs * c.minibatches)
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(rate))
    functions = ft.partial(init_fn, c, size, actions), optimizer, ft.partial(loss_fn, c)
    rows = lambda *shape, dtype=float: jax.ShapeDtypeStruct(
        (c.lanes, c.rollout // c.minibatches, *shape), jnp.result_type(dtype)
    )
    minibatch = {name: rows() for name in ("advantage", "value", "target")}
    minibatch |= {"observation": rows(size), "log_policy": rows(actions)}
    minibatch |= {"action": rows(dtype=int)}
    train, plan, loss = prepare(run, *functions, minibatch, trainable=TRAINABLE)
    fit = ft.partial(rc.train_steps, loss_fn=loss, optimizer=optimizer, trainable=TRAINABLE)
    mesh, state, shardings = mesh_of(plan), {"train": train}, {"train": plan.shardings}
    if c.on_device:
        lanes = start_lanes(ENVIRONMENTS[c.environment], run.key, c.lanes)
        state |= {"lanes": lanes}
        shardings |= {"lanes": rc.batch_shardings(lanes, mesh)}

    def step(state, transitions: Any = None, finished: Any = None):
        train, lanes = state["train"], state.get("lanes")
        act_key, learn_key = jax.random.split(jax.random.fold_in(run.key, train.step))
        if c.on_device:
            policy, environment = ft.partial(sample, train.model), ENVIRONMENTS[c.environment]
            lanes, transitions = rollout(environment, policy, lanes, act_key, c.rollout)
            finished = lanes["finished"]
        train, metrics = learn(c, fit, train, transitions, learn_key)
        after = {"train": train} | ({"lanes": lanes} if c.on_device else {})
        return after, metrics | {"return": jnp.mean(finished)}

    def collect(state, number):
        if c.on_device:
            return ()
        policy = ft.partial(sample, on_one_device(state["train"].model, mesh))
        key = jax.random.fold_in(run.key, number)
        return host.rollout(policy, key, c.rollout), host.finished

    state, steps = run_learner(c, run, step, state, shardings, plan=plan, collect=collect)
    exit_if_stopped(steps, c.steps)
    plot_metric(run.directory, "return")
    model = on_one_device(state["train"].model, mesh)
    best = eqx.filter_jit(lambda x, key: jnp.argmax(log_policy(model, x), axis=-1))
    found = mean_return(c.environment, best, episodes=c.episodes, key=run.key)
    report(run.directory, mean_return=found)


def init_fn(c, size, actions, key):
    keys = jax.random.split(key)
    network = lambda out, key: eqx.nn.MLP(size, out, c.width, 2, jnp.tanh, key=key)
    scale = lambda *n: {"mean": jnp.zeros(n), "variance": jnp.ones(n), "count": jnp.ones(())}
    return {
        "networks": {"actor": network(actions, keys[0]), "critic": network("scalar", keys[1])},
        "scales": {"observation": scale(size), "target": scale()},
    }


def apply(model, name, observations):
    """Applies a network to scaled observations, with any leading dimensions."""
    scale = model["scales"]["observation"]
    scaled = lambda x: (x - scale["mean"]) / jnp.sqrt(scale["variance"] + 1e-8)
    signature = "(n)->(m)" if name == "actor" else "(n)->()"
    network = lambda x: model["networks"][name](scaled(x))
    return jnp.vectorize(network, signature=signature)(observations)


def log_policy(model, observations):
    """The logarithm of the probability of each action."""
    return jax.nn.log_softmax(apply(model, "actor", observations))


def values(model, observations):
    """The expected return, of which the critic's output is a scaled version."""
    scale = model["scales"]["target"]
    return scale["mean"] + jnp.sqrt(scale["variance"]) * apply(model, "critic", observations)


def loss_fn(c, model, batch, key):
    logs = log_policy(model, batch["observation"])
    change = jnp.take_along_axis(logs - batch["log_policy"], batch["action"][..., None], axis=-1)
    ratio = jnp.exp(change[..., 0])
    advantage = (batch["advantage"] - batch["advantage"].mean()) / (batch["advantage"].std() + 1e-8)
    limited = jnp.clip(ratio, 1 - c.clip, 1 + c.clip)
    policy_loss = -jnp.mean(jnp.minimum(ratio * advantage, limited * advantage))

    value, variance = values(model, batch["observation"]), model["scales"]["target"]["variance"]
    limit = c.clip * jnp.sqrt(variance)
    near = batch["value"] + jnp.clip(value - batch["value"], -limit, limit)
    errors = jnp.maximum((value - batch["target"]) ** 2, (near - batch["target"]) ** 2)
    entropy = -jnp.mean(jnp.sum(jnp.exp(logs) * logs, axis=-1))
    loss = policy_loss + 0.5 * jnp.mean(errors) / variance - c.entropy * entropy
    return loss, {"entropy": entropy}


@eqx.filter_jit
def sample(model, observations, key):
    return jax.random.categorical(key, log_policy(model, observations))


def learn(c, fit, train, transitions, key):
    """Updates the networks with the transitions of a rollout."""
    model, observation = train.model, transitions["observation"]
    value = values(model, observation)
    advantage = advantages(c, transitions, value, values(model, transitions["next_observation"]))
    data = {
        "observation": observation,
        "action": transitions["action"],
        "log_policy": log_policy(model, observation),
        "value": value,
        "advantage": advantage,
        "target": value + advantage,
    }
    train, metrics = fit(train, shuffled(c, data, key))
    # The scales are those of acting until here.
    scales = {name: merged(scale, data[name]) for name, scale in model["scales"].items()}
    train = eqx.tree_at(lambda t: t.model["scales"], train, scales)
    return train, jax.tree.map(jnp.mean, metrics)


def advantages(c, transitions, value, after):
    """Generalised advantage estimation (Schulman et al., 2016, arXiv:1506.02438, equation 16)."""
    # An episode that was truncated would have gone on, with the value of the next observation.
    future = jnp.where(transitions["terminated"], 0, after)
    errors = transitions["reward"] + c.discount * future - value

    def step(advantage, inputs):
        error, ended = inputs
        advantage = error + c.discount * c.trace * jnp.where(ended, 0, advantage)
        return advantage, advantage

    inputs = errors.T, transitions["ended"].T
    return jax.lax.scan(step, jnp.zeros_like(value[:, 0]), inputs, reverse=True)[1].T


def shuffled(c, data, key):
    """The minibatches of all epochs. Each lane shuffles its own steps, which stay on its device."""
    keys = jax.random.split(key, (c.epochs, c.lanes))
    order = jax.vmap(jax.vmap(lambda key: jax.random.permutation(key, c.rollout)))(keys)
    pick = jax.vmap(jax.vmap(lambda x, order: x[order]), (None, 0))  # for each epoch and lane
    count, size = c.epochs * c.minibatches, c.rollout // c.minibatches

    def split(x):
        x = pick(x, order).reshape(c.epochs, c.lanes, c.minibatches, size, *x.shape[2:])
        return jnp.swapaxes(x, 1, 2).reshape(count, c.lanes, size, *x.shape[4:])

    return jax.tree.map(split, data)


def merged(scale, x):
    """The mean and variance of all rows so far (Chan et al., 1979)."""
    rows = x.reshape(-1, *scale["mean"].shape)
    count = float(len(rows))
    total, change = scale["count"] + count, rows.mean(axis=0) - scale["mean"]
    squares = scale["variance"] * scale["count"] + rows.var(axis=0) * count
    variance = (squares + change**2 * scale["count"] * count / total) / total
    return {"mean": scale["mean"] + change * count / total, "variance": variance, "count": total}


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
