"""Learns to act by an evolution strategy (Salimans et al., 2017, arXiv:1703.03864).

A step plays episodes with many antithetic perturbations of the policy, split over the devices.
Weighted by the ranks of their returns, the perturbations sum up to the gradient of the step.
Nothing is differentiated. Unlike in the paper, there is neither weight decay nor virtual batch
normalisation.
"""

import functools as ft
from dataclasses import dataclass, field

import _options
import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from _common import exit_if_stopped, report, start
from _environments import ENVIRONMENTS, mean_return, sizes
from _options import Positive
from _plots import plot_metric
from jax.flatten_util import ravel_pytree

import redcoast as rc


@dataclass(frozen=True)
class Config:
    environment: str = "CartPole-v1"  # only those written in JAX: CartPole-v1 and Pendulum-v1
    perturbations: int = 64  # number of antithetic pairs in a step: each is added and subtracted
    sigma: Positive = 0.1  # standard deviation of a perturbation
    width: int = 16  # width of the hidden layer
    steps: int = 60  # number of gradient steps
    learning_rate: Positive = 0.05  # learning rate
    episodes: int = 100  # number of episodes after training, of which the mean return is reported
    run: _options.RunOptions = field(default_factory=_options.Run)


def main(c: Config) -> None:
    discrete = c.environment == "CartPole-v1"
    size, actions = sizes(c.environment, discrete=discrete, on_device=True)
    run = start(c, "evolution")
    act = ft.partial(choose_action, discrete)
    train_key, test_key = jax.random.split(run.key)
    state = rc.fit(
        lambda key: eqx.nn.MLP(size, actions, c.width, 1, jnp.tanh, key=key),
        optax.adam(c.learning_rate),
        range(c.perturbations),  # in each step, all of them
        loss_fn=evolution_loss(c.sigma, ft.partial(play, ENVIRONMENTS[c.environment], act)),
        batch_size=c.perturbations,
        steps=c.steps,
        **run.fit_arguments | {"key": train_key},
    )
    exit_if_stopped(int(state.step), c.steps)
    plot_metric(run.directory, "return")

    @eqx.filter_jit
    def trained_policy(observations, key):
        return jax.vmap(act, (None, 0))(state.model, observations)

    test_return = mean_return(c.environment, trained_policy, episodes=c.episodes, key=test_key)
    report(run.directory, mean_return=test_return)


def choose_action(discrete, policy, observation):
    output = policy(observation)
    if discrete:
        return jnp.argmax(output)
    return jnp.tanh(output)


def play(environment, act, policy, key):
    """The return of an episode."""

    def step(state, _):
        env_state, alive, episode_return = state
        action = act(policy, environment.observe(env_state))
        env_state, reward, terminated = environment.step(env_state, action)
        episode_return += jnp.where(alive, reward, 0)
        return (env_state, alive & ~terminated, episode_return), None

    initial = environment.reset(key), jnp.bool_(True), jnp.zeros(())
    (_, _, episode_return), _ = jax.lax.scan(step, initial, length=environment.limit)
    return episode_return


def evolution_loss(sigma, play):
    """The loss is minus the mean of the returns `play(policy, key)` of perturbed policies."""

    def loss_fn(policy, perturbations, key):
        arrays, static = eqx.partition(policy, eqx.is_inexact_array)
        weights, unravel = ravel_pytree(arrays)

        def play_both(index):
            noise_key, play_key = jax.random.split(jax.random.fold_in(key, index))
            noise = sigma * jax.random.normal(noise_key, weights.shape)
            plus = eqx.combine(unravel(weights + noise), static)
            minus = eqx.combine(unravel(weights - noise), static)
            return noise, jnp.stack([play(plus, play_key), play(minus, play_key)])

        noise, returns = jax.vmap(play_both)(perturbations)  # (pairs, weights), (pairs, 2)
        fitness = centred_ranks(returns.ravel()).reshape(returns.shape)
        ascent = (fitness[:, 0] - fitness[:, 1]) @ noise / (returns.size * sigma**2)
        loss = rc.with_gradient(-jnp.mean(returns), policy, unravel(-ascent))
        return loss, {"return": jnp.mean(returns)}

    return loss_fn


def centred_ranks(x):
    """Ranks from -0.5, the lowest, to 0.5. Equal numbers have the average of their ranks."""
    return jnp.sign(x[:, None] - x[None]).sum(axis=1) / (2 * (x.size - 1))


if __name__ == "__main__":
    _options.run(main, Config, __doc__)
