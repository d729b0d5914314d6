"""How long after a step its metrics are read."""

import jax.numpy as jnp
import pytest

import redcoast as rc
from redcoast.tracking._rates import Rates

QUIET = rc.progress_logger(False)


class StandingClock:
    def __init__(self, step_seconds=0.0):
        self.now, self.step_seconds = 0.0, step_seconds

    def __call__(self):
        self.now += self.step_seconds
        return self.now


def push(reader, step, loss=1.0):
    skipped = float(loss != loss)
    values = {"loss": loss, "grad_norm": 1.0, "skipped": skipped}
    reader.push(step, {name: jnp.float32(x) for name, x in values.items()})


def pushed(tmp_path, log, step_seconds, steps):
    """The numbers of the steps that are in `metrics.jsonl` after each step."""
    run = rc.RunInfo(directory=tmp_path)
    with rc.metrics_reader(log, run) as reader:
        reader._rates = Rates(run, StandingClock(step_seconds))
        for step in range(1, steps + 1):
            push(reader, step)
            rows = rc.read_metrics(tmp_path / "metrics.jsonl")
            yield [row["step"] for row in rows]
    yield [row["step"] for row in rc.read_metrics(tmp_path / "metrics.jsonl")]


@pytest.mark.parametrize(
    ("log", "step_seconds", "late"),
    [
        (QUIET, 1e-4, 16),  # short steps are not waited for
        (QUIET, 1.0, 1),
        ([QUIET, lambda metrics, step: None], 1e-4, 1),  # it may ask to stop after the next step
    ],
)
def test_steps_are_read_late_if_nobody_notices(log, step_seconds, late, tmp_path):
    read = list(pushed(tmp_path, log, step_seconds, steps=20))
    assert read[0] == [1]  # it may reveal a mistake
    assert [len(rows) for rows in read[1:-1]] == [max(1, n - late) for n in range(2, 21)]
    assert read[-1] == list(range(1, 21))


def train(most, first, dispatched):
    """Steps of which all are skipped from the first on; the list gets the numbers of all steps."""
    with rc.metrics_reader(QUIET, max_skipped=most) as reader:
        reader._rates = Rates(rc.RunInfo(), StandingClock())
        for step in range(1, 100):
            dispatched.append(step)
            push(reader, step, jnp.nan if step >= first else 1.0)


@pytest.mark.parametrize("most", [1, 2, 5, 20])
@pytest.mark.parametrize("first", [2, 3, 30])
def test_the_step_that_ends_the_run_is_the_last_that_was_dispatched(most, first):
    """So that its state is still there to find the cause in."""
    dispatched = []
    last = first + most - 1
    words = f"{most} steps in a row, up to step {last} "
    with pytest.raises(FloatingPointError, match=words):
        train(most, first, dispatched)
    assert dispatched[-1] == last
