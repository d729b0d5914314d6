"""Learns to act by proximal policy optimisation (PPO, Schulman et al., 2017, arXiv:1707.06347).

Unlike in the paper, the change of a value is clipped too, as in OpenAI Baselines, and observations
and value targets are normalised by running means and variances.
"""

import functools as ft
from dataclasses import dataclass, field
from typing import Any

import _options
import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from _common import exit_if_stopped, report, start
from _environments import ENVIRONMENTS, HostEnvs, mean_return, reset_envs, rollout, sizes
from _learner import mesh_of, on_one_device, prepare, run_learner, split_keys
from _options import Positive, Share, refuse
from _plots import plot_metric

import redcoast as rc

TRAINABLE = {"networks": eqx.is_inexact_array, "normalization": False}


@dataclass(frozen=True)
class Config:
    environment: str = "CartPole-v1"  # any of gymnasium with discrete actions, such as Acrobot-v1
    on_device: bool = False  # use the environment in JAX: acting and learning are one program
    num_envs: int = 16  # number of parallel environments, a multiple of data x fsdp of --mesh
    rollout: int = 512  # number of steps of each environment in an iteration
    epochs: int = 4  # passes over the transitions of an iteration
    minibatches: int = 16  # number of minibatches in a pass; must divide --rollout
    clip: float = 0.2  # epsilon of the clipped objective; values are clipped by epsilon x their std
    discount: Share = 0.995  # discount factor of rewards (gamma)
    gae_lambda: Share = 0.95  # lambda of generalised advantage estimation
    entropy: float = 0.01  # weight of the policy's entropy
    width: int = 64  # width of the hidden layers
    steps: int = 40  # number of iterations: a rollout, then gradient steps on its minibatches
    learning_rate: Positive = 1e-3  # learning rate at the start, from which it decays to zero
    episodes: int = 100  # number of episodes after training, of which the mean return is reported
    run: _options.RunOptions = field(default_factory=_options.Run)


def main(c: Config) -> None:
    size, actions = sizes(c.environment, discrete=True, on_device=c.on_device)
    if c.rollout % c.minibatches:
        refuse(f"--rollout {c.rollout} is not divisible by --minibatches {c.minibatches}.")
    run = start(c, "ppo", split={"--num-envs": c.num_envs})
    keys, host = split_keys(run), HostEnvs(c.environment, c.num_envs)
    rate = optax.linear_schedule(c.learning_rate, 0, c.steps * c.epochs * c.minibatches)
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(rate))
    train, plan, loss = prepare(
        run,
        ft.partial(init_fn, c, size, actions),
        optimizer,
        ft.partial(loss_fn, c),
        minibatch_of_zeros(c, size, actions),
        trainable=TRAINABLE,
    )
    fit = ft.partial(rc.train_steps, loss_fn=loss, optimizer=optimizer, trainable=TRAINABLE)
    mesh = mesh_of(plan)
    environment, envs = None, {}
    if c.on_device:
        environment = ENVIRONMENTS[c.environment]
        envs = reset_envs(environment, keys.envs, c.num_envs)
    state = {"train": train, "envs": envs}
    shardings = {"train": plan.shardings, "envs": rc.batch_shardings(envs, mesh)}

    def step(state, transitions: Any = None, last_return: Any = None):
        train, envs = state["train"], state["envs"]
        if environment:
            key = jax.random.fold_in(keys.acting, train.step)
            policy = ft.partial(sample, train.model)
            envs, transitions = rollout(environment, policy, envs, key, c.rollout)
            last_return = envs["last_return"]
        key = jax.random.fold_in(keys.learning, train.step)
        train, metrics = learn(c, fit, train, transitions, key)
        return {"train": train, "envs": envs}, metrics | {"return": jnp.mean(last_return)}

    def collect(state, number):
        if c.on_device:
            return ()
        policy = ft.partial(sample, on_one_device(state["train"].model, mesh))
        transitions = host.rollout(policy, jax.random.fold_in(keys.acting, number), c.rollout)
        return transitions, host.last_return

    state, steps = run_learner(c, run, step, state, shardings, plan=plan, collect=collect)
    exit_if_stopped(steps, c.steps)
    plot_metric(run.directory, "return")
    model = on_one_device(state["train"].model, mesh)

    @eqx.filter_jit
    def most_likely(observations, key):
        return jnp.argmax(log_policy(model, observations), axis=-1)

    test_return = mean_return(c.environment, most_likely, episodes=c.episodes, key=keys.test)
    report(run.directory, mean_return=test_return)


def minibatch_of_zeros(c, size, actions):
    """A minibatch of the shapes of training: the same number of transitions of each environment."""
    shape = (c.num_envs, c.rollout // c.minibatches)
    return {
        "observation": jnp.zeros((*shape, size)),
        "action": jnp.zeros(shape, int),
        "log_policy": jnp.zeros((*shape, actions)),
        "advantage": jnp.zeros(shape),
        "value": jnp.zeros(shape),
        "target": jnp.zeros(shape),
    }


def init_fn(c, size, actions, key):
    actor_key, critic_key = jax.random.split(key)
    network = lambda out, key: eqx.nn.MLP(size, out, c.width, 2, jnp.tanh, key=key)
    moments = lambda *n: {"mean": jnp.zeros(n), "variance": jnp.ones(n), "count": jnp.ones(())}
    return {
        "networks": {
            "actor": network(actions, actor_key),
            "critic": network("scalar", critic_key),
        },
        "normalization": {"observation": moments(size), "target": moments()},
    }


def normalized(model, observation):
    moments = model["normalization"]["observation"]
    return (observation - moments["mean"]) / jnp.sqrt(moments["variance"] + 1e-8)


def log_policy(model, observations):
    """The logarithm of the probability of each action, for observations with any leading
    dimensions."""
    actor = lambda x: model["networks"]["actor"](normalized(model, x))
    logits = jnp.vectorize(actor, signature="(n)->(m)")(observations)
    return jax.nn.log_softmax(logits)


def values(model, observations):
    """The expected return. The critic's output is normalised as the targets are."""
    critic = lambda x: model["networks"]["critic"](normalized(model, x))
    normalized_values = jnp.vectorize(critic, signature="(n)->()")(observations)
    moments = model["normalization"]["target"]
    return moments["mean"] + jnp.sqrt(moments["variance"]) * normalized_values


def loss_fn(c, model, batch, key):
    """The loss of a minibatch, whose arrays have the shape `num_envs steps ...`."""
    log_probs = log_policy(model, batch["observation"])  # (num_envs, steps, actions)
    change = log_probs - batch["log_policy"]
    change = jnp.take_along_axis(change, batch["action"][..., None], axis=-1)[..., 0]
    ratio = jnp.exp(change)
    advantage = (batch["advantage"] - batch["advantage"].mean()) / (batch["advantage"].std() + 1e-8)
    clipped = jnp.clip(ratio, 1 - c.clip, 1 + c.clip)
    policy_loss = -jnp.mean(jnp.minimum(ratio * advantage, clipped * advantage))

    value = values(model, batch["observation"])
    variance = model["normalization"]["target"]["variance"]
    limit = c.clip * jnp.sqrt(variance)
    clipped_value = batch["value"] + jnp.clip(value - batch["value"], -limit, limit)
    target = batch["target"]
    errors = jnp.maximum((value - target) ** 2, (clipped_value - target) ** 2)
    entropy = -jnp.mean(jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1))
    loss = policy_loss + 0.5 * jnp.mean(errors) / variance - c.entropy * entropy
    return loss, {"entropy": entropy}


@eqx.filter_jit
def sample(model, observations, key):
    return jax.random.categorical(key, log_policy(model, observations))


def learn(c, fit, train, transitions, key):
    """Updates the networks with the transitions of a rollout."""
    model, observation = train.model, transitions["observation"]
    value = values(model, observation)
    next_value = values(model, transitions["next_observation"])
    advantage = advantages(c, transitions, value, next_value)
    data = {
        "observation": observation,
        "action": transitions["action"],
        "log_policy": log_policy(model, observation),
        "advantage": advantage,
        "value": value,
        "target": value + advantage,
    }
    train, metrics = fit(train, shuffled(c, data, key))
    # Until here, the running moments are those with which the policy acted.
    moments = model["normalization"]
    moments = {
        "observation": update_moments(moments["observation"], observation),
        "target": update_moments(moments["target"], data["target"]),
    }
    train = eqx.tree_at(lambda t: t.model["normalization"], train, moments)
    return train, jax.tree.map(jnp.mean, metrics)


def advantages(c, transitions, value, next_value):
    """Generalised advantage estimation (Schulman et al., 2016, arXiv:1506.02438, equation 16)."""
    # An episode that was truncated would have gone on, with the value of the next observation.
    future = jnp.where(transitions["terminated"], 0, next_value)
    errors = transitions["reward"] + c.discount * future - value  # (num_envs, steps)

    def step(advantage, inputs):
        error, done = inputs
        advantage = error + c.discount * c.gae_lambda * jnp.where(done, 0, advantage)
        return advantage, advantage

    inputs = errors.T, transitions["done"].T
    return jax.lax.scan(step, jnp.zeros_like(value[:, 0]), inputs, reverse=True)[1].T


def shuffled(c, data, key):
    """The minibatches of all epochs. The steps of an environment are shuffled on its device."""
    keys = jax.random.split(key, (c.epochs, c.num_envs))
    permute = jax.vmap(jax.vmap(lambda key: jax.random.permutation(key, c.rollout)))
    order = permute(keys)  # (epochs, num_envs, rollout)
    pick = jax.vmap(jax.vmap(lambda x, order: x[order]), (None, 0))  # of each epoch and env
    count, size = c.epochs * c.minibatches, c.rollout // c.minibatches

    def split(x):
        x = pick(x, order).reshape(c.epochs, c.num_envs, c.minibatches, size, *x.shape[2:])
        return jnp.swapaxes(x, 1, 2).reshape(count, c.num_envs, size, *x.shape[4:])

    return jax.tree.map(split, data)


def update_moments(moments, x):
    """The running mean and variance with the rows of `x` (Chan et al., 1979)."""
    rows = x.reshape(-1, *moments["mean"].shape)
    count = float(len(rows))
    total = moments["count"] + count
    change = rows.mean(axis=0) - moments["mean"]
    mean = moments["mean"] + change * count / total
    squares = moments["variance"] * moments["count"] + rows.var(axis=0) * count
    variance = (squares + change**2 * moments["count"] * count / total) / total
    return {"mean": mean, "variance": variance, "count": total}


if __name__ == "__main__":
    _options.run(main, Config, __doc__)
