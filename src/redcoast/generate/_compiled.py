"""Decoding to the end: in one program after the prompt, or as a part of a traced program."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int, PyTree

from ..core._pytree import SplitTree
from ..distributed._arrays import put, whole
from ..models._inputs import AnyArray, Mask
from ._beam_search import search_beams
from ._generated import Generated
from ._logits import ALL_EXCLUDED, INVALID
from ._prefill import by_layer_with, read_compiled
from ._prompt import ReadPrompt, read_prompt
from ._request import LastHidden, Prompt, Request
from ._sampling import Last, begin, sample

Result = Int[Array, "results new"] | Generated
Padded = Int[Array, "results room"] | Generated


def decode(model: PyTree, tokens: AnyArray, mask: Mask | None, request: Request) -> Padded:
    """Generates tokens as a part of a traced program."""
    if mask is not None:
        mask = jnp.asarray(mask)
    read = read_prompt(model, jnp.asarray(tokens), mask, request)
    cache = read.cache
    if request.room > 1:  # otherwise the only new token follows from the prompt
        model, cache = by_layer_with(model, cache)
    new, _ = _decode(model, ReadPrompt(read.hidden, cache, read.prompt), request)
    return new


def decode_compiled(model: PyTree, tokens: AnyArray, mask: Mask | None, request: Request) -> Result:
    """Generates tokens with programs that are compiled for a number of rows and a size of cache."""
    read, compile_all = read_compiled(model, tokens, mask, request)
    limit = int(request.limit)
    if limit == 1 and request.beams == 1:  # without the program for the tokens after the first
        _, last = begin_after(read.cache, SplitTree.of(model), read.hidden, read.prompt, request)
        new = last.tokens[:, None]
        if last.scores is not None:
            new = Generated(new, last.scores[:, None], (last.lengths > 0)[:, None])
    else:
        model, cache = by_layer_with(model, read.cache)
        run = _run
        if request.copies == request.beams == 1:  # no row of the cache is repeated
            run = _run_in_place
        new, _ = run(cache, SplitTree.of(model), read.hidden, read.prompt, request)
    compile_all()
    return trim(new, limit)


def _decode_after(
    cache: PyTree, model: SplitTree, hidden: LastHidden, prompt: Prompt, request: Request
) -> tuple[Padded, PyTree]:
    return _decode(model.join(), ReadPrompt(hidden, cache, prompt), request)


def _begin_after(
    cache: PyTree, model: SplitTree, hidden: LastHidden, prompt: Prompt, request: Request
) -> tuple[PyTree, Last]:
    """The cache after the prompt, with its rows repeated, and the first new token."""
    return begin(model.join(), ReadPrompt(hidden, cache, prompt), request)


begin_after = jax.jit(_begin_after)
begin_in_place = jax.jit(_begin_after, donate_argnums=0)


# The cache is not copied, unless its rows are repeated.
_run_in_place = jax.jit(_decode_after, donate_argnums=0)
_run = jax.jit(_decode_after)


def _decode(model: PyTree, read: ReadPrompt, request: Request) -> tuple[Padded, PyTree]:
    """Generates tokens after a prompt, padded to `request.room`. Returns also the cache."""
    if request.beams > 1:
        return search_beams(model, read, request)
    new, cache = sample(model, read, request)
    if new.scores is None:
        return new.tokens, cache
    mask = jnp.arange(request.room)[None] < new.lengths[:, None]  # (results, room)
    return Generated(new.tokens, new.scores, mask), cache


def trim(new: Padded, count: int) -> Result:
    """Returns the first `count` columns, after checking that no token is invalid."""
    if isinstance(jax.tree.leaves(new)[0], Tracer):
        return jax.tree.map(lambda x: x[:, :count], new)
    # Cut on the host: on the devices each number of columns would be compiled.
    host: PyTree = jax.tree.map(lambda x: whole(x)[:, :count], new)
    if isinstance(host, Generated):
        check_generated(np.asarray(host.tokens))
    else:
        check_generated(host)
    return jax.tree.map(_put_as, host, new)


def _put_as(host: np.ndarray, x: Array) -> Array:
    """Puts an array where `x` is."""
    if isinstance(x.sharding, NamedSharding) and not x.is_fully_addressable:
        return put(host, NamedSharding(x.sharding.mesh, P()))  # every process gets all of it
    if not x.committed:
        return jax.device_put(host)  # not committed, so that it follows other arrays
    return jax.device_put(host, x.sharding)


def check_generated(new: np.ndarray, *, first: int = 0) -> None:
    """Raises if there was no token to choose. `first` is the number of the first token."""
    rows, steps = np.nonzero(new == ALL_EXCLUDED)
    if rows.size:
        raise ValueError(
            f"All tokens are excluded for row {rows[0]} at new token {first + steps[0]}: the "
            "options of decoding, such as `suppress` or `no_repeat_ngram_size`, or logits of -inf "
            "leave none. Exclude fewer tokens, or pass a smaller `max_new_tokens`."
        )
    rows, steps = np.nonzero(new == INVALID)
    if rows.size:
        raise ValueError(
            f"The logits of row {rows[0]} hold NaN at new token {first + steps[0]}. The parameters "
            "may hold NaN, or activations may overflow in their dtype."
        )
