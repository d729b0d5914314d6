"""Learns to act by an evolution strategy (Salimans et al., 2017, arXiv:1703.03864).

A step plays episodes with many perturbations of the policy, split over the devices. Weighted by the
ranks of their returns, the perturbations sum up to the gradient of the step. Nothing is
differentiated.
"""

from dataclasses import dataclass, field

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from _common import Run, exit_if_stopped, report, start
from _environments import ENVIRONMENTS, mean_return, sizes
from _plots import plot_metric
from jax.flatten_util import ravel_pytree

import redcoast as rc


@dataclass(frozen=True)
class Config:
    environment: str = "CartPole-v1"  # one of those written in JAX: CartPole-v1, Pendulum-v1
    pairs: int = 64  # number of perturbations in a step, each of which is added and subtracted
    deviation: float = 0.1  # standard deviation of a perturbation
    width: int = 16  # width of the hidden layer
    steps: int = 60  # number of training steps
    learning_rate: float = 0.05  # learning rate
    episodes: int = 100  # number of episodes after training, of which the mean return is reported
    run: tyro.conf.OmitArgPrefixes[Run] = field(default_factory=Run)


def main(c: Config) -> None:
    discrete = c.environment == "CartPole-v1"
    size, actions = sizes(c.environment, discrete=discrete, on_device=True)
    run, environment = start(c, "evolution"), ENVIRONMENTS[c.environment]

    def init_fn(key):
        return eqx.nn.MLP(size, actions, c.width, 1, jnp.tanh, key=key)

    def act(policy, observation):
        output = policy(observation)
        return jnp.argmax(output) if discrete else jnp.tanh(output)

    def play(policy, key):
        """The return of an episode."""

        def step(state, _):
            physics, alive, total = state
            action = act(policy, environment.observe(physics))
            physics, reward, terminated = environment.step(physics, action)
            return (physics, alive & ~terminated, total + jnp.where(alive, reward, 0)), None

        first = environment.reset(key), jnp.bool_(True), jnp.zeros(())
        return jax.lax.scan(step, first, length=environment.limit)[0][2]

    def loss_fn(policy, pairs, key):
        arrays, static = eqx.partition(policy, eqx.is_inexact_array)
        weights, unravel = ravel_pytree(arrays)

        def play_pair(index):
            noise_key, play_key = jax.random.split(jax.random.fold_in(key, index))
            noise = c.deviation * jax.random.normal(noise_key, weights.shape)
            perturbed = lambda sign: eqx.combine(unravel(weights + sign * noise), static)
            return noise, jnp.stack([play(perturbed(sign), play_key) for sign in (1, -1)])

        noise, returns = jax.vmap(play_pair)(pairs)
        ranks = jnp.argsort(jnp.argsort(returns.ravel())).reshape(returns.shape)
        fitness = ranks / (returns.size - 1) - 0.5
        ascent = (fitness[:, 0] - fitness[:, 1]) @ noise / (returns.size * c.deviation**2)
        loss = rc.with_gradient(-jnp.mean(returns), policy, unravel(-ascent))
        return loss, {"return": jnp.mean(returns)}

    state = rc.fit(
        init_fn,
        optax.adam(c.learning_rate),
        range(c.pairs),  # in each step, all pairs of perturbations
        collate_fn=np.array,
        loss_fn=loss_fn,
        batch_size=c.pairs,
        steps=c.steps,
        **run.fit_arguments,
    )

    exit_if_stopped(int(state.step), c.steps)
    plot_metric(run.directory, "return")
    policy = eqx.filter_jit(
        lambda observations, key: jax.vmap(act, (None, 0))(state.model, observations)
    )
    found = mean_return(c.environment, policy, episodes=c.episodes, key=run.key)
    report(run.directory, mean_return=found)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
