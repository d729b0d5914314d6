"""What a user is told when loss, gradients, parameters or data are NaN or infinite."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problem import (
    Stream,
    collate_fn,
    fit_quietly,
    loss_fn,
    make_examples,
    make_model,
    stops_after_skipping,
)

import redcoast as rc

EXAMPLES = make_examples(64)


def fit(*, model=None, **options):
    options = {
        "examples": EXAMPLES,
        "collate_fn": collate_fn,
        "loss_fn": loss_fn,
        "batch_size": 8,
        "steps": 8,
        "mesh": rc.make_mesh(devices=jax.devices()[:1]),
    } | options
    return fit_quietly(make_model() if model is None else model, optax.sgd(0.1), **options)


class Branches(eqx.Module):
    """Two parts that a loss may spoil one by one."""

    left: eqx.nn.MLP
    right: eqx.nn.MLP

    def __init__(self):
        self.left, self.right = make_model(0), make_model(1)


def spoiled_from(step):
    """A loss whose gradient is infinite for `right`'s last layer from a step on."""

    def loss(model, batch, key):
        value, aux = loss_fn(model.left, batch, key)
        scale = jnp.where(jnp.any(batch["late"]), 0.0, 1.0)
        weight = model.right.layers[-1].weight
        # The root of zero has a value and no derivative.
        return value + jnp.sum(jnp.sqrt(scale * (weight**2 + 1))), aux

    count = iter(range(-1, 10**6))  # the first batch is made for its shapes

    def collate(examples):
        late = next(count) >= step
        return collate_fn(examples) | {"late": np.full(len(examples), late)}

    return {"loss_fn": loss, "collate_fn": collate, "model": Branches()}


@pytest.mark.thorough
def test_gradients_and_examples_are_named(tmp_path):
    lines = []
    with pytest.raises(FloatingPointError) as error, stops_after_skipping(3):
        fit(
            **spoiled_from(3),
            checkpoints=rc.Checkpoints(tmp_path, every=2),
            log=lambda metrics, step: lines.append((step, metrics["skipped"])),
        )
    text = str(error.value)
    assert lines == [(1, 0), (2, 0), (3, 0), (4, 1), (5, 1), (6, 1)]
    assert "NaN or infinite at 3 steps in a row, up to step 6 with loss 2" in text
    assert "gradient norm nan" in text
    # No other gradient, no parameter, no input.
    assert text.count("NaN or infinite for") == 1
    assert "The gradient is NaN or infinite for model/right/layers/2/weight. " in text
    assert "holds" not in text
    assert f"{tmp_path}/checkpoints/" in text
    # The examples are those of the sixth batch of an order that is known.
    seen = []
    fit(
        steps=6,
        log=None,
        collate_fn=lambda e: (seen.append([x["index"] for x in e]), collate_fn(e))[1],
    )
    assert f"the examples with indices {seen[6]} of epoch 0" in text


@pytest.mark.thorough
@pytest.mark.parametrize("options", [{"accumulate": 2}, {"mesh": rc.make_mesh(fsdp=2, model=2)}])
def test_with_accumulation_and_on_a_mesh(options):
    words = "2 steps.*for model/right/layers/2/weight"
    with pytest.raises(FloatingPointError, match=words), stops_after_skipping(2):
        fit(**spoiled_from(1 if "mesh" not in options else 2), **options)


def test_examples_with_nan_are_named():
    examples = [dict(e) for e in EXAMPLES]
    bad = [5, 11, 40]
    for i in bad:
        examples[i]["x"] = np.full(16, np.inf, np.float32)
    with pytest.raises((FloatingPointError, ValueError)) as error, stops_after_skipping(1):
        fit(examples=examples, batch_size=64)
    text = str(error.value)
    head = "The batch's array x holds NaN or infinite values for the examples ["
    named = eval(text[text.index(head) + len(head) - 1 :].split("]")[0] + "]")
    assert sorted(named) == bad


@pytest.mark.thorough
def test_positions_of_a_stream_are_named():
    examples = [dict(e) for e in EXAMPLES]
    for i in range(16, 32):
        examples[i]["x"] = np.full(16, np.nan, np.float32)
    with pytest.raises(FloatingPointError) as error, stops_after_skipping(2):
        fit(examples=Stream(examples))
    assert "for the examples [24, 25, 26, 27, 28, 29, 30, 31]." in str(error.value)
    assert "The batch held the examples 24 to 31 of the stream." in str(error.value)


@pytest.mark.thorough
@pytest.mark.parametrize("frozen", [False, True])
def test_parameters_with_nan_are_named_before_any_step(frozen):
    model = make_model()
    model = eqx.tree_at(
        lambda m: m.layers[1].weight, model, replace_fn=lambda w: w.at[0, :3].set(jnp.nan)
    )
    trainable = eqx.tree_at(
        lambda m: m.layers[2].bias, jax.tree.map(lambda _: False, model), replace=True
    )
    options = {"trainable": trainable} if frozen else {}
    with pytest.raises(ValueError, match="nan for the first batch") as error:
        fit(model=model, **options)
    text = str(error.value)
    assert "model/layers/1/weight holds 3 values that are NaN or infinite before any step." in text
    assert ("model/layers/0/weight" in text) == (not frozen)


@pytest.mark.thorough
def test_a_damaged_optimizer_state_shows_in_the_parameters(tmp_path):
    """A state loaded with a moment that is not a number: the first step spoils parameters."""
    optimizer = optax.adam(1e-2)
    state = rc.init_state(lambda key: make_model(), optimizer, key=jax.random.key(0))
    where = lambda s: s.opt_state[0].mu.layers[0].bias
    state = eqx.tree_at(where, state, replace_fn=lambda x: x.at[3].set(jnp.nan))
    with pytest.raises(FloatingPointError) as error, stops_after_skipping(2):
        fit_quietly(
            state,
            optimizer,
            EXAMPLES,
            collate_fn=collate_fn,
            loss_fn=loss_fn,
            batch_size=8,
            steps=9,
        )
    assert "model/layers/0/bias holds 1 value that is NaN or infinite." in str(error.value)


@pytest.mark.thorough
def test_a_gradient_too_large_for_its_norm_is_named():
    def loss(model, batch, key):
        value, aux = loss_fn(model, batch, key)
        return value + 1e30 * jnp.sum(model.layers[0].bias), aux

    words = "1 steps? .*for model/layers/0/bias"
    with pytest.raises(FloatingPointError, match=words), stops_after_skipping(1):
        fit(loss_fn=loss)


@pytest.mark.thorough
def test_a_finite_step_in_between_starts_the_count_anew():
    def collate(examples):
        odd = next(count) % 3 < 2
        return collate_fn(examples) | {"bad": np.full(len(examples), odd)}

    def loss(model, batch, key):
        value, aux = loss_fn(model, batch, key)
        return value * jnp.where(jnp.all(batch["bad"]), jnp.inf, 1.0), aux

    count = iter([2, *range(2, 100)])
    lines = []
    log = lambda metrics, step: lines.append(metrics["skipped"])
    with stops_after_skipping(3):
        fit(collate_fn=collate, loss_fn=loss, steps=9, log=log)
    assert sum(lines) >= 5


@pytest.mark.thorough
def test_values_that_are_out_of_sight_do_not_hide_the_error(monkeypatch):
    """Where there is no memory to look for the reason, the message goes without."""
    from redcoast.loop import _nonfinite as _not_finite

    def fail(*_, **__):
        raise MemoryError

    monkeypatch.setattr(_not_finite, "find_nonfinite", fail)
    words = "could not be found: MemoryError"
    with pytest.raises(FloatingPointError, match=words), stops_after_skipping(1):
        fit(**spoiled_from(1))


@pytest.mark.thorough
@pytest.mark.few("1")
@pytest.mark.parametrize("devices", [1, 8])
def test_a_debugged_run_raises_at_the_operation_that_computes_nan(devices):
    """JAX itself checks no later call of a program that was traced through a jaxpr, and `fit` skips
    steps that are not finite."""

    def loss(model, batch, key):
        value, aux = loss_fn(model, batch, key)
        return value + jnp.log(jnp.min(batch["scale"])), aux

    late = iter([1.0, 1.0, 1.0, -1.0] + [1.0] * 9)  # the first batch is made for its shapes
    collate = lambda examples: (
        collate_fn(examples) | {"scale": np.full(len(examples), next(late), np.float32)}
    )
    mesh = rc.make_mesh(devices=jax.devices()[:devices])
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="encountered in log") as e:
        fit(loss_fn=loss, collate_fn=collate, mesh=mesh, workers=0)
    assert "Raised by step 3." in e.value.__notes__
