"""Calls from outside of a program: compiled once for each bucket, and remembered."""

import functools as ft
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int

from ..core._pytree import Static, join, split
from ..distributed._arrays import place_batch, put, whole
from ..distributed._mesh import BATCH_AXES
from ._beam_search import search
from ._checks import is_known
from ._logits import INVALID
from ._prompt import bucket, is_encoder_decoder, pad_columns
from ._request import Request
from ._sampling import sample


def decode(model: Any, tokens: Any, mask: Any, request: Request) -> Int[Array, "batch room"]:
    """The new tokens, with the padding up to the room that there is for them."""
    tokens, mask = jnp.asarray(tokens), None if mask is None else jnp.asarray(mask)
    return (sample if request.beams == 1 else search)(model, tokens, mask, request)


def decode_compiled(
    model: Any, tokens: Any, mask: Any, request: Request
) -> Int[Array, "batch new"]:
    """The new tokens, by a program that is compiled for a bucket of shapes."""
    arrays, static = split(model)
    prompt = prepare_prompt(model, arrays, tokens, mask)
    return trim(_decode(arrays, static, *prompt, request), int(request.limit))


@ft.partial(jax.jit, static_argnums=1)
def _decode(arrays: list[Any], static: Static, tokens: Any, mask: Any, request: Request) -> Any:
    return decode(join(arrays, static), tokens, mask, request)


def prepare_prompt(model: Any, arrays: list[Any], tokens: Any, mask: Any) -> tuple[Any, Any]:
    """Tokens and mask, padded to a bucket's length and put on the model's devices."""
    place = ft.partial(_place, mesh=_mesh_of(arrays))
    if tokens.ndim != 2:
        return place(_on_host(tokens), tokens), None
    # The decoder goes on at the right; an encoder has its prompt at the left.
    left = not is_encoder_decoder(model)
    pad = ft.partial(pad_columns, length=_length(model, tokens.shape[1], left), left=left)
    real = np.ones(tokens.shape, bool) if mask is None else _on_host(mask).astype(bool)
    padded = pad(_on_host(tokens)).astype(np.int32)
    return place(padded, tokens), place(pad(real), tokens if mask is None else mask)


def _length(model: Any, length: int, is_decoder: bool) -> int:
    most = None if is_decoder else getattr(model.config, "positions", None)
    # An encoder may have no positions for so much padding.
    return bucket(length) if most is None else max(length, min(bucket(length), most))


def _on_host(x: Any) -> Any:
    # There, padding takes no program for each length.
    return np.asarray(x) if is_known(x) else x


def _place(x: Any, given: Any, mesh: Mesh | None) -> Any:
    """Puts `x` where `given` was put on purpose; otherwise splits its rows over the mesh."""
    if not isinstance(x, np.ndarray):
        return x
    if isinstance(given, jax.Array) and given.committed:
        sharding = given.sharding
        if isinstance(sharding, NamedSharding):
            sharding = NamedSharding(sharding.mesh, P(*sharding.spec[:1]))
        return put(x, sharding)
    return x if mesh is None else place_batch(x, mesh)


def _mesh_of(arrays: list[Any]) -> Mesh | None:
    """The mesh that a model's arrays are on, if it has axes for the batch."""
    for array in arrays:
        sharding = getattr(array, "sharding", None)
        mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
        if isinstance(mesh, Mesh) and set(BATCH_AXES) <= set(mesh.axis_names):
            return mesh
    return None


def trim(new: Int[Array, "batch room"], count: int) -> Int[Array, "batch new"]:
    """The columns that were asked for, after a look at whether all are tokens."""
    if isinstance(new, Tracer):
        return new[:, :count]
    # Cut on the host, for here each number of columns would take a program.
    host = whole(new)[:, :count]
    refuse_invalid(host)
    if isinstance(new.sharding, NamedSharding) and not new.is_fully_addressable:
        return put(host, NamedSharding(new.sharding.mesh, P()))  # every process gets all of them
    return jax.device_put(host, new.sharding if new.committed else None)


def refuse_invalid(new: np.ndarray) -> None:
    """Raises where a token could not be chosen."""
    rows, steps = np.nonzero(new == INVALID)
    if rows.size:
        raise ValueError(
            f"The logits of row {rows[0]} hold NaN at new token {steps[0]}, so that none could be "
            "chosen. Parameters may hold NaN, or overflow in their dtype."
        )
