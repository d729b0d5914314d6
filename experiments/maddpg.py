"""Three agents learn to spread over three landmarks (MADDPG, Lowe et al., 2017, arXiv:1706.02275).

Each agent acts on its own observation. In training, its critic is centralised: it is given the
observations and actions of all agents. For comparison, the same agents are trained with critics
that are given only those of their own agent (independent DDPG).

The paper trains on more episodes, with actions that are drawn from a softmax. Here, actions are
forces, whose squares are penalised with a weight of 1e-3, and Gaussian noise is added to explore.
Half of a reward is the agent's own and half is shared (`local_ratio` 0.5, the default of mpe2).
"""

import dataclasses
import functools as ft
from dataclasses import dataclass, field
from typing import Any

import _options
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _common import Started, confidence_95, exit_if_stopped, report, start
from _extras import from_extra
from _learner import (
    copy_arrays,
    mesh_of,
    on_one_device,
    prepare,
    run_learner,
    scan_steps,
    split_keys,
)
from _options import Positive, Share, refuse
from _plots import plt, read_metric
from _replay import add, empty_buffer, sample

import redcoast as rc

with from_extra("rl"):
    from mpe2 import simple_spread_v3

AGENTS, OBSERVED, EPISODE = 3, 18, 25
TRAINING, TESTS = 0, 1  # streams of the seeds of episodes


@dataclass(frozen=True)
class Config:
    num_envs: int = 8  # number of parallel environments, a multiple of data x fsdp of --mesh
    gradient_steps: int = 20  # number of gradient steps in an iteration
    batch_size: int = 512  # number of transitions in a gradient step, a multiple of --num-envs
    buffer: int = 100000  # number of the newest transitions that are kept, of all environments
    noise_std: float = 0.2  # standard deviation of the noise on actions, which are from -1 to 1
    discount: Share = 0.95  # discount factor of rewards (gamma)
    tau: Share = 0.02  # rate at which target networks approach the trained ones, from 0 to 1
    width: int = 64  # width of the hidden layers
    steps: int = 400  # number of iterations: an episode in each environment, then gradient steps
    learning_rate: Positive = 1e-3  # learning rate of all networks
    episodes: int = 200  # number of episodes after training; returns are means over the agents
    run: _options.RunOptions = field(default_factory=_options.Run)


def main(c: Config) -> None:
    if c.batch_size % c.num_envs or c.buffer % (c.num_envs * EPISODE):
        refuse(
            f"--batch-size must be divisible by --num-envs {c.num_envs}, and --buffer by "
            f"{c.num_envs} x {EPISODE}, the steps of an episode in each environment."
        )
    run = start(c, "maddpg", split={"--num-envs": c.num_envs})
    centralised_model = train(c, run, AGENTS)
    apart = dataclasses.replace(run, directory=run.directory / "independent")
    independent_model = train(c, apart, 1)
    envs, seeds = make_envs(c.episodes), episode_seeds(c, TESTS, 0, c.episodes)

    def test_returns(policy):  # from the same initial states for each policy
        return episode_returns(play(envs, policy, split_keys(run).test, seeds))

    centralised = test_returns(ft.partial(act, centralised_model))
    independent = test_returns(ft.partial(act, independent_model))
    random = test_returns(lambda x, key: jax.random.uniform(key, (*x.shape[:2], 2), minval=-1))
    gain = centralised - independent
    plot_returns(run.directory, random.mean())
    report(
        run.directory,
        centralised_return=float(centralised.mean()),
        independent_return=float(independent.mean()),
        random_return=float(random.mean()),
        gain=float(gain.mean()),
        confidence_95=confidence_95(gain),
    )


def train(c: Config, run: Started, agents: int) -> dict:
    """Trains agents whose critics are given the observations and actions of all `AGENTS`, or of
    their own agent alone (1); returns their networks."""
    keys, envs = split_keys(run), make_envs(c.num_envs)
    inputs = agents * (OBSERVED + 2)
    buffer = empty_buffer(
        c.num_envs,
        c.buffer // c.num_envs,
        observation=(AGENTS, OBSERVED),
        action=(AGENTS, 2),
        reward=(AGENTS,),
        next_observation=(AGENTS, OBSERVED),
    )
    minibatch = jax.eval_shape(lambda k: sample(buffer, c.batch_size // c.num_envs, k), run.key)
    minibatch["target"] = minibatch["reward"]
    optimizer = optax.chain(clip_networks(0.5), optax.adam(c.learning_rate))
    init = ft.partial(init_fn, c, inputs)
    trained, plan, loss = prepare(run, init, optimizer, loss_fn, minibatch)
    update = ft.partial(learn, c, ft.partial(rc.train_step, loss_fn=loss, optimizer=optimizer))
    mesh = mesh_of(plan)

    def step(state, transitions):
        key = jax.random.fold_in(keys.learning, state["train"].step)
        buffer = add(state["buffer"], transitions)
        networks = {"train": state["train"], "target": state["target"]}
        draws = jax.random.split(key, c.gradient_steps)
        networks, metrics = scan_steps(ft.partial(update, buffer), networks, draws)
        metrics = jax.tree.map(jnp.mean, metrics) | {"return": episode_returns(transitions).mean()}
        return networks | {"buffer": buffer}, metrics

    def collect(state, number):
        policy = ft.partial(explore, c, on_one_device(state["train"].model, mesh))
        key = jax.random.fold_in(keys.acting, number)
        seeds = episode_seeds(c, TRAINING, number, c.num_envs)
        return (play(envs, policy, key, seeds),)

    state = {"train": trained, "target": copy_arrays(trained.model), "buffer": buffer}
    shardings = {"train": plan.shardings, "target": plan.shardings.model}
    shardings["buffer"] = rc.batch_shardings(buffer, mesh)
    state, steps = run_learner(c, run, step, state, shardings, plan=plan, collect=collect)
    exit_if_stopped(steps, c.steps)
    return on_one_device(state["train"].model, mesh)


def init_fn(c, inputs, key):
    """Creates the networks of all agents, stacked along the first dimension."""

    @eqx.filter_vmap
    def actors(key):
        return eqx.nn.MLP(OBSERVED, 2, c.width, 2, final_activation=jnp.tanh, key=key)

    @eqx.filter_vmap
    def critics(key):
        return eqx.nn.MLP(inputs, "scalar", c.width, 2, key=key)

    actor_keys, critic_keys = jax.random.split(key, (2, AGENTS))
    return {"actors": actors(actor_keys), "critics": critics(critic_keys)}


def clip_networks(norm):
    """Clips the gradient of each network of each agent by its own norm, as if they were trained
    separately."""
    clip = optax.clip_by_global_norm(norm)
    of_agents = jax.vmap(lambda gradient: clip.update(gradient, clip.init(gradient))[0])

    def update(gradients: Any, params: Any) -> Any:
        return {name: of_agents(gradient) for name, gradient in gradients.items()}

    return optax.stateless(update)


def actions(model, observations):
    """The action of each agent, for observations of shape `... agents observed`."""
    act = eqx.filter_vmap(lambda actor, x: actor(x))
    return jnp.vectorize(ft.partial(act, model["actors"]), signature="(a,n)->(a,m)")(observations)


def values(model, observations, actions):
    """The value of all agents' actions to each agent."""
    return critics(model, observations, jnp.expand_dims(actions, -3))


def critics(model, observations, actions):
    """The value that the critic of each agent gives to the actions that it sees, of shape
    `... critics agents 2`; with 1 critic, all see the same ones."""

    def of_agents(pairs):  # of an observation and an action, (critics, agents, observed + 2)
        inputs = pairs.reshape(AGENTS, -1)
        if model["critics"].in_size != inputs.shape[1]:  # each is given its own agent alone
            inputs = pairs[jnp.arange(AGENTS), jnp.arange(AGENTS)]
        return eqx.filter_vmap(lambda critic, x: critic(x))(model["critics"], inputs)

    shape = (*observations.shape[:-2], AGENTS, AGENTS)
    observations = jnp.broadcast_to(jnp.expand_dims(observations, -3), (*shape, OBSERVED))
    actions = jnp.broadcast_to(actions, (*shape, 2))
    pairs = jnp.concatenate([observations, actions], axis=-1)
    return jnp.vectorize(of_agents, signature="(a,b,n)->(a)")(pairs)


def loss_fn(model, batch, key):
    """The sum over agents of the losses of their actors and critics."""
    observation = batch["observation"]  # (num_envs, rows, agents, observed)
    errors = values(model, observation, batch["action"]) - batch["target"]
    action = actions(model, observation)
    # Each agent chooses its own action, given those that the others took.
    own = jnp.eye(AGENTS, dtype=bool)[..., None]
    mixed = jnp.where(own, jnp.expand_dims(action, -3), jnp.expand_dims(batch["action"], -3))
    gain = AGENTS * jnp.mean(critics(rc.stop_gradient(model), observation, mixed))
    return AGENTS * jnp.mean(errors**2) - gain + 1e-3 * AGENTS * jnp.mean(action**2)


def learn(c, fit, buffer, networks, key):
    """Takes a gradient step, and moves the target networks by tau."""
    batch, target = sample(buffer, c.batch_size // c.num_envs, key), networks["target"]
    after = batch["next_observation"]
    # Episodes are truncated and never terminated, so each transition has a future.
    future = values(target, after, actions(target, after))
    batch["target"] = batch["reward"] + c.discount * future
    train, metrics = fit(networks["train"], batch)
    return {"train": train, "target": rc.moving_average(target, train.model, 1 - c.tau)}, metrics


@eqx.filter_jit
def act(model, observations, key):
    return actions(model, observations)


@eqx.filter_jit
def explore(c, model, observations, key):
    action = actions(model, observations)
    noise = c.noise_std * jax.random.normal(key, action.shape)
    return jnp.clip(action + noise, -1, 1)


def make_envs(count):
    return [simple_spread_v3.parallel_env(continuous_actions=True) for _ in range(count)]


def episode_seeds(c, stream, number, count):
    """The seeds of the initial states of episodes, which are the same after a resume."""
    sequence = np.random.SeedSequence(c.run.seed, spawn_key=(stream, number))
    return sequence.generate_state(count).tolist()


def play(envs, policy, key, seeds):
    """Plays an episode in each environment; returns its transitions, of shape `envs steps ...`."""
    names = envs[0].possible_agents
    observation = np.zeros((len(envs), AGENTS, OBSERVED), np.float32)
    for i, (env, seed) in enumerate(zip(envs, seeds, strict=True)):
        observation[i] = [*map(env.reset(seed=seed)[0].get, names)]
    steps = []
    for step_key in jax.random.split(key, EPISODE):
        action = np.asarray(policy(observation, step_key))  # (envs, agents, 2)
        # The environment has an action for each direction: none, left, right, down and up.
        none, negative, positive = 0 * action, np.maximum(-action, 0), np.maximum(action, 0)
        forces = [none[..., 0], negative[..., 0], positive[..., 0]]
        forces = np.stack([*forces, negative[..., 1], positive[..., 1]], axis=-1)
        after = np.zeros_like(observation)
        reward = np.zeros(observation.shape[:2], np.float32)
        for i, env in enumerate(envs):
            of_agents, rewards, *_ = env.step(dict(zip(names, forces[i], strict=True)))
            after[i] = [*map(of_agents.get, names)]
            reward[i] = [*map(rewards.get, names)]
        steps.append(
            {
                "observation": observation,
                "action": action,
                "reward": reward,
                "next_observation": after,
            }
        )
        observation = after
    return jax.tree.map(lambda *x: np.stack(x, axis=1), *steps)


def episode_returns(transitions):
    """The return of each episode, as a mean over the agents."""
    return transitions["reward"].sum(axis=1).mean(axis=1)


def plot_returns(directory, random):
    """Plots the returns in training, averaged over the last ten iterations."""
    if jax.process_index() > 0:  # process 0 has the metrics
        return
    axes = plt.figure().add_subplot(xlabel="iteration", ylabel="return of an episode")
    runs = {"centralised": directory, "independent": directory / "independent"}
    for name, of_run in runs.items():
        _, returns = read_metric(of_run, "return")
        count = min(10, len(returns))
        means = np.convolve(returns, np.full(count, 1 / count), "valid")
        axes.plot(range(count, len(returns) + 1), means, label=f"{name} critics")
    axes.axhline(random, linestyle="--", color="gray", label="random actions")
    axes.legend()
    plt.savefig(directory / "returns.png", dpi=150)


if __name__ == "__main__":
    _options.run(main, Config, __doc__)
