"""Calls outside `jax.jit`: compiled once for each bucket of shapes, and cached."""

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
from ..models._by_layer import by_layer
from ._beam_search import search_beams
from ._check_arguments import is_known
from ._generated import Generated
from ._logits import INVALID
from ._prompt import bucket, is_encoder_decoder, pad_columns
from ._request import Request
from ._sampling import sample

Result = Int[Array, "results new"] | Generated
Padded = Int[Array, "results room"] | Generated


def decode(model: Any, tokens: Any, mask: Any, request: Request, stepping: Any = None) -> Padded:
    """Generates tokens, padded to the size of the bucket. `stepping` is the same model, for the
    tokens after the prompt."""
    stepping = model if stepping is None else stepping
    tokens, mask = jnp.asarray(tokens), None if mask is None else jnp.asarray(mask)
    if request.beams > 1:
        return search_beams(model, tokens, mask, request, stepping)
    new = sample(model, tokens, mask, request, stepping)
    if new.scores is None:
        return new.tokens
    return Generated(new.tokens, new.scores, jnp.arange(request.room)[None] < new.lengths[:, None])


def decode_compiled(model: Any, tokens: Any, mask: Any, request: Request) -> Result:
    """Generates tokens with a program that is compiled for a bucket of shapes."""
    arrays, static = split((model, by_layer(model)))
    prompt = prepare_prompt(model, arrays, tokens, mask)
    return trim(_decode(arrays, static, *prompt, request), int(request.limit))


@ft.partial(jax.jit, static_argnums=1)
def _decode(arrays: list[Any], static: Static, tokens: Any, mask: Any, request: Request) -> Any:
    model, stepping = join(arrays, static)
    return decode(model, tokens, mask, request, stepping)


def prepare_prompt(model: Any, arrays: list[Any], tokens: Any, mask: Any) -> tuple[Any, Any]:
    """Pads tokens and mask to the length of a bucket, and puts them on the model's devices."""
    shardings = (getattr(x, "sharding", None) for x in arrays)
    meshes = (s.mesh for s in shardings if isinstance(s, NamedSharding))
    meshes = (m for m in meshes if isinstance(m, Mesh) and set(BATCH_AXES) <= set(m.axis_names))
    place = ft.partial(_place, mesh=next(meshes, None))
    if tokens.ndim != 2:
        return place(_on_host(tokens), tokens), None
    # A decoder appends new tokens on the right, so its prompts are padded on the left.
    left = not is_encoder_decoder(model)
    length = bucket(tokens.shape[1])
    most = None if left else getattr(model.config, "positions", None)
    if most is not None:  # an encoder may have too few positions for a padded length
        length = max(tokens.shape[1], min(length, most))
    pad = ft.partial(pad_columns, length=length, left=left)
    real = np.ones(tokens.shape, bool) if mask is None else _on_host(mask).astype(bool)
    padded = pad(_on_host(tokens)).astype(np.int32)
    return place(padded, tokens), place(pad(real), tokens if mask is None else mask)


def _on_host(x: Any) -> Any:
    # Padding on the host needs no compilation for each length.
    return np.asarray(x) if is_known(x) else x


def _place(x: Any, given: Any, mesh: Mesh | None) -> Any:
    """Puts `x` where the user committed `given`; otherwise shards its rows over the mesh."""
    if not isinstance(x, np.ndarray):
        return x
    if isinstance(given, jax.Array) and given.committed:
        sharding = given.sharding
        if isinstance(sharding, NamedSharding):
            sharding = NamedSharding(sharding.mesh, P(*sharding.spec[:1]))
        return put(x, sharding)
    return x if mesh is None else place_batch(x, mesh)


def trim(new: Padded, count: int) -> Result:
    """Returns the first `count` columns, after checking that no token is invalid."""
    if isinstance(jax.tree.leaves(new)[0], Tracer):
        return jax.tree.map(lambda x: x[:, :count], new)
    # Cut on the host: on the devices each number of columns would be compiled.
    host = jax.tree.map(lambda x: whole(x)[:, :count], new)
    check_generated(host[0] if isinstance(host, Generated) else host)
    return jax.tree.map(_put_as, host, new)


def _put_as(host: np.ndarray, x: Array) -> Array:
    """Puts an array where `x` is."""
    if isinstance(x.sharding, NamedSharding) and not x.is_fully_addressable:
        return put(host, NamedSharding(x.sharding.mesh, P()))  # every process gets all of it
    return jax.device_put(host, x.sharding if x.committed else None)


def check_generated(new: np.ndarray, *, first: int = 0) -> None:
    """Raises if a token is invalid, because its logits were NaN. `first` is the number of the first
    token."""
    rows, steps = np.nonzero(new == INVALID)
    if rows.size:
        raise ValueError(
            f"The logits of row {rows[0]} hold NaN at new token {first + steps[0]}. The parameters "
            "may hold NaN, or activations may overflow in their dtype."
        )
