"""What each line of the user's function costs, and limits for a test of the user's own."""

from linecache import getline

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh

import redcoast as rc

MESH = AbstractMesh((2, 1, 4), ("data", "fsdp", "model"))
TABLE = np.ones((1024, 1024), np.float32)


def array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


MODEL = {"up": array(64, 256), "down": array(256, 64)}


def feed_forward(model, x):
    hidden = jax.nn.relu(x @ model["up"])
    return hidden @ model["down"]


def looks_up(model, x, key):
    x = feed_forward(model, x)
    everyone = x @ jnp.swapaxes(x.reshape(-1, 64), 0, 1)  # planted
    return jnp.mean(everyone**2)


def closes_over(model, x, key):
    x = feed_forward(model, x)
    wide = jnp.tile(x, (1, 1, 16)) @ TABLE  # planted
    return jnp.mean(wide)


def widens(model, x, key):
    x = feed_forward(model, x)
    powers = jnp.exp(x[..., None] * jnp.arange(64.0)[None, None, None])  # planted
    return jnp.mean(powers)


def repeats(model, x, key):
    x = feed_forward(model, x)

    def step(x, _):
        return jnp.sin(x @ model["up"] @ model["down"]), None

    x, _ = jax.lax.scan(step, x, None, length=30)
    return jnp.mean(x)


def plan_of(fn):
    return rc.plan_shardings(MODEL, MESH, fn=fn, args=(array(16, 32, 64), None))


@pytest.mark.parametrize("fn", [looks_up, closes_over, widens])
def test_a_costly_line_is_the_first(fn):
    lines = plan_of(fn).report.program.lines
    first = lines[0]
    assert first.file == __file__
    assert "# planted" in getline(first.file, first.number)


@pytest.mark.parametrize("fn", [looks_up, closes_over, widens, repeats])
def test_all_bytes_belong_to_a_line(fn):
    """The sums are the plan's own, in loops too, and next to nothing has no line."""
    program = plan_of(fn).report.program
    sent = sum(one.bytes for one in program.traffic)
    kept = program.memory.activations + program.memory.closed_over
    assert sum(one.sent_bytes for one in program.lines) == pytest.approx(sent, abs=8)
    assert sum(one.memory_bytes for one in program.lines) == pytest.approx(kept, abs=8)
    nowhere = [one for one in program.lines if not one.file]
    assert sum(one.sent_bytes + one.memory_bytes for one in nowhere) <= 0.05 * (sent + kept)


def test_the_table_shows_code_and_causes():
    text = plan_of(closes_over).table(by="line")
    assert all(len(line) <= 80 for line in text.splitlines())
    for words in ("test_plan_lines.py:", "# planted", "arrays that the function closes over"):
        assert words in text


def test_lines_are_saved_with_the_plan(tmp_path):
    plan = plan_of(looks_up)
    rc.save_plan(plan, tmp_path / "plan.json")
    saved = rc.load_plan(tmp_path / "plan.json", MODEL, MESH)
    assert saved.report.program.lines == plan.report.program.lines


def test_arrays_that_are_closed_over_are_in_the_summary():
    text = str(plan_of(closes_over))
    assert "Closed over    4.19 MB replicated: float32[1024,1024]" in text
    assert len(text.splitlines()) <= 10


def test_limits_name_the_costliest_lines():
    plan = plan_of(closes_over)
    plan.check(max_bytes=1e9, max_memory=1e9)
    with pytest.raises(ValueError, match=r"of memory, more than max_memory=1,000 bytes.*\.py:\d+"):
        plan.check(max_memory=1000)
    with pytest.raises(ValueError, match=r"communicates about .* more than max_bytes=10 bytes"):
        plan.check(max_bytes=10)


def test_limits_and_tables_that_are_not_understood():
    plan = plan_of(looks_up)
    with pytest.raises(ValueError, match="needs a limit"):
        plan.check()
    with pytest.raises(TypeError, match="`max_bytes` is True. It must be a number"):
        plan.check(max_bytes=True)
    with pytest.raises(ValueError, match='must be "array" or "line"'):
        plan.table(by="file")
    with pytest.raises(ValueError, match="made without a function"):
        rc.plan_shardings(MODEL, MESH).table(by="line")
