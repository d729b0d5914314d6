"""Tokens per second of `rc.generate`, of `transformers` with torch, and of the memory's bandwidth.

The model is SmolLM2-135M in float32 on the CPU. Both libraries have the same weights and the same
number of threads, extend the same prompts of 32 tokens greedily by 128 tokens, and take turns in
one process. The limit is the bandwidth of a copy, divided by the bytes that each new token reads:
the weights, and the keys and values of the tokens before it. The last columns are milliseconds of
one step of decoding: the layers, what a full cache adds to them, and the head. Needs gguf; without
torch and transformers (`nox -s bench_torch`), only `rc.generate` is measured.

The other tables have processor seconds of the first call, to the first token and to the last; of
prompts of other lengths, the first time and again; and the steps and the tokens per second of
answers of unequal lengths, in batches that wait for their longest answer, and with `rows`.

    python experiments/benchmarks/generation.py
"""

# pyright: reportMissingImports=false

import importlib.util
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from _timing import elapsed
from bandwidth import bytes_read, copy_bandwidth, seconds_of

import redcoast as rc

sys.path.append(str(Path(__file__).parents[1]))
from _cells import markdown
from _published import smollm2
from jaxtyping import PyTree

HEAD = ["batch", "limit, tokens/s", "redcoast", "of the limit", "transformers", "ratio"]
HEAD += ["equal tokens", "layers, ms", "cache, ms", "head, ms"]


LENGTHS = (17, 33, 100, 300)  # of prompts after the first
FIRST_HEAD = ["prompt, tokens", "first time, s", "again, s"]
TURNS_HEAD = ["16 answers", "tokens", "steps", "tokens per processor second"]
ENDS = (28, 30, 198)  # a comma, a full stop and the end of a line: answers of unequal lengths


@dataclass(frozen=True)
class Config:
    new: int = 128  # number of tokens to generate for each prompt
    batches: tuple[int, ...] = (1, 8, 32)  # batch sizes
    prompt: int = 32  # number of tokens in a prompt
    rounds: int = 5  # number of measurements of each
    copied: int = 2**28  # bytes of the array whose copy measures the bandwidth


def main(c: Config) -> None:
    """Prints a table with a line for each batch size."""
    if all(map(importlib.util.find_spec, ("torch", "transformers"))):
        from reference import both_models, describe

        print(describe())
        ours, theirs = both_models()
    else:
        print("torch or transformers is missing: only redcoast is measured.")
        ours, theirs = rc.load_pretrained(smollm2(), dtype=jnp.float32), None
    print(markdown(FIRST_HEAD, first_calls(c, ours)))
    print(markdown(TURNS_HEAD, in_turn(c, ours)))
    bandwidth = copy_bandwidth(c.copied)
    print(f"A copy reads and writes {bandwidth / 1e9:.1f} GB/s.\n")
    print(markdown(HEAD, [line(c, ours, theirs, batch, bandwidth) for batch in c.batches]))


def first_calls(c: Config, model: PyTree) -> list[list[str]]:
    """Processor seconds of the first call, to its first and its last token; and of prompts of other
    lengths, the first time and again."""
    began, first = time.process_time(), []
    generate = lambda length, **options: rc.generate(
        model, prompts(model, 1, length), max_new_tokens=4, eos=(), **options
    )
    generate(c.prompt, stream=lambda tokens: first.append(time.process_time() - began))
    last = time.process_time() - began
    lines = [[f"{c.prompt}, of this process: to the first token", f"{first[0]:.2f}", ""]]
    lines.append([f"{c.prompt}, of this process: to the last token", f"{last:.2f}", ""])
    generate(c.prompt)
    for length in LENGTHS:
        again = [f"{elapsed(lambda length=length: generate(length)):.2f}" for _ in range(2)]
        lines.append([str(length), *again])
    return lines


def in_turn(c: Config, model: PyTree) -> list[list[str]]:
    """The steps and the tokens per second of processor time of sampled answers to 16 prompts.

    A batch takes as many steps as the longest of the same answers has tokens.
    """
    tokens = prompts(model, 16, c.prompt)
    options: dict[str, Any] = {"key": jax.random.key(0), "temperature": 1.0}
    options["log_probabilities"] = True
    new = rc.generate(model, tokens, rows=4, max_new_tokens=c.new, eos=ENDS, **options)
    lengths = np.asarray(new.mask).sum(axis=1)
    parts = [slice(first, first + 4) for first in range(0, 16, 4)]
    longest = [int(lengths[part].max()) for part in parts]

    def in_batches():
        for part, most in zip(parts, longest, strict=True):
            rc.generate(model, tokens[part], max_new_tokens=most, eos=(), **options)

    def with_rows():
        rc.generate(model, tokens, rows=4, max_new_tokens=c.new, eos=ENDS, **options)

    steps = {"batches of 4": sum(longest) - len(parts), "rows=4": longest_row(lengths)}
    spent: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(c.rounds + 1):
        for name, run in (("batches of 4", in_batches), ("rows=4", with_rows)):
            spent[name].append(elapsed(run))
    lines = []
    for name, times in spent.items():
        rate = lengths.sum() / statistics.median(times[1:])  # the first round compiles
        lines.append([name, str(lengths.sum()), str(steps[name]), f"{rate:.1f}"])
    return lines


def longest_row(lengths: np.ndarray, rows: int = 4) -> int:
    """The steps after the first token, if each answer begins in the first row that is free."""
    ends = [0] * rows
    for length in lengths:
        ends[int(np.argmin(ends))] += int(length) - 1
    return max(ends)


def prompts(model: PyTree, rows: int, length: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, model.config.vocab, (rows, length))


def line(c: Config, ours: Any, theirs: Any, batch: int, bandwidth: float) -> list[str]:
    tokens = prompts(ours, batch, c.prompt)
    length = c.prompt + c.new // 2
    limit = batch * bandwidth / bytes_read(ours, batch=batch, length=length)
    here = lambda: np.asarray(rc.generate(ours, tokens, max_new_tokens=c.new, eos=()))
    if theirs is None:
        speed, compared = batch * c.new / seconds_of(here, c.rounds), ["", "", ""]
    else:
        speed, compared = turns(c, here, there(c, theirs, tokens), batch)
    steps = [f"{1e3 * seconds:.1f}" for seconds in parts(ours, batch, c.prompt + c.new, c.rounds)]
    return [str(batch), f"{limit:.1f}", f"{speed:.1f}", f"{speed / limit:.2f}", *compared, *steps]


def there(c: Config, theirs: Any, tokens: np.ndarray) -> Callable[[], np.ndarray]:
    """The same generation with `transformers`."""
    import torch

    ids = torch.tensor(tokens)
    options = {"max_new_tokens": c.new, "min_new_tokens": c.new, "do_sample": False}
    options |= {"attention_mask": torch.ones_like(ids), "pad_token_id": 0}
    return lambda: theirs.generate(ids, **options)[:, c.prompt :].numpy()


def turns(
    c: Config, here: Callable[[], Any], there: Callable[[], Any], batch: int
) -> tuple[float, list[str]]:
    """Tokens per second here; and there, the ratio, and the share of tokens that are equal."""
    from reference import take_turns

    times, alike = take_turns(here, there, c.rounds), np.mean(here() == there())
    speeds = [batch * c.new / times[name] for name in ("ours", "theirs")]
    return speeds[0], [f"{speeds[1]:.1f}", f"{times['ratio']:.2f}", f"{alike:.1%}"]


def parts(model: PyTree, batch: int, length: int, rounds: int) -> tuple[float, float, float]:
    """Seconds of the layers, of reading a cache of `length` tokens, and of the head."""
    hidden = jnp.ones((batch, 1, model.config.width), model.embed.dtype)
    unembed = jax.jit(lambda model, x: model.unembed(x))
    head = seconds_of(lambda: jax.block_until_ready(unembed(model, hidden)), rounds)
    short, full = (step_seconds(model, batch, n, rounds) for n in (rounds + 1, length))
    return short, full - short, head


def step_seconds(model: PyTree, batch: int, length: int, rounds: int) -> float:
    """Seconds of a step of decoding without its head, over a cache of `length` tokens."""
    tokens, cache = jnp.zeros((batch, 1), jnp.int32), model.init_cache(batch, length)
    step = jax.jit(lambda model, cache: model.decode(tokens, cache), donate_argnums=1)

    def run() -> None:
        nonlocal cache
        hidden, cache = step(model, cache)
        jax.block_until_ready(hidden)

    return seconds_of(run, rounds)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
