"""Learns continuous actions by DDPG (Lillicrap et al., 2016, arXiv:1509.02971).

In the paper, the noise on actions is an Ornstein-Uhlenbeck process, the networks have batch
normalisation, and the actor's learning rate is lower than the critic's. Here, the noise is
Gaussian, there is no normalisation, and both networks have the same learning rate.

The replay buffer is on the devices. The transitions of an environment stay on its device, and a
minibatch has the same number of transitions of each environment.
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
from _learner import (
    copy_arrays,
    mesh_of,
    on_one_device,
    prepare,
    run_learner,
    scan_steps,
    split_keys,
)
from _options import FromZero, Positive, Share, refuse
from _plots import plot_metric
from _replay import add, empty_buffer, sample

import redcoast as rc


@dataclass(frozen=True)
class Config:
    environment: str = "Pendulum-v1"  # any of gymnasium with continuous actions
    on_device: bool = False  # use the environment in JAX: acting and learning are one program
    num_envs: int = 8  # number of parallel environments, a multiple of data x fsdp of --mesh
    rollout: int = 8  # number of steps of each environment in an iteration
    gradient_steps: int = 32  # number of gradient steps in an iteration
    batch_size: int = 128  # number of transitions in a gradient step, a multiple of --num-envs
    buffer: int = 16000  # number of the newest transitions that are kept, of all environments
    warmup: FromZero = 15  # first iterations, with random actions; they take gradient steps too
    noise_std: float = 0.1  # standard deviation of the noise on actions, which are from -1 to 1
    discount: Share = 0.98  # discount factor of rewards (gamma)
    tau: Share = 0.01  # rate at which target networks approach the trained ones, from 0 to 1
    width: int = 128  # width of the hidden layers
    steps: int = 250  # number of iterations: a rollout, then gradient steps
    learning_rate: Positive = 1e-3  # learning rate of both networks
    episodes: int = 100  # number of episodes after training, of which the mean return is reported
    run: _options.RunOptions = field(default_factory=_options.Run)


def main(c: Config) -> None:
    size, count = sizes(c.environment, discrete=False, on_device=c.on_device)
    if c.batch_size % c.num_envs or c.buffer % (c.num_envs * c.rollout):
        refuse("--batch-size must be divisible by --num-envs, and --buffer by that x --rollout.")
    run = start(c, "ddpg", split={"--num-envs": c.num_envs})
    keys, host = split_keys(run), HostEnvs(c.environment, c.num_envs)
    buffer, optimizer = make_buffer(c, size, count), optax.adam(c.learning_rate)
    minibatch = jax.eval_shape(lambda k: sample(buffer, c.batch_size // c.num_envs, k), run.key)
    minibatch["target"] = minibatch["reward"]
    train, plan, loss = prepare(
        run, ft.partial(init_fn, c, size, count), optimizer, loss_fn, minibatch
    )
    update = ft.partial(learn, c, ft.partial(rc.train_step, loss_fn=loss, optimizer=optimizer))
    mesh = mesh_of(plan)
    environment, envs = None, {}
    if c.on_device:
        environment = ENVIRONMENTS[c.environment]
        envs = reset_envs(environment, keys.envs, c.num_envs)

    def step(state, transitions: Any = None, last_return: Any = None):
        train, envs = state["train"], state["envs"]
        if environment:
            key = jax.random.fold_in(keys.acting, train.step)
            policy = ft.partial(explore, c, train.model, state["buffer"]["added"])
            envs, transitions = rollout(environment, policy, envs, key, c.rollout)
            last_return = envs["last_return"]
        buffer = add(state["buffer"], transitions)
        networks = {"train": train, "target": state["target"]}
        draws = jax.random.split(jax.random.fold_in(keys.learning, train.step), c.gradient_steps)
        networks, metrics = scan_steps(ft.partial(update, buffer), networks, draws)
        metrics = jax.tree.map(jnp.mean, metrics) | {"return": jnp.mean(last_return)}
        return networks | {"buffer": buffer, "envs": envs}, metrics

    def collect(state, number):
        if c.on_device:
            return ()
        model, added = on_one_device((state["train"].model, state["buffer"]["added"]), mesh)
        policy = ft.partial(explore, c, model, added)
        transitions = host.rollout(policy, jax.random.fold_in(keys.acting, number), c.rollout)
        return transitions, host.last_return

    target = copy_arrays(train.model)
    state = {"train": train, "target": target, "buffer": buffer, "envs": envs}
    shardings = {"train": plan.shardings, "target": plan.shardings.model}
    shardings |= rc.batch_shardings({"buffer": buffer, "envs": envs}, mesh)
    state, steps = run_learner(c, run, step, state, shardings, plan=plan, collect=collect)
    exit_if_stopped(steps, c.steps)
    plot_metric(run.directory, "return")
    model = on_one_device(state["train"].model, mesh)
    greedy = eqx.filter_jit(lambda observations, key: actions(model, observations))
    test_return = mean_return(c.environment, greedy, episodes=c.episodes, key=keys.test)
    report(run.directory, mean_return=test_return)


def make_buffer(c, size, count):
    shapes = {"observation": (size,), "action": (count,), "next_observation": (size,)}
    return empty_buffer(c.num_envs, c.buffer // c.num_envs, reward=(), terminated=(), **shapes)


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
    """Acts with noise, and at random in the warmup."""
    greedy = actions(model, observations)
    noise_key, random_key = jax.random.split(key)
    noisy = greedy + c.noise_std * jax.random.normal(noise_key, greedy.shape)
    random = jax.random.uniform(random_key, greedy.shape, minval=-1, maxval=1)
    return jnp.clip(jnp.where(added < c.warmup * c.rollout, random, noisy), -1, 1)


def learn(c, fit, buffer, networks, key):
    """Takes a gradient step, and moves the target networks by tau."""
    batch, target = sample(buffer, c.batch_size // c.num_envs, key), networks["target"]
    after = batch["next_observation"]
    future = (1 - batch["terminated"]) * values(target, after, actions(target, after))
    batch["target"] = batch["reward"] + c.discount * future
    train, metrics = fit(networks["train"], batch)
    return {"train": train, "target": rc.moving_average(target, train.model, 1 - c.tau)}, metrics


if __name__ == "__main__":
    _options.run(main, Config, __doc__)
