"""Responses of OpenAI's API, as a whole and in parts."""

import functools as ft
import itertools as it
import re
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ._batching import Piece, Scored
from ._detokenize import UNFINISHED
from ._openai_fields import Body


@dataclass
class Choice:
    """The state of one choice so far."""

    text: str = ""
    finish: str | None = None
    count: int = 0
    scored: list[Scored] = field(default_factory=list)
    length: int = 0  # characters of the tokens whose log-probabilities were sent

    def add(self, piece: Piece) -> None:
        self.text += piece.text
        self.finish, self.count = piece.finish, piece.count
        self.scored += piece.scored


@dataclass(frozen=True)
class Reply:
    """The fields that all parts of a response share. `scored` is whether tokens have
    log-probabilities."""

    chat: bool
    model: str
    id: str
    created: int
    speller: "Speller"
    scored: bool = False

    @staticmethod
    def to(name: str, speller: "Speller", *, chat: bool, scored: bool = False) -> "Reply":
        """A new response of the model `name`."""
        kind = "cmpl"
        if chat:
            kind = "chatcmpl"
        response_id = f"{kind}-{uuid.uuid4().hex}"
        return Reply(chat, name, response_id, int(time.time()), speller, scored)

    def whole(self, choices: Sequence[Choice], usage: dict[str, int]) -> Body:
        """The body of a response that is not streamed."""
        bodies = []
        for index, choice in enumerate(choices):
            content: Body = {"text": choice.text}
            if self.chat:
                message = {"role": "assistant", "content": choice.text, "refusal": None}
                content = {"message": message}
            logprobs = self.logprobs(choice.scored, 0)
            end = {"logprobs": logprobs, "finish_reason": choice.finish}
            bodies.append({"index": index, **content, **end})
        return self._body("", bodies) | {"usage": usage}

    def chunk(self, piece: Piece, before: Choice, *, first: bool) -> Body:
        """One part of a streamed response; `before` is the state before it."""
        content: Body = {"text": piece.text}
        if self.chat:
            delta: Body = {}
            # Only the first part names the role, as OpenAI's do.
            if first:
                delta["role"] = "assistant"
            if piece.text or first:
                delta["content"] = piece.text
            content = {"delta": delta}
        logprobs = self.logprobs(piece.scored, before.length)
        # The next part's offsets begin after the texts of these tokens.
        before.length += sum(len(self.speller.text(scored.token)) for scored in piece.scored)
        end = {"logprobs": logprobs, "finish_reason": piece.finish}
        return self._body(".chunk", [{"index": piece.row, **content, **end}])

    def last(self, usage: dict[str, int]) -> Body:
        """The part of a streamed response that contains its usage."""
        return self._body(".chunk", []) | {"usage": usage}

    def logprobs(self, scored: Sequence[Scored], offset: int) -> Body | None:
        """The log-probabilities of tokens whose texts begin at `offset` in a completion."""
        if not self.scored:
            return None
        if self.chat:
            entries = []
            for score in scored:
                top = list(it.starmap(self._entry, score.top))
                entries.append(self._entry(score.token, score.logprob) | {"top_logprobs": top})
            return {"content": entries, "refusal": None}
        lists: Body = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for score in scored:
            text, top = self.speller.text(score.token), None
            if score.logprob is not None:
                # The most likely tokens and the token itself. The keys are texts, and tokens that
                # are not text may share one: the first of them counts.
                top = {}
                for token, logprob in (*score.top, (score.token, score.logprob)):
                    top.setdefault(self.speller.text(token), logprob)
            lists["tokens"].append(text)
            lists["token_logprobs"].append(score.logprob)
            lists["top_logprobs"].append(top)
            lists["text_offset"].append(offset)
            offset += len(text)
        return lists

    def _entry(self, token: int, logprob: float | None) -> Body:
        text, encoded = self.speller.text(token), self.speller.encoded(token)
        return {"token": text, "logprob": logprob, "bytes": encoded}

    def _body(self, part: str, choices: list[Body]) -> Body:
        kind = "text_completion"
        if self.chat:
            kind = f"chat.completion{part}"
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return head | {"choices": choices}


class Speller:
    """The texts of the tokens of a tokenizer."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.known: dict[int, str] = {}

    def text(self, token: int) -> str:
        """A token's text. A token that is not text, such as a part of a character, is represented
        by its name in the tokenizer."""
        if token not in self.known:
            self.known[token] = self._decoded(token) or self._name(token)
        return self.known[token]

    def encoded(self, token: int) -> list[int] | None:
        """The bytes of a token, which may be a part of a character; None if it is not text."""
        if text := self._decoded(token):
            return [*text.encode()]
        name = self._name(token)
        if match := re.fullmatch("<0x([0-9A-F]{2})>", name):  # of SentencePiece
            return [int(match[1], 16)]
        table = _bytes_of_signs()
        if any(sign not in table for sign in name):
            return None
        return [table[sign] for sign in name]

    def _name(self, token: int) -> str:
        return self.tokenizer.id_to_token(token) or f"<{token}>"

    def _decoded(self, token: int) -> str:
        """The text of a token; empty if it is not text."""
        text = self.tokenizer.decode([token], skip_special_tokens=False)
        # SentencePiece's decoders omit the first space of a text.
        if self._name(token).startswith("\u2581") and not text.startswith(" "):
            text = f" {text}"
        if UNFINISHED in text:
            return ""
        return text


@ft.cache
def _bytes_of_signs() -> dict[str, int]:
    """Maps the characters of byte-level tokenizers to bytes: printable bytes are themselves, and
    the others are, in order, characters from 256 on."""
    # Those that GPT-2's tokenizer shows as they are: `bytes_to_unicode` of its `encoder.py`.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table, after = {}, 256
    for byte in range(256):
        if byte in printable:
            table[chr(byte)] = byte
        else:
            table[chr(after)] = byte
            after += 1
    return table


def usage_body(prompt: int, new: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


def model_body(name: str, created: int) -> Body:
    return {"id": name, "object": "model", "created": created, "owned_by": "redcoast"}
