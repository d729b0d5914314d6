"""Structured answers: the tokens that are allowed next, from `llguidance`."""

import functools as ft
import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import PyTree


class Grammar:
    """The state of an answer in its grammar."""

    def __init__(self, tokenizer: Any, grammar: str):
        from llguidance import LLMatcher  # pyright: ignore[reportMissingImports]

        self.matcher = LLMatcher(tokenizer, grammar)
        self._check()

    def take(self, token: int) -> None:
        self.matcher.consume_token(token)
        self._check()

    @property
    def done(self) -> bool:
        """Whether nothing can follow."""
        return self.matcher.is_stopped()

    def fill(self, bits: np.ndarray, row: int) -> None:
        """Writes the tokens that are allowed next as the bits of a row."""
        from llguidance.numpy import (  # pyright: ignore[reportMissingImports]
            fill_next_token_bitmask,
        )

        # It takes signed words; the bits are the same.
        fill_next_token_bitmask(self.matcher, bits.view(np.int32), row)
        self._check()

    def _check(self) -> None:
        if self.matcher.is_error():
            raise ValueError(f"The answer cannot have the form: {self.matcher.get_error()}")


def allowed_bits(grammars: Sequence[Grammar | None], vocab: int, rows: int) -> np.ndarray:
    """The tokens that are allowed next in each row, as 32-bit words, the least significant bit
    first."""
    # Rows without a grammar, or with a complete one, may have any token.
    bits = np.full((rows, -(-vocab // 32)), 2**32 - 1, np.uint32)
    for row, grammar in enumerate(grammars):
        if grammar is not None and not grammar.done:
            grammar.fill(bits, row)
    return bits


def grammars_of(
    tokenizer: Any, vocab: int, eos: tuple[int, ...]
) -> Callable[[Mapping[str, object]], Callable[[], Grammar]] | None:
    """Returns a function from a `response_format` to a function that creates its grammar; None
    without `llguidance`. It raises a `ValueError` for an unsupported format."""
    if importlib.util.find_spec("llguidance") is None:
        return None

    @ft.cache
    def prepared() -> Any:
        from llguidance import LLTokenizer  # pyright: ignore[reportMissingImports]

        options: dict[str, Any] = {"n_vocab": vocab}
        if eos:
            options["eos_token"] = eos[0]
        return LLTokenizer(tokenizer.to_str(), **options)

    def make(form: Mapping[str, object]) -> Callable[[], Grammar]:
        from llguidance import LLMatcher  # pyright: ignore[reportMissingImports]

        grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema_of(form)))
        if error := LLMatcher.validate_grammar(grammar, prepared()):
            raise ValueError(f"The schema of `response_format` cannot be served: {error}.")
        return lambda: Grammar(prepared(), grammar)

    return make


def schema_of(form: PyTree) -> dict[str, object] | bool:
    """The JSON schema of a `response_format`."""
    kind = None
    if isinstance(form, dict):
        kind = form.get("type")
    if kind == "json_object":
        return {"type": "object"}
    inner = None
    if kind == "json_schema":
        inner = form.get("json_schema")
    schema = None
    if isinstance(inner, dict):
        schema = inner.get("schema")
    if not isinstance(schema, dict | bool):
        raise ValueError(
            "`response_format` must have the type 'text', 'json_object', or 'json_schema' with a "
            "`json_schema` that has a `schema`."
        )
    return schema
