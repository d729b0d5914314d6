"""The heads of encoders, and `with_head`, which replaces one."""

import dataclasses
import operator
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from ..core._tracing import abstract_key
from ._basic import small_normal
from ._einsum import product
from ._inputs import HiddenStates, Mask

Model = TypeVar("Model", bound=eqx.Module)


class Linear(eqx.Module):
    """A linear layer for inputs of shape (batch, inputs), or of tokens, (batch, seq, inputs)."""

    w: Float[Array, "inputs outputs"]
    b: Float[Array, " outputs"]

    def __init__(self, inputs: int, outputs: int, *, key: PRNGKeyArray):
        self.w = small_normal(key, (inputs, outputs))
        self.b = jnp.zeros(outputs)

    def __call__(self, x: Float[Array, "*rows inputs"]) -> Float[Array, "*rows outputs"]:
        if x.ndim == 3:
            return product("bsi,io->bso", x, self.w, self.b)
        return product("bi,io->bo", x, self.w, self.b)


class MaskedHead(eqx.Module):
    """The head for masked language modelling: a dense layer, a norm and a bias of the vocabulary.

    `follows` is the optional head for next-sentence prediction.
    """

    w: Float[Array, "inputs outputs"]
    b: Float[Array, " outputs"]
    norm: Float[Array, " outputs"]
    norm_shift: Float[Array, " outputs"]
    vocab_bias: Float[Array, " vocab"]
    follows: Linear | None

    def __init__(self, width: int, vocab: int, *, follows: bool, key: PRNGKeyArray):
        w, other = jax.random.split(key)
        # The matrix to the vocabulary is the embedding, so it is not among these.
        self.w, self.b = small_normal(w, (width, width)), jnp.zeros(width)
        self.norm, self.norm_shift = jnp.ones(width), jnp.zeros(width)
        self.vocab_bias, self.follows = jnp.zeros(vocab), None
        if follows:
            self.follows = Linear(width, 2, key=other)


def first_token(hidden: HiddenStates, mask: Mask | None) -> Float[Array, "batch width"]:
    """Returns the hidden state of the first real token of each row."""
    if mask is None:
        return hidden[:, 0]
    first = jnp.argmax(mask.astype(bool), axis=1)  # (batch,)
    return jnp.take_along_axis(hidden, first[:, None, None], axis=1)[:, 0]


def with_head(
    model: Model, *, labels: int | Sequence[str], of_tokens: bool = False, key: PRNGKeyArray
) -> Model:
    """Replaces the head of an encoder by a new one for classification, or for regression (which
    is classification with one label).

    ```python
    model = with_head(encoder, labels=["negative", "positive"], key=jax.random.key(0))
    logits = model(tokens, mask=mask)  # (batch, 2)
    ```

    **Arguments:**

    - `model`: a `Bert`, `ModernBert`, `ViT` or `Dinov2`, with or without a head. Its head is
      dropped; its pooler is kept if the new head uses one.
    - `labels`: the number of labels, or their names, which are saved with the model.
    - `of_tokens`: whether to classify each token instead of each row; not for images.
    - `key`: PRNG key for the new parameters.

    **Returns:**

    A model whose call returns logits of shape (batch, labels), or (batch, seq, labels) with
    `of_tokens`. The encoder's arrays are the same as in `model`. The new arrays have the same
    dtype and are replicated over its mesh.

    **Raises:**

    `ValueError` if there are no labels, or if the labels of an image encoder are of tokens;
    `TypeError` if `model` is not such an encoder.
    """
    if not hasattr(getattr(model, "config", None), "labels"):
        raise TypeError(
            f"A {type(model).__name__} cannot have a head for labels. Pass an encoder of "
            "`redcoast.models`: a `Bert`, `ModernBert`, `ViT` or `Dinov2`."
        )
    old: Any = model
    if of_tokens and not hasattr(old.config, "vocab"):
        raise ValueError(
            f"`of_tokens` needs an encoder of text, but a {type(old).__name__} has no tokens."
        )
    changes: dict[str, Any] = {"labels": labels, "label_names": None, "head": "classification"}
    if not isinstance(labels, int):
        changes |= {"labels": len(labels), "label_names": tuple(labels)}
    if of_tokens:
        changes["head"] = "tokens"
    if of_tokens and hasattr(old.config, "pooler"):
        changes["pooler"] = False  # labels of tokens need none
    config = dataclasses.replace(old.config, **changes)
    make = eqx.Partial(type(old), config)
    # The compiler removes unused results, so no second encoder is allocated.
    parts = [name for name in ("pooler", "head") if hasattr(old, name)]
    new = eqx.filter_jit(lambda key: {n: getattr(make(key=key), n) for n in parts})(key)
    new = _like(new, old)
    if new.get("pooler") is not None and old.pooler is not None:
        new["pooler"] = old.pooler
    return with_fields(eqx.filter_eval_shape(make, key=key), vars(old) | new)


def with_fields(model: Model, values: Mapping[str, PyTree]) -> Model:
    """Returns a model with other values in all fields but `config`, which may have been None."""
    names = vars(model).keys() - {"config"}
    new = tuple(values[name] for name in names)
    return eqx.tree_at(operator.attrgetter(*names), model, new, is_leaf=lambda x: x is None)


def _like(new: PyTree, old: PyTree) -> PyTree:
    """Casts new arrays to the dtype of the old ones, and replicates them over the same mesh."""
    # Any array of the encoder has the dtype and the mesh of all.
    leaf = next(leaf for leaf in jax.tree.leaves(old) if eqx.is_inexact_array(leaf))
    new = jax.tree.map(lambda x: x.astype(leaf.dtype), new)
    # In a trace, and on one device, JAX places the new arrays.
    if isinstance(leaf, Tracer) or not isinstance(leaf.sharding, NamedSharding):
        return new
    return jax.device_put(new, NamedSharding(leaf.sharding.mesh, P()))


def can_untie(model: PyTree) -> bool:
    """Whether the head of a model is its embedding, and can be a separate array."""
    scaled = getattr(model.config, "scaled", False)  # which only tied heads of T5 are
    return getattr(model.config, "tied", False) and not scaled


def untie(model: PyTree) -> PyTree:
    """Returns the same model with `config.tied=False`, and a copy of the embedding as its head."""
    config = dataclasses.replace(model.config, tied=False)
    skeleton = eqx.filter_eval_shape(type(model), config, key=abstract_key())
    return with_fields(skeleton, vars(model) | {"head": jnp.transpose(model.embed)})
