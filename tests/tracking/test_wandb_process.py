"""The real W&B: the contents of an offline run, and the exit of a process if W&B hangs."""

import contextlib
import dataclasses
import json
import os
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import pytest
from paths import HELPERS

from redcoast import RunInfo, wandb_logger


def info(directory=None, resumed=False, plan=""):
    return RunInfo(directory, resumed, plan, {"batch_size": 32})


@pytest.fixture
def real_wandb(tmp_path, monkeypatch):
    """W&B as in a new process, because it reads its environment variables once."""
    import wandb

    wandb.teardown()
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    yield wandb
    wandb.teardown()


def records(path):
    """Yields the records of a `.wandb` file, in LevelDB's log format after a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore

    data, at, parts = path.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        parts += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a full record, or the last part of one
            record = Record()
            record.ParseFromString(parts)
            yield record
            parts = b""


def complete(path):
    """All records, once the last is there: on a busy machine wandb's process still writes."""
    deadline = time.monotonic() + 300
    while not any(record.HasField("exit") for record in records(path)):
        assert time.monotonic() < deadline, f"{path} has no end"
        time.sleep(0.1)
    return records(path)


def read_run(path):
    """Returns the id, the resumed flag, the config and the history of a `.wandb` file."""
    config, history, run = {}, [], None
    for record in complete(path):
        if record.HasField("run"):
            run = record.run
            updates = record.run.config.update
            config |= {update.key: json.loads(update.value_json) for update in updates}
        if record.HasField("history"):
            items = record.history.item
            history.append({"/".join(i.nested_key): json.loads(i.value_json) for i in items})
    assert run is not None
    return run, config, history


@dataclasses.dataclass(frozen=True)
class Config:
    dim: int = 256
    dtype: object = jnp.bfloat16
    path: Path = Path("corpus")
    sizes: tuple = (1, 2)


def test_an_offline_run_contains_all_metrics_and_is_resumed(real_wandb, tmp_path, capsys):
    log = wandb_logger(project="lm", config=Config(), name="small")
    log.start(info(tmp_path / "run", plan="layers/0 P('model')"))
    log({"loss": 2.0, "grad_norm": 0.5}, 1)
    log({"loss": 1.0, "grad_norm": float("nan")}, 2)
    log({"eval/loss": 1.5}, 2)
    log.close()
    real_wandb.teardown()  # waits for the process that writes the file

    (path,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    upload = capsys.readouterr().out.splitlines()[1]
    run, config, history = read_run(path)
    assert upload == f"wandb sync {path.parents[1]}/*-{run.run_id}"
    assert (run.project, run.display_name, run.resume) == ("lm", "small", False)
    assert config["dim"] == 256
    assert (config["dtype"], config["path"], config["sizes"]) == ("bfloat16", "corpus", [1, 2])
    assert config["run"] == {"batch_size": 32}
    plan, *history = history
    assert "P(&#x27;model&#x27;)" in (path.parent / "files" / plan["plan/path"]).read_text()
    assert [row["step"] for row in history] == [1, 2, 2]
    assert [row.get("loss") for row in history] == [2.0, 1.0, None]
    assert history[2]["eval/loss"] == 1.5
    metric = next(r.metric for r in records(path) if r.metric.glob_name == "*")
    assert metric.step_metric == "step"

    # The resumed run repeats step 2.
    log.start(info(tmp_path / "run", resumed=True))
    for step in (2, 3):
        log({"loss": 1 / step}, step)
    log.close()
    real_wandb.teardown()
    second = next(p for p in (tmp_path / "wandb").glob("offline-run-*/*.wandb") if p != path)
    again, _, history = read_run(second)
    assert (again.run_id, again.resume) == (run.run_id, True)
    assert [(row["step"], row["loss"]) for row in history] == [(2, 0.5), (3, 1 / 3)]


def test_disabled_writes_and_prints_nothing(real_wandb, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    log = wandb_logger(project="lm")
    log({"loss": 2.0}, 1)
    log.close()
    assert capfd.readouterr() == ("", "")
    assert not list(tmp_path.rglob("*.wandb"))


def run_python(code, *, environment):
    return subprocess.run(
        [sys.executable, "-c", code],
        # The process must not use a service that an earlier test has started.
        env={**{k: v for k, v in os.environ.items() if k != "WANDB_SERVICE"}, **environment},
        capture_output=True,
        text=True,
        timeout=900,
    )


FOR_EVER = """
import time
from wandb.sdk.lib.service.service_connection import ServiceConnection
ServiceConnection.teardown = lambda self, exit_code: time.sleep(10000)
"""
EXIT = """
import sys, time
from redcoast.tracking._wandb import wandb_logger
log = wandb_logger(project="lm", close_timeout=0.5)
log({"loss": 1.0}, 1)
while "wandb" not in sys.modules: time.sleep(0.01)
time.sleep(2)
"""


@pytest.mark.parametrize("close", ["log.close()", "pass", "1 / 0"])
@pytest.mark.integration
def test_a_hanging_import_does_not_block_the_exit(tmp_path, close):
    (tmp_path / "wandb.py").write_text("import time\ntime.sleep(1000)")
    code = EXIT.replace("time.sleep(2)", close)
    result = run_python(code, environment={"PYTHONPATH": str(tmp_path)})
    assert result.returncode == (close == "1 / 0")
    assert "W&B did not finish within 0.5 seconds" in result.stderr


@pytest.mark.integration
def test_a_server_without_response_does_not_block_the_exit(tmp_path):
    # W&B's own exit hook waits for a minute and a half; here it is made to wait without limit.
    with socket.create_server(("127.0.0.1", 0)) as server:
        environment = {
            "WANDB_BASE_URL": f"http://127.0.0.1:{server.getsockname()[1]}",
            "WANDB_API_KEY": "a" * 40,
            "WANDB_MODE": "online",
            "WANDB_DIR": str(tmp_path),
        }
        result = run_python(FOR_EVER + EXIT, environment=environment)
    assert result.returncode == 0
    assert "W&B did not finish within 0.5 seconds" in result.stderr


def services():
    """The W&B service processes that are descendants of this process."""
    actual = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int(path.joinpath("stat").read_text().rsplit(")", 1)[1].split()[1])
            if parent == os.getpid() and b"wandb-core" in path.joinpath("cmdline").read_bytes():
                actual.append(int(path.name))
    return actual


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux's /proc")
@pytest.mark.integration
def test_a_killed_service_costs_no_step_and_loses_no_line(tmp_path):
    code = KILLED.replace("DIRECTORY", repr(str(tmp_path)))
    environment = {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path)}
    path = f"{HELPERS}{os.pathsep}{Path(__file__).parent}"
    result = run_python(code, environment={**environment, "PYTHONPATH": path})
    assert result.returncode == 0, result.stderr
    in_calls, in_all = map(float, result.stdout.split()[-2:])
    # Relative to the time of the loop, because the machine may be busy.
    assert in_calls < 0.2 * in_all
    assert "no longer sent" in result.stderr
    lines = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 301))


KILLED = """
import faulthandler, os, signal, sys, time
faulthandler.dump_traceback_later(800, exit=True)
from redcoast.tracking._jsonl import jsonl_logger
from redcoast.tracking._wandb import wandb_logger
from test_wandb_process import services

log, file = wandb_logger(project="lm", close_timeout=5.0), jsonl_logger(DIRECTORY + "/m.jsonl")
spent, began = [], time.perf_counter()
for step in range(1, 301):
    time.sleep(0.01)
    begin = time.perf_counter()
    log({"loss": 1 / step}, step)
    spent.append(time.perf_counter() - begin)
    file({"loss": 1 / step}, step)
    if step == 50:
        deadline = time.monotonic() + 300
        while not services() and time.monotonic() < deadline:
            time.sleep(0.05)
        for pid in services():
            os.kill(pid, signal.SIGKILL)
ended = time.perf_counter()
log.close()
print(sum(spent), ended - began)
"""
