"""Runs that make their own data, killed and resumed: environments, buffers, moments and keys."""

import json
import signal
import subprocess
import sys
import time

import pytest
from paths import EXPERIMENTS

import redcoast as rc

pytestmark = pytest.mark.integration
SMALL = {
    "ppo": ["--on-device", "--num-envs", 8, "--rollout", 16, "--minibatches", 2, "--epochs", 2],
    "ddpg": ["--on-device", "--rollout", 4, "--buffer", 256, "--warmup", 10],
    "maddpg": ["--batch-size", 32, "--buffer", 1000, "--gradient-steps", 2],
}


def start(name, directory, *options):
    given = ["--local-devices", 8, "--mesh", "2x4", "--width", 16, "--episodes", 4, "--steps", 40]
    command = [EXPERIMENTS / f"{name}.py", "--directory", directory, *SMALL[name], *given, *options]
    return subprocess.Popen([sys.executable, *map(str, command)], stderr=subprocess.PIPE)


def finish(name, directory, *options):
    process = start(name, directory, *options)
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors.decode()
    (run,) = directory.iterdir()
    history = rc.read_metrics(run / "metrics.jsonl")
    losses = {x["step"]: (x["loss"], x["grad_norm"]) for x in history}
    assert sorted(losses) == [*range(1, 41)]
    return losses, json.loads((run / "results.json").read_text())


@pytest.mark.parametrize("name", SMALL)
def test_a_killed_run_resumes_bit_for_bit(name, tmp_path):
    expected = finish(name, tmp_path / "whole")
    process, deadline = start(name, tmp_path / "killed"), time.monotonic() + 600
    while not list((tmp_path / "killed").glob("*/checkpoints/16")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not list((tmp_path / "killed").glob("*/checkpoints/40"))
    assert finish(name, tmp_path / "killed", "--resume") == expected
