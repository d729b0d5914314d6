"""Tokens per second of a rollout and of the update on it, against TRL's `GRPOTrainer`.

TRL trains a LLaMA on a CPU with `transformers` and torch, with the same number of threads. After
each of its steps, redcoast samples answers to the same prompts, of the same length, and takes a
step on the samples of TRL, with the same loss and optimizer, from the same weights at the start.
The first steps, in which programs are compiled, are not counted. The figures are the medians of the
others: tokens of answers in a second of processor time, of all threads, and by the clock.

    python experiments/benchmarks/grpo_speed.py
"""

# pyright: reportMissingImports=false

import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro

import redcoast as rc
from redcoast import losses
from redcoast.models import Llama, LlamaConfig

sys.path.append(str(Path(__file__).parents[1]))
from _cells import markdown
from _tokenizers import byte_tokenizer
from jaxtyping import PyTree

HEAD = ["tokens per second", "redcoast", "TRL", "ratio", "least and most", "by the clock"]
RATE, LETTERS, EOS, PAD = 1e-5, (97, 123), 256, 257
NAMES = ("prompt_ids", "completion_ids", "completion_mask", "advantages")


@dataclass(frozen=True)
class Config:
    width: int = 256  # width of the model
    layers: int = 4  # number of layers
    heads: int = 4  # number of heads
    prompts: int = 8  # number of prompts in a rollout
    samples: int = 8  # number of answers to each prompt
    prompt: int = 32  # number of tokens in a prompt
    new: int = 64  # number of tokens in an answer
    threads: int = 2  # number of threads of torch, as many as JAX has cores
    skipped: int = 1  # number of steps at the start that are not counted
    rounds: int = 5  # number of steps that are counted


@dataclass
class Spent:
    """Processor seconds and seconds by the clock of each turn, by what was done."""

    turns: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    def add(self, name: str, begin: tuple[float, float]) -> None:
        now = clocks()
        self.turns.setdefault(name, []).append((now[0] - begin[0], now[1] - begin[1]))

    def measure(self, name: str, run: Callable[[], Any]) -> Any:
        begin = clocks()
        result = jax.block_until_ready(run())
        self.add(name, begin)
        return result


def clocks() -> tuple[float, float]:
    return time.process_time(), time.perf_counter()


def main(c: Config) -> None:
    """Prints a table with a line for the rollout, one for the update, and one for both."""
    import torch

    torch.set_num_threads(c.threads)
    spent = Spent()
    with tempfile.TemporaryDirectory() as directory:
        weights = write_weights(c, Path(directory) / "weights")
        trainer = make_trainer(c, weights, Path(directory) / "out")
        record(trainer, spent, make_turn(c, weights, spent))
        trainer.train()
    versions = (f"{name} {version(name)}" for name in ("jax", "trl", "transformers", "torch"))
    print(f"{', '.join(versions)}, Python {platform.python_version()}\n")
    parts = {
        who: [spent.turns[f"{who} {name}"][c.skipped :] for name in ("rollout", "update")]
        for who in ("redcoast", "TRL")
    }
    for turns in parts.values():
        turns.append([(x[0] + y[0], x[1] + y[1]) for x, y in zip(*turns, strict=True)])
    names = ("rollout", "update", "both")
    print(markdown(HEAD, [compare(c, *x) for x in zip(names, *parts.values(), strict=True)]))


def write_weights(c: Config, directory: Path) -> Path:
    """A language model of bytes, with its tokenizer, for both libraries."""
    from tokenizers import AddedToken

    heads = c.heads
    config = LlamaConfig(PAD + 1, c.width, c.layers, heads, heads, 3 * c.width, eos=(EOS,), pad=PAD)
    rc.save_pretrained(Llama(config, key=jax.random.key(0)), directory)
    tokenizer = byte_tokenizer()
    special = ("<eos>", "<pad>")
    tokenizer.add_special_tokens([AddedToken(x, special=True, normalized=False) for x in special])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    settings |= {"eos_token": "<eos>", "pad_token": "<pad>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def reward(completions: list[str], **_: Any) -> list[float]:
    """Rewards of which hardly two are equal, so that every group has advantages."""
    return [sum(map(ord, text)) % 97 / 97 for text in completions]


def make_trainer(c: Config, weights: Path, directory: Path) -> Any:
    """TRL's trainer: a rollout and an update of all of its samples in each step."""
    import torch
    import transformers
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    rng = np.random.default_rng(0)
    letters = rng.integers(*LETTERS, (c.prompts * (c.skipped + c.rounds), c.prompt))
    prompts = [{"prompt": bytes(row.tolist()).decode()} for row in letters]
    config = GRPOConfig(
        output_dir=str(directory),
        max_steps=c.skipped + c.rounds,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        per_device_train_batch_size=c.prompts * c.samples,
        num_generations=c.samples,
        max_completion_length=c.new,
        generation_kwargs={"min_new_tokens": c.new},
        temperature=1.0,
        top_k=0,
        beta=0.0,
        loss_type="grpo",
        activation_checkpointing=False,
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
    )
    return GRPOTrainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32),
        processing_class=transformers.AutoTokenizer.from_pretrained(weights),
        args=config,
        train_dataset=Dataset.from_list(prompts),
        reward_funcs=reward,
    )


def record(trainer: Any, spent: Spent, take_turn: Callable[[dict[str, np.ndarray]], float]) -> None:
    """Measures the parts of each step of TRL, and takes a turn of redcoast after it."""
    from transformers import PrinterCallback, TrainerCallback

    generate, compute = trainer._generate_single_turn, trainer._compute_loss
    samples: dict[str, np.ndarray] = {}
    begin = clocks()

    def generate_and_measure(*args: Any) -> Any:
        return spent.measure("TRL rollout", lambda: generate(*args))

    def compute_and_record(model: PyTree, inputs: dict[str, Any]) -> Any:
        nonlocal begin
        samples.update({name: inputs[name].numpy().copy() for name in NAMES})
        begin = clocks()
        return compute(model, inputs)

    class Turns(TrainerCallback):
        own = 0.0

        def on_step_end(self, *args: Any, **options: Any) -> None:
            spent.add("TRL update", begin)
            self.own = take_turn(samples)

        def on_log(self, args: Any, state: PyTree, control: Any, **options: Any) -> None:
            if norm := options["logs"].get("grad_norm"):
                print(f"Gradient norm {self.own:.6f}, of TRL {float(norm):.6f}", flush=True)

    trainer.remove_callback(PrinterCallback)
    trainer._generate_single_turn = generate_and_measure
    trainer._compute_loss = compute_and_record
    trainer.add_callback(Turns())


def make_turn(c: Config, weights: Path, spent: Spent) -> Callable[[dict[str, np.ndarray]], float]:
    """A function that samples answers to the prompts of a rollout, and takes a step on that one."""
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(RATE, weight_decay=0.0))
    rows, columns = c.prompts * c.samples, c.prompt + c.new

    def loss_fn(model: PyTree, batch: PyTree, key: jax.Array) -> PyTree:
        new = rc.log_probabilities(model, batch["tokens"])[:, c.prompt - 1 :]
        old = jax.lax.stop_gradient(new)  # a step for each rollout, as in TRL
        return losses.grpo(new, old, batch["advantages"], mask=batch["mask"]), {}

    batch = {
        "tokens": jax.ShapeDtypeStruct((rows, columns), jnp.int32),
        "mask": jax.ShapeDtypeStruct((rows, c.new), jnp.bool_),
        "advantages": jax.ShapeDtypeStruct((rows,), jnp.float32),
    }
    model = rc.load_pretrained(weights, dtype=jnp.float32)
    mesh = rc.make_mesh(devices=jax.devices()[:1])
    key = jax.random.key(0)
    state, step, _ = rc.prepare(model, optimizer, loss_fn, batch, key=key, mesh=mesh)

    def take_turn(samples: dict[str, np.ndarray]) -> float:
        nonlocal state
        prompts, answers, mask, advantages = (samples[name] for name in NAMES)
        options = {"key": key, "temperature": 1.0, "eos": (), "log_probabilities": True}
        roll_out = lambda: rc.generate(state.model, prompts, c.new, **options).tokens
        spent.measure("redcoast rollout", roll_out)
        batch = {
            "tokens": np.concatenate([prompts, answers], axis=1).astype(np.int32),
            "mask": mask.astype(bool),
            "advantages": advantages,
        }
        state, metrics = spent.measure("redcoast update", lambda: step(state, batch))
        return float(metrics["grad_norm"])

    return take_turn


def compare(
    c: Config, name: str, ours: list[tuple[float, float]], theirs: list[tuple[float, float]]
) -> list[str]:
    """Tokens per second of processor time, and the ratios of the turns."""
    tokens = c.prompts * c.samples * c.new
    speed = lambda turns: tokens / statistics.median(turn[0] for turn in turns)
    processor = [their[0] / our[0] for our, their in zip(ours, theirs, strict=True)]
    clock = statistics.median(their[1] / our[1] for our, their in zip(ours, theirs, strict=True))
    return [
        name,
        f"{speed(ours):.0f}",
        f"{speed(theirs):.0f}",
        f"{statistics.median(processor):.2f}",
        f"{min(processor):.2f} {max(processor):.2f}",
        f"{clock:.2f}",
    ]


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    main(tyro.cli(Config))
