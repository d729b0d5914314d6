import contextlib
import importlib.metadata
import io
import re
import subprocess
import sys

import equinox
import jax
import optax
import pytest

import redcoast as rc
from redcoast import RunInfo, console_logger
from redcoast.tracking import _loggers as _tracking
from redcoast.tracking._loggers import all_loggers, code_version, shows_progress, start_loggers
from redcoast.tracking._progress import ProgressLogger


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(_tracking, "monotonic", lambda: now[0])

    def sleep(seconds):
        now[0] += seconds

    return sleep


def test_console_prints_periodically(clock, capsys):
    log = console_logger(every=10)
    for step in range(1, 26):
        log({"loss": 2.5 / step, "tokens": 131072.0}, step)
        clock(1.0)
    lines = capsys.readouterr().out.splitlines()
    assert [int(line.split()[1]) for line in lines] == [1, 11, 21]
    assert lines[1] == "step      11  loss 0.2273      tokens 131,072"
    log.close()
    log.close()
    assert capsys.readouterr().out == "step      25  loss 0.1         tokens 131,072\n"


def test_console_prints_the_same_steps_in_each_run(capsys):
    def printed(run, log):
        with contextlib.ExitStack() as stack:
            (log,) = _tracking.start_loggers([log], run, stack)
            for step in range(1, (run.steps or 120) + 1):
                log({"loss": 1.0}, step)
        lines = capsys.readouterr().out.splitlines()
        return [int(line.split()[1].replace(",", "")) for line in lines]

    run = RunInfo(steps=1050)
    assert printed(run, console_logger()) == [1, *range(50, 1051, 50)]
    assert printed(RunInfo(steps=7), console_logger()) == [*range(1, 8)]
    unknown = [*range(1, 10), *range(10, 100, 10), 100, 120]  # the last one at the end
    assert printed(RunInfo(), console_logger()) == unknown
    assert printed(RunInfo(steps=10), console_logger(steps=4)) == [4, 8, 10]


def test_console_by_time_and_by_steps_is_refused():
    with pytest.raises(ValueError, match="pass one of them"):
        console_logger(every=1, steps=1)
    with pytest.raises(ValueError, match="`steps` is 0"):
        console_logger(steps=0)


def test_console_lines_are_aligned(capsys):
    log = console_logger(every=0)
    for step, scale in [(1, 1e-5), (20, 0.3), (300, 12.0), (4000, -7e6), (50_000, 123.456)]:
        log({"loss": scale, "grad_norm": scale / 3, "skipped": 1}, step)
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


def test_console_hides_what_means_nothing(capsys):
    log = console_logger(every=0)
    log({"loss": 1.0, "weight": 4096.0, "skipped": 0.0}, 1)
    log({"loss": 1.0, "skipped": 1.0, "eval/weight": 2.0}, 2)
    lines = [line.split()[2:] for line in capsys.readouterr().out.splitlines()]
    assert lines == [["loss", "1"], ["loss", "1", "skipped", "1"]]


class Screen(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("colours", [False, True])
def test_console_lines_fit_the_terminal(monkeypatch, colours):
    monkeypatch.setenv("COLUMNS", "50")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "" if colours else "1")
    monkeypatch.setattr(sys, "stdout", screen := Screen())
    console_logger(every=0)({f"metric_{i}": i / 7 for i in range(9)}, 20)
    text = screen.getvalue()
    assert ("\x1b[" in text) == colours
    lines = re.sub(r"\x1b\[\d*m", "", text).splitlines()
    assert 1 < len(lines) < 9
    assert max(map(len, lines)) <= 50
    assert " ".join(lines).count("metric_") == 9
    assert all(line.startswith(" " * 14) for line in lines[1:])


def test_console_does_not_break_a_bar(monkeypatch):
    terminal = io.StringIO()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    log = console_logger(every=0)
    bar = ProgressLogger(True, None)
    bar.begin(10)
    bar.update(1, {"loss": 2.0}, 4)
    log({"loss": 2.0}, 1)
    bar.update(2, {"loss": 1.0}, 4)
    bar.close()
    rows = [""]
    for text in terminal.getvalue().replace("\n", "\n\r").split("\r"):
        rows[-1] = text.rstrip("\n") + rows[-1][len(text.rstrip("\n")) :]
        rows += [""] * text.count("\n")
    line, bar_line = [row.rstrip() for row in rows if row.strip()]
    assert line == "step       1  loss 2"
    assert bar_line.startswith("step 2/10 |")


@pytest.mark.parametrize("every", [-1.0, float("nan")])
def test_console_bad_interval(every):
    with pytest.raises(ValueError, match="`every` is .* It must be at least 0"):
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

    version = code_version()
    assert (version["git_commit"], version["git_dirty"]) == (head, "false")
    (tmp_path / "train.py").write_text("print(2)")
    version = code_version()
    assert (version["git_commit"], version["git_dirty"]) == (head, "true")


def test_code_version_names_libraries(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        sys.modules["__main__"], "__file__", str(tmp_path / "train.py"), raising=False
    )
    version = code_version()
    assert version["jax"] == jax.__version__
    assert version["equinox"] == equinox.__version__
    assert version["optax"] == optax.__version__
    assert version["python"] == sys.version.split()[0]
    # The directory is not in a repository.
    assert version.keys() == {"python", "redcoast", "jax", "equinox", "optax"}


def test_code_version_omits_missing_libraries(monkeypatch):
    actual = importlib.metadata.version

    def version(package):
        if package == "optax":
            raise importlib.metadata.PackageNotFoundError(package)
        return actual(package)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert "jax" in code_version()
    assert "optax" not in code_version()


def test_code_version_without_git(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "git_commit" not in code_version()


@pytest.mark.thorough
def test_importing_does_not_import_wandb_or_tqdm():
    code = """
import sys
import redcoast
from redcoast.tracking import _jsonl, _progress, _loggers, _wandb
_wandb.wandb_logger(project="p")
bar = _progress.ProgressLogger(None, open("/dev/null", "w"))
bar.begin(3)
bar.close()
print(sorted({"wandb", "tqdm"} & set(sys.modules)))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "[]\n", result.stderr


def test_a_logger_must_be_callable():
    with pytest.raises(TypeError, match=r"`log` is of type int.*pass a list of them"):
        all_loggers(3)
    with pytest.raises(TypeError, match=r"`log\[1\]` is of type NoneType"):
        all_loggers([print, None])


def test_progress_is_shown_unless_a_logger_shows_it():
    """One bar, whatever else is logged, and none at all with `False`."""
    assert all_loggers(False) == []
    assert not shows_progress(all_loggers(False))
    assert shows_progress(all_loggers(None)[-1:])
    for log in (print, [print, repr]):
        *given, bar = all_loggers(log)
        assert given == [print, repr][: len(given)]
        assert shows_progress([bar])
    own = [rc.progress_logger(False), print]
    assert all_loggers(own) == own
    assert not shows_progress(own)


def test_evaluations_are_printed_if_there_are_no_loggers(capsys):
    show, _ = all_loggers(None)
    show({"loss": 1.0}, 1)
    show({"eval/loss": 0.5, "eval/weight": 8.0}, 1)
    assert capsys.readouterr().out.split() == ["step", "1", "eval/loss", "0.5"]


class Recorder:
    """A logger with all optional methods."""

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
def test_all_loggers_are_started_and_closed(error):
    run = RunInfo(directory=None, resumed=False, plan="the plan", config={})
    recorders = [Recorder(), Recorder()]
    with contextlib.suppress(KeyError), contextlib.ExitStack() as stack:
        for log in start_loggers(recorders, run, stack):
            log({"loss": 1.0}, 1)
        if error:
            raise error
    for recorder in recorders:
        assert recorder.events == [run, 1, *([error] if error else []), "closed"]


def test_a_logger_called_by_another_is_closed_with_the_run(clock, capsys):
    """Otherwise the last line, which the console logger delays, would not be printed."""
    console = console_logger(every=10)
    run = RunInfo(directory=None, resumed=False, plan="", config={})

    def log(metrics, step):
        console({"mine": metrics["loss"]}, step)

    with contextlib.ExitStack() as stack:
        (logger,) = start_loggers([log], run, stack)
        for step in range(1, 4):
            logger({"loss": 1.0}, step)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines] == [["step", "1", "mine"], ["step", "3", "mine"]]
    console({"mine": 1.0}, 4)  # outside of a run, the caller closes it
    assert _tracking.join_run(console) is None


def test_nested_runs_have_their_own_loggers():
    outer, inner = Recorder(), Recorder()
    info = lambda plan: RunInfo(directory=None, resumed=False, plan=plan, config={})
    with contextlib.ExitStack() as first:
        start_loggers([print], info("outer"), first)
        assert _tracking.join_run(outer) == info("outer")
        with contextlib.ExitStack() as second:
            start_loggers([print], info("inner"), second)
            assert _tracking.join_run(inner) == info("inner")
        assert (outer.events, inner.events) == ([], ["closed"])
    assert outer.events == ["closed"]


def test_the_plan_is_in_the_directory_of_the_run(tmp_path):
    """That of a resumed run is kept beside the first one if it differs."""

    def start(plan, directory=tmp_path, **options):
        with rc.metrics_reader(False, rc.RunInfo(directory=directory, plan=plan, **options)):
            pass

    start("first")
    start("first", resumed=True, step=3)
    assert [path.name for path in tmp_path.glob("plan*")] == ["plan.txt"]
    start("second", resumed=True, step=5)
    texts = {path.name: path.read_text() for path in tmp_path.glob("plan*")}
    assert texts == {"plan.txt": "first\n", "plan_5.txt": "second\n"}
    start("third", resumed=True, step=5)
    start("third", resumed=True, step=5)
    assert (tmp_path / "plan_5.txt").read_text() == "second\n"
    assert (tmp_path / "plan_5_2.txt").read_text() == "third\n"
    assert len(list(tmp_path.glob("plan*"))) == 3
