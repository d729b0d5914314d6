"""The public functions. What they do is imported when it is first done, and with it the models."""

from pathlib import Path
from typing import Any

from jax.sharding import Mesh
from jaxtyping import PyTree

from ..core._errors import check_kind


def load_pretrained(
    path: str | Path,
    *,
    mesh: Mesh | None = None,
    shardings: PyTree | None = None,
    dtype: Any = None,
    **options: Any,
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
    - `options`: what of the model's configuration is to be otherwise than published: `remat`, say,
        or a rate of dropout.

    **Returns:**

    The model; its configuration is `model.config`.

    **Raises:**

    `ValueError` if there is no model at `path`, or one of an unknown architecture or with settings
    that are not implemented; if weights are pickled, since opening a pickle runs code; and if the
    files do not hold exactly the tensors of the model: all that are missing, unexpected or
    misshapen are listed. `TypeError` if the configuration has no such field.

    !!! Example

        ```python
        config = LlamaConfig(vocab=256, width=64, layers=2, heads=4, kv_heads=2, hidden=128)
        rc.save_pretrained(Llama(config, key=key), "tiny-llama")
        model = rc.load_pretrained("tiny-llama", mesh=mesh, dtype="bfloat16", remat="dots")
        logits = model(jnp.zeros((4, 16), jnp.int32))
        ```
    """
    from ._load import load

    check_kind("path", path, (str, Path), "a path")
    return load(Path(path).expanduser().absolute(), mesh, shardings, dtype, options)


def save_pretrained(
    model: Any, path: str | Path, *, max_file_bytes: int | float = 2_000_000_000
) -> None:
    """Saves a model of `redcoast.models` as `transformers` loads it.

    Writes `config.json` and `model.safetensors`, or several files and their index. The model may
    be split over any mesh; the host holds one file at a time, twice. Of several processes all
    have to call this, with a `path` that they share; they write different files. The directory
    appears under its name only when it is whole.

    **Arguments:**

    - `model`: a model of `redcoast.models`.
    - `path`: a directory that does not exist yet, or is empty.
    - `max_file_bytes`: above how many bytes of tensors there are several files.

    **Raises:**

    `ValueError` if `path` holds something already, if the model is none of `redcoast.models`, or if
    its weights are adapted (LoRA), so that they are not what would be saved: merge them first.

    !!! Example

        ```python
        config = LlamaConfig(vocab=256, width=64, layers=2, heads=4, kv_heads=2, hidden=128)
        rc.save_pretrained(Llama(config, key=key), "tiny-llama")
        ```
    """
    from ._save import save

    save(model, Path(path).expanduser().absolute(), max_file_bytes)
