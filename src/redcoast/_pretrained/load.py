"""From published weights to a model."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import PyTree

from .._parts import join, split
from .families import find_family
from .fill_device import fill_device
from .fill_host import fill_host
from .match import Layout, layout_of, match, needed_shapes
from .source import open_source
from .steps import Target
from .stored import Stored
from .where import choose_shardings, leaf_paths


def load_pretrained(
    path: str | Path,
    *,
    mesh: Mesh | None = None,
    shardings: PyTree | None = None,
    dtype: Any = None,
) -> Any:
    """Loads published weights into a model of `redcoast.models`.

    Each device gets just what it is to hold, read from the files in pieces: beyond the devices'
    own memory, the host holds less than 1.5 times the largest tensor.

    **Arguments:**

    - `path`: a directory in Hugging Face's layout (`config.json` and `model.safetensors`, or
        several files and their `model.safetensors.index.json`); a `.gguf` file of the LLaMA
        architecture, which needs the package `gguf`; or a directory with just one such file.
    - `mesh`: devices to split the model over, as [`redcoast.infer_shardings`][] finds by tracing
        the model's own forward pass.
    - `shardings`: where to put the arrays, instead: a tree such as
        [`redcoast.infer_shardings`][] gives for the model. With neither, all arrays go where JAX
        puts new ones.
    - `dtype`: of the arrays. By default that of the files; if they have several, the one that
        most bytes have. What a `.gguf` file holds quantised counts as float32.

    **Returns:**

    The model; its configuration is `model.config`.

    **Raises:**

    `ValueError` if there is no model at `path`, or one of an unknown architecture or with settings
    that are not implemented; if weights are pickled, since opening a pickle runs code; and if the
    files do not hold exactly the tensors of the model: all that are missing, unexpected or
    misshapen are listed.

    !!! Example

        ```python
        config = LlamaConfig(vocab=256, width=64, layers=2, heads=4, kv_heads=2, hidden=128)
        rc.save_pretrained(Llama(config, key=key), "tiny-llama")
        model = rc.load_pretrained("tiny-llama", mesh=mesh, dtype="bfloat16")
        logits = model(jnp.zeros((4, 16), jnp.int32))
        ```
    """
    path = Path(path).expanduser().absolute()
    source = open_source(path)
    model_class, config = find_family(source.settings, path)
    if settle := getattr(model_class, "settle", None):
        config = settle(config, source.stored.keys())
    key = jax.eval_shape(lambda: jax.random.key(0))
    abstract = eqx.filter_eval_shape(model_class, config, key=key)
    arrays = leaf_paths(abstract, jax.ShapeDtypeStruct)
    layout = layout_of(model_class, config) if source.table is None else Layout(source.table)
    stored = match(layout, needed_shapes(layout, arrays), source.stored, path)
    dtype = _common_dtype(stored) if dtype is None else _floating(dtype)
    leaves, static = split(abstract)
    abstract = join([jax.ShapeDtypeStruct(x.shape, dtype) for x in leaves], static)
    places = choose_shardings(abstract, model_class, config, mesh, shardings)
    targets = {p: Target(x.shape, dtype, layout.table[p], places[p]) for p, x in arrays.items()}
    on_host = {d.platform for place in places.values() for d in place.device_set} == {"cpu"}
    fill, piece = (fill_host, 2**22) if on_host else (fill_device, 2**24)
    made = fill(targets, stored, most=_piece_elements(stored, dtype, piece))
    return join([made[p] for p in arrays], static)


def _common_dtype(stored: Mapping[str, Stored]) -> np.dtype:
    # One for all, since models do not multiply numbers of different dtypes.
    sizes = Counter()
    for x in stored.values():
        sizes[x.dtype] += x.nbytes
    return jax.dtypes.canonicalize_dtype(sizes.most_common(1)[0][0])


def _floating(dtype: Any) -> np.dtype:
    found = jax.dtypes.canonicalize_dtype(dtype)
    if not jnp.issubdtype(found, np.floating):
        raise ValueError(f"`dtype` must be a floating type such as 'bfloat16', but is {found}.")
    return found


def _piece_elements(stored: Mapping[str, Stored], dtype: np.dtype, most: int) -> int:
    """How many elements to read at once: `most` bytes, or less where the tensors are small, so
    that all that is under way is less than the largest of them."""
    largest = max(x.nbytes for x in stored.values())
    size = max(dtype.itemsize, *(x.dtype.itemsize for x in stored.values()))
    return min(max(largest // 16, 2**18), most) // size
