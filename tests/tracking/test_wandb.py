import dataclasses
import json
import logging
import sys
import threading
import time
from types import SimpleNamespace

import jax
import numpy as np
import optax
import pytest
from problem import collate_fn, loss_fn, make_examples, make_model, quiet

import redcoast as rc
from redcoast import RunInfo, wandb_logger


class FakeWandb:
    """A fake of the module, whose functions behave as a test specifies."""

    def __init__(self, mode="online", **behaviour):
        self.behaviour, self.run = behaviour, None
        self.arguments, self.logged, self.finished = {}, [], False
        self.settings = SimpleNamespace(mode=mode, base_url="https://api.wandb.ai")

    def setup(self):
        return self

    def init(self, **arguments):
        self.arguments = arguments
        self.behaviour.get("init", lambda: None)()
        return SimpleNamespace(
            log=self.log,
            finish=self.finish,
            define_metric=lambda *_, **__: None,
            config=SimpleNamespace(update=self.update),
            id=arguments.get("id", "made-up"),
            project=arguments["project"],
            disabled=False,
            offline=arguments.get("mode") == "offline",
            url="https://wandb.ai/me/p/runs/1",
            dir="/runs/wandb/offline-run-1/files",
        )

    def log(self, metrics):
        self.behaviour.get("log", lambda: None)()
        if float("inf") in metrics.values():
            raise TypeError("it is not JSON serializable")
        self.logged.append(metrics)

    def update(self, config, allow_val_change):
        self.arguments["config"] |= config

    def finish(self, exit_code=None):
        self.behaviour.get("finish", lambda: None)()
        self.finished, self.exit_code = True, exit_code

    def Html(self, text):
        return text

    def Table(self, columns, data):
        return [dict(zip(columns, row, strict=True)) for row in data]


@pytest.fixture
def fake(monkeypatch, tmp_path):
    """A function that replaces wandb by a `FakeWandb`, without an account."""
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_DIR", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))

    def install(**behaviour):
        wandb = FakeWandb(**behaviour)
        monkeypatch.setitem(sys.modules, "wandb", wandb)
        return wandb

    return install


@pytest.fixture
def hang():
    """Blocks until the end of the test."""
    over = threading.Event()
    yield over.wait
    over.set()


class Gate:
    """Blocks W&B until the test opens it; a call that waited for W&B would time out."""

    def __init__(self):
        self.opened, self.in_vain = threading.Event(), False

    def __call__(self):
        if not self.opened.wait(60):
            self.in_vain = True

    def open(self):
        assert not self.in_vain, "a call waited for W&B"
        self.opened.set()


def info(directory=None, resumed=False, plan=""):
    return RunInfo(directory, resumed, plan, {"batch_size": 32})


def wait_until(condition):
    deadline = time.monotonic() + 300
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.001)
    return condition()


def call(log, steps):
    for step in range(steps):
        log({"loss": float(step)}, step)


def fail():
    raise ConnectionError("no route to host")


# Messages when W&B fails, hangs or is slow.


def test_sends_everything_in_order(fake, capsys):
    gate = Gate()
    wandb = fake(init=gate)
    log = wandb_logger(project="lm", mode="online", tags=["a"])
    call(log, 500)
    gate.open()
    log.close()
    assert wandb.logged == [{"loss": float(step), "step": step} for step in range(500)]
    assert wandb.finished
    assert wandb.arguments["tags"] == ["a"]
    assert "optax" in wandb.arguments["config"]["run"]
    assert capsys.readouterr().out == "W&B: https://wandb.ai/me/p/runs/1\n"


@pytest.mark.parametrize("name", ["init", "log", "finish"])
def test_error_is_one_warning(fake, caplog, name):
    fake(**{name: fail})
    log = wandb_logger(project="lm")
    log.start(info())
    call(log, 1)
    if name != "finish":
        assert wait_until(lambda: log._thread.has_given_up)
    call(log, 499)
    log.close()
    log.close()
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("redcoast", logging.WARNING)
    assert "W&B failed (ConnectionError: no route to host)" in record.message
    # No calls are queued after W&B has failed.
    assert log._thread._queue.qsize() < 499 or name == "finish"


@pytest.mark.parametrize("name", ["init", "log", "finish"])
def test_waiting_for_a_hanging_wandb_times_out(fake, hang, caplog, name):
    reached = threading.Event()
    # It hangs until the end of the test: a call that waited for it would not return.
    fake(**{name: lambda: reached.set() or hang()})
    log = wandb_logger(project="lm", close_timeout=0.2)
    log.start(info())
    call(log, 100)
    # Waits until W&B hangs, because only then is a timeout of 0.2 s reliable.
    if name == "finish":
        log._thread.put(log._finish)
    assert reached.wait(300)
    start = time.perf_counter()
    log.close()
    assert time.perf_counter() - start >= 0.2
    (record,) = caplog.records
    assert "W&B did not finish within 0.2 seconds" in record.message
    # If there is a run on disk, the message shows how to upload it.
    assert ("wandb sync /runs/wandb/*-made-up" in record.message) == (name != "init")
    log({"loss": 1.0}, 101)
    log.start(info())
    assert not log._thread.is_open
    log.close()
    assert len(caplog.records) == 1


def test_dropped_calls_are_counted(fake, caplog):
    gate = Gate()
    wandb = fake(log=gate)
    log = wandb_logger(project="lm", queue_size=10)
    call(log, 100)
    gate.open()
    log.close()
    dropped = 100 - len(wandb.logged)
    # The call that W&B is processing has left the queue.
    assert dropped in (89, 90)
    assert [record.message for record in caplog.records] == [
        f"W&B was too slow: {dropped} of the calls to its logger were dropped."
    ]


def test_close_waits_for_a_slow_wandb(fake, caplog):
    wandb = fake(init=lambda: time.sleep(0.6), log=lambda: time.sleep(0.002))
    log = wandb_logger(project="lm", close_timeout=300)
    call(log, 100)
    log.close()
    assert len(wandb.logged) == 100
    assert not caplog.records


def test_close_before_start(fake, caplog):
    wandb = fake()
    wandb_logger(project="lm").close()
    assert not wandb.arguments
    assert not caplog.records


# Accounts, modes and ids.


def started(fake, directory=None, resumed=False, **options):
    wandb = fake(mode=options.pop("settings_mode", "online"))
    log = wandb_logger(project="lm", **options)
    log.start(info(directory, resumed))
    log.close()
    return wandb.arguments


def test_metrics_that_wandb_cannot_store_are_left_out(fake, caplog):
    wandb = fake()
    log = wandb_logger("lm")
    for step, value in enumerate([1.0, float("inf"), float("inf"), 2.0]):
        log({"loss": value}, step)
    log.close()
    assert wandb.finished
    assert [metrics["step"] for metrics in wandb.logged] == [0, 3]
    assert [record.message for record in caplog.records] == [
        "W&B cannot store the metrics of step 1 (loss), which are left out: TypeError: it is not "
        "JSON serializable. Later metrics that it cannot store are left out without a warning."
    ]


def test_arrays_are_logged_with_the_values_that_they_had(fake):
    gate, total = Gate(), np.zeros(())
    wandb = fake(init=gate)
    log = wandb_logger("lm")
    for step in range(3):
        total += 1  # in place
        log({"total": total}, step)
    gate.open()
    log.close()
    assert [float(metrics["total"]) for metrics in wandb.logged] == [1, 2, 3]


def test_a_run_that_is_active_is_not_taken_over(fake):
    wandb = fake()
    wandb.run = object()  # by another logger, or by the caller
    log = wandb_logger("lm")
    log({"loss": 1.0}, 1)
    log.close()
    assert wandb.arguments["reinit"] == "create_new"


def test_run_of_the_caller_is_logged_to_and_not_finished(fake, tmp_path):
    wandb = fake()
    wandb.Run = SimpleNamespace
    run = wandb.init(project="own", config={"seed": 3})
    logger = wandb_logger(run, config={"width": 16})
    train(logger, steps=2, checkpoints=rc.Checkpoints(tmp_path))
    assert [entry["step"] for entry in wandb.logged if "loss" in entry] == [1, 2]
    assert not wandb.finished
    assert wandb.arguments["config"].keys() == {"seed", "width", "run"}
    assert json.loads((tmp_path / "wandb.json").read_text()) == {"id": "made-up", "project": "own"}
    with pytest.raises(ValueError, match="name, mode cannot be set for a run of W&B"):
        wandb_logger(run, name="a", mode="offline")
    with pytest.raises(TypeError, match="W&B project, or a run that `wandb.init` returned"):
        wandb_logger(3)


def test_project_may_be_positional(fake):
    wandb = fake()
    logger = wandb_logger("lm")
    logger.start(info(None, False))
    logger.close()
    assert wandb.arguments["project"] == "lm"


def test_offline_without_an_account(fake, capsys):
    assert started(fake)["mode"] == "offline"
    out = capsys.readouterr().out
    assert out.count("\n") == 2
    assert "no account was found" in out
    assert "wandb sync /runs/wandb/*-made-up" in out


def test_online_with_a_key(fake, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    assert "mode" not in started(fake)


def test_online_with_netrc(fake, tmp_path, monkeypatch):
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password abc\n")
    assert "mode" not in started(fake)
    (tmp_path / ".netrc").write_text("machine example.com login user password abc\n")
    assert started(fake)["mode"] == "offline"
    (tmp_path / ".netrc").write_text("no netrc file at all\n")
    assert started(fake)["mode"] == "offline"
    (tmp_path / "elsewhere").write_text("machine api.wandb.ai login user password abc\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "elsewhere"))
    assert "mode" not in started(fake)


def test_a_requested_mode_is_kept(fake, monkeypatch):
    assert started(fake, mode="online")["mode"] == "online"
    assert "mode" not in started(fake, settings_mode="disabled")
    monkeypatch.setenv("WANDB_MODE", "online")
    assert "mode" not in started(fake)


def test_on_a_terminal_wandb_asks_for_no_account(fake, monkeypatch, capsys):
    """Its thread would still read the terminal when Python ends, which would end in an abort."""
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    assert started(fake, mode="online")["mode"] == "offline"
    assert "no account was found" in capsys.readouterr().out
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    assert started(fake, mode="online")["mode"] == "online"


def test_run_id_is_stored_for_resuming(fake, tmp_path):
    first = started(fake, tmp_path / "run")
    kept = {"id": first["id"], "project": "lm"}
    assert json.loads((tmp_path / "run" / "wandb.json").read_text()) == kept
    assert first["dir"] == str(tmp_path / "run")
    assert "resume" not in first

    resumed = started(fake, tmp_path / "run", resumed=True)
    assert (resumed["id"], resumed["resume"]) == (first["id"], "allow")
    # A new run in the same directory is another W&B run.
    assert started(fake, tmp_path / "run")["id"] != first["id"]


@pytest.mark.parametrize("content", [None, "", "{", "[]", "{}"])
def test_resuming_without_an_id_creates_one(fake, tmp_path, content):
    if content is not None:
        (tmp_path / "wandb.json").write_text(content)
    arguments = started(fake, tmp_path, resumed=True)
    assert len(arguments["id"]) == 8
    assert json.loads((tmp_path / "wandb.json").read_text())["id"] == arguments["id"]


def test_options_of_the_user_override_defaults(fake, tmp_path, monkeypatch):
    arguments = started(
        fake, tmp_path, resumed=True, id="mine", dir="there", resume="must", settings={"a": 1}
    )
    assert (arguments["id"], arguments["dir"], arguments["resume"]) == ("mine", "there", "must")
    assert arguments["settings"]["a"] == 1
    assert json.loads((tmp_path / "wandb.json").read_text())["id"] == "mine"
    monkeypatch.setenv("WANDB_CONSOLE", "wrap")
    assert "console" not in started(fake)["settings"]


@dataclasses.dataclass(frozen=True)
class Config:
    dim: int = 256


@pytest.mark.parametrize("config", [3, "text", ["a"], Config])
def test_bad_config(config):
    with pytest.raises(TypeError, match="pass a mapping or a dataclass instance"):
        wandb_logger(project="lm", config=config)


def test_a_failed_run_is_marked_as_failed(fake):
    wandb = fake()
    log = wandb_logger(project="lm")
    for failed in (True, False):
        log.start(info())
        if failed:
            log.fail(RuntimeError("broken"))
        log.close()
        assert wandb.exit_code == failed


def train(log, **options):
    return rc.fit(
        make_model(),
        optax.sgd(0.1),
        make_examples(32),
        collate_fn=collate_fn,
        loss_fn=loss_fn,
        batch_size=16,
        mesh=rc.make_mesh(devices=jax.devices()[:1]),
        log=quiet(log),
        **options,
    )


def texts(wandb):
    """The plans that were logged."""
    return [entry["plan"] for entry in wandb.logged if "plan" in entry]


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["itself", "in a list", "called by a function"])
def test_the_logger_joins_the_run_however_it_is_passed(fake, tmp_path, how):
    """The logger receives plan, mesh and id, and a resumed run is the same W&B run."""
    checkpoints = rc.Checkpoints(tmp_path)
    ids = []
    for steps in (2, 4):
        wandb = fake()
        logger = wandb_logger(project="lm", config={"mine": 1})
        log = {"itself": logger, "in a list": [print, logger]}.get(
            how, lambda metrics, step, logger=logger: logger({"mine": metrics["loss"]}, step)
        )
        train(log, steps=steps, checkpoints=checkpoints)
        assert wandb.finished
        assert wandb.exit_code == 0
        assert len(texts(wandb)) == 1
        assert "layers/0/weight" in texts(wandb)[0]
        (table,) = [entry["plan_table"] for entry in wandb.logged if "plan_table" in entry]
        assert "layers/0/weight" in [row["array"] for row in table]
        assert all(isinstance(x, str | float) for row in table for x in row.values())
        config = wandb.arguments["config"]
        assert config["mine"] == 1
        assert config["run"]["mesh"] == {"data": 1, "fsdp": 1, "model": 1}
        assert config["run"]["precision"] == "float32"
        assert config["run"]["parameters"] > 0
        assert json.loads((tmp_path / "wandb.json").read_text())["id"] == wandb.arguments["id"]
        ids.append(wandb.arguments["id"])
    assert ids[0] == ids[1]
    assert wandb.arguments["resume"] == "allow"


def test_a_logger_called_by_a_function_is_marked_as_failed(fake):
    wandb = fake()
    logger = wandb_logger(project="lm")

    def log(metrics, step):
        logger(metrics, step)
        if step == 2:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        train(log, steps=3)
    assert wandb.finished
    assert wandb.exit_code == 1


@pytest.mark.thorough
def test_metrics_logged_before_the_run_are_in_the_same_wandb_run(fake, tmp_path, caplog):
    wandb = fake()
    logger = wandb_logger(project="lm")
    logger({"tokens": 3.0}, 0)
    train(logger, steps=2, checkpoints=rc.Checkpoints(tmp_path))
    assert wandb.logged[0] == {"tokens": 3.0, "step": 0}
    assert len(texts(wandb)) == 1
    assert wandb.arguments["config"]["run"]["batch_size"] == 16
    assert json.loads((tmp_path / "wandb.json").read_text())["id"] == "made-up"
    assert not caplog.text
    fake()
    logger({"tokens": 3.0}, 0)
    train(logger, steps=3, checkpoints=rc.Checkpoints(tmp_path))
    assert "called before the run was resumed" in caplog.text


@pytest.mark.few("raises")
@pytest.mark.parametrize("fault", ["fine", "raises", "slow", "hangs", "never starts", "cannot end"])
def test_no_step_waits_for_wandb_and_none_is_lost(fake, hang, tmp_path, fault):
    """Training ends although W&B fails or hangs, and the file contains every step."""
    logged, waited_in_vain = [], []

    def slow():
        """Takes as long as ten steps, so training is much slower if a step waits for it."""
        seen = len(logged)
        if not wait_until(lambda: len(logged) >= min(seen + 10, 60)):
            waited_in_vain.append(seen)

    behaviour = {
        "fine": {},
        "raises": {"log": fail},
        "slow": {"log": slow},
        "hangs": {"log": hang},
        "never starts": {"init": hang},
        "cannot end": {"finish": hang},
    }
    fake(**behaviour[fault])
    log = wandb_logger(project="lm", close_timeout=0.2, queue_size=20)

    class Counted:
        start, fail, close = log.start, log.fail, log.close

        def __call__(self, metrics, step):
            log(metrics, step)
            logged.append(step)

    rc.fit(
        make_model(),
        optax.sgd(0.1),
        make_examples(64),
        collate_fn=collate_fn,
        loss_fn=loss_fn,
        batch_size=8,
        steps=60,
        mesh=rc.make_mesh(devices=jax.devices()[:1]),
        checkpoints=rc.Checkpoints(tmp_path),
        log=quiet(Counted()),
    )
    assert logged == list(range(1, 61))
    assert not waited_in_vain
    lines = rc.read_metrics(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, 61))
    assert all("loss" in line and "grad_norm" in line for line in lines)
