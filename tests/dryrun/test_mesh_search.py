"""A language model trains to the same losses on all meshes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from grids import few_of
from problem import quiet

import redcoast as rc
from redcoast.models.llama import Llama, LlamaConfig

CONFIG = LlamaConfig(vocab=64, width=64, layers=2, heads=4, kv_heads=4, hidden=128)
TEXT = np.random.default_rng(0).integers(0, 64, 4096).astype(np.int32)
WINDOWS = np.lib.stride_tricks.sliding_window_view(TEXT, 17)[::16]


def loss_fn(model, batch, key):
    logits = model(batch[:, :-1])
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]))


def losses(mesh):
    actual = []
    rc.fit(
        Llama(CONFIG, key=jax.random.key(0)),
        optax.adamw(3e-3),
        WINDOWS,
        collate_fn=np.stack,
        loss_fn=loss_fn,
        batch_size=16,
        steps=20,
        mesh=mesh,
        log=quiet(lambda metrics, step: actual.append(metrics["loss"])),
    )
    return actual


@pytest.fixture(scope="module")
def expected():
    return losses(rc.make_mesh(devices=jax.devices()[:1]))


@pytest.mark.parametrize(
    "sizes",
    few_of(
        [
            {"data": 8},
            {"data": 2, "model": 4},
            {"data": 2, "fsdp": 2, "model": 2},
            {"data": 1, "fsdp": 8},
        ],
        {"data": 2, "fsdp": 2, "model": 2},
    ),
)
@pytest.mark.thorough
def test_the_same_losses_on_any_mesh(sizes, expected):
    actual = losses(rc.make_mesh(**sizes))
    np.testing.assert_allclose(actual, expected, rtol=1e-5)
    assert actual[-1] < actual[0] - 0.1
