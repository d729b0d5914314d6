"""The class of `lm-eval` that a model in memory is wrapped in. It is imported on the first call."""

# pyright: reportMissingImports=false

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jaxtyping import Int, PyTree
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from ..generate import generate
from ._score_pairs import cut_at, pad_tokens, score_pairs


class InMemory(TemplateLM):
    """A decoder in memory, with the interface of `lm-eval`."""

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
        # A model may have several.
        return int(np.atleast_1d(self.model.config.eos)[0])

    @property
    def prefix_token_id(self) -> int:
        bos = getattr(self.model.config, "bos", None)
        if bos is None:
            return self.eot_token_id
        return bos

    @property
    def tokenizer_name(self) -> str:
        return "redcoast"

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: object
    ) -> list[int]:
        if add_special_tokens is None:
            # A text that a chat template has rendered begins with the token already.
            prefix = self.encoder.id_to_token(self.prefix_token_id)
            add_special_tokens = not (prefix and string.startswith(prefix))
        return self.encoder.encode(string, add_special_tokens=add_special_tokens).ids

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        if self.render is None:
            raise ValueError(
                "A task needs a chat template, but `lm_eval_model` was called without one. Pass "
                "`chat_template`, such as `rc.load_chat_template(path)`."
            )
        return self.render(chat_history, add_generation_prompt=add_generation_prompt)

    def _loglikelihood_tokens(
        self, requests: list[PyTree], **_: object
    ) -> list[tuple[float, bool]]:
        # The first item of a request is its texts, which are encoded already.
        pairs = [(context, continuation) for _, context, continuation in requests]
        return score_pairs(self.model, pairs, self.max_length, self.batch_size)

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        windows: list[tuple[list[int], list[int]]] = []
        owners: list[int] = []
        for owner, request in enumerate(requests):
            rolling = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for window in rolling:
                # Without the tokens that the window scores in its context.
                windows.append(make_disjoint_window(window))
                owners.append(owner)
        scores = score_pairs(self.model, windows, self.max_length, self.batch_size)
        totals = [0.0] * len(requests)
        for owner, (score, _) in zip(owners, scores, strict=True):
            totals[owner] += score
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        groups: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            # Requests with the same options are generated together. Dicts cannot be keys.
            groups.setdefault(repr(request.args[1]), []).append(index)
        texts = [""] * len(requests)
        for indices in groups.values():
            options = normalize_gen_kwargs(requests[indices[0]].args[1], self.max_gen_toks)
            until = handle_stop_sequences(options.pop("until", None), eos=None)
            prompts = []
            for i in indices:
                # Without any token, there would be nothing to continue.
                prompts.append(self.tok_encode(requests[i].args[0]) or [self.prefix_token_id])
            for i, text in zip(indices, self._answers(prompts, until, options), strict=True):
                texts[i] = text
        return texts

    def _answers(
        self, prompts: list[list[int]], until: list[str], options: dict[str, PyTree]
    ) -> list[str]:
        new = options.pop("max_gen_toks")
        sampled = options.pop("do_sample", False)
        # Tasks decode greedily unless they say otherwise.
        if not sampled:
            options["temperature"] = 0.0

        def decode(row: Int[np.ndarray, " new"]) -> str:
            return self.encoder.decode(np.asarray(row).tolist())

        def stop(row: Int[np.ndarray, " new"]) -> bool:
            text = decode(row)
            return any(end in text for end in until if end)

        # Prompts lose their beginning, so that the answer has room.
        rows = [prompt[-max(1, self.max_length - new) :] for prompt in prompts]
        # Rows of similar lengths stand together, so that batches have little padding.
        order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
        texts = [""] * len(rows)
        key = None
        for start in range(0, len(order), self.batch_size):
            batch = order[start : start + self.batch_size]
            tokens, mask = pad_tokens([rows[i] for i in batch], len(rows[batch[0]]), left=True)
            if sampled:
                # Another key for each batch, and the same ones in each run.
                key = jax.random.fold_in(jax.random.key(0), start // self.batch_size)
            answers = generate(self.model, tokens, new, mask=mask, key=key, stop=stop, **options)
            for i, row in zip(batch, np.asarray(answers), strict=True):
                # The rest of a row that has ended is padding.
                ends = np.flatnonzero(np.isin(row, self.model.config.eos))
                texts[i] = cut_at(decode(row[: min(ends, default=len(row))]), until)
        return texts
