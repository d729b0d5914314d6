"""Small random models of Hugging Face's `transformers`, and the same here: what has to agree.

The reference sees each text alone and without padding; ours sees all of them in one batch, padded
on either side. Both read the same directory, whose weights are made by a formula.
"""

# pyright: reportMissingImports=false

import functools as ft
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import transformers
from agreement import record
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from published import (
    PROMPT,
    apply,
    make_batch,
    make_tokens,
    ragged,
    rows_of,
    settings_of,
    shapes_of,
    write_weights,
)
from safetensors.numpy import load_file

import redcoast as rc
from redcoast import load_pretrained, save_pretrained
from redcoast.losses import cross_entropy

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

make_mesh = ft.partial(rc.make_mesh, data=2, model=4)
NEW, BEAMS = 12, 3
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Case:
    """A `transformers` class, and the settings of its configuration."""

    name: str
    model: Any
    settings: dict[str, Any]

    def __str__(self) -> str:
        return self.name


def make_reference(case: Case, directory: Path) -> Any:
    """A model of `transformers` with the formula's weights, and its directory."""
    case.model(case.model.config_class(**case.settings)).save_pretrained(directory)
    write_weights(directory, shapes_of(directory))
    reference = case.model.from_pretrained(directory).eval()
    if is_whisper(reference):  # as it is created; `from_pretrained` forgets it
        reference.model.encoder.embed_positions.requires_grad_(False)
    return reference


def is_whisper(reference: Any) -> bool:
    return reference.config.model_type == "whisper"


def takes_pixels(reference: Any) -> bool:
    both = hasattr(reference.config, "vision_config")  # such as SigLIP, which takes texts too
    return both or reference.main_input_name == "pixel_values"


def batch_for(reference: Any, directory: Path) -> dict[str, np.ndarray]:
    pixels = takes_pixels(reference)
    return make_batch(settings_of(directory), pixels=pixels, text=reference.can_generate())


# What both compute: a model's outputs, and a loss that depends on every one of them.


def loss_and_outputs(model: Any, batch: dict[str, Any], key: Any) -> tuple[jax.Array, jax.Array]:
    outputs = apply(model, batch)
    if "targets" in batch:
        return cross_entropy(outputs, batch["targets"], mask=batch["weight"]), outputs
    means = outputs @ jnp.cos(jnp.arange(outputs.shape[-1]))
    real = batch["mask"] == 1 if means.ndim == 2 and "mask" in batch else None
    return jnp.mean(means, where=real), outputs


def loss_fn(model: Any, batch: dict[str, Any], key: Any) -> jax.Array:
    return loss_and_outputs(model, batch, key)[0]


@eqx.filter_jit
def evaluate(model: Any, batch: dict[str, Any], loss: Any) -> Any:
    """The loss and the outputs, and the gradients."""
    return eqx.filter_value_and_grad(loss, has_aux=True)(model, batch, None)


def reference_outputs(reference: Any, batch: dict[str, np.ndarray]) -> list[torch.Tensor]:
    """The outputs for each row's real tokens."""
    rows = range(len(next(iter(batch.values()))))
    return [reference(**reference_inputs(batch, row))[0][0] for row in rows]


def reference_inputs(batch: dict[str, np.ndarray], row: int) -> dict[str, torch.Tensor]:
    """One row, without padding."""
    if "pixels" in batch:
        inputs = {"pixel_values": torch.tensor(batch["pixels"][row][None])}
        if "tokens" in batch:  # each image is compared with all texts
            inputs["input_ids"] = torch.tensor(batch["tokens"].astype(np.int64))
    elif "features" in batch:
        inputs = {"input_features": torch.tensor(batch["features"][row][None])}
    else:
        inputs = {"input_ids": real_tokens(batch["tokens"][row], batch["mask"][row])[None]}
    if "decoder_tokens" in batch:
        tokens = real_tokens(batch["decoder_tokens"][row], batch["decoder_mask"][row])
        inputs["decoder_input_ids"] = tokens[None]
    return inputs


def real_tokens(tokens: np.ndarray, mask: np.ndarray) -> torch.Tensor:
    return torch.tensor(tokens[mask == 1].astype(np.int64))


def reference_loss(rows: list[torch.Tensor], batch: dict[str, np.ndarray]) -> torch.Tensor:
    if "targets" not in batch:
        means = [row @ torch.cos(torch.arange(row.shape[-1])) for row in rows]
        return torch.cat([each.reshape(-1) for each in means]).mean()
    names = ("decoder_tokens", "decoder_mask") if "decoder_mask" in batch else ("tokens", "mask")
    texts = map(real_tokens, *(batch[name] for name in names))
    losses = [
        torch.nn.functional.cross_entropy(logits[:-1], text[1:], reduction="none")
        for logits, text in zip(rows, texts, strict=True)
    ]
    return torch.cat(losses).mean()


def difference(ours: list[np.ndarray], theirs: list[torch.Tensor]) -> float:
    pairs = zip(ours, theirs, strict=True)
    return max(float(np.abs(a - b.detach().numpy()).max()) for a, b in pairs)


# Gradients are compared as published tensors: written as if they were the weights.


def published_gradients(gradients: Any, directory: Path) -> dict[str, np.ndarray]:
    save_pretrained(gradients, directory)
    return load_file(directory / "model.safetensors")


def reference_gradients(reference: Any, directory: Path) -> dict[str, np.ndarray]:
    for parameter in reference.parameters():
        # None for a pooler that the outputs do not depend on.
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    for buffer in reference.buffers():
        buffer.zero_()
    reference.save_pretrained(directory)
    return load_file(directory / "model.safetensors")


def gradient_errors(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> dict[str, float]:
    """The largest difference in each tensor, relative to its largest number."""
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    # Some gradients, such as those of a bias of K, are zero but for rounding.
    nothing = 1e-6 * max(np.abs(x).max() for x in theirs.values())
    size = lambda x: float(np.abs(x).max())
    return {
        name: size(ours[name] - x) / max(size(x), nothing / TOLERANCE if size(x) < nothing else 0)
        for name, x in theirs.items()
    }


def split_over_mesh(directory: Path, model: Any, batch: dict[str, Any]) -> tuple[Any, Any, Any]:
    """The plan, the directory's model loaded as planned, and the batch, on 2 x 4 devices."""
    plan = rc.plan_shardings(model, make_mesh(), fn=loss_fn, args=(batch, None))
    model = load_pretrained(directory, shardings=plan.shardings)
    return plan, model, jax.device_put(batch, NamedSharding(plan.mesh, P("data")))


def check_outputs(case: Case, directory: Path) -> None:
    """Outputs, loss and all gradients, on one device and split over eight."""
    reference = make_reference(case, directory / "theirs")
    batch = batch_for(reference, directory / "theirs")
    expected = reference_outputs(reference, batch)
    expected_loss = reference_loss(expected, batch)
    expected_loss.backward()
    expected_gradients = reference_gradients(reference, directory / "gradients")
    model = load_pretrained(directory / "theirs")
    plan, split_model, split_batch = split_over_mesh(directory / "theirs", model, batch)
    for where, result in {
        "one device": evaluate(model, batch, loss_and_outputs),
        "2 x 4": evaluate(split_model, split_batch, plan.constrain(loss_and_outputs)),
    }.items():
        (loss, outputs), gradients = result
        error = difference(rows_of(outputs, batch), expected)
        errors = gradient_errors(
            published_gradients(gradients, directory / where), expected_gradients
        )
        worst = max(errors, key=errors.__getitem__)
        print(f"{case} on {where}: outputs {error:.1e}, gradient {errors[worst]:.1e} ({worst})")
        record(case, "logits", error)
        record(case, "gradients", errors[worst])
        assert error < TOLERANCE
        assert abs(float(loss) - expected_loss.item()) < TOLERANCE
        assert errors[worst] < TOLERANCE
    record(case, "configurations")


def prompts_for(batch: dict[str, np.ndarray], settings: dict[str, Any]) -> tuple[Any, Any]:
    """Ragged prompts: `transformers` continues a decoder's on the right, and counts the positions
    of most encoders from the left."""
    for name in ("pixels", "features"):
        if name in batch:
            return batch[name], None
    side = -1 if settings.get("is_encoder_decoder") else 1
    tokens = make_tokens("prompts", settings["vocab_size"], PROMPT)
    return tokens, ragged(tuple(side * n for n in (0, 3, 1, 6)), PROMPT)


def reference_ids(
    reference: Any, prompts: np.ndarray, mask: np.ndarray | None, *, eos: int | None, beams: int
) -> np.ndarray:
    """The new tokens, with padding up to `NEW`."""
    config = reference.config
    pad = (eos or 0) if config.pad_token_id is None else config.pad_token_id
    start = getattr(config, "decoder_start_token_id", None)
    reference.generation_config = transformers.GenerationConfig(
        max_new_tokens=NEW,
        num_beams=beams,
        eos_token_id=eos,
        pad_token_id=pad,
        decoder_start_token_id=start,
        forced_eos_token_id=getattr(config, "forced_eos_token_id", None),
    )
    masks = {} if mask is None else {"attention_mask": torch.tensor(mask)}
    inputs = torch.tensor(prompts if mask is None else prompts.astype(np.int64))
    with torch.no_grad():
        # Not Whisper's own, which drops the tokens that end a text.
        ids = transformers.GenerationMixin.generate(reference, inputs, **masks).numpy()
    new = ids[:, 1:] if config.is_encoder_decoder else ids[:, prompts.shape[1] :]
    new = np.pad(new, ((0, 0), (0, NEW - new.shape[1])), constant_values=pad)
    # Its beam search takes a padding token 0 for none, and pads with the one that ends a text.
    behind = np.cumsum(new == eos, axis=1) > (new == eos)
    return np.where(behind, pad, new)


def check_generation(case: Case, directory: Path) -> None:
    """Greedy and beam search, until a token that ends some rows, on one device and on eight."""
    reference = make_reference(case, directory)
    batch = batch_for(reference, directory)
    model = load_pretrained(directory)
    plan, split_model, _ = split_over_mesh(directory, model, batch)
    prompts, mask = prompts_for(batch, settings_of(directory))
    free = reference_ids(reference, prompts, mask, eos=None, beams=1)
    eos = int(free[0, 4])
    for beams in (1, BEAMS):
        expected = reference_ids(reference, prompts, mask, eos=eos, beams=beams)
        generate = ft.partial(new_ids, eos=eos, beams=beams)
        planned = jax.jit(plan.constrain(generate)) if beams > 1 else generate
        np.testing.assert_array_equal(generate(model, prompts, mask), expected)
        np.testing.assert_array_equal(planned(split_model, prompts, mask), expected)
        record(case, "decoding")


def new_ids(model: Any, prompts: Any, mask: Any, *, eos: int, beams: int) -> jax.Array:
    return rc.generate(model, prompts, mask=mask, max_new_tokens=NEW, eos=eos, beams=beams)


def check_training(case: Case, directory: Path) -> None:
    """Three steps on eight devices, saved: the reference reads that strictly, and agrees."""
    reference = make_reference(case, directory / "theirs")
    batch = batch_for(reference, directory / "theirs")
    model = load_pretrained(directory / "theirs")
    optimizer = optax.adam(0.01)
    state = rc.init_state(lambda _: model, optimizer, key=jax.random.key(0))
    plan = rc.plan_shardings(state, make_mesh(), fn=loss_fn, args=(batch, None))
    step = ft.partial(rc.train_step, loss_fn=plan.constrain(loss_fn), optimizer=optimizer)
    step = rc.compile_step(step, plan.shardings)
    losses = []
    for _ in range(3):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    save_pretrained(state.model, directory / "ours")
    trained, info = case.model.from_pretrained(directory / "ours", output_loading_info=True)
    assert not any(info.values()), info
    expected = reference_outputs(trained.eval(), batch)
    ours = jax.tree.map(jnp.asarray, jax.device_get(state.model))
    (loss, outputs), _ = evaluate(ours, batch, loss_and_outputs)
    error = difference(rows_of(outputs, batch), expected)
    print(f"{case} trained: loss {losses} {float(loss):.4f}, outputs {error:.1e}")
    record(case, "saved and read", error)
    assert float(loss) < losses[0]
    assert error < TOLERANCE
