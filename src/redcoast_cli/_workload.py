"""The training step of a dry run: a model by name or `config.json`, its loss, and a batch."""

import dataclasses
import difflib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from redcoast import models
from redcoast.core._read_json import read_json
from redcoast.core._tracing import abstract_key
from redcoast.losses import chunked_cross_entropy, cross_entropy
from redcoast.models import sizes
from redcoast.pretrained._registry import find_family

from ._usage import refuse

LONGEST = 1024  # the default sequence length, in tokens


@dataclasses.dataclass(frozen=True)
class Workload:
    """A training step: functions that make the model, its loss and an abstract batch."""

    init_fn: Callable[[Any], Any]
    loss_fn: Callable[[Any, Any, Any], Any]
    make_batch: Callable[[int], Any]  # takes the number of rows
    seq: int | None  # tokens in a row; None for images
    notes: tuple[str, ...]

    def arguments(self, rows: int) -> tuple[Any, ...]:
        """The positional arguments of `redcoast.dry_run`, for a batch of `rows` rows."""
        return self.init_fn, self.loss_fn, self.make_batch(rows), optax.adamw(1e-4)


def make_workload(
    model: str, seq: int | None = None, *, remat: str = "full", chunk: int | None = None
) -> Workload:
    """The training step of a model on sequences of `seq` tokens (of the decoder, for encoders of
    images or sounds).

    `chunk` is the number of positions whose logits are in memory at a time; all by default. If the
    sequence is longer than the model's learned positions, positions are added, with a note.
    """
    if chunk is not None and chunk < 1:
        refuse(f"--chunk must be at least 1, but is {chunk}.")
    model_class, config = find_model(model)
    seq = _length(model, model_class, config, seq)
    config, notes = _with_head(model_class, config), ()
    if seq is not None and _learned(config) and seq > config.positions:
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


def find_model(model: str) -> tuple[Any, Any]:
    """The class and the configuration of a named model, or of the model in a `config.json`."""
    path = Path(model).expanduser()
    path = path / "config.json" if path.is_dir() else path
    if path.is_file():
        try:
            family, config = find_family(read_json(path), path)
            return family.model, config
        except ValueError as error:
            refuse(str(error))
    names = [name for name, make in vars(sizes).items() if _is_size(name, make)]
    name = model.lower().replace("-", "_").replace(".", "_")
    if name not in names:
        refuse(_unknown(model, name, names))
    abstract = eqx.filter_eval_shape(getattr(sizes, name), key=abstract_key())
    return type(abstract), abstract.config


def _is_size(name: str, make: Any) -> bool:
    public = inspect.isfunction(make) and not name.startswith("_")
    return public and make.__module__ == sizes.__name__


def _unknown(model: str, name: str, names: list[str]) -> str:
    near = difflib.get_close_matches(name, names, n=3)
    meant = f" Did you mean {' or '.join(x.replace('_', '-') for x in near)}?" if near else ""
    known = ", ".join(x.replace("_", "-") for x in names)
    return (
        f"There is no model {model!r}, and no config.json at that path.{meant} "
        f"The named models are {known}."
    )


def _length(model: str, model_class: Any, config: Any, seq: int | None) -> int | None:
    if model_class is models.ViT and seq is not None:
        refuse(f"{model} reads images of {config.image} pixels: leave out --seq.")
    if seq is not None and seq < 1:
        refuse(f"--seq must be at least 1, but is {seq}.")
    return None if model_class is models.ViT else seq or min(LONGEST, _most_tokens(config))


def _learned(config: Any) -> bool:
    return hasattr(config, "positions")


def _most_tokens(config: Any) -> int:
    """The greatest sequence length of the weights, if the configuration gives one."""
    return getattr(config, "positions", getattr(config, "context", LONGEST))


def _changed(config: Any, **changes: Any) -> Any:
    """Replaces fields of a configuration, and of nested ones, where they have such fields."""
    fields = [field.name for field in dataclasses.fields(config)]
    parts = {x: getattr(config, x) for x in fields if dataclasses.is_dataclass(getattr(config, x))}
    own = {name: value for name, value in changes.items() if name in fields}
    return dataclasses.replace(
        config, **{x: _changed(y, **changes) for x, y in parts.items()}, **own
    )


def _with_head(model_class: Any, config: Any) -> Any:
    """Gives an encoder without a head the head of its pretraining."""
    if model_class is models.Bert and config.head is None:
        return dataclasses.replace(config, head="masked")
    if model_class is models.ViT and config.head is None:
        return dataclasses.replace(config, head="classification", labels=1000)
    return config


def _task(
    model_class: Any, config: Any, seq: int | None, chunk: int | None
) -> tuple[Callable[..., Any], Callable[[int], Any]]:
    """The loss, and a function from the number of rows to an abstract batch."""
    labels = lambda rows: jax.ShapeDtypeStruct((rows,), jnp.int32)
    tokens = lambda rows: jax.ShapeDtypeStruct((rows, seq), jnp.int32)
    images = getattr(config, "encoder", config)
    pixels = lambda rows: jax.ShapeDtypeStruct((rows, images.channels, *images.image), jnp.float32)
    if model_class is models.ViT or getattr(config, "head", None) == "classification":
        inputs = pixels if model_class is models.ViT else tokens
        return _classify, lambda rows: {"inputs": inputs(rows), "targets": labels(rows)}
    loss_of = _token_loss(chunk)
    if model_class in (models.Bart, models.T5, models.Captioner, models.Whisper):
        sounds = lambda rows: jax.ShapeDtypeStruct((rows, config.mels, config.frames), jnp.float32)
        inputs = {models.Captioner: pixels, models.Whisper: sounds}.get(model_class, tokens)
        loss_fn = _decode(loss_of, start=config.decoder_start or 0)
        return loss_fn, lambda rows: {"inputs": inputs(rows), "targets": tokens(rows)}
    return _predict(loss_of), lambda rows: {"inputs": tokens(rows), "targets": tokens(rows)}


def _token_loss(chunk: int | None) -> Callable[..., Any]:
    if chunk is None:
        return lambda hidden, unembed, targets: cross_entropy(unembed(hidden), targets)
    return lambda *args: chunked_cross_entropy(*args, chunk=chunk)


def _classify(model: Any, batch: Any, key: Any) -> Any:
    return cross_entropy(model(batch["inputs"], key=key), batch["targets"])


def _decode(loss_of: Callable[..., Any], *, start: int) -> Callable[..., Any]:
    """The loss of an encoder-decoder with teacher forcing."""

    def loss_fn(model: Any, batch: Any, key: Any) -> Any:
        before = models.shift_right(batch["targets"], start=start)
        hidden = model.hidden(batch["inputs"], before, key=key)
        return loss_of(hidden, model.unembed, batch["targets"])

    return loss_fn


def _predict(loss_of: Callable[..., Any]) -> Callable[..., Any]:
    """The loss of predicting `targets` position by position: next tokens or masked tokens."""

    def loss_fn(model: Any, batch: Any, key: Any) -> Any:
        hidden = model.hidden(batch["inputs"], key=key)
        return loss_of(hidden, model.unembed, batch["targets"])

    return loss_fn
