"""The log-probabilities of texts that follow other texts, in batches on any mesh."""

from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree

from ..generate._prefill import mesh_of
from ..loop._evaluate import predict_examples
from ..losses._cross_entropy import in_chunks, join_chunks

CHUNK, SHORTEST = 128, 32  # tokens whose logits are in memory at once, and of the shortest row


def score_pairs(
    model: PyTree, pairs: Sequence[tuple[list[int], list[int]]], length: int, batch_size: int
) -> list[tuple[float, bool]]:
    """Returns for each context and continuation the log-probability of the continuation, and
    whether it is what greedy decoding would write. Contexts that are too long lose their beginning.
    """
    # The last token is only predicted, and no input.
    rows = [(context + continuation)[-(length + 1) :] for context, continuation in pairs]
    by_size: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        # Padded to a power of two, of which there are few, or to the most.
        size = min(max(SHORTEST, 1 << (len(row) - 2).bit_length()), length)
        by_size.setdefault(size, []).append(index)
    results: list[tuple[float, bool]] = [(0.0, True)] * len(rows)
    for size, indices in by_size.items():
        examples = [(rows[i], len(pairs[i][1])) for i in indices]
        scores = predict_examples(
            model,
            examples,
            collate_fn=lambda examples, size=size: _collate(examples, size + 1),
            predict_fn=_scores,
            batch_size=batch_size,
            mesh=mesh_of(model),
        )
        for i, score in zip(indices, scores, strict=True):
            results[i] = float(score["log_prob"]), bool(score["greedy"])
    return results


def _scores(model: PyTree, batch: dict[str, Array], key: object) -> dict[str, Array]:
    """The log-probability of the scored tokens of each row, and whether all are the likeliest; with
    the logits of only one chunk of the sequence in memory at a time."""
    hidden = model.hidden(batch["tokens"][:, :-1], mask=batch["real"][:, :-1])
    # What follows each token, (batch, seq).
    targets, scored = batch["tokens"][:, 1:], batch["scored"][:, 1:]

    def of_chunk(
        inputs: tuple[Array, Array],
    ) -> tuple[Float[Array, "batch chunk"], Bool[Array, "batch chunk"]]:
        hidden, targets = inputs
        logits = model.unembed(hidden).astype(jnp.float32)  # (batch, chunk, vocab)
        chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        log_probs = chosen - jax.nn.logsumexp(logits, axis=-1)
        return log_probs, jnp.argmax(logits, axis=-1) == targets

    chunks = in_chunks(hidden, CHUNK), in_chunks(targets, CHUNK)
    log_probs, greedy = jax.lax.map(of_chunk, chunks)
    log_probs = join_chunks(log_probs, targets.shape[1])  # (batch, seq)
    greedy = join_chunks(greedy, targets.shape[1])
    total = jnp.sum(jnp.where(scored, log_probs, 0), axis=1)
    return {"log_prob": total, "greedy": jnp.all(greedy | ~scored, axis=1)}


def _collate(
    examples: Sequence[tuple[list[int], int]], length: int
) -> dict[str, Int[np.ndarray, "batch seq"] | Bool[np.ndarray, "batch seq"]]:
    rows, counts = zip(*examples, strict=True)
    tokens, real = pad_tokens(rows, length)
    ends = real.sum(axis=1)  # (batch,)
    starts = ends - np.array(counts)  # a continuation is at the end of its row
    columns = np.arange(length)
    scored = (columns >= starts[:, None]) & (columns < ends[:, None])
    return {"tokens": tokens, "real": real, "scored": scored}


def pad_tokens(
    rows: Sequence[list[int]], length: int, *, left: bool = False
) -> tuple[Int[np.ndarray, "batch seq"], Bool[np.ndarray, "batch seq"]]:
    tokens, real = np.zeros((len(rows), length), np.int32), np.zeros((len(rows), length), bool)
    for index, row in enumerate(rows):
        start = 0
        if left:
            start = length - len(row)
        tokens[index, start : start + len(row)] = row
        real[index, start : start + len(row)] = True
    return tokens, real


def cut_at(text: str, ends: Iterable[str]) -> str:
    """Returns the part of a text before the first of some strings."""
    for end in ends:
        if end:
            text = text.split(end)[0]
    return text
