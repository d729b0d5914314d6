"""Text from tokens that come one by one, up to a stop string."""

from collections.abc import Callable, Sequence

CONTEXT = 8  # tokens before a text that its beginning may depend on
UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # at the end of a text: a character takes several tokens


class Text:
    """The text of the tokens so far, of which each part is given out once.

    `add` and `rest` return what is new. Text that may be the beginning of a stop string is held
    back. After a stop string, `stopped` is true; the string and what follows are not given out.

    `before` are the tokens that the text continues, of which it is no part. Without them, a
    tokenizer like SentencePiece's leaves out the space that the first word begins with.
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
        self.held = ""

    def add(self, token: int) -> str:
        """Returns the text that is certain after one more token."""
        self.tokens.append(token)
        # The text of a token depends on the ones before it, of which a few are enough.
        before = self.decode(self.tokens[self.begin : self.known])
        now = self.decode(self.tokens[self.begin :])
        if now.endswith(UNFINISHED) or len(now) <= len(before):
            return ""
        self.begin, self.known = self.known, len(self.tokens)
        return self._release(now[len(before) :])

    def rest(self) -> str:
        """Returns what was held back, at the end."""
        before = self.decode(self.tokens[self.begin : self.known])
        last = self._release(self.decode(self.tokens[self.begin :])[len(before) :])
        self.begin = self.known = len(self.tokens)
        last, self.held = last + self.held, ""
        return last

    def _release(self, new: str) -> str:
        text = self.held + new
        found = [text.index(stop) for stop in self.stops if stop in text]
        if found:
            self.stopped, self.held = True, ""
            return text[: min(found)]
        hold = max((_overlap(text, stop) for stop in self.stops), default=0)
        self.held = text[len(text) - hold :]
        return text[: len(text) - hold]


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of a text that a stop string may begin with."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((n for n in lengths if text.endswith(stop[:n])), 0)
