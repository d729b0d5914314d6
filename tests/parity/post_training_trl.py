"""The losses of post-training against TRL: fifty steps from the same weights on the same batches.

TRL's trainers train a small LLaMA. The batches that they read, and the answers that they sampled,
are recorded with the loss of each step; the same steps are taken here. `nox -s trl` runs it.
"""

# pyright: reportMissingImports=false

import functools as ft
import json
import shutil
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
import transformers
from datasets import Dataset
from safetensors.numpy import load_file, save_file
from serve_helpers import TEMPLATE, byte_level
from tokenizers import AddedToken
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.experimental.cpo import CPOTrainer
from trl.experimental.kto import KTOConfig, KTOTrainer
from trl.experimental.orpo import ORPOTrainer

import redcoast as rc
from redcoast import losses
from redcoast.models import Llama, LlamaConfig

torch.set_num_threads(1)
STEPS, RATE, TOLERANCE = 50, 1e-4, 1e-4
RNG = np.random.default_rng(0)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A language model of bytes, whose weights are larger than at the start of a training."""
    directory = tmp_path_factory.mktemp("weights") / "tiny"
    sizes: dict[str, Any] = {"vocab": 258, "width": 64, "layers": 2, "heads": 4, "kv_heads": 2}
    model = Llama(LlamaConfig(**sizes, hidden=96, eos=(256,), pad=257), key=jax.random.key(3))
    rc.save_pretrained(jax.tree.map(lambda x: x * 2 if x.ndim > 1 else x, model), directory)
    tokenizer = byte_level()
    special = ("<eos>", "<pad>")
    tokenizer.add_special_tokens([AddedToken(x, special=True, normalized=False) for x in special])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
    settings |= {"pad_token": "<pad>", "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def recorded(trainer, weights=None):
    """Trains, and returns the tensors and the loss of each step as NumPy arrays; adds the weights
    before each step to a list."""
    steps, compute = [], trainer._compute_loss

    def compute_and_record(model, inputs, *rest):
        arrays = {k: x.detach().numpy().copy() for k, x in inputs.items() if torch.is_tensor(x)}
        others = {k: np.array(x) for k, x in inputs.items() if isinstance(x, list)}
        if weights is not None:
            weights.append({k: x.numpy().copy() for k, x in model.state_dict().items()})
        loss = compute(model, inputs, *rest)
        steps.append(
            (arrays | others, float((loss[0] if isinstance(loss, tuple) else loss).detach()))
        )
        return loss

    trainer._compute_loss = compute_and_record
    trainer.train()
    assert len(steps) == STEPS
    return steps


def settings(directory, **options):
    common = {"output_dir": str(directory), "max_steps": STEPS, "learning_rate": RATE}
    common |= {"lr_scheduler_type": "constant", "warmup_steps": 0, "max_grad_norm": 0.0}
    common |= {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
    common |= {"report_to": "none", "save_strategy": "no", "use_cpu": True, "bf16": False}
    common |= {"disable_tqdm": True, "logging_strategy": "no"}
    return common | options


def padded(x, length, *, left=False):
    """To one length, so that there is one program."""
    missing = length - x.shape[1]
    return np.pad(x, ((0, 0), (missing, 0) if left else (0, missing)))


def answers(count=80):
    letters = lambda n: bytes(RNG.integers(97, 123, n).tolist()).decode()
    rows = []
    for _ in range(count):
        lengths = RNG.integers(3, 12, 3)
        rows.append(dict(zip(("prompt", "chosen", "rejected"), map(letters, lengths), strict=True)))
    return rows


def load(weights):
    model = transformers.AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(weights)
    return {"model": model, "processing_class": tokenizer}


def log_probs(model, tokens, real, learned):
    """The sum of the log-probabilities of the learned tokens of each row, and their number."""
    hidden = model.hidden(tokens[:, :-1], mask=real[:, :-1])
    logs = jax.nn.log_softmax(model.unembed(hidden))
    each = jnp.take_along_axis(logs, tokens[:, 1:, None], axis=-1)[..., 0]
    mask = learned[:, 1:]
    return jnp.sum(jnp.where(mask, each, 0), axis=1), jnp.sum(mask, axis=1).astype(jnp.float32)


def own_losses(weights, steps, loss_fn, as_batch):
    """Takes the recorded steps, and returns their losses."""
    optimizer = optax.adamw(RATE, weight_decay=0.0)
    model = rc.load_pretrained(weights, dtype=jnp.float32)
    state = rc.init_state(lambda key: model, optimizer, key=jax.random.key(0))
    step = jax.jit(ft.partial(rc.train_step, loss_fn=loss_fn, optimizer=optimizer))
    found = []
    for arrays, _ in steps:
        state, metrics = step(state, as_batch(arrays))
        found.append(float(metrics["loss"]))
    return found


def assert_equal_losses(steps, found):
    expected = [loss for _, loss in steps]
    worst = np.max(np.abs(np.subtract(found, expected)))
    print(f"from {expected[0]:.4f} to {expected[-1]:.4f}; largest difference {worst:.1e}")
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


def rows_of(arrays, names=("input_ids", "attention_mask", "completion_mask")):
    tokens, real, learned = (padded(arrays[name], 32) for name in names)
    return {"tokens": tokens, "real": real.astype(bool), "learned": learned.astype(bool)}


@pytest.mark.parametrize("kind", ["sigmoid", "ipo"])
def test_preferences(weights, tmp_path, kind):
    config = DPOConfig(**settings(tmp_path, loss_type=[kind], beta=0.2))
    trainer = DPOTrainer(args=config, train_dataset=Dataset.from_list(answers()), **load(weights))
    steps = recorded(trainer)
    reference = rc.load_pretrained(weights, dtype=jnp.float32)

    def loss_fn(model, batch, key):
        halves = []
        for each in (model, reference):
            sums, counts = log_probs(each, batch["tokens"], batch["real"], batch["learned"])
            halves += jnp.split(sums / counts if kind == "ipo" else sums, 2)
        chosen, rejected, reference_chosen, reference_rejected = halves
        loss = losses.ipo if kind == "ipo" else losses.dpo
        return loss(chosen, rejected, reference_chosen, reference_rejected, beta=0.2)

    assert_equal_losses(steps, own_losses(weights, steps, loss_fn, rows_of))


def test_kto(weights, tmp_path):
    rows = answers()
    data = [
        {"prompt": row["prompt"], "completion": row[name], "label": name == "chosen"}
        for row in rows
        for name in ("chosen", "rejected")
    ]
    options = {"beta": 0.2, "desirable_weight": 1.5, "undesirable_weight": 0.5}
    config = KTOConfig(**settings(tmp_path, **options))
    trainer = KTOTrainer(args=config, train_dataset=Dataset.from_list(data), **load(weights))
    steps = recorded(trainer)
    reference = rc.load_pretrained(weights, dtype=jnp.float32)

    def as_batch(arrays):
        names = ("KL_input_ids", "KL_attention_mask", "KL_completion_mask")
        rows, others = rows_of(arrays), rows_of(arrays, names)
        return rows | {"other": others, "desirable": np.asarray(arrays["label"]).astype(bool)}

    def loss_fn(model, batch, key):
        sums = lambda model, rows: log_probs(model, rows["tokens"], rows["real"], rows["learned"])[
            0
        ]
        return losses.kto(
            sums(model, batch),
            sums(reference, batch),
            batch["desirable"],
            unrelated=sums(model, batch["other"]),
            reference_unrelated=sums(reference, batch["other"]),
            **options,
        )

    assert_equal_losses(steps, own_losses(weights, steps, loss_fn, as_batch))


def test_losses_without_a_reference():
    """TRL's formulas on given log-probabilities."""
    chosen, rejected = RNG.uniform(-4, -0.05, (2, 16)).astype(np.float32)
    device = SimpleNamespace(device="cpu")
    ours = jnp.asarray(chosen), jnp.asarray(rejected)
    theirs = torch.tensor(chosen), torch.tensor(rejected)
    of_orpo = SimpleNamespace(beta=0.3, accelerator=device)
    odds = ORPOTrainer.odds_ratio_loss(of_orpo, *theirs)[0]
    expected = float((-theirs[0] - odds).mean())
    assert float(losses.orpo(*ours, weight=0.3)) == pytest.approx(expected, abs=TOLERANCE)
    of_simpo = SimpleNamespace(beta=2.0, simpo_gamma=0.8, alpha=0.0, label_smoothing=0.0)
    of_simpo.loss_type, of_simpo.accelerator = "simpo", device
    expected = float(CPOTrainer.cpo_loss(of_simpo, *theirs)[0].mean())
    found = float(losses.simpo(*ours, beta=2.0, gamma=0.8))
    assert found == pytest.approx(expected, abs=TOLERANCE)


def varied(completions, **_):
    """Rewards of which hardly two are equal, so that every group has advantages."""
    return [sum(map(ord, text)) % 97 / 97 for text in completions]


def assert_equal_in_any_order(advantages, expected):
    """TRL shuffles the rows of a rollout."""
    found = np.sort(np.asarray(advantages).reshape(-1))
    np.testing.assert_allclose(found, np.sort(expected), atol=TOLERANCE)


GROUPS: dict[str, Any] = {
    "grpo": {"loss_type": "grpo", "beta": 0.1, "use_bias_correction_kl": False},
    "grpo unbiased": {"loss_type": "grpo", "beta": 0.1},
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none", "beta": 0.0},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28, "beta": 0.0},
}


@pytest.mark.parametrize("kind", GROUPS)
def test_groups(weights, tmp_path, kind):
    """Two passes over each rollout, so that the ratio is clipped in the second."""
    options = GROUPS[kind] | {"num_generations": 4, "max_completion_length": 10}
    options |= {"learning_rate": 1e-3}
    options |= {"num_iterations": 2, "temperature": 1.0, "top_k": 0}
    config = GRPOConfig(**settings(tmp_path, **options, seed=1))
    data = Dataset.from_list([{"prompt": row["prompt"]} for row in answers()])
    trainer = GRPOTrainer(args=config, train_dataset=data, reward_funcs=varied, **load(weights))
    rewards = []
    trainer.reward_funcs[0] = lambda **given: rewards.append(varied(**keywords)) or rewards[-1]
    models: list[Any] = []
    steps = recorded(trainer, models)
    scale = config.scale_rewards == "group"
    # A rollout is trained on in two steps.
    for (arrays, _), keywords in zip(steps[::2], rewards, strict=True):
        own = losses.grpo_advantages(np.array(keywords, np.float32).reshape(-1, 4), scale=scale)
        assert_equal_in_any_order(own, arrays["advantages"])

    def as_batch(arrays):
        join = lambda one, two: np.concatenate(
            [padded(arrays[one], 16, left=True), padded(arrays[two], 10)], axis=1
        )
        batch = {"tokens": join("prompt_ids", "completion_ids")}
        batch |= {"real": join("prompt_mask", "completion_mask").astype(bool)}
        batch |= {"advantages": arrays["advantages"]}
        batch |= {"mask": padded(arrays["completion_mask"], 10).astype(bool)}
        names = {"old": "old_per_token_logps", "reference": "ref_per_token_logps"}
        return batch | {k: padded(arrays[x], 10) for k, x in names.items() if x in arrays}

    def loss_fn(model, batch, key):
        hidden = model.hidden(batch["tokens"][:, :-1], mask=batch["real"][:, :-1])
        start = batch["tokens"].shape[1] - batch["mask"].shape[1]
        logs = jax.nn.log_softmax(model.unembed(hidden[:, start - 1 :]))
        new = jnp.take_along_axis(logs, batch["tokens"][:, start:, None], axis=-1)[..., 0]
        keywords = {"mask": batch["mask"]}
        keywords |= {"clip": (0.2, 0.28)} if kind == "dapo" else {}
        keywords |= {"max_tokens": 10} if kind == "dr_grpo" else {}
        if "reference" in batch:
            keywords |= {"reference_log_probs": batch["reference"], "kl_weight": 0.1}
            keywords |= {"unbiased_kl": kind.endswith("unbiased")}
        old = batch.get("old", jax.lax.stop_gradient(new))
        return getattr(losses, kind.split()[0])(new, old, batch["advantages"], **keywords)

    # At the weights of each step: the ratio is that of two models, and where hardly any gradient
    # is left, Adam makes whole steps of rounding.
    compiled, found = jax.jit(loss_fn), []
    copy = tmp_path / "copy"
    shutil.copytree(weights, copy)
    for (arrays, _), tensors in zip(steps, models, strict=True):
        names = load_file(weights / "model.safetensors").keys()
        save_file({name: tensors[name] for name in names}, copy / "model.safetensors")
        model = rc.load_pretrained(copy, dtype=jnp.float32)
        found.append(float(compiled(model, as_batch(arrays), None)))
    assert_equal_losses(steps, found)


def test_leave_one_out(weights, tmp_path):
    options = {"num_generations": 4, "max_completion_length": 10, "beta": 0.0}
    config = RLOOConfig(**settings(tmp_path, **options))
    data = Dataset.from_list([{"prompt": row["prompt"]} for row in answers()])
    rewards = []
    reward = lambda **given: rewards.append(varied(**given)) or rewards[-1]
    reward.__name__ = "varied"
    trainer = RLOOTrainer(args=config, train_dataset=data, reward_funcs=reward, **load(weights))
    steps = recorded(trainer)
    for (arrays, _), given in zip(steps, rewards, strict=True):
        own = losses.rloo_advantages(np.array(given, np.float32).reshape(-1, 4))
        assert_equal_in_any_order(own, arrays["advantages"])
