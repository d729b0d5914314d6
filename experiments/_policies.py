"""Language models to train further: small ones that learnt by imitation, and published ones."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from _common import Started, exit_if_stopped, make_optimizer, mesh_of_weights
from _published import chat_template, read_model, read_tokenizer, weights_path
from _verifiable import Problem, Task

import redcoast as rc
from redcoast import losses
from redcoast.models import Llama, LlamaConfig

SIGNS = "\0\1" + "".join(map(chr, range(32, 127))) + "\n"  # padding and the end come first
PAD, END = 0, 1


class Policy(NamedTuple):
    """A model, and how prompts become tokens and answers become text."""

    model: Any
    encode_prompt: Callable[[str], list[int]]
    encode_answer: Callable[[str], list[int]]  # with its end
    decode: Callable[[Sequence[int]], str]  # without its end
    ends: tuple[int, ...]

    def prompts(
        self, problems: Sequence[Problem], length: int = 0
    ) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and mask of prompts, padded on the left to the longest, or to `length`."""
        rows = [self.encode_prompt(problem.prompt) for problem in problems]
        return pad_rows(rows, length or max(map(len, rows)), left=True)


class Imitation(NamedTuple):
    """The options of imitation, as `make_optimizer` reads them."""

    steps: int
    batch_size: int = 64
    learning_rate: float = 1e-3


def pad_rows(
    rows: Sequence[Sequence[int]], length: int, *, left: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Returns tokens, padded to `length`, and their mask."""
    tokens = np.zeros((len(rows), length), np.int32)
    real = np.zeros((len(rows), length), bool)
    for i, row in enumerate(rows):
        if len(row) > length:
            raise ValueError(f"A row has {len(row)} tokens, but there is room for {length}.")
        start = 0
        if left:
            start = length - len(row)
        tokens[i, start : start + len(row)] = row
        real[i, start : start + len(row)] = True
    return tokens, real


def published_policy(run: Started, weights: str) -> Policy:
    """SmolLM2 (`smollm2`), or the model of a directory or .gguf file that has a chat template."""
    path = weights_path(weights)
    tokenizer, render = read_tokenizer(path), chat_template(path)
    model = read_model(path, mesh=mesh_of_weights(run.mesh), dtype=jnp.float32)
    eos = model.config.decoding.eos
    if eos is None:
        eos = model.config.eos
    ends = tuple(np.atleast_1d(eos).tolist())

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    def encode_prompt(text: str) -> list[int]:
        return encode(render([{"role": "user", "content": text}], add_generation_prompt=True))

    def encode_answer(text: str) -> list[int]:
        return [*encode(text), *ends[:1]]

    return Policy(model, encode_prompt, encode_answer, tokenizer.decode, ends)


def read_policy(run: Started, weights: str | None, task: Task, steps: int) -> Policy:
    """A published model, or a small one that imitates the answers that a task shows."""
    if weights is not None:
        return published_policy(run, weights)
    return imitating_policy(run, task, "imitation", steps)


def imitating_policy(
    run: Started, task: Task, name: str, steps: int, *, width: int = 128, layers: int = 2
) -> Policy:
    """A small LLaMA over the signs of ASCII that learnt to imitate the answers of a task."""
    length = max(len(problem.prompt) + len(problem.answer) + 1 for problem in task.train)

    def encode(text: str) -> list[int]:
        return [*map(SIGNS.index, text)]

    def encode_answer(text: str) -> list[int]:
        return [*encode(text), END]

    def decode(tokens: Sequence[int]) -> str:
        return "".join(SIGNS[token] for token in tokens if token > END)

    def collate_fn(problems, rngs):
        rows = []
        for problem, rng in zip(problems, rngs, strict=True):
            answer = task.show(problem, rng)
            rows.append((encode(problem.prompt), encode_answer(answer)))
        return collate_answers(rows, length)

    options, heads = Imitation(steps), width // 32
    sizes = LlamaConfig(len(SIGNS), width, layers, heads, heads, 3 * width, eos=(END,), pad=PAD)
    state = rc.fit(
        lambda key: Llama(sizes, key=key),
        make_optimizer(options, len(task.train), weight_decay=0.01),
        task.train,
        collate_fn=collate_fn,
        loss_fn=imitation_loss,
        batch_size=options.batch_size,
        steps=steps,
        # Only what follows is logged to Weights & Biases.
        **run.fit_arguments | {"checkpoints": rc.Checkpoints(run.directory / name), "log": None},
    )
    exit_if_stopped(int(state.step), steps)
    return Policy(state.model, encode, encode_answer, decode, (END,))


def collate_answers(rows: Sequence[tuple[list[int], list[int]]], length: int) -> dict:
    """Prompts with their answers in one row, (rows, length); what is learned are the answers."""
    tokens, real = pad_rows([[*prompt, *answer] for prompt, answer in rows], length)
    learned = real.copy()
    for i, (prompt, _) in enumerate(rows):
        learned[i, : len(prompt)] = False
    return {"tokens": tokens, "real": real, "learned": learned}


def imitation_loss(model, batch, key):
    """The cross-entropy of the answers."""
    tokens, learned = batch["tokens"], batch["learned"][:, 1:]
    hidden = model.hidden(tokens[:, :-1], mask=batch["real"][:, :-1], key=key)
    loss = losses.chunked_cross_entropy(hidden, model.unembed, tokens[:, 1:], mask=learned)
    return loss, {"weight": jnp.sum(learned)}


def token_logits(model, batch, start: int) -> jax.Array:
    """The logits of each token from position `start` on, given those before it."""
    hidden = model.hidden(batch["tokens"][:, :-1], mask=batch["real"][:, :-1])
    return model.unembed(hidden[:, start - 1 :]).astype(jnp.float32)


def token_log_probs(model, batch, start: int, *, exact: bool = False) -> jax.Array:
    """The log-probability of each token from position `start` on, given those before it, with the
    logits of only one chunk of the sequence in memory at a time."""
    tokens, real = batch["tokens"], batch["real"]
    if exact:
        return rc.log_probabilities(model, tokens, mask=real, exact=True)[:, start - 1 :]
    hidden = model.hidden(tokens[:, :-1], mask=real[:, :-1])[:, start - 1 :]
    return losses.token_log_probabilities(hidden, model.unembed, tokens[:, start:])


def answer_lengths(new: np.ndarray, ends: Sequence[int]) -> np.ndarray:
    """The number of tokens of each answer, with the one that ends it."""
    ending = np.isin(new, ends)
    return np.where(ending.any(axis=1), ending.argmax(axis=1) + 1, new.shape[1])


def write_answers(
    policy: Policy, model, problems: Sequence[Problem], *, new_tokens: int, mesh, key=None
) -> list[str]:
    """The model's answers to problems: sampled with a key, and otherwise the most likely tokens."""
    temperature = 1.0
    if key is None:
        temperature = 0.0
    if isinstance(mesh, str):  # "auto"
        mesh = None

    def predict_fn(model, batch, key):
        tokens, mask = batch  # (batch, prompt tokens)
        return rc.generate(
            model,
            tokens,
            new_tokens,
            mask=mask,
            eos=policy.ends,
            key=key,
            temperature=temperature,
            top_k=None,
            top_p=None,
        )

    answers = rc.predict_examples(
        model,
        [*zip(*policy.prompts(problems), strict=True)],
        predict_fn=predict_fn,
        batch_size=128,
        mesh=mesh,
        key=key,
    )
    lengths = answer_lengths(np.stack(answers), policy.ends)
    texts = []
    for tokens, length in zip(answers, lengths, strict=True):
        texts.append(policy.decode(tokens[:length].tolist()))
    return texts


def accuracy(policy: Policy, model, task: Task, *, new_tokens: int, mesh, key=None) -> float:
    """The part of the held-out problems that get the full reward: with sampled answers if there is
    a key, and otherwise with greedy decoding."""
    texts = write_answers(policy, model, task.test, new_tokens=new_tokens, mesh=mesh, key=key)
    solved = [task.reward(*answered) >= 1 for answered in zip(task.test, texts, strict=True)]
    return float(np.mean(solved))
