"""What `redcoast dry-run` and `redcoast plan` show while they run."""

import io
import json

import pytest

from redcoast.dryrun import _devices
from redcoast.dryrun._phases import enter_phase
from redcoast.models import LlamaConfig
from redcoast.pretrained._registry import write_config
from redcoast_cli import _phase_display, main
from redcoast_cli._phase_display import PhaseDisplay, show_phases


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    """The time, as the display sees it."""
    now = [100.0]
    monkeypatch.setattr(_phase_display, "monotonic", lambda: now[0])
    return now


def test_a_terminal_has_one_line_that_is_no_longer_than_it(clock, monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")  # of all terminals, pytest's own too
    file = Terminal()
    display = PhaseDisplay(file)
    display.enter("Planning", "mesh 1 of 3")
    clock[0] += 61
    display.enter("Compiling", "the step on the mesh data=1, fsdp=8, model=8")
    clock[0] += 0.1
    display.tick()  # too soon
    clock[0] += 1
    display.tick()
    lines = file.getvalue().split("\r\x1b[K")[1:]
    assert lines[0] == "0:00  Planning mesh 1 of 3"
    assert lines[1].startswith("1:01  Compiling the step")
    assert lines[2].startswith("1:02  Compiling the step")
    assert max(map(len, lines)) < 30
    assert len(lines) == 3
    display.clear()
    assert file.getvalue().endswith("\r\x1b[K")
    assert "\n" not in file.getvalue()


def test_a_log_has_a_line_for_each_phase_and_each_minute(clock):
    file = io.StringIO()
    display = PhaseDisplay(file)
    for number in range(1, 4):
        display.enter("Planning", f"mesh {number} of 3")
        clock[0] += 1
    display.enter("Compiling", "the step")
    for _ in range(130):
        clock[0] += 1
        display.tick()
    display.clear()
    assert file.getvalue().splitlines() == [
        "0:00  Planning mesh 1 of 3",
        "0:03  Compiling the step",
        "1:03  Compiling the step",
        "2:03  Compiling the step",
    ]


def test_phases_are_shown_only_in_the_context(clock, capsys):
    enter_phase("Planning", "nobody listens")
    with show_phases():
        enter_phase("Compiling", "a step")
    enter_phase("Planning", "nobody listens")
    assert capsys.readouterr().err == "0:00  Compiling a step\n"


@pytest.mark.seconds(6)
@pytest.mark.thorough
def test_a_dry_run_without_the_compiler_says_so_first(clock, tmp_path, monkeypatch, capsys):
    sizes = LlamaConfig(vocab=64, width=64, layers=1, heads=4, kv_heads=4, hidden=128)
    (tmp_path / "config.json").write_text(json.dumps(write_config(sizes)))
    monkeypatch.setattr(_devices, "_installed", lambda compiler: False)
    options = ["--target", "v4:2x2x1", "--mesh", "fsdp=4", "--seq", "16"]
    with pytest.raises(SystemExit):
        main(["dry-run", "--model", str(tmp_path), *options])
    shown = capsys.readouterr()
    assert shown.out.startswith("Estimates by the CPU compiler")
    note = " ".join(shown.out.split())
    assert "documentation has figures" in note
    assert "own compiler, and differ for this reason" in note
    first, *phases = shown.err.split("\n0:00  ")
    assert "the compiler for v4 is not installed" in " ".join(first.split())
    assert phases[0] == "Tracing the model and its loss"
    assert [phase.split()[0] for phase in phases] == ["Tracing", "Planning", "Tracing", "Compiling"]
