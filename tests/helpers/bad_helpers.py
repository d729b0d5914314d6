"""What the rows of bad inputs call."""

# pyright: reportArgumentType=false, reportCallIssue=false

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh
from problem import (
    batch_of,
    collate_fn,
    fit_quietly,
    loss_fn,
    make_examples,
    make_model,
    predict_fn,
)

import redcoast as rc
from redcoast import models

EXAMPLES = make_examples(16)
KEY = jax.random.key(0)
PROMPT = np.ones((1, 3), np.int32)
SGD = optax.sgd(0.1)
TINY = {"vocab": 16, "width": 8, "layers": 1, "heads": 2, "kv_heads": 1, "hidden": 8}
ABSTRACT = jax.eval_shape(lambda: {"w": jnp.zeros((8, 8))})


def deleted():
    """An array that was donated, of which nothing can be shown."""
    x = jnp.ones(3)
    x.delete()
    return x


def deleted_key():
    key = jax.random.key(1)
    key.delete()
    return key


def state():
    return rc.init_state(lambda key: make_model(), SGD, key=KEY)


def llama(**sizes):
    return models.Llama(models.LlamaConfig(**(TINY | sizes)), key=KEY)


def fit(**options):
    settings = {
        "model_or_state": make_model(),
        "optimizer": SGD,
        "examples": EXAMPLES,
        "collate_fn": collate_fn,
        "loss_fn": loss_fn,
        "batch_size": 8,
        "steps": 2,
        "mesh": rc.make_mesh(devices=jax.devices()[:1]),
    } | options
    return fit_quietly(
        settings.pop("model_or_state"),
        settings.pop("optimizer"),
        settings.pop("examples"),
        **settings,
    )


def step(loss=loss_fn, optimizer=SGD, batch=None, **options):
    """A training step, traced and not compiled."""
    batch = batch_of(8) if batch is None else batch
    train = lambda s: rc.train_step(s, batch, loss_fn=loss, optimizer=optimizer, **options)
    return eqx.filter_eval_shape(train, state())


def evaluate(**options):
    settings = {"collate_fn": collate_fn, "loss_fn": loss_fn, "batch_size": 8} | options
    return rc.evaluate(make_model(), settings.pop("examples", EXAMPLES), **settings)


def predict(**options):
    settings = {"collate_fn": collate_fn, "predict_fn": predict_fn, "batch_size": 8} | options
    return rc.predict_examples(make_model(), settings.pop("examples", EXAMPLES), **settings)


def generate(tokens=PROMPT, **options):
    return rc.generate(llama(), tokens, **({"max_new_tokens": 2} | options))


def written(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path.parent


def saved(path):
    rc.save_checkpoint(path / "a", {"w": np.ones((2, 3), np.float32)})
    return path / "a"


def plan_file(path):
    rc.save_plan(rc.plan_shardings({"w": jnp.zeros((8, 8))}, rc.make_mesh()), path / "plan.json")
    return path / "plan.json"


def other_mesh():
    return Mesh(np.array(jax.devices()), ("x",), axis_types=(AxisType.Auto,))
