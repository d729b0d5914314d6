"""The gradient of the evolution strategy, and a run."""

import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import redcoast as rc

NAME = "evolution"
SMALL = {"perturbations": 16, "width": 4, "steps": 2, "episodes": 2}


@pytest.mark.seconds(10)  # a whole run
@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(
    ("mesh", "environment"),
    [
        ("1", "CartPole-v1"),
        *(
            pytest.param("2x4", x, marks=pytest.mark.integration)
            for x in ("CartPole-v1", "Pendulum-v1")
        ),
    ],
)
@pytest.mark.thorough
def test_a_run_reports_the_return(experiment, config, tmp_path, mesh, environment):
    experiment.main(config(mesh, environment=environment))
    (directory,) = tmp_path.iterdir()
    history = rc.read_metrics(directory / "metrics.jsonl")
    assert [-x["loss"] for x in history] == [x["return"] for x in history]
    low, high = (8, 500) if environment == "CartPole-v1" else (-2000, 0)
    assert low <= json.loads((directory / "results.json").read_text())["mean_return"] <= high
    assert (directory / "return.png").is_file()


def test_other_environments_are_refused(experiment, config, capsys):
    with pytest.raises(SystemExit):
        experiment.main(config(environment="Acrobot-v1"))
    assert (
        "Acrobot-v1 is not written in JAX; CartPole-v1, Pendulum-v1 are." in capsys.readouterr().err
    )


def test_equal_returns_have_the_average_of_their_ranks(experiment):
    returns = np.random.default_rng(0).integers(8, size=30).astype(np.float32)
    actual = jax.jit(experiment.centred_ranks)(jnp.asarray(returns))
    ranks = stats.rankdata(returns, method="average")  # from 1
    np.testing.assert_allclose(actual, (ranks - 1) / 29 - 0.5, atol=1e-6)
    np.testing.assert_array_equal(experiment.centred_ranks(jnp.full(5, 500.0)), np.zeros(5))


@pytest.mark.thorough
def test_the_gradient_is_that_of_the_expected_return(experiment, script, config, monkeypatch):
    """In an environment of one step, whose return is a linear function of the action."""
    seen = []

    def fit(init_fn, optimizer, examples, *, loss_fn, **options):
        seen.append((init_fn, loss_fn))
        raise KeyboardInterrupt

    environments = script("_environments")
    slope = jnp.array([3.0])
    one = environments.Environment(
        reset=lambda key: jnp.ones(3),
        step=lambda env_state, action: (env_state, slope @ action, jnp.bool_(True)),
        observe=lambda env_state: env_state,
        limit=1,
    )
    monkeypatch.setitem(environments.ENVIRONMENTS, "Pendulum-v1", one)
    monkeypatch.setattr(rc, "fit", fit)
    with pytest.raises(KeyboardInterrupt):
        experiment.main(config(environment="Pendulum-v1", sigma=0.02))
    ((init_fn, loss_fn),) = seen
    policy = init_fn(jax.random.key(0))
    args = (policy, jnp.arange(4000), jax.random.key(1))
    actual = eqx.filter_jit(eqx.filter_grad(loss_fn, has_aux=True))(*args)[0]
    expected = eqx.filter_grad(lambda p: -slope @ jnp.tanh(p(jnp.ones(3))))(policy)
    actual, expected = (
        np.concatenate([np.ravel(x) for x in jax.tree.leaves(eqx.filter(t, eqx.is_array))])
        for t in (actual, expected)
    )
    # Ranks keep the direction of the gradient, and not its length.
    cosine = actual @ expected / np.linalg.norm(actual) / np.linalg.norm(expected)
    assert cosine > 0.98
