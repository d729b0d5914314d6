"""Converts a sequence of tokens to text, one token at a time, up to a stop string."""

from collections.abc import Callable, Sequence

CONTEXT = 8  # tokens before a text on which its beginning may depend
UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # at the end of a text: a character takes several tokens


class Text:
    """The text of the tokens so far, of which each part is returned once.

    `add` and `rest` return new text. Text that may be the beginning of a stop string is held back.
    After a stop string, `stopped` is true; the string and later text are not returned.

    `before` are the tokens that the text continues. Without them, tokenizers such as SentencePiece
    omit the space before the first word.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        stops: Sequence[str] = (),
        before: Sequence[int] = (),
    ):
        self.decode, self.stops, self.stopped = decode, stops, False
        self.tokens = list(before[-CONTEXT:])
        self.begin, self.known = 0, len(self.tokens)  # tokens before `known` are in the text
        # A character that the prompt leaves unfinished belongs to the text.
        while self.known and decode(self.tokens[: self.known]).endswith(UNFINISHED):
            self.known -= 1
        self.pending = ""

    def add(self, token: int) -> str:
        """Returns the text that is final after one more token."""
        self.tokens.append(token)
        # The text of a token depends on a few tokens before it.
        before = self.decode(self.tokens[self.begin : self.known])
        now = self.decode(self.tokens[self.begin :])
        if now.endswith(UNFINISHED) or len(now) <= len(before):
            return ""
        self.begin, self.known = self.known, len(self.tokens)
        return self._release(now[len(before) :])

    def rest(self) -> str:
        """Returns the text that was held back, at the end."""
        before = self.decode(self.tokens[self.begin : self.known])
        last = self._release(self.decode(self.tokens[self.begin :])[len(before) :])
        self.begin = self.known = len(self.tokens)
        last, self.pending = last + self.pending, ""
        return last

    def _release(self, new: str) -> str:
        text = self.pending + new
        # The earliest of all stop strings ends the text.
        begins = [text.index(stop) for stop in self.stops if stop in text]
        if begins:
            self.stopped, self.pending = True, ""
            return text[: min(begins)]
        hold = max((_overlap(text, stop) for stop in self.stops), default=0)
        self.pending = text[len(text) - hold :]
        return text[: len(text) - hold]


def _overlap(text: str, stop: str) -> int:
    """The length of the longest suffix of a text that is a prefix of a stop string."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((n for n in lengths if text.endswith(stop[:n])), 0)
