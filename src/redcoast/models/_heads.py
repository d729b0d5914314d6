"""Heads of encoders, and how an encoder gets a fresh one."""

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from ._attention import Mask
from ._basic import normal
from ._einsum import product

Model = TypeVar("Model", bound=eqx.Module)


def small_normal(key: PRNGKeyArray, shape: tuple[int, ...]) -> Float[Array, "..."]:
    """The first parameters of BERT and ViT: normal with a deviation of 0.02, truncated."""
    return normal(key, shape, fan_in=1, scale=0.02)


class Linear(eqx.Module):
    """A matrix and a bias, for one vector a row."""

    w: Float[Array, "inputs outputs"]
    b: Float[Array, " outputs"]

    def __init__(self, inputs: int, outputs: int, *, key: PRNGKeyArray):
        self.w = small_normal(key, (inputs, outputs))
        self.b = jnp.zeros(outputs)

    def __call__(self, x: Float[Array, "batch inputs"]) -> Float[Array, "batch outputs"]:
        return product("bi,io->bo", x, self.w, self.b)


class MaskedHead(eqx.Module):
    """What guesses hidden tokens: a layer of its own before the embedding, and a bias; and, if it
    has that, what guesses whether the second text of a row `follows` the first."""

    w: Float[Array, "inputs outputs"]
    b: Float[Array, " outputs"]
    norm: Float[Array, " outputs"]
    norm_shift: Float[Array, " outputs"]
    vocab_bias: Float[Array, " vocab"]
    follows: Linear | None

    def __init__(self, width: int, vocab: int, *, follows: bool, key: PRNGKeyArray):
        w, other = jax.random.split(key)
        self.w, self.b = small_normal(w, (width, width)), jnp.zeros(width)
        self.norm, self.norm_shift = jnp.ones(width), jnp.zeros(width)
        self.vocab_bias = jnp.zeros(vocab)
        self.follows = Linear(width, 2, key=other) if follows else None


def first_token(
    hidden: Float[Array, "batch seq width"], mask: Mask | None
) -> Float[Array, "batch width"]:
    """The hidden state of the first real token of each row."""
    if mask is None:
        return hidden[:, 0]
    first = jnp.argmax(mask.astype(bool), axis=1)
    return jnp.take_along_axis(hidden, first[:, None, None], axis=1)[:, 0]


def check_labels(config: Any) -> None:
    """Refuses counts of labels below 1, and names that are not as many."""
    if config.labels < 1:
        raise ValueError(f"`labels` must be at least 1, but is {config.labels}.")
    if config.label_names is not None and len(config.label_names) != config.labels:
        raise ValueError(
            f"`label_names` has {len(config.label_names)} names, but there are {config.labels} "
            "`labels`."
        )


def with_head(model: Model, *, labels: int | Sequence[str], key: PRNGKeyArray) -> Model:
    """The same encoder with a fresh head for classification, or for regression, which is
    classification with one label: where fine-tuning begins.

    ```python
    model = with_head(encoder, labels=["negative", "positive"], key=jax.random.key(0))
    logits = model(tokens, mask=mask)  # (batch, 2)
    ```

    **Arguments:**

    - `model`: a `Bert` or a `ViT` with any head or none. A head that it has is left out; a pooler
      that the new head can use is kept.
    - `labels`: how many, or their names, which are saved with the model.
    - `key`: of the new parameters.

    **Returns:**

    A model whose call returns logits "batch labels". The encoder's arrays are those of `model`;
    the new ones are of the same dtype, and whole on each device of its mesh.

    **Raises:**

    `ValueError` if there are no labels, `TypeError` if the model takes no such head.
    """
    if not hasattr(getattr(model, "config", None), "labels"):
        raise TypeError(
            f"A {type(model).__name__} takes no head for labels. The encoders of "
            "`redcoast.models`, `Bert` and `ViT`, do."
        )
    old: Any = model
    names = None if isinstance(labels, int) else tuple(labels)
    changes = {"labels": labels if names is None else len(names), "label_names": names}
    config = dataclasses.replace(old.config, head="classification", **changes)
    make = lambda key: type(old)(config, key=key)
    # The compiler leaves out what is not returned: no second encoder is ever made.
    new = eqx.filter_jit(lambda key: {n: getattr(make(key), n) for n in ("pooler", "head")})(key)
    new = _alike(new, old)
    if old.pooler is not None and new["pooler"] is not None:
        new["pooler"] = old.pooler
    fields = [f.name for f in dataclasses.fields(old) if f.name != "config"]
    values = [new[name] if name in new else getattr(old, name) for name in fields]
    where = lambda m: [getattr(m, name) for name in fields]
    skeleton = eqx.filter_eval_shape(make, key)
    return eqx.tree_at(where, skeleton, values, is_leaf=lambda x: x is None)


def _alike(new: PyTree, old: PyTree) -> Any:
    """New arrays of the dtype of a model's old ones, on all of its devices."""
    leaf = next(leaf for leaf in jax.tree.leaves(old) if eqx.is_inexact_array(leaf))
    new = jax.tree.map(lambda x: x.astype(leaf.dtype), new)
    if isinstance(leaf, Tracer) or not isinstance(leaf.sharding, NamedSharding):
        return new
    return jax.device_put(new, NamedSharding(leaf.sharding.mesh, P()))
