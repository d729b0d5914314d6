"""How long small requests to `redcoast serve` wait while other clients send large ones.

A client streams small greedy answers, one after the other. Meanwhile other clients (a) request
samples with eleven values of `top_k`, (b) send a prompt of 8 MiB, which is refused, (c) request
samples at eight temperatures at once. The times are compared with those without other clients, so
that they do not depend on the machine.

    python experiments/benchmarks/fairness.py
"""

import contextlib
import http.client
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro

sys.path.append(str(Path(__file__).parents[1]))
from _cells import markdown
from serving import SERVE, random_model, server

HEAD = ["meanwhile", "first token, median", "first token, longest", "new tokens/s", "seconds"]


@dataclass(frozen=True)
class Config:
    seconds: float = 8.0  # of the measurement without others
    new: int = 16  # tokens of a small answer
    server: tuple[str, ...] = SERVE  # arguments of Python that start the server


def main(c: Config) -> None:
    """Prints a table with a line for each kind of other clients."""
    with tempfile.TemporaryDirectory() as folder:
        weights = random_model(Path(folder) / "model")
        with server(c.server, weights) as address:
            warm(c, address)
            lines = []
            loads = {
                "nobody": lambda: time.sleep(c.seconds),
                "(a) 11 values of top_k": lambda: top_k(address),
                "(b) a prompt of 8 MiB": lambda: large(address),
                "nobody again": lambda: time.sleep(c.seconds),
            }
            for name, load in loads.items():
                lines.append([name, *measured(c, address, load)])
                print(" | ".join(lines[-1]), file=sys.stderr, flush=True)
            print(markdown(HEAD, lines))
            print(f"(c) 8 temperatures at once: {mixed(c, address):.2f} requests/s")


def warm(c: Config, address: str) -> None:
    """Compiles what small requests need, also for two rows: alone, and beside another."""
    for rows in (1, 2):
        body = {"prompt": ["The mesh has a data"] * rows, "max_tokens": c.new}
        for temperature in (0, 1):
            with answered(address, body | {"temperature": temperature}) as response:
                response.read()


def measured(c: Config, address: str, load: Callable[[], Any]) -> list[str]:
    """The cells of a line: what small requests took while `load` ran."""
    running = threading.Thread(target=load)
    began = time.perf_counter()
    running.start()
    firsts, tokens = [], 0
    while running.is_alive():
        firsts.append(small(c, address))
        tokens += c.new
    seconds = time.perf_counter() - began
    running.join()
    cells = np.median(firsts), np.max(firsts), tokens / seconds, seconds
    return [f"{cell:.3f}" for cell in cells]


def small(c: Config, address: str) -> float:
    """Streams a small answer. Returns the seconds until its first part."""
    body = {"prompt": "The mesh has a data", "max_tokens": c.new, "temperature": 0, "stream": True}
    began = time.perf_counter()
    with answered(address, body) as response:
        first = response.readline()
        seconds = time.perf_counter() - began
        rest = response.read()
    if response.status != 200:
        raise SystemExit(f"The server answered {response.status}: {(first + rest).decode()}")
    return seconds


@contextlib.contextmanager
def answered(address: str, body: dict[str, Any]) -> Iterator[http.client.HTTPResponse]:
    connection = http.client.HTTPConnection(address, timeout=600)
    with contextlib.closing(connection):
        head = {"Content-Type": "application/json"}
        data = json.dumps({"model": "model"} | body)
        # A server may answer before it has read all of a body.
        with contextlib.suppress(ConnectionError):
            connection.request("POST", "/v1/completions", data, head)
        yield connection.getresponse()


def top_k(address: str) -> None:
    for k in (*range(6, 16), 10**30):
        body = {"prompt": "The mesh", "max_tokens": 3, "temperature": 1, "top_k": k}
        with answered(address, body) as response:
            response.read()


def large(address: str) -> None:
    body = {"prompt": "hello world " * 690_000}
    with contextlib.suppress(ConnectionError), answered(address, body) as response:
        response.read()


def mixed(c: Config, address: str, requests: int = 32) -> float:
    """How many requests are answered per second, of eight clients at eight temperatures."""

    def ask(index: int) -> None:
        temperature = 0.5 + 0.1 * (index % 8)
        body = {"prompt": "The mesh", "max_tokens": c.new, "temperature": temperature}
        with answered(address, body) as response:
            response.read()

    with ThreadPoolExecutor(8) as pool:
        [*pool.map(ask, range(16))]  # compiles
        began = time.perf_counter()
        [*pool.map(ask, range(requests))]
        return requests / (time.perf_counter() - began)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
