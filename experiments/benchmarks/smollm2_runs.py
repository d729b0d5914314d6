"""Processor time and memory of a few steps of each script of post-training with SmolLM2-135M.

Each script runs in a process of its own, with few and short rows, so that it takes minutes on a
CPU. The student of the distillation is the model that `sft.py` has trained. The figures are those
of whole processes: they include the compilation, and the answers to held-out problems before and
after the training.

    python experiments/benchmarks/smollm2_runs.py
"""

import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import tyro

sys.path.append(str(Path(__file__).parents[1]))
from _cells import markdown

SCRIPTS = Path(__file__).parents[1]
HEAD = ["run", "steps", "processor time, s", "time, s", "memory, GB"]
SHORT = ["--task", "word_problems", "--max-tokens", "64", "--test-problems", "8"]
GROUPS = ["--prompts", "2", "--samples", "4", *SHORT]


@dataclass(frozen=True)
class Config:
    steps: int = 4  # number of steps of each run
    only: tuple[str, ...] = ()  # names of runs; by default all of them


def main(c: Config) -> None:
    """Prints a table with a line for each run."""
    if "distill_on_policy" in c.only and "sft" not in c.only:
        raise SystemExit("distill_on_policy needs the model of sft: add it to --only.")
    lines = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_pairs(folder / "pairs.jsonl")
        for name, command in commands(folder).items():
            if c.only and name not in c.only:
                continue
            directory = folder / name.replace(", ", "_")
            common = ["--steps", str(c.steps), "--directory", str(directory)]
            lines.append([name, str(c.steps), *measure([*command(), *common])])
            print(markdown(HEAD, lines), flush=True)


def write_pairs(file: Path) -> None:
    """Right sums, each with a wrong one."""
    pairs = []
    for a, b in itertools.product(range(11, 99, 11), repeat=2):
        pair = {"prompt": f"{a} + {b}?", "chosen": f"{a + b}", "rejected": f"{a + b - 10}"}
        pairs.append(json.dumps(pair))
    file.write_text("\n".join(pairs), "utf-8")


def commands(folder: Path) -> dict[str, Callable[[], list[str]]]:
    """The arguments of each run. They are functions, since the student of the distillation exists
    when `sft.py` has run."""
    return {
        "sft": lambda: ["sft.py", "--batch-size", "2", "--seq", "128"],
        "preferences, adapters": lambda: [
            *["preferences.py", "--weights", "smollm2", "--rank", "16"],
            *["--reference", "adapters", "--beta", "0.1", "--batch-size", "4"],
            *["--data", str(folder / "pairs.jsonl"), *SHORT],
        ],
        "grpo, adapters": lambda: ["grpo.py", "--weights", "smollm2", "--rank", "16", *GROUPS],
        "grpo": lambda: ["grpo.py", "--weights", "smollm2", "--learning-rate", "1e-6", *GROUPS],
        "distill_on_policy": lambda: [
            *["distill_on_policy.py", "--weights", str(next(folder.glob("sft/*/model")))],
            *["--teacher-weights", "smollm2", "--learning-rate", "1e-5"],
            *["--batch-size", "8", *SHORT],
        ],
    }


def measure(command: list[str]) -> list[str]:
    """The processor seconds, the seconds and the gigabytes of the largest process of a run."""
    script, *options = command
    begin = time.perf_counter()
    process = subprocess.Popen([sys.executable, str(SCRIPTS / script), *options])
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{script} {' '.join(options)} failed.")
    seconds = usage.ru_utime + usage.ru_stime
    elapsed = time.perf_counter() - begin
    return [f"{seconds:.0f}", f"{elapsed:.0f}", f"{usage.ru_maxrss * KILOBYTES / 1e9:.1f}"]


# On Linux, `ru_maxrss` counts units of 1,024 bytes, and on macOS bytes.
KILOBYTES = {"darwin": 1}.get(sys.platform, 1024)

if __name__ == "__main__":
    main(tyro.cli(Config))
