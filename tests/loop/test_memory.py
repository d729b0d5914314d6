"""What is said when a device runs out of memory."""

import jax
import jax.numpy as jnp
import optax
import pytest
from problem import make_model
from test_errors import EXAMPLES, ONE, fit, notes, saved

import redcoast as rc
from redcoast.loop import _error_notes as _memory
from redcoast.loop import _fit
from redcoast.loop._evaluation import CompiledEvaluation
from redcoast.train._compile import CompiledStep
from redcoast.train._start import starting_state


def out_of_memory(monkeypatch, at):
    """Lets a step fail as XLA's allocator does."""
    calls = iter(range(1, 100))

    def failing(run):
        def call(self, *args):
            if next(calls) == at:
                raise jax.errors.JaxRuntimeError(
                    "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 68719476736 bytes."
                )
            return run(self, *args)

        return call

    for name in ("__call__", "take"):
        monkeypatch.setattr(CompiledStep, name, failing(getattr(CompiledStep, name)))


@pytest.mark.thorough
@pytest.mark.parametrize("sizes", [ONE, {"fsdp": 2, "model": 2}])
def test_out_of_memory_says_what_is_where_and_what_to_try(monkeypatch, tmp_path, sizes):
    out_of_memory(monkeypatch, 3)
    with pytest.raises(jax.errors.JaxRuntimeError) as error:
        fit(checkpoints=rc.Checkpoints(tmp_path, every=1, keep=1), mesh=rc.make_mesh(**sizes))
    text = str(error.value)
    assert text.startswith("RESOURCE_EXHAUSTED: a device ran out of memory.")
    axes = "data 1 x fsdp 1 x model 1" if sizes is ONE else "data 2 x fsdp 2 x model 2"
    assert f"On the mesh {axes} the plan puts " in text
    for remedy in ("fsdp", "`model`", "accumulate", "batch_size", "jax.checkpoint", "bfloat16"):
        assert remedy in text
    assert "68719476736" in str(error.value.__cause__)
    assert "Raised by step 3." in notes(error.value.__cause__)
    # What was saved before stays, and nothing is made of what may be wrong.
    assert saved(tmp_path) == [2]


@pytest.mark.parametrize("name", ["starting_state", "__call__"])
def test_out_of_memory_before_the_first_step_is_explained_too(monkeypatch, name):
    def fail(*args, **kwargs):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.")

    if name == "starting_state":
        made = starting_state
        monkeypatch.setattr(
            _fit, name, lambda *args, **options: (*made(*args, **options)[:2], fail)
        )
    else:
        monkeypatch.setattr(CompiledEvaluation, name, fail)
    with pytest.raises(jax.errors.JaxRuntimeError, match="ran out of memory. On the mesh"):
        fit(evaluation=rc.Evaluation(EXAMPLES[:8]))


def test_the_plans_bytes_are_those_of_its_table():
    model, mesh = make_model(width=512), rc.make_mesh(fsdp=8)
    state = rc.init_state(lambda key: model, optax.adamw(1e-3), key=jax.random.key(0))
    plan = rc.plan_shardings(state, mesh)
    totals = plan.report.totals
    text = _memory._explanation(plan)
    parameters = sum(x.size for x in jax.tree.leaves(model) if hasattr(x, "size")) * 4
    assert totals.parameters.bytes == parameters
    each = totals.parameters.bytes_per_device
    assert each < parameters / 4
    assert f"{each / 1e3:.3g} kB of parameters" in text


def test_other_errors_of_the_device_pass(monkeypatch):
    with (
        pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL: bad"),
        _memory.explained_memory(rc.plan_shardings({"w": jnp.ones(8)}, rc.make_mesh())),
    ):
        raise jax.errors.JaxRuntimeError("INTERNAL: bad")
