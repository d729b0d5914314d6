"""Calls outside `jax.jit`: reading prompts of any length with a few programs.

A decoder reads its prompt in chunks of two fixed sizes, into a cache whose size is a power of two.
So its programs depend on the number of rows and the size of the cache only, and a prompt of another
length compiles nothing. An encoder reads its whole input, padded to one of a few lengths.
"""

import functools as ft
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Int, PyTree

from ..core._pytree import SplitTree, abstract_array
from ..core._target import target
from ..distributed._arrays import place_batch, put
from ..distributed._mesh import BATCH_AXES
from ..models._by_layer import by_layer
from ..models._cache import at_slot, split_layers
from ..models._check_tokens import is_known
from ..models._inputs import AnyArray
from ..models._rotary import RopeScaling
from ..models._scan_layers import is_by_layer
from ._check_arguments import are_known
from ._model_calls import read_tokens
from ._prompt import ReadPrompt, bucket, is_encoder_decoder, new_cache, pad_columns, read_prompt
from ._request import Request, Rows

Places = tuple[NamedSharding | None, ...]
Read = tuple[Array, Array, PyTree]  # the hidden states, that of the last token, and the cache

# The numbers of tokens of a row in a chunk. A pass over a chunk reads all weights, so large chunks
# are faster for long prompts: on two CPU cores, SmolLM2-135M reads 128 tokens in 0.59 s, and as
# eight chunks of 16 in 1.02 s. Small chunks serve short prompts, and the rest of long ones, without
# arithmetic for much padding. Accelerators need more tokens to be busy.
SMALL, LARGE = {"cpu": 16}, {"cpu": 128}
SMALL_OF_ACCELERATORS, LARGE_OF_ACCELERATORS = 64, 512
# The smallest cache, in slots of a row. Reading 128 slots takes less than a tenth of the time of
# reading the weights of a small model.
LEAST_SLOTS = 128
LEAST_ROOM = 16  # for new tokens


def chunk_sizes() -> tuple[int, int]:
    """Returns the numbers of tokens of small and of large chunks on the target's platform."""
    platform = target().platform
    small = SMALL.get(platform, SMALL_OF_ACCELERATORS)
    return small, LARGE.get(platform, LARGE_OF_ACCELERATORS)


def chunks_for(model: PyTree, length: int, most: int | None = None) -> list[int]:
    """Returns the sizes of the chunks of a prompt of `length` tokens, with at most `most` columns.
    Padding is in the first one.

    If the rotations of all tokens depend on the length, there is one chunk, of one of a few sizes.
    """
    scaling = getattr(model.config, "rope_scaling", None)
    if isinstance(scaling, RopeScaling) and scaling.kind == "dynamic":
        return [bucket(length)]
    small, large = chunk_sizes()
    full, rest = divmod(length, large)
    # One large chunk, mostly of padding, is faster than many small ones, if the cache has room for
    # it.
    if rest > large // 2 and (most is None or (full + 1) * large <= most):
        return [large] * (full + 1)
    return [small] * -(-rest // small) + [large] * full


def slots_for(model: PyTree, length: int, new: int) -> int:
    """Returns the size of the cache for prompts of `length` tokens and `new` tokens."""
    return slots_of(sum(chunks_for(model, length, most=0)) + new)


def slots_of(length: int) -> int:
    """Returns the size of the cache of rows of at most `length` tokens, a power of two."""
    return at_least(LEAST_SLOTS, length)


def at_least(least: int, length: int) -> int:
    """Rounds a length up to a power of two, and to `least`, so that few programs serve all."""
    return 1 << (max(least, length) - 1).bit_length()


def reads_in_chunks(model: PyTree, tokens: AnyArray, mask: AnyArray | None) -> bool:
    """Whether a prompt is read in chunks: by a decoder, if this process knows its tokens."""
    return are_known(tokens, mask) and not is_encoder_decoder(model)


def room_for(model: PyTree, tokens: AnyArray, mask: AnyArray | None, new: int) -> int:
    """Returns the room for `new` tokens, which programs are compiled for: of a prompt in chunks,
    the size of the cache."""
    if reads_in_chunks(model, tokens, mask):
        return slots_for(model, tokens.shape[1], new)
    return at_least(LEAST_ROOM, new)


def read_compiled(
    model: PyTree, tokens: AnyArray, mask: AnyArray | None, request: Request
) -> tuple[ReadPrompt, Callable[[], None]]:
    """Processes prompts, of any length with the same programs if they are read in chunks.

    Returns also a function to call when the first new token is on its way, which compiles what
    prompts of other lengths need.
    """
    if not reads_in_chunks(model, tokens, mask):
        tokens, mask = prepare_prompt(model, tokens, mask)
        return _read_whole(SplitTree.of(model), tokens, mask, request), lambda: None
    chunks = PromptChunks(model, tokens, mask, request)
    ((_, last, cache),) = deque(chunks, maxlen=1)  # the last chunk
    return ReadPrompt(last, cache, chunks.prompt), chunks.compile_all


class PromptChunks:
    """The chunks of a prompt. Iterating over them yields the hidden states of each, that of its
    last token, and the cache after it, into which the cache of the chunk before is donated.

    - `prompt`: the tokens, padded on the left with -1 to the size of the cache.
    - `columns`: the number of columns of all chunks.

    `start` is the slot of the first column.
    """

    def __init__(
        self,
        model: PyTree,
        tokens: AnyArray,
        mask: AnyArray | None,
        request: Request,
        *,
        start: int = 0,
    ):
        self._model = SplitTree.of(model)
        self._mesh, self._request = mesh_of(model), request
        self._slot = np.asarray(start, np.int32)  # an array, so that each start is not compiled
        self._place = ft.partial(_place, like=tokens, mesh=self._mesh)
        most = request.room - int(np.max(request.limit))
        self._sizes = chunks_for(model, tokens.shape[1], most)
        self.columns = sum(self._sizes)
        self._tokens, self._real = aligned(_on_host(tokens), mask, self.columns)
        prompt = np.where(self._real, self._tokens, -1).astype(np.int32)  # (rows, columns)
        room = request.room - self.columns
        self.prompt = self._place(np.pad(prompt, ((0, 0), (room, 0)), constant_values=-1))

    def __iter__(self) -> Iterator[tuple[Array, Array, PyTree]]:
        model, request = self._model, self._request
        count = self._place(self._real.sum(axis=1, dtype=np.int32))  # real tokens of each row
        start, cache, places = 0, None, ()
        if self._mesh is None:
            cache = _empty(model, count, self._slot, request)
        for size in self._sizes:
            part = slice(start, start + size)
            tokens, real = self._place(self._tokens[:, part]), self._place(self._real[:, part])
            if cache is None:
                hidden, last, cache = _open(model, tokens, real, count, self._slot, request)
                places = places_of(cache)
            else:
                hidden, last, cache = _append(cache, model, tokens, real, places)
            # Without the arrays themselves, whose memory is donated to the next chunk.
            self._compiled_for = types_and_places((cache, model, tokens, real)), places
            start += size
            yield hidden, last, cache

    def compile_all(self) -> None:
        """Compiles the programs for chunks of all sizes that fit into the cache, so that a prompt
        of another length compiles nothing. It is called when the first new token is on its way."""
        (cache, model, tokens, real), places = self._compiled_for
        for size in chunk_sizes():
            if size < self._request.room:
                shape = (tokens.shape[0], size)
                chunk, chunk_real = tokens.update(shape=shape), real.update(shape=shape)
                leaves, structure = jax.tree.flatten((cache, model, chunk, chunk_real))
                _compile_append(places, structure, tuple(leaves))


def by_layer_with(model: PyTree, cache: PyTree) -> tuple[PyTree, PyTree]:
    """Returns the model and the cache for the steps after the prompt, with arrays for each layer
    as [`by_layer`][redcoast.models._by_layer.by_layer] makes them."""
    model_by_layer = by_layer(model)
    if any(map(is_by_layer, jax.tree.leaves(model_by_layer, is_leaf=is_by_layer))):
        cache = split_layers(cache)
    return model_by_layer, cache


def types_and_places(tree: PyTree) -> PyTree:
    """What `jax.jit` compiles a program for, of its arguments."""

    def of_array(x: AnyArray) -> jax.ShapeDtypeStruct:
        if isinstance(x, jax.Array) and x.committed:
            return abstract_array(x, x.sharding)
        return abstract_array(x, None)

    return jax.tree.map(of_array, tree)


@ft.lru_cache(maxsize=1024)
def _compile_append(places: Places, structure: PyTree, leaves: tuple[PyTree, ...]):
    """Compiles a program once. A call with such arguments does not compile it again."""
    _append.lower(*structure.unflatten(leaves), places).compile()


def aligned(
    tokens: np.ndarray, mask: AnyArray | None, columns: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns tokens and their mask with all padding on the left, in `columns` columns."""
    real = as_real(tokens, mask)
    order = np.argsort(real, axis=1, kind="stable")  # padding between tokens goes to the left too
    tokens = np.take_along_axis(tokens, order, axis=1)
    real = np.take_along_axis(real, order, axis=1)
    # Ids outside the vocabulary would result in NaN.
    tokens = np.where(real, tokens, 0).astype(np.int32)
    return pad_columns(tokens, columns, left=True), pad_columns(real, columns, left=True)


@jax.jit
def _empty(model: SplitTree, count: Rows, slot: Int[Array, ""], request: Request) -> PyTree:
    return at_slot(new_cache(model.join(), count, request.room, request), slot)


@jax.jit
def _open(
    model: SplitTree,
    tokens: Int[Array, "rows chunk"],
    real: Bool[Array, "rows chunk"],
    count: Rows,
    slot: Int[Array, ""],
    request: Request,
) -> Read:
    """Reads the first chunk. The compiler chooses the shardings of the cache."""
    decoder = model.join()
    cache = at_slot(new_cache(decoder, count, request.room, request), slot)
    hidden, cache = read_tokens(decoder, tokens, cache, real)
    return hidden, hidden[:, -1:], cache


@ft.partial(jax.jit, static_argnums=4, donate_argnums=0)
def _append(
    cache: PyTree,
    model: SplitTree,
    tokens: Int[Array, "rows chunk"],
    real: Bool[Array, "rows chunk"],
    places: Places,
) -> Read:
    """Reads a chunk. The cache keeps its shardings, or each chunk would be compiled again."""
    hidden, cache = read_tokens(model.join(), tokens, cache, real)
    return hidden, hidden[:, -1:], keep_places(cache, places)


@jax.jit
def _read_whole(
    model: SplitTree, tokens: Array, mask: Array | None, request: Request
) -> ReadPrompt:
    return read_prompt(model.join(), tokens, mask, request)


def places_of(tree: PyTree) -> Places:
    """Returns the shardings of arrays that are on a mesh."""
    return tuple(map(_named_sharding, jax.tree.leaves(tree)))


def _named_sharding(x: object) -> NamedSharding | None:
    sharding = getattr(x, "sharding", None)
    if isinstance(sharding, NamedSharding):
        return sharding
    return None


def replicated(places: Places) -> NamedSharding | None:
    """Returns the sharding of arrays that every device of a mesh has, if some are on one."""
    first = next(filter(None, places), None)
    if first is None:
        return None
    return NamedSharding(first.mesh, P())


def keep_places(tree: PyTree, places: Places) -> PyTree:
    """Constrains the arrays of a tree to shardings, if there are any."""
    if not places:
        return tree
    leaves, structure = jax.tree.flatten(tree)
    for i, (leaf, sharding) in enumerate(zip(leaves, places, strict=True)):
        if sharding is not None:
            leaves[i] = jax.lax.with_sharding_constraint(leaf, sharding)
    return structure.unflatten(leaves)


def place_all(tree: PyTree, sharding: NamedSharding | None) -> PyTree:
    """Constrains all arrays of a tree to one sharding, if there is one."""
    if sharding is None:
        return tree
    return jax.lax.with_sharding_constraint(tree, sharding)


def mesh_of(model: PyTree) -> Mesh | None:
    """Returns the mesh that a model is on."""
    for sharding in filter(None, places_of(model)):
        mesh = sharding.mesh
        if isinstance(mesh, Mesh) and set(BATCH_AXES) <= set(mesh.axis_names):
            return mesh
    return None


def prepare_prompt(
    model: PyTree, tokens: AnyArray, mask: AnyArray | None
) -> tuple[AnyArray, AnyArray | None]:
    """Pads tokens and mask to the length of a bucket, and puts them on the model's devices."""
    place = ft.partial(_place, mesh=mesh_of(model))
    if tokens.ndim != 2:
        return place(_on_host(tokens), tokens), None
    # A decoder appends new tokens on the right, so its prompts are padded on the left.
    left = not is_encoder_decoder(model)
    length = bucket(tokens.shape[1])
    most = getattr(model.config, "positions", None)
    if most is not None and not left:  # an encoder may have too few positions for a padded length
        length = max(tokens.shape[1], min(length, most))
    pad = ft.partial(pad_columns, length=length, left=left)
    padded = pad(_on_host(tokens)).astype(np.int32)
    real = pad(as_real(tokens, mask))
    if mask is None:
        return place(padded, tokens), place(real, tokens)
    return place(padded, tokens), place(real, mask)


def as_real(tokens: AnyArray, mask: AnyArray | None) -> Any:
    """Which tokens are not padding, as booleans; on the host if they are known."""
    if mask is None:
        return np.ones(tokens.shape, bool)
    return _on_host(mask).astype(bool)


def _on_host(x: AnyArray) -> Any:
    # Padding on the host needs no compilation for each length.
    if not is_known(x):
        return x
    return np.asarray(x)


def _place(x: AnyArray, like: AnyArray, mesh: Mesh | None) -> AnyArray:
    """Puts `x` where the user committed `like`; otherwise shards its rows over the mesh."""
    if not isinstance(x, np.ndarray):
        return x
    if isinstance(like, jax.Array) and like.committed:
        sharding = like.sharding
        if isinstance(sharding, NamedSharding):
            sharding = NamedSharding(sharding.mesh, P(*sharding.spec[:1]))
        return put(x, sharding)
    if mesh is None:
        return x
    return place_batch(x, mesh)
