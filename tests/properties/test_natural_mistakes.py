"""What a newcomer sees after a natural mistake: what is wrong, where, and what would work."""

import json
import re
import subprocess
import sys

import pytest
from grids import few_of
from natural_mistakes import ROWS
from paths import HELPERS

import redcoast as rc

# These compile steps of their own, for messages that shorter rows have too.
LONG = {
    "a few NaN inputs",
    "a key of the older kind",
    "a label out of range",
    "a learning rate that is too large",
    "a logarithm of zero",
    "a loss compiled by JAX",
    "a loss that keeps what it computes",
    "a model from the state of a run",
    "a rate that is too large for a short run",
    "an empty mask",
    "labels of -100",
    "labels of an evaluation that are out of range",
    "parameters in float16",
    "predictions in a column and flat labels",
    "the directory of a run",
    "the evaluation of a state",
    "tokens out of range",
}
SHORT = [name for name in ROWS if name not in LONG]


@pytest.fixture(scope="session")
def printed(request, tmp_path_factory):
    """What the mistakes of this session print, in a process where no types are checked."""
    tests = [item for item in request.session.items if "printed" in item.fixturenames]
    names = [item.callspec.params["name"] for item in tests]
    directory = tmp_path_factory.mktemp("mistakes")
    command = [sys.executable, str(HELPERS / "natural_mistakes.py"), str(directory), *names]
    process = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert process.returncode == 0, process.stderr
    assert not process.stderr, "something is printed below the last error"
    return json.loads(process.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", few_of(ROWS, *SHORT))
def test_the_last_line_says_what_would_work(printed, name):
    _, expected, words = ROWS[name]
    kinds, hidden, text = printed[name]
    assert re.search(words, text, re.DOTALL), text
    if expected is None:
        assert not kinds, text
        return
    assert f"{expected.__module__}.{expected.__qualname__}" in kinds, text
    assert hidden == 0, "frames of redcoast or JAX are shown"
    last = text.splitlines()[-1]
    assert re.search(r"[A-Z`'].*[.?]$", last), "the last line is not a sentence"
    assert "JAX has removed" not in text
    # A sentence of redcoast names a function or an argument, or describes what it was given.
    assert re.search("`|The |step|checkpoint", last), last


def test_there_are_the_newcomers_mistakes_and_twenty_more():
    assert len(ROWS) >= 34 + 20


def test_exceptions_are_public():
    modules = {id(x): x for name, x in sys.modules.items() if name.startswith("redcoast.")}
    actual = {
        x
        for module in modules.values()
        for x in vars(module).values()
        if isinstance(x, type) and issubclass(x, Exception) and "redcoast" in x.__module__
    }
    # These never leave the package, or are the category of a warning.
    private = {"CannotRebind", "Misfit", "MixesRows", "NotLocal", "NoPipeline"}
    private |= {"Postponed", "Refused", "RuleError", "Unconstrained", "WrongEntries"}
    named = {x.__name__ for x in actual}
    assert named >= {"CheckpointDamaged", "CheckpointMismatch", "CheckpointNotSaved", "ProcessLost"}
    for kind in actual:
        assert kind.__name__ in private or getattr(rc, kind.__name__) is kind
        assert kind.__name__ in private or kind.__module__ == "redcoast"
