"""Mistakes that newcomers make, each with the error and the words that they should see.

`python natural_mistakes.py DIRECTORY NAME...` makes those with these names as a user does, without
the type checker of the tests, and prints what each of them prints. `tests/helpers/bad_*.py` have
single bad arguments.
"""

# pyright: reportArgumentType=false, reportCallIssue=false

import contextlib
import functools as ft
import inspect
import io
import json
import logging
import os
import sys
import traceback
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import redcoast as rc
from redcoast.core._low_rank import AbstractLowRank
from redcoast.data._stack import stack_examples

rng = np.random.default_rng(0)
X = rng.normal(size=(32, 4)).astype(np.float32)
Y = rng.integers(0, 2, 32).astype(np.int32)
EXAMPLES = [{"x": x, "y": y} for x, y in zip(X, Y, strict=True)]
ONE = rc.make_mesh(devices=jax.devices()[:1])
KEY = jax.random.key(0)
SGD = optax.sgd(0.1)
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def formatted(model, batch, key):
    loss = good(model, batch, key)
    print(f"{loss:.3f}")
    return loss


def one_hot(model, batch, key):
    labels = jax.nn.one_hot(batch["y"], 2)
    return jnp.mean(cross_entropy(jax.vmap(model)(batch["x"]), labels))


def swapped_arguments(batch, model, key):
    return jnp.mean(jax.vmap(model)(batch["x"]))


def model(inputs=4, outputs=2):
    return eqx.nn.Sequential([eqx.nn.Linear(inputs, outputs, key=KEY)])


def collate(examples):
    return {name: np.stack([e[name] for e in examples]) for name in examples[0]}


def good(model, batch, key):
    return jnp.mean(cross_entropy(jax.vmap(model)(batch["x"]), batch["y"]))


def predict_fn(model, batch, key):
    return jnp.argmax(jax.vmap(model)(batch["x"]), -1)


MODEL = model()


def fit(loss_fn=good, examples=EXAMPLES, model=MODEL, optimizer=SGD, **options):
    options = {"collate_fn": collate, "batch_size": 8, "steps": 4, "mesh": ONE} | options
    options = {"log": [rc.progress_logger(False)]} | options
    return rc.fit(model, optimizer, examples, loss_fn=loss_fn, **options)


def evaluated(**options):
    return fit(evaluation=rc.Evaluation(EXAMPLES[:8], **{"predict_fn": predict_fn, **options}))


@ft.cache
def run(directory):
    """A finished run."""
    fit(optimizer=optax.adam(0.1), checkpoints=rc.Checkpoints(directory / "run"))
    return directory / "run"


def resumed(directory, **options):
    fit(steps=8, checkpoints=rc.Checkpoints(run(directory)), **options)


def changed(index, **values):
    return [e | values if i == index else e for i, e in enumerate(EXAMPLES)]


def steep(model, batch, key):
    return jnp.mean(cross_entropy(10 * jax.vmap(model)(batch["x"]), batch["y"]))


def branch(model, batch, key):
    loss = good(model, batch, key)
    return loss if loss > 0 else -loss


def number(model, batch, key):
    loss = good(model, batch, key)
    return loss, {"perplexity": float(jnp.exp(loss))}


def in_numpy(model, batch, key):
    return jnp.mean(np.log(np.asarray(jax.vmap(model)(batch["x"]))))


def masked(model, batch, key):
    return jnp.mean(jax.vmap(model)(batch["x"])[batch["y"] == 1])


def without_key(model, batch, key):
    return jnp.mean(jax.vmap(lambda x: eqx.nn.Dropout(0.5)(model(x)))(batch["x"]))


def assigned(model, batch, key):
    model.layers[0].weight = model.layers[0].weight * 2
    return good(model, batch, key)


def entropy(model, batch, key):
    p = jax.nn.relu(jax.vmap(model)(batch["x"]) - 100)
    return -jnp.mean(p * jnp.log(p))


def empty_mask(model, batch, key):
    mask = (batch["y"] == 5).astype(jnp.float32)
    return jnp.sum(jax.vmap(model)(batch["x"])[:, 0] * mask) / jnp.sum(mask)


def looked_up(model, batch, key):
    return jnp.mean(jnp.take(model.layers[0].weight, batch["y"] + 40, axis=0))


def variance(model, batch, key):
    out = jax.vmap(model)(batch["x"])
    return jnp.mean((out - jnp.mean(out, 0, keepdims=True)) ** 2)


def of_all_pairs(model, batch, key):
    return jnp.mean((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2)


def prepared_for_pairs():
    rc.prepare(model(outputs=1), SGD, of_all_pairs, collate(EXAMPLES[:8]), mesh=ONE)


def embedded(model, batch, key):
    rows = jax.vmap(model)(batch["y"])
    return jnp.mean(rows**2)


def of_tokens(*tokens):
    """A run on these tokens, some of which may be no row of an embedding of 10 rows."""
    examples = [{"y": np.int32(tokens[i % len(tokens)])} for i in range(8)]
    fit(embedded, examples, model=eqx.nn.Embedding(10, 3, key=KEY))


def convolved(dtype, shape):
    conv = eqx.nn.Conv2d(1, 2, 3, key=KEY)
    loss = lambda model, batch, key: jnp.mean(jax.vmap(model)(batch["x"]))
    fit(loss, [{"x": np.ones(shape, dtype)}] * 32, conv)


def loop(loss_fn):
    """A step of a custom loop."""
    state = rc.init_state(lambda key: model(), SGD, key=KEY)
    step = ft.partial(rc.train_step, loss_fn=loss_fn, optimizer=SGD)
    rc.compile_step(step, rc.infer_shardings(state, ONE))(state, collate(EXAMPLES[:8]))


class Net:
    def __init__(self):
        self.weight = jnp.ones((4, 2))


class OfFields(eqx.Module):
    """A module without an `__init__`, whose class is called with the array."""

    weight: jax.Array


class FlaxNet:
    """What a module of Flax is to JAX: an object that is no PyTree."""


class DataLoader:
    dataset = EXAMPLES

    def __len__(self):
        return 4


class Decoder(eqx.Module):
    """What `generate` takes for a decoder, until its options are read."""

    init_cache = decode = unembed = config = None


class Adapted(AbstractLowRank):
    weight: jax.Array
    a: jax.Array
    b: jax.Array


class Own(eqx.Module):
    weight: jax.Array

    def __call__(self, x):
        return self.weight @ x


def half():
    is_array = eqx.is_inexact_array
    return jax.tree.map(lambda x: x.astype(jnp.float16) if is_array(x) else x, model())


def fit_twice(loss):
    """Each of two runs traces the loss once."""
    fit(loss)
    fit(loss)


def ruled_by_a_value_outside(model, batch, key):
    shift = jnp.mean(batch["x"])

    @jax.custom_jvp
    def shifted_sine(x):
        return jnp.sin(x + shift)

    shifted_sine.defjvp(lambda x, t: (jnp.sin(x[0] + shift), t[0] * jnp.cos(x[0] + shift)))
    return shifted_sine(good(model, batch, key))


def keeping(kept):
    """A loss that uses what an earlier call of it has computed."""

    def loss(model, batch, key):
        kept.append(good(model, batch, key))
        return kept[-1] + 0 * kept[0]

    return loss


def state():
    return rc.init_state(lambda key: model(), SGD, key=KEY)


FlaxNet.__module__ = "flax.linen.module"
LATE = changed(0, x=np.full(4, np.nan, np.float32))  # not in the first batch
ODD_LABEL = changed(3, y=np.int32(7))
BATCH = r"The batch is x float32\[8, 4\], y int32\[8\]\."
STATE = r"takes a model, but was given a TrainState\. Pass its model, `state\.model`, or"
PLANNED = r"Raised while the step was planned, before the first step\."
VMAP = r"was called with the entire batch\..*`jax\.vmap\(model\)\(batch\[\"x\"\]\)`\.$"

# By name: what is done in a directory, the error (`None`: none), and the words at its end.
ROWS = {
    "formatted tracer": (lambda d: fit(formatted), TypeError, r"`jax\.debug\.print\("),
    "one-hot labels": (lambda d: fit(one_hot), TypeError, "`optax.softmax_cross_entropy`"),
    "loss of batch and model": (
        lambda d: fit(swapped_arguments),
        TypeError,
        r"called as `loss_fn\(model, batch, key\)`, with the arguments in this order",
    ),
    "gradient of the loss": (
        lambda d: fit(eqx.filter_value_and_grad(good)),
        TypeError,
        "If it is the gradient, pass the loss itself",
    ),
    "integer parameters": (
        lambda d: fit(model={"w": np.arange(3)}),
        ValueError,
        "`fit`|its arrays are of int32, and only floating arrays are trained",
    ),
    "functions in place of parameters": (
        lambda d: fit(model=(jnp.sin, jnp.cos)),
        ValueError,
        "has no arrays, but .*Pass the parameters as the model",
    ),
    "a schedule by position": (
        lambda d: rc.learning_rate_schedule(1e-3, 100),
        TypeError,
        r"`learning_rate_schedule` takes arguments by name, .*: examples, batch_size",
    ),
    # The 32 of a newcomer.
    "key of the batch": (
        lambda d: fit(lambda m, b, k: jnp.mean(b["image"])),
        KeyError,
        rf"'image'\nRaised by `loss_fn`.*\n{PLANNED}\n{BATCH}$",
    ),
    "floating labels": (
        lambda d: fit(examples=[e | {"y": np.float32(e["y"])} for e in EXAMPLES]),
        TypeError,
        r"y float32\[8\]\.\nLabels that are integers have the type int32\..*softmax_cross_entropy`",
    ),
    "text in a batch": (
        lambda d: fit(collate_fn=lambda e: collate(e) | {"name": ["a"] * len(e)}),
        TypeError,
        "`collate_fn` returned str at name/0",
    ),
    "examples in place of a batch": (
        lambda d: fit(collate_fn=lambda e: e),
        TypeError,
        r"returned a list of 8 entries.*stack the examples, as in .*np\.stack",
    ),
    "no vmap": (
        lambda d: fit(lambda m, b, k: jnp.mean(cross_entropy(m(b["x"]), b["y"]))),
        TypeError,
        rf"{PLANNED}\n{BATCH}\n`Sequential` {VMAP}",
    ),
    "a batch that does not divide": (
        lambda d: fit(batch_size=7, steps=1, mesh=rc.make_mesh(), log=None),
        None,
        "A batch of 7 does not divide over data x fsdp = 8 devices"
        ".*A multiple of 8 would be sharded",
    ),
    "a module of Flax": (
        lambda d: fit(model=FlaxNet()),
        TypeError,
        r"FlaxNet, is a Flax module.*`module\.init\(key, x\)`.*`module\.apply\(model, x\)`",
    ),
    "a class": (
        lambda d: fit(model=eqx.nn.MLP),
        TypeError,
        r"The model is the class MLP\. Pass an instance",
    ),
    "a class of one field": (
        lambda d: fit(model=OfFields),
        TypeError,
        r"The model is the class OfFields\. Pass an instance",
    ),
    "a plain object": (
        lambda d: fit(model=Net()),
        TypeError,
        r"a Net, which is not a PyTree\. Make Net a subclass of `eqx.Module`",
    ),
    "a vector for a loss": (
        lambda d: fit(lambda m, b, k: cross_entropy(jax.vmap(m)(b["x"]), b["y"])),
        ValueError,
        r"a loss of shape \(8,\).*`jnp\.mean\(loss\)`",
    ),
    "metrics that are an array": (
        lambda d: fit(lambda m, b, k: (good(m, b, k), jnp.mean(b["x"]))),
        TypeError,
        r"The second value that `loss_fn` returned is of type jax\.Array\. It must be a dict",
    ),
    "a third value that is no model": (
        lambda d: fit(lambda m, b, k: (good(m, b, k), {}, jnp.mean(b["x"]))),
        ValueError,
        r"If `loss_fn` returns three values, they are the loss, a dict of metrics, and the model",
    ),
    "a loss without a key": (
        lambda d: fit(lambda model, batch: good(model, batch, None)),
        TypeError,
        rf"{BATCH}\nThe function is called as `loss_fn\(model, batch, key\)`, and must accept",
    ),
    "no return": (
        lambda d: fit(lambda m, b, k: None),
        TypeError,
        r"type NoneType.*Is a `return` missing\?",
    ),
    "a few NaN inputs": (
        lambda d: fit(examples=LATE),
        None,
        r"Step \d was skipped: loss nan.*array x holds NaN or infinite values for the examples "
        r"\[0\]\..*1 of 4 steps were skipped",
    ),
    "a learning rate that is too large": (
        lambda d: fit(steep, optimizer=optax.sgd(1e38), steps=40),
        FloatingPointError,
        r"20 steps in a row.*first NaN with the operation `.*`, at .*\.py:\d+\..*"
        "Lower the learning rate",
    ),
    "a path without a checkpoint": (
        lambda d: rc.load_checkpoint(d / "none", model()),
        FileNotFoundError,
        "There is no checkpoint at .*none. Pass the path that was given",
    ),
    "the directory of a run": (
        lambda d: rc.load_checkpoint(run(d), model()),
        rc.CheckpointDamaged,
        r"Its newest checkpoint is .*run/checkpoints/4\. `subtree=\"model\"`",
    ),
    "a model from the state of a run": (
        lambda d: rc.load_checkpoint(run(d) / "checkpoints/4", model()),
        rc.CheckpointMismatch,
        r"All arrays of `like` are in the part `model`: pass `subtree=\"model\"`",
    ),
    "another model on resumption": (
        lambda d: resumed(d, model=model(outputs=3), optimizer=optax.adam(0.1)),
        rc.CheckpointMismatch,
        r"another model or optimizer.*model/layers/0/bias is float32\[2\] in the checkpoint and "
        r"float32\[3\] in this run.*choose another directory",
    ),
    "another optimizer on resumption": (
        lambda d: resumed(d),
        rc.CheckpointMismatch,
        "another model or optimizer.*Only in the checkpoint: opt_state/0/count.*another directory",
    ),
    "a mesh larger than the machine": (
        lambda d: rc.make_mesh(model=16),
        ValueError,
        r"there are 8\..*model in \[1, 2, 4, 8\] would fit",
    ),
    "a key of the older kind": (lambda d: fit(key=jax.random.PRNGKey(0), steps=1), None, ""),
    "a number for a key": (lambda d: fit(key=0), TypeError, r"`key` is 0.*`jax\.random\.key\(0\)`"),
    "a mean over the batch": (
        lambda d: evaluated(
            metric_fn=lambda e, o: {}, predict_fn=lambda *a: jnp.mean(predict_fn(*a) * 1.0)
        ),
        ValueError,
        r"`predict_fn` returned an array of shape \(\) for a batch of 8 examples",
    ),
    "text for a metric": (
        lambda d: evaluated(metric_fn=lambda e, o: {"accuracy": "99%"}),
        ValueError,
        "`metric_fn` returned '99%' for 'accuracy'",
    ),
    "a generator": (
        lambda d: fit(examples=(e for e in EXAMPLES), checkpoints=rc.Checkpoints(d)),
        TypeError,
        r"`examples` is an iterator without a state.*Pass a function that returns a new iterator",
    ),
    "no length": (lambda d: fit(steps=None), ValueError, "Pass `epochs` or `steps`"),
    "other inputs than the data's": (
        lambda d: fit(model=model(inputs=3)),
        TypeError,
        rf"{BATCH}\nIt failed in a `Linear` with weight float32\[2, 3\], bias float32\[2\]\.$",
    ),
    "a branch on the loss": (
        lambda d: fit(branch, mesh=rc.make_mesh()),
        jax.errors.TracerBoolConversionError,
        rf"the function branch at .*natural_mistakes\.py.*{BATCH}\n.*use `jnp\.where` or",
    ),
    "key of an example": (
        lambda d: fit(collate_fn=lambda ex: {"x": np.stack([e["image"] for e in ex])}),
        KeyError,
        r"`collate_fn` for the examples with indices \[0, .*The first of the examples is x "
        r"float32\[4\], y int32\[\]\.$",
    ),
    "a label out of range": (
        lambda d: fit(examples=ODD_LABEL, batch_size=32),
        ValueError,
        r"index 7 of an axis of size 2.*array y holds 7 for the examples \[3\]\. Labels.*0 to 1",
    ),
    "the name of a pretrained model": (
        lambda d: rc.load_pretrained("gpt2"),
        FileNotFoundError,
        "nothing at .*gpt2.*`hf download",
    ),
    "a metric that is not there": (
        lambda d: fit(
            checkpoints=rc.Checkpoints(d / "best", best="acc", mode="max"),
            evaluation=rc.Evaluation(EXAMPLES[:8]),
        ),
        ValueError,
        r"best='acc'.*has loss\.$",
    ),
    "an early stop by an accuracy without a mode": (
        lambda d: fit(
            evaluation=rc.Evaluation(EXAMPLES[:8]),
            early_stopping=rc.EarlyStopping(2, metric="accuracy"),
        ),
        ValueError,
        r"`EarlyStopping\(metric='accuracy'\)` needs a `mode`: pass mode='max' .* or mode='min'",
    ),
    "the best accuracy without a mode": (
        lambda d: rc.Checkpoints(d / "best", best="eval/accuracy"),
        ValueError,
        r"`Checkpoints\(best='eval/accuracy'\)` needs a `mode`: pass mode='max' ",
    ),
    "the evaluation of a state": (
        lambda d: rc.evaluate(state(), EXAMPLES, loss_fn=good, batch_size=8),
        TypeError,
        STATE,
    ),
    "the predictions of a state": (
        lambda d: rc.predict_examples(state(), EXAMPLES, predict_fn=predict_fn, batch_size=8),
        TypeError,
        STATE,
    ),
    "tokens from a state": (
        lambda d: rc.generate(state(), np.ones((1, 4), np.int32), 4),
        TypeError,
        STATE,
    ),
    "a state to be saved as a model": (
        lambda d: rc.save_pretrained(state(), d / "saved"),
        TypeError,
        STATE,
    ),
    "adapters without trainable": (
        lambda d: fit(lambda m, b, k: jnp.mean(m.weight * m.a), model=Adapted(*[jnp.ones(4)] * 3)),
        None,
        r"natural_mistakes\.py:\d+: UserWarning: .*`trainable=redcoast\.lora\.trainable\(model\)`",
    ),
    "checkpoints in a bucket": (
        lambda d: fit(checkpoints="s3://bucket/run"),
        ValueError,
        r"`directory` is 's3://bucket/run', an address, .*path at which the store is mounted",
    ),
    "a model in a bucket": (
        lambda d: rc.save_checkpoint(Path("gs://bucket/model"), model()),
        ValueError,
        r"`path` is 'gs:/bucket/model', an address",
    ),
    "checkpoints in a file": (
        lambda d: fit(checkpoints=run(d) / "metrics.jsonl"),
        FileExistsError,
        r"The directory of the run, .*metrics\.jsonl, is a file",
    ),
    "the metrics of a directory": (
        lambda d: rc.read_metrics(run(d)),
        IsADirectoryError,
        r"run is a directory\. Pass the path of its file `metrics\.jsonl`: .*run/metrics\.jsonl\.$",
    ),
    "the monitor of an early stop": (
        lambda d: rc.EarlyStopping(3, monitor="val_loss"),
        TypeError,
        r"`EarlyStopping` has no argument `monitor`\. Pass `metric`, .* and its `mode`\.$",
    ),
    "the best weights": (
        lambda d: rc.EarlyStopping(3, restore_best_weights=True),
        TypeError,
        r"`restore_best_weights`\. Leave it out: `fit` always returns the state of the best",
    ),
    "the number of checkpoints by another name": (
        lambda d: rc.Checkpoints(d, max_to_keep=3),
        TypeError,
        r"`Checkpoints` has no argument `max_to_keep`\. Pass `keep`",
    ),
    "tensor parallelism": (
        lambda d: rc.make_mesh(tp=2),
        TypeError,
        r"`make_mesh` has no argument `tp`\. Pass `model`, .*`model=2`\.$",
    ),
    "a number of devices": (
        lambda d: rc.make_mesh(8),
        TypeError,
        r"`make_mesh` takes arguments by name, such as `make_mesh\(data=\.\.\.\)`: data, fsdp,",
    ),
    "a length with the prompt": (
        lambda d: rc.generate(model(), np.ones((1, 4), np.int32), max_length=8),
        TypeError,
        r"`generate` has no argument `max_length`\. Pass `max_new_tokens`",
    ),
    "a seed for tokens": (
        lambda d: rc.generate(Decoder(), np.ones((1, 4), np.int32), 4, seed=0),
        TypeError,
        r"`generate` has no option seed\..* Pass `key=jax\.random\.key\(0\)`\.$",
    ),
    "keys for tokens": (
        lambda d: rc.generate(Decoder(), np.ones((2, 4), np.int32), 4, key=jax.random.split(KEY)),
        ValueError,
        r"`key` is an array of keys, of shape \(2,\).* Pass one of them\.$",
    ),
    "keys for an evaluation": (
        lambda d: rc.evaluate(
            model(), EXAMPLES, loss_fn=good, batch_size=8, key=jax.random.split(KEY)
        ),
        ValueError,
        r"`key` is an array of keys, of shape \(2,\).* Pass one of them\.$",
    ),
    "keys for predictions": (
        lambda d: rc.predict_examples(
            model(), EXAMPLES, predict_fn=predict_fn, batch_size=8, key=jax.random.split(KEY)
        ),
        ValueError,
        r"`key` is an array of keys, of shape \(2,\).* Pass one of them\.$",
    ),
    "the name of a logger": (
        lambda d: fit(log="wandb"),
        TypeError,
        r"`log` is 'wandb'\..*such as `redcoast\.wandb_logger\(project=\"lm\"\)`\.$",
    ),
    "a log that is true": (lambda d: fit(log=True), TypeError, r"`log` is True\. Leave it out"),
    "a logger that is not created": (
        lambda d: fit(log=[rc.jsonl_logger]),
        TypeError,
        r"`log\[0\]` is the function `jsonl_logger`, .*`redcoast\.jsonl_logger\(.metrics.jsonl.\)`",
    ),
    "a dict of columns": (lambda d: fit(examples={"x": X, "y": Y}), TypeError, "a dict.*columns"),
    "a misspelt override": (
        lambda d: fit(overrides=[("layrs", jax.sharding.PartitionSpec())], mesh=rc.make_mesh()),
        ValueError,
        "'layrs' matches no array's path",
    ),
    # And more.
    "a misspelt argument": (
        lambda d: fit(batchsize=8),
        TypeError,
        r"`fit` has no argument `batchsize`\. Did you mean `batch_size`\?$",
    ),
    "results in the wrong order": (
        lambda d: fit(lambda m, b, k: ({"accuracy": 1.0}, good(m, b, k))),
        TypeError,
        r"type dict.*The loss comes first: `return loss, aux`\.",
    ),
    "a Python number in the loss": (
        lambda d: fit(number),
        jax.errors.ConcretizationTypeError,
        rf"{BATCH}\n.*In place of `if`, `float\(x\)` and `x\.item\(\)`",
    ),
    "NumPy in the loss": (
        lambda d: fit(in_numpy),
        jax.errors.TracerArrayConversionError,
        "use `jax.numpy`",
    ),
    "a mask as an index": (
        lambda d: fit(masked),
        jax.errors.NonConcreteBooleanIndexError,
        r"select by a mask, `x\[mask\]`: use `jnp\.where`",
    ),
    "dropout without a key": (
        lambda d: fit(without_key),
        RuntimeError,
        r"`loss_fn` gets a `key`\. Split it.*jax\.random\.split",
    ),
    "a model that is assigned to": (
        lambda d: fit(assigned),
        AttributeError,
        rf"field.*{BATCH}\nA module cannot be changed in place\. `eqx\.tree_at` ",
    ),
    "a logarithm of zero": (
        lambda d: fit(entropy),
        ValueError,
        r"nan for the first batch\. The loss computes its first NaN .* at natural_mistakes\.py:\d+",
    ),
    "an empty mask": (
        lambda d: fit(empty_mask),
        ValueError,
        r"The loss computes a division by zero, at natural_mistakes\.py:\d+",
    ),
    "tokens out of range": (
        lambda d: fit(looked_up),
        ValueError,
        r"index 4[01] of an axis of size 2, of an array of shape \(2, 4\)",
    ),
    "a batch that is not a dict": (
        lambda d: fit(collate_fn=lambda e: collate(e)["x"]),
        TypeError,
        rf"{PLANNED}\nThe batch is float32\[8, 4\]\.$",
    ),
    "shapes that do not broadcast": (
        lambda d: fit(lambda m, b, k: jnp.mean(jax.vmap(m)(b["x"]) - b["y"] * 1.0)),
        ValueError,
        rf"broadcasting.*{BATCH}$",
    ),
    "integer pixels": (
        lambda d: convolved(np.uint8, (1, 8, 8)),
        TypeError,
        r"The batch is x uint8\[8, 1, 8, 8\]\.\nIt failed in a `Conv2d` with weight float32\[2, 1,",
    ),
    "channels last": (
        lambda d: convolved(np.float32, (8, 8, 1)),
        ValueError,
        r"The batch is x float32\[8, 8, 8, 1\]\.\nIt failed in a `Conv2d`",
    ),
    "a module of one's own without vmap": (
        lambda d: fit(lambda m, b, k: jnp.mean(m(b["x"])), model=Own(jnp.ones((2, 4)))),
        TypeError,
        rf"`Own` {VMAP}",
    ),
    "no vmap in a custom loop": (
        lambda d: loop(lambda m, b, k: jnp.mean(m(b["x"]))),
        TypeError,
        rf"{BATCH}\n`Sequential` {VMAP}",
    ),
    "no vmap in predictions": (
        lambda d: rc.predict_examples(
            model(),
            EXAMPLES,
            collate_fn=collate,
            predict_fn=lambda m, b, k: m(b["x"]),
            batch_size=8,
        ),
        TypeError,
        rf"Raised by `predict_fn`.*{BATCH}\n`Sequential` {VMAP}",
    ),
    "rows of several lengths": (
        lambda d: fit(examples=[{"t": np.zeros(1 + i % 3, np.int32)} for i in range(32)]),
        ValueError,
        r"The first of the examples is t int32\[1\], and another is t int32\[[23]\]\.\n"
        r"Pad or cut the arrays of the examples to one shape in `collate_fn`\.$",
    ),
    "a batch that is not returned": (
        lambda d: fit(collate_fn=lambda e: None),
        ValueError,
        r"`collate_fn` returned no arrays.*Is a `return` missing\?",
    ),
    "columns for a batch": (
        lambda d: fit(collate_fn=lambda x, y: {"x": np.stack(x), "y": np.stack(y)}),
        TypeError,
        r"The function is called as `collate_fn\(examples\)`",
    ),
    "columns of different lengths": (
        lambda d: fit(examples=(X, Y[:-1])),
        ValueError,
        r"a tuple of 2 arrays with different first dimensions.*`list\(zip\(\*examples\)\)`",
    ),
    "columns or examples": (
        lambda d: fit(examples=(X, X)),
        ValueError,
        r"a tuple of 2 arrays of one shape.*may be columns or examples.*`list\(examples\)`",
    ),
    "text without a collate_fn": (
        lambda d: fit(examples=[{"text": "a"}] * 8, collate_fn=stack_examples),
        TypeError,
        "The examples have str at text, and only arrays and numbers can be stacked. Pass a `coll",
    ),
    "names of files without a collate_fn": (
        lambda d: fit(examples=[{"name": "a"}] * 8, collate_fn=stack_examples),
        TypeError,
        r"^(?!.*The function is called as).*leaves out other values, such as names of files",
    ),
    "a loss that keeps what it computes": (
        lambda d: fit_twice(keeping([])),
        jax.errors.UnexpectedTracerError,
        r"excluding JAX-internal frames were:\n-+\n(\S+natural_mistakes\.py:\S+ \(\S+\)\n)+-.*"
        r"Return it: `loss_fn` may return numbers to log, `\(loss, {\"name\": value}\)`",
    ),
    "a derivative that uses a value of the loss": (
        lambda d: fit(loss_fn=ruled_by_a_value_outside),
        jax.errors.UnexpectedTracerError,
        r"the rules of a `jax\.custom_vjp` or `jax\.custom_jvp` cannot use a value of the function",
    ),
    "channels at the end": (
        lambda d: convolved(np.float32, (6, 6, 1)),
        ValueError,
        r"input has the shape \(6, 6, 1\).*its 1 channel first, as `jnp\.moveaxis\(x, -1, 0\)` has",
    ),
    "images without channels": (
        lambda d: convolved(np.float32, (6, 6)),
        ValueError,
        r"input has the shape \(6, 6\).*its 1 channel first, as `x\[None\]` has them\.$",
    ),
    "a function for a model": (
        lambda d: fit(model=lambda x: jnp.ones((4, 4)) @ x["x"]),
        TypeError,
        r"Raised by `init_fn`\.\n.*called as `init_fn\(key\)`.*pass them, and call the function in",
    ),
    "all keys of a split": (
        lambda d: fit(key=jax.random.split(KEY)),
        ValueError,
        r"`key` is an array of keys, of shape \(2,\)",
    ),
    "an evaluation at each epoch": (
        lambda d: rc.Evaluation(EXAMPLES, every="epoch"),
        TypeError,
        "`every` is 'epoch'",
    ),
    "text for tokens": (
        lambda d: rc.generate(Decoder(), ["a text"], 3),
        TypeError,
        "Encode text with the tokenizer",
    ),
    "parameters in float16": (
        lambda d: fit(model=half(), optimizer=optax.adam(0.1)),
        None,
        r"parameters in float16 \(layers/0/.*pass `compute_dtype=\"fp16\"`",
    ),
    "a rate that is too large for a short run": (
        lambda d: fit(steep, optimizer=optax.sgd(1e38)),
        None,
        r"3 of 4 steps were skipped.*Lower the learning rate, or clip the gradient\.$",
    ),
    "a loss compiled by JAX": (
        lambda d: fit(loss_fn=jax.jit(good), model=eqx.nn.MLP(4, 2, 8, 1, key=KEY)),
        TypeError,
        r"`jax\.jit` takes arrays only.*Pass `loss_fn` without `jax\.jit`.*`eqx\.filter_jit`\.$",
    ),
    "ragged rows without a collate_fn": (
        lambda d: fit(
            examples=[([1] * (1 + i % 3), i) for i in range(32)],
            collate_fn=stack_examples,
        ),
        ValueError,
        r"at example\[0\] have different shapes: \(\d,\) in the first, and .*by padding",
    ),
    "a loader of batches": (
        lambda d: fit(examples=DataLoader()),
        TypeError,
        "of type DataLoader.*Pass the `dataset` of the DataLoader",
    ),
    "a metric that is a number": (
        lambda d: evaluated(metric_fn=lambda e, o: 0.5),
        TypeError,
        "`metric_fn` returned float.*a dict of numbers",
    ),
    "a metric that fails": (
        lambda d: evaluated(metric_fn=lambda e, o: {"a": e[0]["label"] == o[0]}),
        KeyError,
        r"'label'.*The first of the examples is x float32\[4\], y int32\[\]\.\n"
        r"The first of the outputs is int32\[\]\.$",
    ),
    "a logger without the step": (
        lambda d: fit(log=[rc.progress_logger(False), lambda metrics: None]),
        TypeError,
        r"for the metrics of step 1\.\nThe function is called as `log\(metrics, step\)`",
    ),
    "a function that makes a model without a key": (
        lambda d: fit(model=lambda: model()),
        TypeError,
        r"The function is called as `init_fn\(key\)`",
    ),
    "callbacks": (
        lambda d: fit(callbacks=[print]),
        TypeError,
        r"no argument `callbacks`\. Pass functions .*as `log`.*`redcoast.STOP`",
    ),
    "an average by another name": (
        lambda d: fit(ema=0.999),
        TypeError,
        r"no argument `ema`\. Pass the decay .*`average=0\.999`",
    ),
    "patience": (
        lambda d: fit(patience=3),
        TypeError,
        r"no argument `patience`\. Pass `early_stopping=redcoast\.EarlyStopping\(patience=3\)`",
    ),
    "steps by another name": (
        lambda d: fit(max_steps=3),
        TypeError,
        r"no argument `max_steps`\. Pass `steps`, the number of steps\.$",
    ),
    "a seed": (
        lambda d: rc.evaluate(model(), EXAMPLES, loss_fn=good, batch_size=8, seed=0),
        TypeError,
        r"`evaluate` has no argument `seed`\. Pass `key=jax\.random\.key\(0\)`",
    ),
    "a jitted loss of two arguments": (
        lambda d: fit(loss_fn=eqx.filter_jit(lambda model, batch: 0.0)),
        TypeError,
        r"The function is called as `loss_fn\(model, batch, key\)`",
    ),
    "a tuple for a batch": (
        lambda d: fit(
            examples=(X, Y),
            collate_fn=stack_examples,
            loss_fn=lambda m, b, k: jnp.mean(m(b[0])),
        ),
        TypeError,
        r"The batch is batch\[0\] float32\[8, 4\], batch\[1\] int32\[8\]\.\n.*\(batch\[0\]\)`",
    ),
    "microbatches of a tuple": (
        lambda d: fit(
            examples=(X, Y),
            collate_fn=stack_examples,
            loss_fn=lambda m, b, k: jnp.mean(jax.vmap(m)(b[0])),
            accumulate=3,
        ),
        ValueError,
        r"`accumulate=3` does not divide the batch dimension of batch\[0\], of shape \(8, 4\)",
    ),
    "an evaluation in batches of a loss of the full batch": (
        lambda d: rc.evaluate(
            model(), EXAMPLES, collate_fn=collate, loss_fn=variance, batch_size=8, mesh=ONE
        ),
        None,
        r"natural_mistakes\.py:\d+: UserWarning: .*its result depends on `batch_size`",
    ),
    "predictions in a column and flat labels": (
        lambda d: fit(of_all_pairs, model=model(outputs=1)),
        None,
        r"shape \(n, 1\) with one of shape \(n,\) \(natural_mistakes\.py:\d+\).*`jnp\.squeeze",
    ),
    "the same in a custom loop": (
        lambda d: prepared_for_pairs(),
        None,
        r"shape \(n, 1\) with one of shape \(n,\) \(natural_mistakes\.py:\d+\).*`jnp\.squeeze",
    ),
    "tokens beyond the vocabulary": (
        lambda d: of_tokens(1, 2, 12, 3),
        None,
        r"reads index 12 of an axis of size 10, of an array of shape \(10, 3\), at "
        r"natural_mistakes\.py:\d+\. The batch's array y holds 12 for the examples "
        r"\[[26], [26]\]\. .*from 0 to 9 there\. JAX reads the last element",
    ),
    "padding at the end of the vocabulary": (
        lambda d: of_tokens(1, 2, -1, 9),
        None,
        r"^(?!.*Warning)",
    ),
    "labels of -100": (
        lambda d: fit(examples=changed(2, y=np.int32(-100)), batch_size=32),
        ValueError,
        r"reads index -100 of an axis of size 2, .*The batch's array y holds -100 for the examples "
        r"\[2\]\. .*from 0 to 1 there\. Mask .*`aux\[\"weight\"\]`",
    ),
    "labels of an evaluation that are out of range": (
        lambda d: fit(evaluation=rc.Evaluation(changed(5, y=np.int32(2)), every=2)),
        None,
        r"The loss of the evaluation is NaN\. .*reads index 2 of an axis of size 2, .*array y "
        r"holds 2 for the examples \[5\]\. .*from 0 to 1 there",
    ),
    "the directory of checkpoints": (
        lambda d: rc.load_checkpoint(run(d) / "checkpoints"),
        rc.CheckpointDamaged,
        "Its newest checkpoint is .*checkpoints/4",
    ),
}


def made(call, directory):
    """The class of the error, how many frames above it are redcoast's or JAX's, and the text."""
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    logging.getLogger("redcoast").addHandler(handler)
    kinds, hidden = [], 0
    try:
        with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
            call(directory)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        packages = tuple(str(Path(package.__file__).parent) for package in (rc, jax))
        packages += (ft.__file__, inspect.__file__, str(Path(eqx.__file__).parent / "_"))
        hidden = sum(frame.filename.startswith(packages) for frame in frames)
        kinds = [f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__]
        text.write("".join(traceback.format_exception_only(error)))
    logging.getLogger("redcoast").removeHandler(handler)
    return [kinds, hidden, text.getvalue().rstrip()]


if __name__ == "__main__":
    os.chdir(sys.argv[1])
    logging.getLogger("redcoast").propagate = False
    directory, *names = sys.argv[1:]
    print(json.dumps({name: made(ROWS[name][0], Path(directory)) for name in names}))
