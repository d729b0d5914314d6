"""The replay buffer and the updates of DDPG against their definitions, and runs."""

import json
import math
import types

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from random_models import to_device

import redcoast as rc

NAME = "ddpg"
SMALL = {"num_envs": 8, "rollout": 4, "gradient_steps": 2, "batch_size": 16, "buffer": 128}
SMALL |= {"width": 8, "steps": 3, "warmup": 1, "episodes": 2}


@pytest.mark.integration  # a whole run
@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(
    ("mesh", "on_device"),
    [("1", True), ("2x4", True), ("2x4", False)],
)
def test_a_run_learns_and_reports_the_return(experiment, config, tmp_path, mesh, on_device):
    experiment.main(config(mesh, on_device=on_device))
    (directory,) = tmp_path.iterdir()
    history = rc.read_metrics(directory / "metrics.jsonl")
    assert len(history) == 3
    assert all(math.isfinite(x["loss"]) and not x["skipped"] for x in history)
    found = json.loads((directory / "results.json").read_text())["mean_return"]
    assert -2000 < found < 0
    assert (directory / "return.png").is_file()


@pytest.mark.parametrize("options", [{"batch_size": 12}, {"buffer": 72}])
def test_sizes_that_do_not_divide_are_refused(experiment, config, options, capsys):
    with pytest.raises(SystemExit):
        experiment.main(config(**options))
    assert "--buffer by that x --rollout" in capsys.readouterr().err


def test_environments_that_the_mesh_cannot_split_are_refused(experiment, config, capsys):
    with pytest.raises(SystemExit):
        experiment.main(config(num_envs=3, batch_size=15, buffer=120))
    assert "--num-envs is 3, but --mesh splits it over data x fsdp = 2" in capsys.readouterr().err


def test_each_purpose_has_keys_of_its_own(script):
    """Also after the number of an iteration is folded in, as it is for acting and learning."""
    keys = script("_learner").split_keys(types.SimpleNamespace(key=jax.random.key(0)))
    found = [*keys, *(jax.random.fold_in(key, i) for key in keys for i in range(4))]
    assert len({tuple(jax.random.key_data(key).tolist()) for key in found}) == 5 * 5


def test_a_full_buffer_keeps_the_newest_transitions(script):
    replay = script("_replay")
    buffer = replay.empty_buffer(2, 6, reward=(), action=(3,))
    expected = [[], []]
    for i in range(5):
        reward = np.arange(4.0, dtype=np.float32).reshape(2, 2) + 10 * i
        action = np.broadcast_to(reward[..., None], (2, 2, 3))
        buffer = jax.jit(replay.add)(buffer, {"reward": reward, "action": action, "done": reward})
        for env in range(2):
            expected[env].extend(reward[env].tolist())
            filled = np.asarray(buffer["transitions"]["reward"])[env, : min(len(expected[env]), 6)]
            assert sorted(filled) == expected[env][-6:]
    assert buffer["transitions"].keys() == {"reward", "action"}
    np.testing.assert_array_equal(
        buffer["transitions"]["action"][..., 0], buffer["transitions"]["reward"]
    )


@pytest.mark.thorough
def test_samples_are_of_each_environment_and_never_of_empty_places(script):
    replay = script("_replay")
    buffer = replay.empty_buffer(3, 8, reward=())
    new = {"reward": jnp.arange(1.0, 13.0).reshape(3, 4)}
    found = replay.sample(replay.add(buffer, new), 50, jax.random.key(0))["reward"]
    assert found.shape == (3, 50)
    for drawn, added in zip(found.tolist(), new["reward"].tolist(), strict=True):
        assert {*drawn} == {*added}


@pytest.mark.thorough
def test_an_update_is_that_of_the_paper(experiment, config):
    """The critic follows the reward and the target networks, and the actor the critic."""
    c, rate = config(discount=0.9, tau=0.25), 0.1
    model, target = (experiment.init_fn(c, 3, 2, jax.random.key(i)) for i in (0, 1))
    train = rc.init_state(lambda key: model, optax.sgd(rate), key=jax.random.key(2))
    rng = np.random.default_rng(0)
    floats = lambda *shape: to_device(rng.normal(size=(8, 4, *shape)), np.float32)
    shapes = {"observation": (3,), "action": (2,), "reward": (), "next_observation": (3,)}
    new = {name: floats(*shape) for name, shape in shapes.items()}
    new["terminated"] = to_device(rng.random((8, 4)) < 0.3, np.float32)
    buffer = experiment.add(experiment.empty_buffer(8, 4, terminated=(), **shapes), new)
    key = jax.random.key(3)

    fit = lambda state, batch: rc.train_step(
        state, batch, loss_fn=experiment.loss_fn, optimizer=optax.sgd(rate)
    )
    networks = {"train": train, "target": target}
    found, _ = eqx.filter_jit(experiment.learn)(c, fit, buffer, networks, key)

    batch = experiment.sample(buffer, 2, key)
    rows = jax.tree.map(lambda x: x.reshape(16, *x.shape[2:]), batch)
    joined = lambda *parts: jnp.concatenate(parts)

    def critic_loss(critic):
        def error(seen, action, reward, after, terminated):
            future = target["critic"](joined(after, target["actor"](after)))
            goal = reward + 0.9 * jnp.where(terminated > 0, 0, future)
            return (critic(joined(seen, action)) - goal) ** 2

        names = ("observation", "action", "reward", "next_observation", "terminated")
        return jnp.mean(jax.vmap(error)(*(rows[name] for name in names)))

    def actor_loss(actor):
        value = lambda seen: model["critic"](joined(seen, actor(seen)))
        return -jnp.mean(jax.vmap(value)(rows["observation"]))

    losses = {"critic": critic_loss, "actor": actor_loss}
    for name, loss in losses.items():
        gradient = eqx.filter_grad(loss)(model[name])
        expected = jax.tree.map(lambda x, g: x - rate * g, *map(arrays, (model[name], gradient)))
        average = jax.tree.map(lambda x, y: 0.75 * x + 0.25 * y, arrays(target[name]), expected)
        close(found["train"].model[name], expected)
        close(found["target"][name], average)


def arrays(tree):
    return eqx.filter(tree, eqx.is_inexact_array)


def close(found, expected):
    for a, b in zip(jax.tree.leaves(arrays(found)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.thorough
def test_transitions_stay_on_their_device(experiment, config, collectives):
    assert collectives(experiment, config(on_device=True)) == ["all-reduce"]


@pytest.mark.thorough
def test_actions_are_random_at_first_and_noisy_later(experiment, config):
    c = config(warmup=5, noise_std=0.1)
    model = experiment.init_fn(c, 3, 1, jax.random.key(0))
    seen = jnp.ones((500, 3))
    act = lambda added: experiment.explore(c, model, jnp.int32(added), seen, jax.random.key(1))
    chosen = experiment.actions(model, seen[:1])[0, 0]
    random, noisy = (np.asarray(act(added)) for added in (5 * c.rollout - 1, 5 * c.rollout))
    assert abs(np.std(random) - 1 / math.sqrt(3)) < 0.03
    assert abs(np.mean(random)) < 0.1
    assert np.std(noisy) == pytest.approx(0.1, rel=0.15)
    assert np.mean(noisy) == pytest.approx(float(chosen), abs=0.03)
    assert np.abs(np.concatenate([random, noisy])).max() <= 1
