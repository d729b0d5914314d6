"""What the server takes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..core._decoding import Decoding
from ._grammar import Grammar


@dataclass(frozen=True)
class Limits:
    """The limits of requests.

    - `name`: the name of its model; `vocab`: the size of the model's vocabulary.
    - `context`: the maximum number of tokens of a prompt and its answer; `characters`: the maximum
        number of characters of a prompt.
    - `rows`: the maximum number of rows of a request.
    - `new_tokens`: the default number of tokens of an answer in a chat; `decoding`: the default
        decoding.
    - `eos`: the tokens that end an answer.
    - `grammars`: creates the grammar of a `response_format`; None if not supported.
    """

    name: str
    vocab: int
    context: int
    rows: int
    new_tokens: int
    decoding: Decoding
    characters: int = 2**18
    eos: tuple[int, ...] = ()
    grammars: Callable[[Mapping[str, object]], Callable[[], Grammar] | None] | None = None

    @property
    def most_bytes(self) -> int:
        """The maximum size of the body of a request, in bytes."""
        return 2**20 + 16 * self.rows * self.context
