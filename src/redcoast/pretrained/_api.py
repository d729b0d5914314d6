"""The public functions. They import their implementation, and the models, on the first call."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jax.sharding import Mesh
from jaxtyping import PyTree

from ..core._errors import check_kind, local_path
from ..core._frames import hide_frames
from ..core._train_state import refuse_state


@hide_frames
def load_pretrained(
    path: str | Path,
    *,
    mesh: Mesh | None = None,
    shardings: PyTree | None = None,
    dtype: Any = None,
    **options: Any,
) -> Any:
    """Loads pretrained weights into a model of `redcoast.models`.

    Each device reads only its own slices of the tensors, in pieces. In addition to the memory of
    the devices, the host needs less than 1.5 times the size of the largest tensor.

    **Arguments:**

    - `path`: a directory in Hugging Face's layout (`config.json` and `model.safetensors`, or
        several files and their `model.safetensors.index.json`); a `.gguf` file of the LLaMA
        architecture, which needs the package `gguf`, or one of the files that such a model is split
        into; or a directory with exactly one such model.
    - `mesh`: the devices to shard the model over. [`redcoast.infer_shardings`][] plans the
        shardings by tracing the model's forward pass.
    - `shardings`: the shardings of the arrays, in place of planned ones: a tree such as
        [`redcoast.infer_shardings`][] returns for the model. With neither `mesh` nor `shardings`,
        all arrays are put on JAX's default device.
    - `dtype`: the dtype of the arrays. By default that of the files; if they have several, the one
        with the most bytes. Quantised tensors of a `.gguf` file count as float32; those in FP8 or
        MXFP4 have the dtype of the others, or bfloat16 if there are none.
    - `options`: fields of the model's configuration to override, such as `remat` or a dropout rate.

    **Returns:**

    The model. Its configuration is `model.config`. Its `decoding` has the options of the file
    `generation_config.json`, which [`redcoast.generate`][] uses by default; options that are not
    implemented are warned of.

    **Raises:**

    `FileNotFoundError` if `path` does not exist. `ValueError` if it holds no model, or if its
    architecture, its quantisation or one of its settings is not implemented; if the weights are
    pickled, because unpickling can run arbitrary code; or if the files do not hold exactly the
    tensors of the model (all missing, unexpected and misshapen ones are listed). `TypeError` if the
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
    return load(Path(path).expanduser().absolute(), mesh, shardings, dtype, options)


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
    for two copies of one file. In a job of several processes, all of them must call this with the
    same `path` on a shared file system; they write different files. The directory appears under its
    name only once it is complete.

    **Arguments:**

    - `model`: a model of `redcoast.models`.
    - `path`: a directory that does not exist yet, or is empty.
    - `tokenizer`: a directory, such as the one that the model was loaded from, from which the files
        of the tokenizer, the chat template and the processor are copied.
    - `card`: facts about the model and its training, such as `{"license": "apache-2.0", "steps":
        100, "final_loss": 2.1}`. They are written as a model card, a `README.md` that Hugging
        Face's hub reads: `license`, `license_name`, `license_link`, `language`, `datasets`,
        `base_model`, `metrics`, `tags` and `pipeline_tag` as its front matter, all others as a
        table.
    - `max_file_bytes`: the maximum size of one file of tensors, in bytes. A tensor that is larger
        has a file of its own.

    **Raises:**

    `ValueError` if `path` exists and is not an empty directory, if `model` is not a model of
    `redcoast.models`, if its arrays do not match its configuration, or if it has LoRA adapters,
    which must be merged first. `TypeError` if `card` is not a mapping, or if an entry of its front
    matter is not text. `FileNotFoundError` if there is no directory `tokenizer`.

    !!! Example

        ```python
        config = LlamaConfig(vocab=256, width=64, layers=2, heads=4, kv_heads=2, hidden=128)
        card = {"license": "apache-2.0", "data": "ten books", "steps": 100, "final_loss": 2.1}
        rc.save_pretrained(Llama(config, key=key), "tiny-llama", card=card)
        ```
    """
    from ._save import save

    refuse_state(model, "save_pretrained")
    source = None if tokenizer is None else Path(tokenizer).expanduser().absolute()
    save(model, local_path("path", path).absolute(), source, card, max_file_bytes)
