"""What the server takes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..core._decoding import Decoding


@dataclass(frozen=True)
class Limits:
    """What the server takes.

    - `name`: the name of its model; `vocab`: the size of the model's vocabulary.
    - `context`: the most tokens of a prompt and its answer; `characters`: the most of a prompt.
    - `rows`: the most rows of a request.
    - `new_tokens`: the tokens of an answer in a chat by default; `decoding`: that by default.
    - `eos`: the tokens that end an answer.
    - `grammars`: makes the grammar of a `response_format`; None if none are served.
    """

    name: str
    vocab: int
    context: int
    rows: int
    new_tokens: int
    decoding: Decoding
    characters: int = 2**18
    eos: tuple[int, ...] = ()
    grammars: Callable[[Mapping[str, Any]], Callable[[], Any] | None] | None = None

    @property
    def most_bytes(self) -> int:
        """The most bytes of the body of a request."""
        return 2**20 + 16 * self.rows * self.context
