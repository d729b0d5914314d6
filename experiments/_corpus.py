"""Texts and chats as examples for language models: windows of tokens, padded with -1."""

import json
import sysconfig
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

Encode = Callable[[str], Iterable[int]]


def read_texts(path: Path | None) -> tuple[list[str], list[str]]:
    """Returns the training and the validation texts: the files of a folder, split by the hash of
    their names; or the first 95 % and the rest of a single file."""
    if path is not None and path.is_file():
        text = path.read_text("utf-8")
        return [text[: -(len(text) // 20)]], [text[-(len(text) // 20) :]]
    root = path or Path(sysconfig.get_path("stdlib"))
    skip = set() if path else {"site-packages", "dist-packages", "test", "tests"}
    names = [file.relative_to(root) for file in root.rglob("*" if path else "*.py")]
    names = [name for name in names if (root / name).is_file() and not skip & {*name.parts}]
    if len(names) < 2:
        raise SystemExit(f"{root} must hold at least two files: for training and validation.")
    names.sort(key=lambda name: zlib.crc32(name.as_posix().encode()))
    texts = [(root / name).read_text("utf-8", errors="replace") for name in names]
    return texts[len(texts) // 32 + 1 :], texts[: len(texts) // 32 + 1]


def windows(texts: Iterable[Iterable[int]], seq: int) -> np.ndarray:
    """Splits texts into windows of `seq + 1` tokens. Each window starts with the last token of the
    one before; the last one is padded with -1."""
    tokens = np.concatenate([np.fromiter(text, np.int32) for text in texts])
    tokens = np.pad(tokens, (0, -(len(tokens) - 1) % seq), constant_values=-1)
    return np.lib.stride_tricks.sliding_window_view(tokens, seq + 1)[::seq]


def read_chats(path: Path) -> tuple[list[Any], list[Any]]:
    """Reads a .jsonl file with one chat on each line, `{"messages": [{"role": ..., "content":
    ...}, ...]}`. Returns the training chats and the validation chats (every twentieth)."""
    lines = [line for line in path.read_text("utf-8").splitlines() if line.strip()]
    chats = [json.loads(line)["messages"] for line in lines]
    if len(chats) < 2:
        raise SystemExit(f"{path} must hold at least two chats: for training and validation.")
    return [c for i, c in enumerate(chats) if i % 20], chats[::20]


def chat_windows(
    chats: list[Any], render: Callable[..., str], encode: Encode, seq: int
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns for each chat its tokens, and a mask of those to learn: the assistant's messages."""
    rows = [_chat(chat, render, encode) for chat in chats]
    if long := sum(len(tokens) > seq + 1 for tokens, _ in rows):
        print(f"{long} of {len(rows)} chats have more than {seq + 1} tokens and are truncated.")
    pad = lambda x, fill: np.pad(x[: seq + 1], (0, max(0, seq + 1 - len(x))), constant_values=fill)
    return [(pad(tokens, -1), pad(learned, False)) for tokens, learned in rows]


def _chat(chat: Any, render: Callable[..., str], encode: Encode) -> tuple[np.ndarray, np.ndarray]:
    """Tokenizes a chat piece by piece: the text that each message adds, as one piece."""
    before, tokens, learned = "", [], []
    for index, message in enumerate(chat):
        assistant = message["role"] == "assistant"
        # The generation prompt before the assistant's message is not learned.
        texts = [render(chat[:index], add_generation_prompt=True)] if assistant else []
        for text in (*texts, render(chat[: index + 1], add_generation_prompt=False)):
            piece = [*encode(text[len(before) :])]
            tokens += piece
            learned += [assistant and text is not (texts or [None])[0]] * len(piece)
            before = text
    return np.array(tokens, np.int32), np.array(learned, bool)
