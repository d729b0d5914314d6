"""Jobs of a real SLURM, on this machine alone."""

import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
from cluster import logs, one_node, run, wait_until

import redcoast as rc

ROOT = Path(__file__).parents[2]
SUM = """
import jax, jax.numpy as jnp, redcoast as rc
from jax.sharding import NamedSharding, PartitionSpec as P
rc.initialize(local_devices=2, timeout=60)
x = jax.device_put(jnp.arange(4.0), NamedSharding(rc.make_mesh(), P("data")))
total = float(jnp.sum(x))
print(f"{jax.process_index()} of {jax.process_count()}: {total} of {jax.device_count()}")
"""
SMALL = ["--width", 32, "--layers", 1, "--heads", 2, "--kv-heads", 2, "--seq", 16]
SMALL += ["--batch-size", 8, "--steps", 200]


@pytest.fixture(scope="module")
def slurm():
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    folder.chmod(0o755)
    try:
        with one_node(folder) as env:
            # `python` is the one of these tests.
            yield env | {"PATH": f"{Path(sys.executable).parent}:{env['PATH']}"}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_tasks_of_srun_join(slurm):
    output = run("srun", "-n", 2, "python", "-c", SUM, env=slurm)
    assert "0 of 2: 6.0 of 4" in output
    assert "1 of 2: 6.0 of 4" in output


def test_task_that_is_alone_joins_nothing(slurm):
    assert "0 of 1: 6.0 of 2" in run("srun", "-n", 1, "python", "-c", SUM, env=slurm)


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"  # in which nothing else is written
    folder.mkdir()
    for index in range(3):
        (folder / f"{index}.txt").write_text(f"Text {index} says what it is about.\n" * 40)
    return folder


@pytest.mark.parametrize("tasks", [1, 2])
def test_job_that_is_told_to_stop_is_requeued_and_goes_on(slurm, texts, tmp_path, tasks):
    folder = tmp_path / "submitted"
    folder.mkdir()
    (folder / "experiments").symlink_to(ROOT / "experiments")
    sizes = ["--nodes=1", f"--ntasks-per-node={tasks}", "--time=10"]
    script = ROOT / "experiments" / "language_modeling.sbatch"
    options = ["--text", texts, *SMALL, "--local-devices", 2, "--mesh", f"fsdp={2 * tasks}"]
    job = run("sbatch", "--parsable", *sizes, script, *options, env=slurm, cwd=folder).strip()
    output = lambda: (folder / f"language_modeling-{job}.out").read_text()
    shown = lambda: run("scontrol", "show", "job", job, env=slurm)
    # What is to be known when it takes too long.
    explain = lambda: f"{logs(Path(slurm['SLURM_CONF']).parent)}\n{shown()}\n{output()}"

    wait_until(lambda: steps(folder) >= 20 or "JobState=FAILED" in shown(), 120, explain)
    run("scancel", "--signal=TERM", job, env=slurm)  # as `--signal` of the script does
    wait_until(lambda: "Restarts=1" in shown(), 60, explain)
    stopped = steps(folder)
    assert 20 <= stopped < 200, output()
    # SLURM would wait for two minutes; in the same second the job's credentials are not valid yet.
    wait_until(lambda: "JobState=PENDING" in shown(), 60, explain)
    run("scontrol", "update", f"JobId={job}", "StartTime=now+3seconds", env=slurm)
    wait_until(lambda: re.search(r"JobState=(?!PENDING|RUNNING|COMPLETING)", shown()), 240, explain)

    assert "JobState=COMPLETED" in shown(), explain()
    assert f"Resumed at step {stopped}" in output(), output()
    (directory,) = (folder / "runs" / job).iterdir()
    history = rc.read_metrics(directory / "metrics.jsonl")
    assert [entry["step"] for entry in history] == [*range(1, 201)]
    assert history[-1]["loss"] < history[0]["loss"]
    assert (directory / "bits_per_byte.png").is_file()


def steps(folder):
    files = [*folder.glob("runs/*/*/metrics.jsonl")]
    return max((entry["step"] for file in files for entry in rc.read_metrics(file)), default=0)


def test_missing_task_is_named(slurm):
    # The second task ends before it joins.
    early = "import os\nif os.environ['SLURM_PROCID'] == '1': raise SystemExit\n"
    script = early + "import redcoast as rc\nrc.initialize(timeout=5)"
    with pytest.raises(AssertionError, match="Process 1 of 2 did not join within 5 s"):
        run("srun", "-n", 2, "python", "-c", script, env=slurm)
    assert os.environ.get("SLURM_JOB_ID") is None
