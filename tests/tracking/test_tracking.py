import contextlib
import io
import subprocess
import sys

import equinox
import jax
import optax
import pytest

from redcoast.tracking import _run as _tracking
from redcoast.tracking._progress import progress
from redcoast.tracking._run import RunInfo, code_version, console_logger, start_loggers


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(_tracking, "monotonic", lambda: now[0])

    def sleep(seconds):
        now[0] += seconds

    return sleep


def test_console_prints_now_and_then(clock, capsys):
    log = console_logger(every=10)
    for step in range(1, 26):
        log({"loss": 2.5 / step, "weight": 131072.0}, step)
        clock(1.0)
    lines = capsys.readouterr().out.splitlines()
    assert [int(line.split()[1]) for line in lines] == [1, 11, 21]
    assert lines[1] == "step      11  loss 0.2273      weight 131,072"
    log.close()
    log.close()
    assert capsys.readouterr().out == "step      25  loss 0.1         weight 131,072\n"


def test_console_lines_are_aligned(capsys):
    log = console_logger(every=0)
    for step, scale in [(1, 1e-5), (20, 0.3), (300, 12.0), (4000, -7e6), (50_000, 123.456)]:
        log({"loss": scale, "grad_norm": scale / 3, "skipped": 0}, step)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    for word in ("loss", "grad_norm", "skipped"):
        assert len({line.index(word) for line in lines}) == 1


def test_console_prints_every_evaluation(clock, capsys):
    log = console_logger(every=10)
    log({"loss": 1.0}, 1)
    for step in (2, 3, 4):
        log({"loss": 1.0}, step)
        log({"eval/loss": 0.5, "eval/rouge2": 0.25}, step)
    log.close()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1:3] for line in lines] == [
        ["1", "loss"],
        ["2", "eval/loss"],
        ["3", "eval/loss"],
        ["4", "eval/loss"],
        ["4", "loss"],
    ]


def test_console_prints_nan(capsys):
    console_logger(every=0)({"loss": float("nan"), "grad_norm": float("inf")}, 1)
    assert capsys.readouterr().out == "step       1  loss nan         grad_norm inf\n"


def test_console_leaves_a_bar_whole(monkeypatch):
    terminal = io.StringIO()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    log = console_logger(every=0)
    with progress(10, enabled=True) as bar:
        bar.update(1, {"loss": 2.0}, 4)
        log({"loss": 2.0}, 1)
        bar.update(2, {"loss": 1.0}, 4)
    rows = [""]
    for text in terminal.getvalue().replace("\n", "\n\r").split("\r"):
        rows[-1] = text.rstrip("\n") + rows[-1][len(text.rstrip("\n")) :]
        rows += [""] * text.count("\n")
    line, bar_line = [row.rstrip() for row in rows if row.strip()]
    assert line == "step       1  loss 2"
    assert bar_line.startswith("step 2/10 |")


@pytest.mark.parametrize("every", [-1.0, float("nan")])
def test_console_bad_interval(every):
    with pytest.raises(ValueError, match=r"every is .*number of seconds"):
        console_logger(every=every)


def test_run_info_is_frozen():
    run = RunInfo(directory=None, resumed=False, plan="", config={})
    with pytest.raises(AttributeError):
        run.resumed = True  # pyright: ignore[reportAttributeAccessIssue]


def git(directory, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    command = ["git", *identity, *arguments]
    return subprocess.run(command, cwd=directory, check=True, capture_output=True, text=True).stdout


def test_code_version_of_a_repository(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text("print(1)")
    monkeypatch.setattr(
        sys.modules["__main__"], "__file__", str(tmp_path / "train.py"), raising=False
    )
    git(tmp_path, "init")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "a")
    git(tmp_path, "tag", "-a", "v1", "-m", "a tag is not a commit")
    head = git(tmp_path, "rev-parse", "HEAD").strip()

    version = code_version("numpy")
    assert (version["git_commit"], version["git_dirty"]) == (head, "false")
    (tmp_path / "train.py").write_text("print(2)")
    version = code_version()
    assert (version["git_commit"], version["git_dirty"]) == (head, "true")


def test_code_version_names_libraries(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        sys.modules["__main__"], "__file__", str(tmp_path / "train.py"), raising=False
    )
    version = code_version("beartype", "no-such-package")
    assert version["jax"] == jax.__version__
    assert version["equinox"] == equinox.__version__
    assert version["optax"] == optax.__version__
    assert version["python"] == sys.version.split()[0]
    assert {"redcoast", "beartype"} < version.keys()
    # No package of this name, and no repository here.
    assert not {"no-such-package", "git_commit", "git_dirty"} & version.keys()


def test_code_version_without_git(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "git_commit" not in code_version()


def test_importing_costs_neither_wandb_nor_tqdm():
    code = """
import sys
import redcoast
from redcoast.tracking import _jsonl, _progress, _run, _wandb
_wandb.wandb_logger(project="p")
_progress.progress(3, enabled=None, file=open("/dev/null", "w")).close()
print(sorted({"wandb", "tqdm"} & set(sys.modules)))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "[]\n", result.stderr


def test_a_logger_must_be_callable():
    run = RunInfo(directory=None, resumed=False, plan="", config={})
    with contextlib.ExitStack() as stack:
        assert start_loggers(None, run, stack) == []
        assert start_loggers([print, repr], run, stack) == [print, repr]
        with pytest.raises(TypeError, match=r"`log` is of type int.*pass a list of them"):
            start_loggers(3, run, stack)
        with pytest.raises(TypeError, match=r"`log\[1\]` is of type NoneType"):
            start_loggers([print, None], run, stack)


class Recorder:
    """A logger with all that a logger may have."""

    def __init__(self):
        self.events = []

    def start(self, run):
        self.events.append(run)

    def __call__(self, metrics, step):
        self.events.append(step)

    def fail(self, error):
        self.events.append(error)

    def close(self):
        self.events.append("closed")


@pytest.mark.parametrize("error", [None, KeyError("broken")])
def test_each_of_several_loggers_is_told_of_the_run_and_of_its_end(error):
    run = RunInfo(directory=None, resumed=False, plan="the plan", config={})
    recorders = [Recorder(), Recorder()]
    with contextlib.suppress(KeyError), contextlib.ExitStack() as stack:
        for log in start_loggers(recorders, run, stack):
            log({"loss": 1.0}, 1)
        if error:
            raise error
    for recorder in recorders:
        assert recorder.events == [run, 1, *([error] if error else []), "closed"]


def test_a_logger_that_another_one_calls_ends_with_the_run(clock, capsys):
    """Else the last line that the console holds back would never be printed."""
    console = console_logger(every=10)
    run = RunInfo(directory=None, resumed=False, plan="", config={})

    def log(metrics, step):
        console({"mine": metrics["loss"]}, step)

    with contextlib.ExitStack() as stack:
        (logger,) = start_loggers(log, run, stack)
        for step in range(1, 4):
            logger({"loss": 1.0}, step)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines] == [["step", "1", "mine"], ["step", "3", "mine"]]
    console({"mine": 1.0}, 4)  # outside of a run it is the caller's own
    assert _tracking.join_run(console) is None


def test_runs_inside_of_runs_have_loggers_of_their_own():
    outer, inner = Recorder(), Recorder()
    info = lambda plan: RunInfo(directory=None, resumed=False, plan=plan, config={})
    with contextlib.ExitStack() as first:
        start_loggers(print, info("outer"), first)
        assert _tracking.join_run(outer) == info("outer")
        with contextlib.ExitStack() as second:
            start_loggers(print, info("inner"), second)
            assert _tracking.join_run(inner) == info("inner")
        assert (outer.events, inner.events) == ([], ["closed"])
    assert outer.events == ["closed"]
