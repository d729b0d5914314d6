"""Three agents learn to spread over three landmarks (MADDPG, Lowe et al., 2017, arXiv:1706.02275).

Each agent acts on what it observes. In training, its critic knows what all agents observe and do.
For comparison, the same agents are trained with critics that know only their own agent (DDPG).
"""

import dataclasses
import functools as ft
from dataclasses import dataclass, field
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from _common import Run, Started, exit_if_stopped, report, start
from _learner import mesh_of, on_one_device, prepare, run_learner, scan_steps
from _plots import plt
from _replay import add, empty_buffer, sample
from _usage import refuse
from mpe2 import simple_spread_v3

import redcoast as rc

AGENTS, OBSERVED, EPISODE = 3, 18, 25


@dataclass(frozen=True)
class Config:
    lanes: int = 8  # number of environments that are stepped side by side
    updates: int = 20  # number of updates after an episode in each lane
    batch_size: int = 512  # number of transitions in an update
    buffer: int = 100000  # number of the newest transitions that are kept
    noise: float = 0.2  # deviation of the noise that is added to actions of the range -1 to 1
    discount: float = 0.95  # by which a reward counts less for each step that it is later
    decay: float = 0.98  # of the moving averages that are the target networks
    width: int = 64  # width of the hidden layers
    steps: int = 400  # number of episodes in each lane
    learning_rate: float = 1e-3  # learning rate of all networks
    episodes: int = 200  # number of episodes after training, of which the mean return is reported
    run: tyro.conf.OmitArgPrefixes[Run] = field(default_factory=Run)


def main(c: Config) -> None:
    if c.batch_size % c.lanes or c.buffer % (c.lanes * EPISODE):
        refuse(
            f"--batch-size must be divisible by --lanes {c.lanes}, and --buffer by lanes x "
            f"{EPISODE}, the steps of an episode."
        )
    run = start(c, "maddpg")
    models = {name: train(c, run, name) for name in ("central", "independent")}
    policies: dict[str, Any] = {name: ft.partial(act, model) for name, model in models.items()}
    policies["random"] = lambda x, key: jax.random.uniform(key, (*x.shape[:2], 2), minval=-1)
    envs = [simple_spread_v3.parallel_env(continuous_actions=True) for _ in range(c.episodes)]
    returns = {
        name: float(mean_return(play(envs, policy, run.key, seed=2**30)))
        for name, policy in policies.items()
    }
    plot_returns(run.directory, returns["random"])
    report(run.directory, **{f"{name}_return": x for name, x in returns.items()})


def train(c: Config, run: Started, critics: str) -> dict:
    """Trains the agents, each with a `central` or an `independent` critic; returns the networks."""
    if critics == "independent":
        run = dataclasses.replace(run, directory=run.directory / critics)
    inputs = (OBSERVED + 2) * (AGENTS if critics == "central" else 1)
    shapes = {"observation": (AGENTS, OBSERVED), "action": (AGENTS, 2), "reward": (AGENTS,)}
    shapes["next_observation"] = shapes["observation"]
    buffer = empty_buffer(c.lanes, c.buffer // c.lanes, **shapes)
    take = ft.partial(sample, rows=c.batch_size // c.lanes)
    minibatch = jax.eval_shape(lambda key: take(buffer, key=key), run.key)
    minibatch["target"] = minibatch["reward"]
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(c.learning_rate))
    init = ft.partial(init_fn, c, inputs)
    trained, plan, loss = prepare(run, init, optimizer, loss_fn, minibatch)

    mesh = mesh_of(plan)

    def update(buffer, networks, key):
        batch, target = take(buffer, key=key), networks["target"]
        after = batch["next_observation"]
        future = values(target, after, actions(target, after))
        batch["target"] = batch["reward"] + c.discount * future
        options = {"loss_fn": loss, "optimizer": optimizer}
        trained, metrics = rc.train_step(networks["train"], batch, **options)
        target = rc.moving_average(target, trained.model, c.decay)
        return {"train": trained, "target": target}, metrics

    def step(state, transitions):
        keys = jax.random.split(jax.random.fold_in(run.key, state["train"].step), c.updates)
        buffer = add(state["buffer"], transitions)
        networks = {name: state[name] for name in ("train", "target")}
        networks, metrics = scan_steps(ft.partial(update, buffer), networks, keys)
        metrics = jax.tree.map(jnp.mean, metrics) | {"return": mean_return(transitions)}
        return networks | {"buffer": buffer}, metrics

    envs = [simple_spread_v3.parallel_env(continuous_actions=True) for _ in range(c.lanes)]

    def collect(state, number):
        # Episodes are seeded by their number, so a run that is resumed has the same ones.
        policy = ft.partial(explore, c, on_one_device(state["train"].model, mesh))
        key = jax.random.fold_in(run.key, number)
        return (play(envs, policy, key, seed=number * c.lanes),)

    copy = jax.tree.map(lambda x: jnp.copy(x) if eqx.is_array(x) else x, trained.model)
    state = {"train": trained, "target": copy, "buffer": buffer}
    shardings = {"train": plan.shardings, "target": plan.shardings.model}
    shardings["buffer"] = rc.batch_shardings(buffer, mesh)
    state, steps = run_learner(c, run, step, state, shardings, plan=plan, collect=collect)
    exit_if_stopped(steps, c.steps)
    return on_one_device(state["train"].model, mesh)


def init_fn(c, inputs, key):
    """Creates the networks of all agents, stacked along the first dimension."""
    networks = lambda inputs, out, **options: eqx.filter_vmap(
        lambda key: eqx.nn.MLP(inputs, out, c.width, 2, key=key, **options)
    )
    keys = jax.random.split(key, (2, AGENTS))
    actors = networks(OBSERVED, 2, final_activation=jnp.tanh)(keys[0])
    return {"actors": actors, "critics": networks(inputs, "scalar")(keys[1])}


def actions(model, observations):
    """The action of each agent, for observations of shape `... agents observed`."""
    act = eqx.filter_vmap(lambda actor, x: actor(x))
    return jnp.vectorize(ft.partial(act, model["actors"]), signature="(a,n)->(a,m)")(observations)


def values(model, observations, actions):
    """The value of all agents' actions to each agent."""

    def of_agents(known):
        inputs = model["critics"].in_size
        central = jnp.broadcast_to(known.ravel(), (AGENTS, known.size))
        critic = eqx.filter_vmap(lambda critic, x: critic(x))
        return critic(model["critics"], central if inputs == known.size else known)

    known = jnp.concatenate([observations, actions], axis=-1)
    return jnp.vectorize(of_agents, signature="(a,n)->(a)")(known)


def loss_fn(model, batch, key):
    observation, taken = batch["observation"], batch["action"]
    errors = values(model, observation, taken) - batch["target"]
    chosen, fixed = actions(model, observation), rc.stop_gradient(model)
    gain = 0.0
    for i in range(AGENTS):  # each chooses its own action, given those that the others took
        mixed = taken.at[..., i, :].set(chosen[..., i, :])
        gain += jnp.mean(values(fixed, observation, mixed)[..., i])
    return jnp.mean(errors**2) - gain + 1e-3 * jnp.mean(chosen**2)


@eqx.filter_jit
def act(model, observations, key):
    return actions(model, observations)


@eqx.filter_jit
def explore(c, model, observations, key):
    chosen = actions(model, observations)
    return jnp.clip(chosen + c.noise * jax.random.normal(key, chosen.shape), -1, 1)


def play(envs, policy, key, *, seed):
    """Plays an episode in each environment; returns its transitions, of shape `lanes steps ...`."""
    names, taken = envs[0].possible_agents, []
    stack = lambda found: np.array([[x[name] for name in names] for x in found], np.float32)
    after = stack([env.reset(seed=seed + i)[0] for i, env in enumerate(envs)])
    for step_key in jax.random.split(key, EPISODE):
        before, action = after, np.asarray(policy(after, step_key))
        # The environment has an action for each direction: left, right, down and up.
        pushes = np.stack([0 * action, np.maximum(-action, 0), np.maximum(action, 0)], axis=-1)
        pushes = np.concatenate([pushes[..., 0, :1], pushes[..., 0, 1:], pushes[..., 1, 1:]], -1)
        found = [
            env.step(dict(zip(names, x, strict=True))) for env, x in zip(envs, pushes, strict=True)
        ]
        after, reward = (stack([x[i] for x in found]) for i in (0, 1))
        taken.append(
            {"observation": before, "action": action, "reward": reward, "next_observation": after}
        )
    return jax.tree.map(lambda *x: np.stack(x, axis=1), *taken)


def mean_return(transitions):
    """The mean over agents and episodes."""
    return transitions["reward"].sum(axis=1).mean()


def plot_returns(directory, random):
    """Plots the returns in training, averaged over ten steps."""
    if jax.process_index() > 0:  # process 0 has the metrics
        return
    axes = plt.figure().add_subplot(xlabel="episodes in each lane", ylabel="return of an episode")
    for name, of_run in (("central", directory), ("independent", directory / "independent")):
        returns = [x["return"] for x in rc.read_metrics(of_run / "metrics.jsonl")]
        axes.plot(np.convolve(returns, np.full(10, 0.1), "valid"), label=f"{name} critics")
    axes.axhline(random, linestyle="--", color="gray", label="random actions")
    axes.legend()
    plt.savefig(directory / "returns.png", dpi=150)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
