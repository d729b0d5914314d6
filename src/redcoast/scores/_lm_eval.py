"""A model in memory as a model of EleutherAI's `lm-eval`."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Bool, Float, Int, PyTree

from ..core._errors import check_integer
from ..core._frames import hide_frames
from ..generate import generate
from ..loop._evaluate import predict_examples

CHUNK, SHORTEST = 128, 32


@hide_frames
def lm_eval_model(
    model: PyTree,
    tokenizer: Any,
    *,
    chat_template: Callable[..., str] | None = None,
    batch_size: int = 8,
    context: int | None = None,
    max_new_tokens: int = 256,
) -> Any:
    """Wraps a decoder for EleutherAI's `lm-eval`, which then scores it in this process, sharded as
    it is, without a server and without other weights.

    Needs the package `lm-eval`, 0.4.9 or newer.

    **Arguments:**

    - `model`: a decoder of `redcoast.models`, on one device or sharded.
    - `tokenizer`: a tokenizer of `tokenizers`, from [`redcoast.load_tokenizer`][].
    - `chat_template`: from [`redcoast.load_chat_template`][], for `apply_chat_template=True`.
    - `batch_size`: the number of texts in a batch, a multiple of data x fsdp of the mesh.
    - `context`: the maximum number of tokens in a text, by default `model.config.context` or
        `model.config.positions`. Longer ones lose their beginning.
    - `max_new_tokens`: the maximum length of an answer, for tasks without a length of their own.

    **Returns:**

    An `lm_eval.api.model.LM`, to pass to `lm_eval.simple_evaluate`. Texts are padded to a few
    lengths, each of which is compiled once.

    **Raises:**

    `ModuleNotFoundError` without `lm-eval`; `ValueError` if a number is less than 1, or if the
    model has no token that ends a text, or no length.

    !!! Example

        ```py
        import lm_eval

        model = rc.load_pretrained("smollm2", mesh=mesh)
        wrapped = rc.lm_eval_model(model, rc.load_tokenizer("smollm2"), batch_size=16)
        results = lm_eval.simple_evaluate(wrapped, tasks=["gsm8k"])
        ```
    """
    for name, value in {"batch_size": batch_size, "max_new_tokens": max_new_tokens}.items():
        check_integer(name, value)
    config = model.config
    length = context or getattr(config, "context", None) or getattr(config, "positions", None)
    if not length:
        raise ValueError("The configuration of the model has no length. Pass `context`, in tokens.")
    check_integer("context", length)
    if not config.eos:
        raise ValueError(
            "The configuration of the model has no `eos`, so its answers never end. Set the token "
            "that ends a text: `dataclasses.replace(config, eos=(token,))`."
        )
    return _class()(model, tokenizer, chat_template, batch_size, length, max_new_tokens)


def _class() -> type:
    """The class, which cannot be defined before `lm_eval` is imported."""
    try:
        from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports]
        from lm_eval.models.utils import (  # pyright: ignore[reportMissingImports]
            handle_stop_sequences,
            normalize_gen_kwargs,
        )
        from lm_eval.utils import (  # pyright: ignore[reportMissingImports]
            get_rolling_token_windows,
            make_disjoint_window,
        )
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"`lm_eval_model` needs the package {error.name}, which is not installed: "
            '`pip install "lm-eval>=0.4.9"`.'
        ) from error

    class InMemory(TemplateLM):
        def __init__(
            self,
            model: PyTree,
            tokenizer: Any,
            chat_template: Callable[..., str] | None,
            batch_size: int,
            length: int,
            max_new_tokens: int,
        ):
            super().__init__()
            self.model, self.encoder, self.render = model, tokenizer, chat_template
            self.batch_size, self.max_length = batch_size, length
            self.max_gen_toks = max_new_tokens

        @property
        def eot_token_id(self) -> int:
            return int(np.atleast_1d(self.model.config.eos)[0])

        @property
        def prefix_token_id(self) -> int:
            bos = getattr(self.model.config, "bos", None)
            return self.eot_token_id if bos is None else bos

        @property
        def tokenizer_name(self) -> str:
            return "redcoast"

        def tok_encode(
            self, string: str, add_special_tokens: bool | None = None, **_: Any
        ) -> list[int]:
            if add_special_tokens is None:
                prefix = self.encoder.id_to_token(self.prefix_token_id)
                add_special_tokens = not (prefix and string.startswith(prefix))
            return self.encoder.encode(string, add_special_tokens=add_special_tokens).ids

        def apply_chat_template(
            self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
        ) -> str:
            if self.render is None:
                raise ValueError("Pass `chat_template` to `lm_eval_model` to render chats.")
            return self.render(chat_history, add_generation_prompt=add_generation_prompt)

        def _loglikelihood_tokens(self, requests: list[Any], **_: Any) -> list[tuple[float, bool]]:
            pairs = [(context, continuation) for _, context, continuation in requests]
            return score_pairs(self.model, pairs, self.max_length, self.batch_size)

        def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> Any:
            windows: list[Any] = []
            owners: list[int] = []
            for owner, request in enumerate(requests):
                rolling = get_rolling_token_windows(
                    token_list=self.tok_encode(request.args[0]),
                    prefix_token=self.prefix_token_id,
                    max_seq_len=self.max_length,
                    context_len=1,
                )
                new = [make_disjoint_window(window) for window in rolling]
                windows += new
                owners += [owner] * len(new)
            scores = score_pairs(self.model, windows, self.max_length, self.batch_size)
            totals = np.zeros(len(requests))
            np.add.at(totals, owners, [score for score, _ in scores])
            return totals.tolist()

        def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
            groups: dict[str, list[int]] = {}
            for index, request in enumerate(requests):
                groups.setdefault(repr(request.args[1]), []).append(index)
            texts = [""] * len(requests)
            for indices in groups.values():
                options = normalize_gen_kwargs(requests[indices[0]].args[1], self.max_gen_toks)
                until = handle_stop_sequences(options.pop("until", None), eos=None)
                prompts = [self.tok_encode(requests[i].args[0]) for i in indices]
                for i, text in zip(indices, self._answers(prompts, until, options), strict=True):
                    texts[i] = text
            return texts

        def _answers(
            self, prompts: list[list[int]], until: list[str], options: dict[str, Any]
        ) -> list[str]:
            new = options.pop("max_gen_toks")
            sampled = options.pop("do_sample", False)
            if not sampled:
                options["temperature"] = 0.0
            decode = lambda row: self.encoder.decode(np.asarray(row).tolist())
            stop = lambda row: any(end in decode(row) for end in until if end)
            rows = [prompt[-max(1, self.max_length - new) :] for prompt in prompts]
            order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
            texts = [""] * len(rows)
            for number, batch in enumerate(_batches(order, self.batch_size)):
                tokens, mask = _pad([rows[i] for i in batch], len(rows[batch[0]]), left=True)
                key = jax.random.fold_in(jax.random.key(0), number) if sampled else None
                found = generate(self.model, tokens, new, mask=mask, key=key, stop=stop, **options)
                for i, row in zip(batch, np.asarray(found), strict=True):
                    texts[i] = cut_at(decode(_before_end(row, self.model.config)), until)
            return texts

    return InMemory


def score_pairs(
    model: PyTree, pairs: Sequence[tuple[list[int], list[int]]], length: int, batch_size: int
) -> list[tuple[float, bool]]:
    """Returns for each context and continuation the log-probability of the continuation, and
    whether it is what greedy decoding would write. Contexts that are too long lose their beginning.
    """
    rows = [(context + continuation)[-(length + 1) :] for context, continuation in pairs]
    by_size: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        by_size.setdefault(_padded_size(len(row) - 1, length), []).append(index)
    results: list[tuple[float, bool]] = [(0.0, True)] * len(rows)
    for size, indices in by_size.items():
        examples = [(rows[i], len(pairs[i][1])) for i in indices]
        found = predict_examples(
            model,
            examples,
            collate_fn=lambda examples, size=size: _collate(examples, size + 1),
            predict_fn=_scores,
            batch_size=batch_size,
            mesh=_mesh_of(model),
        )
        for i, score in zip(indices, found, strict=True):
            results[i] = float(score["log_prob"]), bool(score["greedy"])
    return results


def _scores(model: PyTree, batch: dict[str, Array], key: Any) -> dict[str, Array]:
    """The log-probability of the scored tokens of each row, and whether all are the likeliest; with
    the logits of only one chunk of the sequence in memory at a time."""
    hidden = model.hidden(batch["tokens"][:, :-1], mask=batch["real"][:, :-1])
    targets, scored = batch["tokens"][:, 1:], batch["scored"][:, 1:]

    def of_chunk(
        inputs: tuple[Array, Array],
    ) -> tuple[Float[Array, "batch chunk"], Bool[Array, "batch chunk"]]:
        hidden, targets = inputs
        logits = model.unembed(hidden).astype(jnp.float32)
        chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        log_probs = chosen - jax.nn.logsumexp(logits, axis=-1)
        return log_probs, jnp.argmax(logits, axis=-1) == targets

    chunks = _in_chunks(hidden), _in_chunks(targets)
    log_probs, greedy = (
        jnp.moveaxis(x, 0, 1).reshape(len(targets), -1)[:, : targets.shape[1]]
        for x in jax.lax.map(of_chunk, chunks)
    )
    total = jnp.sum(jnp.where(scored, log_probs, 0), axis=1)
    return {"log_prob": total, "greedy": jnp.all(greedy | ~scored, axis=1)}


def _in_chunks(x: Array) -> Array:
    """Pads and splits the sequence into chunks of equal length, along a new first dimension."""
    batch, seq, *rest = x.shape
    count = -(-seq // CHUNK)
    size = -(-seq // count)
    x = jnp.pad(x, [(0, 0), (0, count * size - seq)] + [(0, 0)] * len(rest))
    return jnp.moveaxis(x.reshape(batch, count, size, *rest), 1, 0)


def _collate(
    examples: Sequence[tuple[list[int], int]], length: int
) -> dict[str, Int[np.ndarray, "batch seq"] | Bool[np.ndarray, "batch seq"]]:
    tokens, real = _pad([row for row, _ in examples], length)
    ends = np.array([len(row) for row, _ in examples])
    starts = ends - [count for _, count in examples]
    columns = np.arange(length)
    scored = (columns >= starts[:, None]) & (columns < ends[:, None])
    return {"tokens": tokens, "real": real, "scored": scored}


def _padded_size(size: int, most: int) -> int:
    """The size that a text is padded to: a power of two, of which there are few, or the most."""
    return min(max(SHORTEST, 1 << (size - 1).bit_length()), most)


def _pad(
    rows: Sequence[list[int]], length: int, *, left: bool = False
) -> tuple[Int[np.ndarray, "batch seq"], Bool[np.ndarray, "batch seq"]]:
    tokens, real = np.zeros((len(rows), length), np.int32), np.zeros((len(rows), length), bool)
    for index, row in enumerate(rows):
        place = slice(length - len(row), length) if left else slice(len(row))
        tokens[index, place], real[index, place] = row, True
    return tokens, real


def _batches(order: list[int], size: int) -> Iterable[list[int]]:
    return (order[i : i + size] for i in range(0, len(order), size))


def _before_end(row: Int[np.ndarray, " new"], config: Any) -> Int[np.ndarray, " kept"]:
    ending = np.isin(row, config.eos)
    return row[: ending.argmax()] if ending.any() else row


def cut_at(text: str, ends: Iterable[str]) -> str:
    """Returns the part of a text before the first of some strings."""
    for end in ends:
        text = text.split(end)[0] if end else text
    return text


def _mesh_of(model: PyTree) -> Mesh | None:
    """The mesh that a model is on; None if it is on one device."""
    for leaf in jax.tree.leaves(model):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
            return sharding.mesh
    return None
