"""Reads valid files with random damage for a while: `python fuzz_readers.py SECONDS [SEED]`.

Each must be read, or refused with a ValueError or OSError, soon and in little memory. What is not
so is printed with its seed, which `python fuzz_readers.py 0 SEED` does again.
"""

import faulthandler
import json
import logging
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import jax
from hostile_helpers import READERS, make

MEMORY = 3 * 2**30  # beyond what the process has when it begins
SECONDS = 120  # for one file, of which the longest takes a small part
FEWEST = 12
NUMBERS = [0, 1, 2, 7, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1]
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 10**6, 10**12, 10**30, 0.5, -1e308, float("nan"), "", "a",
    "../../outside", "/etc/hostname", "\0", "F32", [], [1], ["a"], [[[[]]]], {}, {"a": 1},
    "1" * 5000,
]  # fmt: skip


def damage_bytes(data: bytes, draw: random.Random) -> bytes:
    at = draw.randrange(len(data) + 1)
    size = draw.choice((1, 1, 2, 8, 64, 1000))
    number = struct.pack("<Q", draw.choice(NUMBERS))[: draw.choice((4, 8))]
    return draw.choice(
        (
            lambda: data[:at] + bytes(x ^ (1 << draw.randrange(8)) for x in data[at : at + 1])
            + data[at + 1 :],
            lambda: data[:at] + draw.randbytes(size) + data[at + size :],
            lambda: data[:at],
            lambda: data[:at] + data[at + size :],
            lambda: data[: at + size] + data[at:],
            lambda: data[:at] + number + data[at + len(number) :],
            lambda: data + draw.randbytes(size),
        )
    )()  # fmt: skip


def damage_json(found: Any, draw: random.Random) -> Any:
    """A copy with something else in one place."""
    if not found or not isinstance(found, dict | list) or draw.random() < 0.2:
        return draw.choice(VALUES)
    if isinstance(found, list):
        at = draw.randrange(len(found))
        return [damage_json(x, draw) if i == at else x for i, x in enumerate(found)]
    key = draw.choice(list(found))
    changed = dict(found)
    kind = draw.random()
    if kind < 0.15:
        del changed[key]
    elif kind < 0.3:
        changed[draw.choice([x for x in VALUES if isinstance(x, str)])] = changed.pop(key)
    else:
        changed[key] = damage_json(found[key], draw)
    return changed


def damage(file: Path, draw: random.Random) -> None:
    data = file.read_bytes()
    kind = draw.random()
    if kind < 0.03:
        file.unlink()
        return
    start, size = 0, len(data)
    if file.suffix == ".safetensors" and size > 8:
        start, size = 8, struct.unpack("<Q", data[:8])[0]
    try:
        found = json.loads(data[start : start + size])
    except (ValueError, RecursionError):
        found = None
    if found is None or kind < 0.3:
        file.write_bytes(damage_bytes(data, draw))
        return
    text = json.dumps(damage_json(found, draw)).encode()
    before = struct.pack("<Q", len(text)) if start else b""
    file.write_bytes(before + text + data[start + size :])


def try_one(originals: dict[str, Path], place: Path, seed: int) -> str | None:
    """What was wrong with how damaged files were read, if anything was."""
    draw = random.Random(seed)
    name = draw.choice(list(READERS))
    path = place / originals[name].name
    copy = shutil.copytree if originals[name].is_dir() else shutil.copy
    copy(originals[name], path)
    files = [p for p in sorted(path.rglob("*")) if p.is_file()] if path.is_dir() else [path]
    for _ in range(draw.choice((1, 1, 2, 4))):
        if (file := draw.choice(files)).exists():
            damage(file, draw)
    signal.alarm(SECONDS)
    try:
        jax.block_until_ready(jax.tree.leaves(READERS[name](path)))
    except (ValueError, OSError) as error:
        # In a sentence that says where.
        return None if str(path) in str(error) else f"{name}: no path in {error!r}"
    except BaseException:
        return f"{name}:\n{traceback.format_exc()}"
    finally:
        signal.alarm(0)
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    return None


def too_long(*_: object) -> None:
    raise TooLong


class TooLong(BaseException):
    """No OSError, which would be a fair answer."""


def main() -> None:
    faulthandler.enable()
    logging.disable()
    seconds, *seeds = map(int, sys.argv[1:])
    first = seeds[0] if seeds else random.randrange(10**9)
    signal.signal(signal.SIGALRM, too_long)
    with tempfile.TemporaryDirectory() as directory:
        originals = make(Path(directory) / "valid")
        for name, read in READERS.items():
            read(originals[name])
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, resource.RLIM_INFINITY))
        end, seed, wrong = time.monotonic() + seconds, first, 0
        fewest = first + (FEWEST if seconds else 1)  # however slow the machine
        while seed < fewest or time.monotonic() < end:
            place = Path(directory) / "damaged"
            place.mkdir(exist_ok=True)
            print(f"seed {seed}", file=sys.stderr)
            if (problem := try_one(originals, place, seed)) is not None:
                print(f"WRONG, seed {seed}: {problem}", flush=True)
                wrong += 1
            seed += 1
        print(f"{seed - first} damaged files, {wrong} wrong")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
