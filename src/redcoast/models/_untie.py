"""Replaces a tied output head by a separate one."""

import dataclasses
from typing import Any

import equinox as eqx
import jax.numpy as jnp

from ..core._tracing import abstract_key
from ._heads import with_fields


def can_untie(model: Any) -> bool:
    """Whether the head of a model is its embedding, and can be a separate array."""
    scaled = getattr(model.config, "scaled", False)  # which only tied heads of T5 are
    return getattr(model.config, "tied", False) and not scaled


def untie(model: Any) -> Any:
    """Returns the same model with `config.tied=False`, and a copy of the embedding as its head."""
    config = dataclasses.replace(model.config, tied=False)
    skeleton = eqx.filter_eval_shape(type(model), config, key=abstract_key())
    return with_fields(skeleton, vars(model) | {"head": jnp.transpose(model.embed)})
