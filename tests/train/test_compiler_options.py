"""Options of the compiler, which reach it, and which versions of XLA may not know."""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import redcoast as rc
from redcoast.train import _compiler_options

FAST = {"xla_backend_optimization_level": 0}
OPTIMIZER = optax.sgd(0.1)


def loss_fn(model, batch, key):
    return jnp.mean((batch["x"] @ model["w"]) ** 2)


def training():
    model = {"w": np.ones((4, 2), np.float32)}
    return model, {"x": np.ones((8, 4), np.float32)}


@pytest.fixture
def compiled_with(monkeypatch):
    """The options that jitted functions are given."""
    given, jit = [], jax.jit

    def recorded(fn=None, **options):
        given.append(options.get("compiler_options"))
        return jit(fn, **options) if fn is not None else ft.partial(jit, **options)

    monkeypatch.setattr(jax, "jit", recorded)
    return given


@pytest.mark.few("1")
@pytest.mark.parametrize("steps_per_call", [1, 2])
def test_options_reach_the_compiler_of_a_prepared_step(steps_per_call, compiled_with):
    model, batch = training()
    options = {"compiler_options": FAST, "steps_per_call": steps_per_call}
    state, step, _ = rc.prepare(model, OPTIMIZER, loss_fn, batch, **options)
    if steps_per_call > 1:
        batch = {"x": np.stack([batch["x"]] * 2)}
    step(state, batch)
    assert FAST in compiled_with


def test_options_of_fit_are_printed_and_unknown_ones_left_out(compiled_with, capsys):
    """A run does not end because another version of XLA has renamed an option."""
    model, batch = training()
    options = FAST | {"xla_of_another_version": True}
    with pytest.warns(UserWarning, match="does not know the options xla_of_another_version"):
        rc.fit(
            *(model, OPTIMIZER, (batch["x"],)),
            collate_fn=lambda rows: {"x": np.stack([row[0] for row in rows])},
            loss_fn=loss_fn,
            batch_size=8,
            steps=2,
            compiler_options=options,
            steps_per_call=1,
        )
    assert FAST in compiled_with
    assert "Compiler       xla_backend_optimization_level=0" in capsys.readouterr().out


def test_two_steps_with_other_options_are_two_programs():
    model, batch = training()
    steps = [
        rc.prepare(model, OPTIMIZER, loss_fn, batch, compiler_options=options, steps_per_call=2)
        for options in (FAST, {})
    ]
    assert [one.step.compiler_options for one in steps] == [FAST, {}]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"xla_flag": "true"}, "xla_flag='true'.*boolean True"),
        ({"xla_backend_optimization_level": "x"}, "refuses.*level='x'"),
    ],
)
def test_bad_values_are_refused_in_a_sentence(options, message):
    model, batch = training()
    with pytest.raises(ValueError, match=message):
        rc.prepare(model, OPTIMIZER, loss_fn, batch, compiler_options=options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"xla_flag": None}, "xla_flag=None.*booleans, numbers or strings"),
        ({3: True}, "the name 3"),
        ("--xla_flag", "must be a dict"),
    ],
)
def test_bad_types_are_refused_in_a_sentence(options, message):
    with pytest.raises(TypeError, match=message):
        _compiler_options.check_compiler_options(options)


def test_defaults_of_another_version_are_left_out_without_a_warning(monkeypatch):
    defaults = {"cpu": FAST | {"xla_of_another_version": True}}
    monkeypatch.setattr(_compiler_options, "_DEFAULTS", defaults)
    actual = _compiler_options.compiler_options_for(rc.make_mesh())
    assert actual == tuple(FAST.items())
    assert _compiler_options.compiler_options_for(rc.make_mesh(), {}) == ()


def test_a_cpu_has_no_defaults():
    assert _compiler_options.compiler_options_for(rc.make_mesh()) == ()
