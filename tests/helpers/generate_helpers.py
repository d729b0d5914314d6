"""Small models to decode with, and slow references in NumPy that share nothing with the code."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from random_models import to_device

TRACED = Counter()  # how often a model's `decode` ran in Python, which it does when it is traced


@dataclass(frozen=True)
class TinyConfig:
    vocab: int = 11
    width: int = 8
    eos: tuple[int, ...] = ()
    pad: int | None = None
    positions: int | None = None
    decoder_start: int | None = None


class TinyCache(eqx.Module):
    k: jax.Array
    v: jax.Array
    mask: jax.Array
    filled: jax.Array
    memory: jax.Array

    def take(self, rows):
        k, v, mask, memory = (x[rows] for x in (self.k, self.v, self.mask, self.memory))
        return TinyCache(k, v, mask, self.filled, memory)


class Tiny(eqx.Module):
    """One layer of attention with one head, and rotating positions."""

    embed: jax.Array
    wq: jax.Array
    wk: jax.Array
    wv: jax.Array
    head: jax.Array
    config: TinyConfig = eqx.field(static=True)

    def init_cache(self, batch, length, *, memory=None):
        c, dtype = self.config, self.embed.dtype
        k = jnp.zeros((batch, length, c.width), dtype)
        memory = jnp.zeros((batch, c.width), dtype) if memory is None else memory
        return TinyCache(k, k, jnp.zeros((batch, length), bool), jnp.zeros((), jnp.int32), memory)

    def decode(self, tokens, cache, *, mask=None):
        TRACED["decode"] += 1
        real = jnp.ones(tokens.shape, bool) if mask is None else mask.astype(bool)
        real = jax.lax.dynamic_update_slice(cache.mask, real, (0, cache.filled))
        slots = cache.filled + jnp.arange(tokens.shape[1])
        positions = jnp.take(jnp.cumsum(real, axis=1), slots, axis=1) - 1
        waves = jnp.arange(1, self.config.width + 1)[None, None] / 3
        waves = jnp.cos(positions[:, :, None].astype(waves.dtype) * waves)
        x = jnp.take(self.embed, tokens, axis=0) + waves.astype(self.embed.dtype)
        x = x + cache.memory[:, None]
        k = jax.lax.dynamic_update_slice(cache.k, x @ self.wk, (0, cache.filled, 0))
        v = jax.lax.dynamic_update_slice(cache.v, x @ self.wv, (0, cache.filled, 0))
        scores = jnp.einsum("bsd,btd->bst", x @ self.wq, k) / self.config.width**0.5
        seen = real[:, None] & (jnp.arange(k.shape[1])[None] <= slots[:, None])[None]
        weights = jax.nn.softmax(jnp.where(seen, scores, -1e30).astype(jnp.float32))
        hidden = jnp.tanh(x + jnp.einsum("bst,btd->bsd", weights.astype(v.dtype), v))
        filled = cache.filled + tokens.shape[1]
        return hidden, TinyCache(k, v, real, filled, cache.memory)

    def unembed(self, hidden):
        return hidden @ self.head


class TinySeq2Seq(Tiny):
    """The mean of an encoder's tokens, or of an image's pixels, goes to every decoder token."""

    def encode(self, tokens, *, mask=None):
        if tokens.ndim > 2:
            return jnp.mean(tokens, axis=(1, 2))
        real = jnp.ones(tokens.shape, bool) if mask is None else mask.astype(bool)
        real = real[:, :, None].astype(self.embed.dtype)
        return jnp.sum(self.embed[tokens] * real, axis=1) / jnp.sum(real, axis=1)

    def init_cache(self, batch, length, *, memory=None, memory_mask=None):
        return super().init_cache(batch, length, memory=memory)


def tiny(seed, kind: Any = Tiny, *, spread=1.5, dtype=jnp.float32, **changes) -> Any:
    """A model with random weights; the greater `spread`, the surer is it of its tokens."""
    config = TinyConfig(**changes)
    rng = np.random.default_rng(seed)
    make = lambda *shape: to_device(rng.normal(0, shape[0] ** -0.5, shape), dtype)
    embed = to_device(rng.normal(0, 1, (config.vocab, config.width)), dtype)
    square = [3 * make(config.width, config.width) for _ in range(3)]
    return kind(embed, *square, spread * make(config.width, config.vocab), config)


def slow_logits(model, tokens, memory=None):
    """The logits behind a whole unpadded sequence, in float64, without a cache."""
    embed, wq, wk, wv, head = (
        np.asarray(x, np.float64) for x in (model.embed, model.wq, model.wk, model.wv, model.head)
    )
    width = embed.shape[1]
    x = np.stack(
        [embed[t] + np.cos(at * np.arange(1, width + 1) / 3) for at, t in enumerate(tokens)]
    )
    x = x if memory is None else x + memory
    scores = (x @ wk) @ (x[-1] @ wq) / np.sqrt(width)
    weights = np.exp(scores - scores.max())
    return np.tanh(x[-1] + weights / weights.sum() @ (x @ wv)) @ head


def slow_memory(model, tokens):
    return np.asarray(model.embed, np.float64)[list(tokens)].mean(axis=0)


def log_softmax(logits):
    logits = logits - logits.max()
    return logits - np.log(np.exp(logits).sum())


def slow_greedy(model, prompt, count, eos=(), pad=0, memory=None):
    """The likeliest tokens, with the whole sequence computed anew for each."""
    new = []
    while len(new) < count and not (new and new[-1] in eos):
        new.append(int(np.argmax(slow_logits(model, [*prompt, *new], memory))))
    return new + [pad] * (count - len(new))


def slow_beams(model, prompt, count, beams, *, penalty=1.0, eos=(), pad=0, memory=None):
    """Beam search with lists of hypotheses: (sum of log-probabilities, tokens)."""
    running, finished = [(0.0, [])], []
    for length in range(1, count + 1):
        candidates = []
        for score, new in running:
            log_probs = log_softmax(slow_logits(model, [*prompt, *new], memory))
            candidates += [(score + p, [*new, t]) for t, p in enumerate(log_probs)]
        candidates.sort(key=lambda one: -one[0])
        candidates = candidates[: max(2, 1 + len(eos)) * beams]
        ends = [new[-1] in eos or length == count for _, new in candidates]
        for (score, new), end in list(zip(candidates, ends, strict=True))[:beams]:
            if end:
                finished.append((score / length**penalty, new))
        finished = sorted(finished, key=lambda one: -one[0])[:beams]
        going = zip(candidates, ends, strict=True)
        running = [one for one, end in going if not end][:beams]
        full = len(finished) == beams
        if not running or (full and running[0][0] / length**penalty <= finished[-1][0]):
            break
    best = finished[0][1]
    return best + [pad] * (count - len(best))


def prompts(lengths, vocab=11, seed=0):
    """Random prompts, and the two ways to pad them: (rows, (left, mask), (right, mask))."""
    rng = np.random.default_rng(seed)
    rows = [rng.integers(0, vocab, n).tolist() for n in lengths]
    width = max(lengths)
    shape = (len(rows), width)
    left, right = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    left_mask, right_mask = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    for i, row in enumerate(rows):
        left[i, width - len(row) :], left_mask[i, width - len(row) :] = row, 1
        right[i, : len(row)], right_mask[i, : len(row)] = row, 1
    return rows, (left, left_mask), (right, right_mask)
