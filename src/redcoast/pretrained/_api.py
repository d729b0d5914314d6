"""The public functions. They import their implementation, and the models, on the first call."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from jax.sharding import Mesh
from jaxtyping import PyTree

from ..core._errors import absolute_path, check_kind
from ..core._frames import hide_frames
from ..core._train_state import refuse_state


@hide_frames
def load_pretrained(
    path: str | Path,
    *,
    mesh: Mesh | None = None,
    shardings: PyTree | None = None,
    dtype: Any = None,
    quantise: Literal["nf4", "int8"] | None = None,
    **options: Any,
) -> Any:
    """Loads pretrained weights into a model of `redcoast.models`.

    Each device reads only its own slices of the tensors, in pieces. The host needs less than 1.5
    times the size of the largest tensor, in addition to the memory of the devices.

    **Arguments:**

    - `path`: a directory in Hugging Face's layout (`config.json` and `model.safetensors`, or
        several files and `model.safetensors.index.json`); a `.gguf` file of the LLaMA architecture,
        or one of its parts, which needs the package `gguf`; or a directory with exactly one such
        model.
    - `mesh`: the mesh to shard the model over, as [`redcoast.infer_shardings`][] does for its
        forward pass.
    - `shardings`: the shardings of the arrays, as returned by [`redcoast.infer_shardings`][] for
        the model, in place of planned ones. With neither `mesh` nor `shardings`, all arrays are
        placed on JAX's default device.
    - `dtype`: the dtype of the arrays; by default, the dtype of the files (if they have several,
        the one with the most bytes). Quantised tensors of a `.gguf` file count as float32. Other
        quantised tensors get the dtype of the other tensors, or bfloat16 if there are none.
    - `quantise`: stores the matrices of the layers as [`redcoast.lora.quantise`][] does, a few
        layers at a time, so that the devices never store the model whole in `dtype`.
    - `options`: fields of the model's configuration to override, such as `remat` or a dropout rate.

    **Returns:**

    The model. Its configuration is `model.config`. Its `decoding` has the options in
    `generation_config.json`, which are the defaults of [`redcoast.generate`][]; a warning names
    options that are not implemented.

    **Raises:**

    `FileNotFoundError` if `path` does not exist. `ValueError` if it contains no model; if the
    architecture, the quantisation or a setting is not implemented; if the weights are pickled,
    because unpickling can run arbitrary code; or if the files do not contain exactly the tensors of
    the model (all missing, unexpected and misshapen tensors are listed). `TypeError` if the
    configuration does not have a field of `options`.

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
    return load(absolute_path("path", path), mesh, shardings, dtype, quantise, options)


@hide_frames
def save_pretrained(
    model: Any,
    path: str | Path,
    *,
    tokenizer: str | Path | None = None,
    card: Mapping[str, Any] | None = None,
    max_file_bytes: int | float = 2_000_000_000,
) -> None:
    """Saves a model of `redcoast.models` in the format of `transformers`.

    Writes `config.json`, `generation_config.json` if the model generates, and `model.safetensors`,
    or several files and their index. The model may be sharded over any mesh. The host needs memory
    for two copies of one file. In a job with several processes, all of them must call this with the
    same `path` on a shared file system; they write different files. The directory is written
    atomically.

    **Arguments:**

    - `model`: a model of `redcoast.models`.
    - `path`: a directory that does not exist yet, or is empty.
    - `tokenizer`: what the model was loaded from: a directory, from which the files of the
        tokenizer, the chat template and the processor are copied; or a `.gguf` file, whose
        tokenizer and chat template are written as such files.
    - `card`: facts about the model and its training, such as `{"license": "apache-2.0", "steps":
        100, "final_loss": 2.1}`. They are written to a model card for Hugging Face's hub,
        `README.md`: `license`, `license_name`, `license_link`, `language`, `datasets`,
        `base_model`, `metrics`, `tags` and `pipeline_tag` as front matter, and others as a table.
    - `max_file_bytes`: the maximum size of a file of tensors, in bytes. A larger tensor gets its
        own file.

    **Raises:**

    `ValueError` if `path` exists and is not an empty directory, if `model` is not a model of
    `redcoast.models`, if its arrays do not match its configuration, or if it has LoRA adapters,
    which must be merged first. `TypeError` if `card` is not a mapping, or if an entry of its front
    matter is not text. `FileNotFoundError` if there is no path `tokenizer`.

    !!! Example

        ```python
        config = LlamaConfig(vocab=256, width=64, layers=2, heads=4, kv_heads=2, hidden=128)
        card = {"license": "apache-2.0", "data": "ten books", "steps": 100, "final_loss": 2.1}
        rc.save_pretrained(Llama(config, key=key), "tiny-llama", card=card)
        ```
    """
    from ._save import save

    refuse_state(model, "save_pretrained")
    source = None
    if tokenizer is not None:
        source = Path(tokenizer).expanduser().absolute()
    save(model, absolute_path("path", path), source, card, max_file_bytes)
