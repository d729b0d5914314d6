"""Bad input to any public function gets a sentence that names the culprit."""

import json
import re
import subprocess
import sys

import pytest
from bad_inputs import ROWS
from paths import HELPERS

import redcoast as rc
from redcoast import lora, losses

CASES = [(name, i) for name, rows in ROWS.items() for i in range(len(rows))]


@pytest.fixture(scope="session")
def results(tmp_path_factory):
    """What each row raises in a process of its own, where no types are checked."""
    directory = tmp_path_factory.mktemp("bad")
    command = [sys.executable, str(HELPERS / "bad_inputs.py"), str(directory)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout.splitlines()[-1])


@pytest.mark.parametrize(("name", "index"), CASES)
def test_bad_input_is_named(results, name, index):
    _, expected, words = ROWS[name][index]
    kind, kinds, message, compiled = results[name][index]
    names = {e.__name__ for e in (expected if isinstance(expected, tuple) else (expected,))}
    assert names & set(kinds), (kind, message)
    assert re.search(words, message, re.DOTALL), (kind, message)
    assert compiled < 100, "it is refused too late"


def test_there_are_many_and_of_every_public_function():
    assert len(CASES) >= 80
    public = {n for n in dir(rc) if not n.startswith("_") and callable(getattr(rc, n))}
    public |= {f"lora.{n}" for n in vars(lora) if callable(getattr(lora, n))}
    public |= {f"losses.{n}" for n in vars(losses) if callable(getattr(losses, n))}
    text = "".join(p.read_text() for p in HELPERS.glob("bad_*.py"))
    # These take nothing that could be bad, or are made by the functions above.
    without = {
        "Plan",
        "Estimate",
        "Generated",
        "PlanReport",
        "DryRun",
        "Chip",
        "MeshSuggestion",
        "TargetComparison",
        "TrainState",
        "Batch",
        "Batches",
        "Restored",
        "Step",
        "MetricsReader",
        "Prepared",
        "stop_gradient",
        "RunInfo",
        "run_info",
        "progress_logger",
        "jsonl_logger",
        "tensorboard_logger",
        "CheckpointDamaged",
        "CheckpointMismatch",
        "CheckpointNotSaved",
        "ProcessLost",
        "UnsupportedJaxVersion",
        "lora.LowRank",
        "lora.QuantisedWeight",
        "lora.dequantise",
        "lora.merge",
        "lora.without_adapters",
    }
    missing = {n for n in public - without if f"{n.removeprefix('rc.')}(" not in text}
    assert not missing
