"""The training step of a dry run: a model by name or `config.json`, its loss, and a batch."""

import dataclasses
import difflib
import inspect
from collections.abc import Callable
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from redcoast import models
from redcoast.core._read_json import read_json
from redcoast.core._tracing import abstract_key
from redcoast.losses import chunked_cross_entropy, cross_entropy
from redcoast.models import sizes
from redcoast.pretrained._registry import find_family

from ._usage import refuse, refuse_impossible_size

LONGEST = 1024  # the default sequence length, in tokens
# Attention over longer sequences has more pairs of blocks than the memory of a host may hold.
MOST_TOKENS = 2**20

# The inputs of the model and the targets of the loss: arrays, or their shapes and dtypes.
Batch = dict[str, PyTree]


@dataclasses.dataclass(frozen=True)
class Workload:
    """A training step: functions that make the model, its loss and an abstract batch."""

    init_fn: Callable[[PRNGKeyArray], PyTree]
    loss_fn: Callable[[PyTree, Batch, PRNGKeyArray], Float[Array, ""]]
    make_batch: Callable[[int], Batch]  # takes the number of rows
    seq: int | None  # tokens in a row; None for images
    notes: tuple[str, ...]

    def arguments(self, rows: int) -> tuple[PyTree, ...]:
        """The positional arguments of `redcoast.dry_run`, for a batch of `rows` rows."""
        return self.init_fn, self.loss_fn, self.make_batch(rows), optax.adamw(1e-4)


def make_workload(
    model: str, seq: int | None = None, *, remat: str = "full", chunk: int | None = None
) -> Workload:
    """The training step of a model on sequences of `seq` tokens (of the decoder, for encoders of
    images or sounds).

    `chunk` is the number of positions whose logits are in memory at a time; by default, all of them
    unless they are large. If the sequence is longer than the model's learned positions, positions
    are added, with a note.
    """
    if chunk is not None and chunk < 1:
        refuse(f"--chunk must be at least 1, but is {chunk}.")
    model_class, config = find_model(model)
    seq = _length(model, model_class, config, seq)
    notes = ()
    # An encoder without a head gets the head of its pretraining.
    if model_class is models.Bert and config.head is None:
        config = dataclasses.replace(config, head="masked")
    if model_class is models.ViT and config.head is None:
        config = dataclasses.replace(config, head="classification", labels=1000)
    if seq is not None and hasattr(config, "positions") and seq > config.positions:
        notes = (
            f"The pretrained model has {config.positions} learned positions; here it has {seq}.",
        )
        config = _changed(config, positions=seq)
    config = _changed(config, remat=remat)
    init_fn = lambda key: model_class(config, key=key)
    loss_fn, make_batch = _task(model_class, config, seq, chunk)
    return Workload(init_fn, loss_fn, make_batch, seq, notes)


def state_bytes(workload: Workload) -> int:
    """Bytes of the training state: parameters, and AdamW's two moments of each."""
    model = eqx.filter_eval_shape(workload.init_fn, abstract_key())
    arrays = [x for x in jax.tree.leaves(model) if isinstance(x, jax.ShapeDtypeStruct)]
    return 3 * sum(x.size * x.dtype.itemsize for x in arrays)


def find_model(model: str) -> tuple[type, PyTree]:
    """The class and the configuration of a named model, or of the model in a `config.json`."""
    path = Path(model).expanduser()
    if path.is_dir():
        path /= "config.json"
    if path.is_file():
        try:
            family, config = find_family(read_json(path), path)
            return family.model, config
        except ValueError as error:
            refuse(str(error))
    names = [name for name, make in vars(sizes).items() if _is_model(name, make)]
    name = model.lower().replace("-", "_").replace(".", "_")
    if name not in names:
        text = f"There is no model {model!r}, and no config.json at that path."
        if near := difflib.get_close_matches(name, names, n=3):
            text += f" Did you mean {' or '.join(near)}?".replace("_", "-")
        known = ", ".join(names).replace("_", "-")
        refuse(f"{text} The named models are {known}.")
    abstract = eqx.filter_eval_shape(getattr(sizes, name), key=abstract_key())
    return type(abstract), abstract.config


def _is_model(name: str, make: object) -> bool:
    if name.startswith("_") or not inspect.isfunction(make):
        return False
    return make.__module__ == sizes.__name__


def _length(model: str, model_class: type, config: PyTree, seq: int | None) -> int | None:
    if model_class is models.ViT and seq is not None:
        refuse(f"{model} reads images of {config.image} pixels: leave out --seq.")
    refuse_impossible_size("seq", seq, MOST_TOKENS)
    if model_class is models.ViT or seq is not None:
        return seq
    # The maximum length of the weights, if the configuration states one.
    most = getattr(config, "positions", getattr(config, "context", LONGEST))
    return min(LONGEST, most)


def _changed(config: PyTree, **changes: object) -> PyTree:
    """Replaces fields of a configuration, and of nested ones, where they have such fields."""
    changed = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            changed[field.name] = _changed(value, **changes)
        elif field.name in changes:
            changed[field.name] = changes[field.name]
    return dataclasses.replace(config, **changed)


def _task(
    model_class: type, config: PyTree, seq: int | None, chunk: int | None
) -> tuple[Callable[[PyTree, Batch, PRNGKeyArray], Float[Array, ""]], Callable[[int], Batch]]:
    """The loss, and a function from the number of rows to an abstract batch."""
    classifies = model_class is models.ViT or getattr(config, "head", None) == "classification"
    decodes = model_class in (models.Bart, models.T5, models.Captioner, models.Whisper)
    row, dtype = (seq,), jnp.int32
    if model_class in (models.ViT, models.Captioner):
        images = getattr(config, "encoder", config)
        row, dtype = (images.channels, *images.image), jnp.float32
    elif model_class is models.Whisper:
        row, dtype = (config.mels, config.frames), jnp.float32

    def make_batch(rows: int) -> Batch:
        shape = (rows, seq)
        if classifies:
            shape = (rows,)
        targets = jax.ShapeDtypeStruct(shape, jnp.int32)
        return {"inputs": jax.ShapeDtypeStruct((rows, *row), dtype), "targets": targets}

    def loss_fn(model: PyTree, batch: Batch, key: PRNGKeyArray) -> Float[Array, ""]:
        targets = batch["targets"]
        if classifies:
            return cross_entropy(model(batch["inputs"], key=key), targets)
        # Decoders predict the next token, encoders the masked ones, position by position.
        inputs = [batch["inputs"]]
        if decodes:
            inputs.append(models.shift_right(targets, start=config.decoder_start or 0))
        hidden = model.hidden(*inputs, key=key)
        return chunked_cross_entropy(hidden, model.unembed, targets, chunk=chunk)

    return loss_fn, make_batch
