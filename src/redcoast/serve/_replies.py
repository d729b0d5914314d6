"""Responses of OpenAI's API, as a whole and in parts."""

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from ._batching import Piece, Scored

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@dataclass
class Choice:
    """What has come of one choice so far."""

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
    """The fields that all parts of one response share. `spell` returns the text of a token;
    `scored` says that the tokens have log-probabilities."""

    chat: bool
    model: str
    id: str
    created: int
    spell: Callable[[int], str]
    scored: bool = False

    @staticmethod
    def to(name: str, spell: Callable[[int], str], *, chat: bool, scored: bool = False) -> "Reply":
        """A new response of the model `name`."""
        kind = "chatcmpl" if chat else "cmpl"
        response_id = f"{kind}-{uuid.uuid4().hex}"
        return Reply(chat, name, response_id, int(time.time()), spell, scored)

    def whole(self, choices: Sequence[Choice], usage: Any) -> dict[str, Any]:
        """The body of a response that is not streamed."""
        bodies = []
        for index, choice in enumerate(choices):
            message = {"role": "assistant", "content": choice.text, "refusal": None}
            content = {"message": message} if self.chat else {"text": choice.text}
            logprobs = self.logprobs(choice.scored, 0)
            end = {"logprobs": logprobs, "finish_reason": choice.finish}
            bodies.append({"index": index, **content, **end})
        return self._body("", bodies) | {"usage": usage}

    def chunk(self, piece: Piece, before: Choice, *, first: bool) -> dict[str, Any]:
        """One part of a streamed response; `before` is what came before it."""
        delta: dict[str, Any] = {"role": "assistant"} if first else {}
        delta |= {"content": piece.text} if piece.text or first else {}
        content = {"delta": delta} if self.chat else {"text": piece.text}
        logprobs = self.logprobs(piece.scored, before.length)
        before.length += sum(len(self.spell(scored.token)) for scored in piece.scored)
        end = {"logprobs": logprobs, "finish_reason": piece.finish}
        return self._body(".chunk", [{"index": piece.row, **content, **end}])

    def last(self, usage: Any) -> dict[str, Any]:
        """The part of a streamed response that has its usage."""
        return self._body(".chunk", []) | {"usage": usage}

    def logprobs(self, scored: Sequence[Scored], offset: int) -> dict[str, Any] | None:
        """The log-probabilities of tokens, whose texts begin at `offset` in a completion."""
        if not self.scored:
            return None
        if self.chat:
            return {"content": [self._of_chat(token) for token in scored], "refusal": None}
        texts = [self.spell(token.token) for token in scored]
        ends = accumulate(map(len, texts), initial=offset)
        offsets = [*ends][: len(texts)]
        return {
            "tokens": texts,
            "token_logprobs": [token.logprob for token in scored],
            "top_logprobs": [self._top(token) for token in scored],
            "text_offset": offsets,
        }

    def _top(self, scored: Scored) -> dict[str, float] | None:
        """The most likely tokens and the token itself; of tokens with equal texts, the first."""
        if scored.logprob is None:
            return None
        top: dict[str, float] = {}
        for token, logprob in (*scored.top, (scored.token, scored.logprob)):
            top.setdefault(self.spell(token), logprob)
        return top

    def _of_chat(self, scored: Scored) -> dict[str, Any]:
        entry = lambda token, logprob: {
            "token": self.spell(token),
            "logprob": logprob,
            "bytes": [*self.spell(token).encode()],
        }
        top = [entry(*pair) for pair in scored.top]
        return entry(scored.token, scored.logprob) | {"top_logprobs": top}

    def _body(self, part: str, choices: list[Any]) -> dict[str, Any]:
        kind = f"chat.completion{part}" if self.chat else "text_completion"
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return head | {"choices": choices}


def speller(tokenizer: Any) -> Callable[[int], str]:
    """Returns the function from a token to its text. A token that is no text, such as a part of a
    character, has the name that the tokenizer gives it."""
    known: dict[int, str] = {}

    def spell(token: int) -> str:
        if token not in known:
            known[token] = _spelled(tokenizer, token)
        return known[token]

    return spell


def _spelled(tokenizer: Any, token: int) -> str:
    name = tokenizer.id_to_token(token)
    if name is None:
        return f"<{token}>"
    text = tokenizer.decode([token], skip_special_tokens=False)
    # SentencePiece's decoders leave out the first space of a text.
    if name.startswith("\u2581") and not text.startswith(" "):
        text = f" {text}"
    return text if text and REPLACEMENT not in text else name


def usage_body(prompt: int, new: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


def model_body(name: str, created: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": "redcoast"}
