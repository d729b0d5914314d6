"""Texts and chats as examples for language models: windows of tokens, padded with -1."""

import json
import re
import sysconfig
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from _options import refuse

# Around the assistant's words, in a text that is rendered with `mark_answers`.
OPEN, CLOSE = "\ufdd0", "\ufdd1"
Encode = Callable[[str], Iterable[int]]


def read_texts(path: Path | None) -> tuple[list[str], list[str]]:
    """Returns the training and the validation texts: the files of a folder, split by the hash of
    their names; or the first 95 % and the rest of a single file."""
    if path is not None and path.is_file():
        try:
            text = path.read_text("utf-8")
        except UnicodeDecodeError as error:
            refuse(f"{path} is not text in UTF-8: {error}.")
        split = len(text) - len(text) // 20
        return [text[:split]], [text[split:]]
    root, pattern, skipped = path, "*", set()
    if root is None:
        root, pattern = Path(sysconfig.get_path("stdlib")), "*.py"
        skipped = {"site-packages", "dist-packages", "test", "tests"}
    names = []
    for file in root.rglob(pattern):
        name = file.relative_to(root)
        if file.is_file() and skipped.isdisjoint(name.parts):
            names.append(name)
    if len(names) < 2:
        refuse(f"{root} must hold at least two files: for training and validation.")
    names.sort(key=lambda name: zlib.crc32(name.as_posix().encode()))
    texts = [(root / name).read_text("utf-8", errors="replace") for name in names]
    valid = len(texts) // 32 + 1
    return texts[valid:], texts[:valid]


def windows(texts: Iterable[Iterable[int]], seq: int) -> np.ndarray:
    """Splits texts into windows of `seq + 1` tokens. Each window starts with the last token of the
    one before; the last one is padded with -1."""
    tokens = np.concatenate([np.fromiter(text, np.int32) for text in texts])
    if len(tokens) < 2:
        refuse(f"The text to train or to validate on has {len(tokens)} tokens. Pass a longer one.")
    tokens = np.pad(tokens, (0, -(len(tokens) - 1) % seq), constant_values=-1)
    return np.lib.stride_tricks.sliding_window_view(tokens, seq + 1)[::seq]


def beginning_of_text(tokenizer: Any) -> list[int]:
    """Returns the tokens that a tokenizer puts before each text, such as `<s>`, if it does."""
    encoded = tokenizer.encode("a")
    return encoded.ids[: encoded.special_tokens_mask.index(0)]


def read_chats(path: Path) -> tuple[list[Any], list[Any]]:
    """Reads a .jsonl file with one chat on each line, `{"messages": [{"role": ..., "content":
    ...}, ...]}`. Returns the training chats and the validation chats (every twentieth)."""
    chats = []
    for number, row in enumerate(read_json_lines(path), 1):
        if not isinstance(row, dict) or not isinstance(row.get("messages"), list):
            refuse(f'Chat {number} of {path} must have the form {{"messages": [...]}}.')
        chats.append(row["messages"])
    if len(chats) < 2:
        refuse(f"{path} must hold at least two chats: for training and validation.")
    return [chat for i, chat in enumerate(chats) if i % 20], chats[::20]


def read_json_lines(path: Path) -> list[Any]:
    """Reads a .jsonl file: a line of JSON for each example, and maybe empty lines."""
    try:
        lines = path.read_text("utf-8").splitlines()
        return [json.loads(line) for line in lines if line.strip()]
    except (OSError, ValueError) as error:
        refuse(f"{path} is not a file of JSON lines: {error}.")


def chat_windows(
    chats: list[Any], render: Callable[..., str], encode: Encode, seq: int
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns for each chat its tokens, and a mask of those to learn: the assistant's messages."""
    rows = _truncated(chats, render, encode, seq)
    return [(_pad(tokens, seq, -1), _pad(learned, seq, False)) for tokens, learned in rows]


def packed_chats(
    chats: list[Any], render: Callable[..., str], encode: Encode, seq: int
) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Returns rows of several chats: their tokens, a mask of those to learn, and for each token the
    number of its chat in the row, from 1; 0 is padding.

    The longest chats come first, each in the fullest row that has room for it.
    """
    rows: list[list[tuple[np.ndarray, np.ndarray]]] = []
    rows_by_room: list[list[int]] = [[] for _ in range(seq + 2)]  # in tokens
    for chat in sorted(_truncated(chats, render, encode, seq), key=lambda chat: -len(chat[0])):
        size = len(chat[0])
        room = size
        while room <= seq + 1 and not rows_by_room[room]:
            room += 1
        if room <= seq + 1:
            row = rows_by_room[room].pop()
        else:
            room, row = seq + 1, len(rows)
            rows.append([])
        rows[row].append(chat)
        rows_by_room[room - size].append(row)
    return [_packed(row, seq) for row in rows]


def _packed(
    row: list[tuple[np.ndarray, np.ndarray]], seq: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    tokens, learned = map(np.concatenate, zip(*row, strict=True))
    sizes = [len(chat) for chat, _ in row]
    segments = np.repeat(np.arange(1, len(row) + 1, dtype=np.int32), sizes)
    # The first token of a chat has nothing before it that predicts it.
    learned[np.cumsum([0, *sizes[:-1]])] = False
    return _pad(tokens, seq, -1), _pad(learned, seq, False), _pad(segments, seq, 0)


def _truncated(
    chats: list[Any], render: Callable[..., str], encode: Encode, seq: int
) -> list[tuple[np.ndarray, np.ndarray]]:
    rows, too_long = [], 0
    for chat in chats:
        tokens, learned = _chat(chat, render, encode)
        too_long += len(tokens) > seq + 1
        rows.append((tokens[: seq + 1], learned[: seq + 1]))
    if too_long:
        print(f"{too_long} of {len(rows)} chats have more than {seq + 1} tokens and are truncated.")
    return rows


def _pad(x: np.ndarray, seq: int, fill: int | bool) -> np.ndarray:
    return np.pad(x, (0, seq + 1 - len(x)), constant_values=fill)


def _chat(chat: Any, render: Callable[..., str], encode: Encode) -> tuple[np.ndarray, np.ndarray]:
    """Returns the tokens of the whole chat, as the template renders it, and which are learned."""
    text = render(chat, add_generation_prompt=False)
    tokens = np.fromiter(encode(text), np.int32)
    learned = np.zeros(len(tokens), bool)
    for begin, end in _marked(chat, render) or _answers(chat, render, text):
        learned[slice(*_tokens_between(text, tokens, begin, end, encode))] = True
    return tokens, learned


def _marked(chat: Any, render: Callable[..., str]) -> list[tuple[int, int]]:
    """Returns where the assistant's words are, in a template that marks them itself."""
    text = render(chat, add_generation_prompt=False, mark_answers=True)
    spans, begin, length = [], 0, 0
    for piece in re.split(f"({OPEN}|{CLOSE})", text):
        if piece == OPEN:
            begin = length
        elif piece == CLOSE:
            spans.append((begin, length))
        else:
            length += len(piece)
    return spans


def _answers(chat: Any, render: Callable[..., str], text: str) -> list[tuple[int, int]]:
    """Returns where the assistant's messages are in the text of a chat, each with its end.

    What changes with the content of a message is its text. So templates may render a message
    otherwise once another follows it, or leave out its thoughts.
    """
    spans, last = [], 0
    for index, message in enumerate(chat):
        if message["role"] != "assistant":
            continue
        begin, end = _changing(chat, index, render)
        answer = str(message["content"] or "").rpartition("</think>")[2].strip()
        if begin < last or answer not in text[begin:end]:
            refuse(
                f"The chat template renders message {index} of a chat, an assistant's, such that "
                f"its text cannot be told from the others: {answer[:60]!r}. Mark what "
                "is learned in the template, with {% generation %} and {% endgeneration %}."
            )
        # A model is asked to continue the generation prompt: all that follows it is learned.
        prompt = render(chat[:index], add_generation_prompt=True)
        if text.startswith(prompt) and last <= len(prompt) <= begin:
            begin = len(prompt)
        # What ends the message: the end of the chat up to it.
        upto = render(chat[: index + 1], add_generation_prompt=False)
        ending = upto[_changing(chat[: index + 1], index, render)[1] :]
        last = end + _common(text[end:], ending)
        spans.append((begin, last))
    return spans


def _changing(chat: Any, index: int, render: Callable[..., str]) -> tuple[int, int]:
    """Returns the part of the text of a chat that depends on the content of a message."""
    changed_chat = [*chat]
    changed_chat[index] = {**chat[index], "content": OPEN}
    text = render(chat, add_generation_prompt=False)
    changed = render(changed_chat, add_generation_prompt=False)
    begin = _common(text, changed)
    end = len(text) - _common(text[begin:][::-1], changed[begin:][::-1])
    return begin, end


def _common(a: str, b: str) -> int:
    """The length of the longest common beginning of two texts."""
    length = 0
    while a[length : length + 1] == b[length : length + 1] != "":
        length += 1
    return length


def _tokens_between(
    text: str, tokens: np.ndarray, begin: int, end: int, encode: Encode
) -> tuple[int, int]:
    """Returns the first token of a part of a text, and the one after its last."""

    def before(place: int) -> int:
        """How many tokens are those of the text before a place."""
        own = np.fromiter(encode(text[:place]), np.int32)[: len(tokens)]
        differs = np.flatnonzero(own != tokens[: len(own)])
        return int(min([*differs, len(own)]))

    first, after = before(begin), before(end)
    if len(np.fromiter(encode(text[:end]), np.int32)) != after:
        after += 1  # the token that the end falls into has text of this part
    return first, after
