"""Post-training that is killed, with answers that have not ended, and resumed."""

import json
import signal
import subprocess
import sys
import time

import jax
import pytest
from paths import EXPERIMENTS
from serve_helpers import byte_level

import redcoast as rc
from redcoast.models import Llama, LlamaConfig

pytestmark = pytest.mark.integration
ROLLOUTS = ["--new-tokens", 1, "--steps", 20]
# So many steps of imitation that some answers are right.
GRPO = ["--imitation-steps", 150, "--prompts", 8, "--samples", 8, *ROLLOUTS]
OPTIONS = {
    "grpo": GRPO,
    "grpo exact": [*GRPO, "--exact"],
    "distill_on_policy": [
        *("--imitation-steps", 2, "--teacher-steps", 2, "--width", 32, "--batch-size", 16),
        *ROLLOUTS,
    ],
    "preferences": ["--imitation-steps", 2, "--pairs", 160, "--batch-size", 16, "--steps", 20],
    "sft": ["--seq", 32, "--batch-size", 8, "--steps", 20, "--new-tokens", 4],
}


def start(name, directory, *options):
    script, *_ = name.split()
    given = ["--local-devices", 8, "--mesh", "2x4", "--directory", directory]
    command = [EXPERIMENTS / f"{script}.py", *OPTIONS[name], *given, *options]
    return subprocess.Popen([sys.executable, *map(str, command)], stderr=subprocess.PIPE)


def finish(name, directory, *options):
    """The metrics of all steps, and the results."""
    process = start(name, directory, *options)
    _, errors = process.communicate(timeout=900)
    assert process.returncode == 0, errors.decode()
    (run,) = directory.iterdir()
    names = ("loss", "grad_norm", "reward", "length", "kl")
    history = [x for x in rc.read_metrics(run / "metrics.jsonl") if "loss" in x]
    metrics = {x["step"]: [x.get(name) for name in names] for x in history}
    assert sorted(metrics) == [*range(1, 21)]
    assert any(x["grad_norm"] > 0 for x in history)
    return metrics, json.loads((run / "results.json").read_text())


def options_of(name, directory):
    """What else a script needs: a model of bytes and texts, for `sft.py`."""
    if name != "sft":
        return []
    sizes = LlamaConfig(256, 32, 1, 2, 2, 64, eos=(0,))
    rc.save_pretrained(Llama(sizes, key=jax.random.key(0)), directory / "tiny")
    byte_level().save(str(directory / "tiny" / "tokenizer.json"))
    text = directory / "text.txt"
    text.write_text("\n\n".join(f"The square of {i} is {i * i}, and no other." for i in range(48)))
    return ["--weights", directory / "tiny", "--text", text]


def saved_in(directory):
    """The finished checkpoints of the runs in a directory, and not one that is being written."""
    paths = directory.glob("*/checkpoints/*")
    return sorted(
        (path for path in paths if path.name.isdecimal()), key=lambda path: int(path.name)
    )


@pytest.mark.parametrize("name", OPTIONS)
def test_a_killed_run_has_the_bits_of_one_that_was_not(name, tmp_path):
    options = options_of(name, tmp_path)
    expected = finish(name, tmp_path / "whole", *options)
    killed = tmp_path / "killed"
    process, deadline = start(name, killed, *options), time.monotonic() + 900
    while not saved_in(killed):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    newest = saved_in(killed)[-1]
    assert newest.name != "20"
    if "--new-tokens" in OPTIONS[name] and name != "sft":
        # Answers of up to four tokens get one in each iteration.
        rollout = rc.load_checkpoint(newest, subtree="rollout")
        assert not rollout["done"].all()
    assert finish(name, killed, *options, "--resume") == expected
