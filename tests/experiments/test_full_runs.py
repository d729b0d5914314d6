"""The experiments as they are: what they learn, on any mesh, interrupted or not."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from paths import EXPERIMENTS
from PIL import Image

import redcoast as rc

sys.path.append(str(EXPERIMENTS / "benchmarks"))
from examples import EXAMPLES, run

pytestmark = pytest.mark.experiments
NAMES = [example.name for example in EXAMPLES]
SHORT = 20


def run_short(name, directory, *options):
    """Runs an experiment for few steps on emulated devices; returns its output and its losses."""
    script = str(EXPERIMENTS / f"{name}.py")
    command = [sys.executable, script, "--directory", directory, "--local-devices", "8", *options]
    environment = os.environ | {"XLA_FLAGS": "--xla_backend_optimization_level=0"}
    result = subprocess.run(
        [*map(str, command)], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    (file,) = directory.glob("*/metrics.jsonl")
    return result.stdout, {x["step"]: x["loss"] for x in rc.read_metrics(file) if "loss" in x}


@pytest.mark.parametrize(
    ("example", "seed"),
    [pytest.param(x, seed, id=f"{x.name}-{seed}") for x in EXAMPLES for seed in x.seeds],
)
def test_every_seed_reaches_the_threshold(example, seed, tmp_path):
    results = run(example.name, seed, tmp_path)
    assert example.reached(results), results
    (directory,) = tmp_path.iterdir()
    with Image.open(directory / example.plot) as plot:
        plot.verify()
    assert (directory / "plan.txt").is_file()
    assert (directory / example.picture).is_file()


@pytest.mark.parametrize("example", EXAMPLES, ids=NAMES)
def test_losses_are_the_same_on_every_mesh(example, tmp_path, monkeypatch):
    options = ["--steps", SHORT, *(example.double or ())]
    monkeypatch.setenv("JAX_ENABLE_X64", str(example.double is not None))
    losses = {
        mesh: run_short(example.name, tmp_path / mesh, "--mesh", mesh, *options)[1]
        for mesh in ("1", "8", "2x4")
    }
    assert [*losses["1"]] == [*range(1, SHORT + 1)]
    for mesh in ("8", "2x4"):
        actual, expected = ([*losses[x].values()] for x in (mesh, "1"))
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["ddpg", "maddpg"])
def test_meshes_differ_no_more_than_weights_that_differ_by_rounding(name, tmp_path):
    """With the default options, whose gradient steps amplify rounding in float64 too."""
    script, out = EXPERIMENTS / "benchmarks" / "rounding.py", tmp_path / "differences.json"
    command = [sys.executable, str(script), "--names", name, "--out", str(out)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    actual = {k: np.maximum.accumulate(x) for k, x in json.loads(out.read_text())[name].items()}
    changed = actual.pop("changed weights")
    assert changed[6] < 1e-12  # a difference of the programs would be seen here
    assert changed[-1] > 1e-4
    assert actual.keys() == {"8", "2x4"}
    for differences in actual.values():
        assert len(differences) == SHORT
        assert (differences < 1e-12 + 10 * changed).all()


@pytest.mark.parametrize("name", NAMES)
def test_runs_resume_and_log_to_wandb_without_an_account(name, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_MODE", "offline")
    runs = tmp_path / "runs"
    run_short(name, runs, "--mesh", "2x4", "--steps", 4)
    output, losses = run_short(name, runs, "--mesh", "2x4", "--steps", 6, "--resume", "--wandb")
    assert "Resumed at step 4" in output
    assert [*losses] == [1, 2, 3, 4, 5, 6]
    assert list(tmp_path.glob("**/*.wandb"))
    (results,) = runs.glob("*/results.json")
    assert all(np.isfinite(x) for x in json.loads(results.read_text()).values())
