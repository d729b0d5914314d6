"""The cost of faults: steps lost and seconds to resume; and the cost of saving.

Each fault is injected into a process that trains a small model and saves every five steps. Then the
run is started again. The cost of saving is measured in this process.

    chrt -r 10 python experiments/benchmarks/faults.py

Real-time priority (`chrt`, which needs root) reduces the influence of other programs.
"""

import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from _complete import complete
from jaxtyping import PyTree

import redcoast as rc

EVERY, STEPS, FAULT = 5, 60, 33


class Examples:
    """Vectors that are a function of their index; those with an index in `bad` are infinite."""

    def __init__(self, bad: range = range(0)):
        self.bad = bad

    def __len__(self) -> int:
        return 8 * STEPS

    def __getitem__(self, index: int) -> np.ndarray:
        value = float(index % 7)
        if index in self.bad:
            value = np.inf
        return np.full(32, value, np.float32)


def loss_fn(model: PyTree, batch: PyTree, key: jax.Array) -> jax.Array:
    return jnp.mean(jax.vmap(model)(batch) ** 2)


def train(directory: Path, fault: str = "") -> None:
    """The run that faults are injected into, in a separate process."""
    calls = iter(range(10**6))

    def collate_fn(examples: list[np.ndarray]) -> np.ndarray:
        if fault == "collate_fn raises" and next(calls) == FAULT:
            raise OSError("stale file handle")
        time.sleep(0.02)
        return np.stack(examples)

    def log(metrics: dict[str, float], step: int) -> None:
        if fault.startswith("disk full") and step == FAULT - EVERY:
            limit_files(4096)
        if fault == "disk full for 10 steps" and step == FAULT + EVERY:
            limit_files(resource.RLIM_INFINITY)
        print(f"{step} {time.time()}", flush=True)

    bad = range(0)
    if fault == "NaN in the data":
        bad = range(8, 16)
    wandb = rc.wandb_logger(project="faults", mode="offline", close_timeout=5.0)

    class Logs:
        start, close = wandb.start, wandb.close

        def __call__(self, metrics: dict[str, float], step: int) -> None:
            log(metrics, step)
            wandb(metrics, step)

    logger: Any = log
    if fault == "W&B's service killed":
        logger = Logs()
    state = rc.fit(
        eqx.nn.MLP(32, 32, 256, 2, key=jax.random.key(0)),
        optax.adamw(1e-3),
        Examples(bad),
        collate_fn=collate_fn,
        loss_fn=loss_fn,
        batch_size=8,
        steps=STEPS,
        checkpoints=rc.Checkpoints(directory, every=EVERY, keep=3),
        log=[rc.progress_logger(False), logger],
    )
    if state.step < STEPS:
        sys.exit(os.EX_TEMPFAIL)


def limit_files(size: int) -> None:
    """Makes writes beyond a file size fail, as on a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def start(directory: Path, fault: str = "") -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--child", str(directory), "--fault", fault]
    # Its many warnings are expected.
    out, errors = subprocess.PIPE, subprocess.DEVNULL
    return subprocess.Popen(command, text=True, stdout=out, stderr=errors)


def follow(process: subprocess.Popen[str], act: Callable[[int], None]) -> list[tuple[int, float]]:
    """Calls `act` at each step that a process logs; returns the steps and times when it ends."""
    assert process.stdout is not None
    steps = []
    for line in process.stdout:
        step, _, when = line.partition(" ")
        if not step.isdigit():
            continue
        steps.append((int(step), float(when)))
        act(int(step))
    process.communicate()
    return steps


def services(parent: int) -> list[int]:
    """The W&B service processes that are children of a process."""
    children = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            above = int((path / "stat").read_text().rsplit(")", 1)[1].split()[1])
            if above == parent and b"wandb-core" in (path / "cmdline").read_bytes():
                children.append(int(path.name))
        except OSError:
            continue
    return children


def inject(fault: str, process: subprocess.Popen[str], step: int) -> None:
    """Injects a fault that comes from outside the process, such as a signal."""
    if fault in signal.Signals.__members__ and step == FAULT:
        process.send_signal(signal.Signals[fault])
    if fault == "SIGKILL while saving" and step >= EVERY * (FAULT // EVERY):
        process.send_signal(signal.SIGKILL)
    if fault == "W&B's service killed" and step == FAULT:
        for pid in services(process.pid):
            os.kill(pid, signal.SIGKILL)


def damage(directory: Path) -> None:
    """Flips a bit of the newest checkpoint."""
    newest = max((p for p in directory.iterdir() if p.name.isdigit()), key=lambda p: int(p.name))
    file = max((p for p in newest.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


FAULTS = [
    "none",
    "SIGTERM",
    "SIGUSR1",
    "SIGKILL",
    "SIGKILL while saving",
    "newest checkpoint damaged",
    "disk full for 10 steps",
    "disk full to the end",
    "NaN in the data",
    "collate_fn raises",
    "W&B's service killed",
]


def survive(fault: str, directory: Path) -> str:
    """A row of the table: the effect of a fault, and the steps that the resumed run lost."""
    injected = fault
    if fault == "newest checkpoint damaged":
        injected = "SIGKILL"
    first = start(directory, injected)
    before = follow(first, lambda step: inject(injected, first, step))
    last = before[-1][0]
    if last == STEPS and first.returncode == 0:
        return row(fault, first.returncode, "yes", "0", "-")
    if fault == "newest checkpoint damaged":
        damage(directory / "checkpoints")
    begin = time.time()
    second = start(directory)
    after = follow(second, lambda step: None)
    complete = "NO"
    if second.returncode == 0 and after[-1][0] == STEPS:
        complete = "yes"
    lost_steps = max(0, last - after[0][0] + 1)
    seconds = after[0][1] - begin
    return row(fault, first.returncode, complete, str(lost_steps), f"{seconds:.1f}")


def row(*cells: Any) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def timed(directory: Path, width: int, every: int, steps: int, seconds: float) -> Any:
    """The start time of each step on the device, and the megabytes of memory after it.

    Each step takes at least `seconds` on the device, and almost nothing on the host.
    """
    begun: list[float] = []

    def wait(x: np.ndarray) -> np.ndarray:
        begun.append(time.perf_counter())
        time.sleep(seconds)
        return np.zeros((), np.float32)

    def slow_loss(model: PyTree, batch: PyTree, key: jax.Array) -> jax.Array:
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        waited = jax.pure_callback(wait, shape, batch[0, 0])
        return loss_fn(model, batch, key) + waited

    memory: list[float] = []
    state = rc.fit(
        eqx.nn.MLP(32, 32, width, 3, key=jax.random.key(0)),
        optax.adamw(1e-3),
        Examples(),
        collate_fn=np.stack,
        loss_fn=slow_loss,
        batch_size=8,
        steps=steps,
        checkpoints=rc.Checkpoints(directory, every=every),
        log=[rc.progress_logger(False), lambda metrics, step: memory.append(resident())],
    )
    complete(state, steps)
    return begun[-steps:], memory


def resident() -> float:
    """The resident memory of this process, in megabytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def cost_of_saving(directory: Path, saves: int = 40) -> str:
    """The time that a save of 100 MB adds to a loop of 200 ms steps.

    It is the time of the five steps that start with a save, less that of the next five steps.
    """
    begun, _ = timed(directory, 2040, 10, 10 * saves + 20, 0.19)  # computing takes the rest
    # The first steps are left out: they include compilation and the first save.
    with_save, without = np.diff(begun)[19 : 19 + 10 * saves].reshape(saves, 2, 5).sum(2).T
    added = (with_save - without) * 1e3
    low, middle, high = np.percentile(added, [25, 50, 75])
    return (
        f"A save of 100 MB adds {middle:.1f} ms (interquartile range {low:.1f} to {high:.1f} of "
        f"{saves} saves; mean {added.mean():.1f}) to a loop with steps of "
        f"{np.median(without) / 5e-3:.0f} ms, which is blocked for "
        f"{time_of_call(directory / 'calls') * 1e3:.1f} ms."
    )


def time_of_call(directory: Path) -> float:
    """The median time for which a save of 100 MB blocks the loop, in seconds."""
    state = jax.block_until_ready([jnp.full((2040, 2040), x, jnp.float32) for x in range(6)])
    times = []
    with rc.Checkpointer(rc.Checkpoints(directory, every=1)) as checkpointer:
        for step in range(15):
            begin = time.perf_counter()
            checkpointer.save(step, state)
            times.append(time.perf_counter() - begin)
            time.sleep(1)  # in place of training steps
    return float(np.median(times))


def memory_of_saving(directory: Path) -> str:
    """The memory after 20 saves, and after 200 more."""
    _, memory = timed(directory, 512, 1, 221, 0.0)
    early, late = float(np.median(memory[15:25])), float(np.median(memory[210:]))
    return f"Memory after 20 saves {early:.0f} MB, after 200 more {late:.0f} MB."


def main(child: Path | None = None, fault: str = "") -> None:
    """Prints the table.

    Args:
        child: Only train in this directory; used for the child processes.
        fault: The fault to inject into that run.
    """
    if child:
        return train(child, fault)
    print(row("fault", "exit code", "survived", "steps lost", "seconds to resume"))
    print(row(*["---"] * 5))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        os.environ["WANDB_DIR"] = directory
        for i, name in enumerate(FAULTS):
            print(survive(name, Path(directory) / str(i)), flush=True)
        print(cost_of_saving(Path(directory) / "cost"), flush=True)
        print(memory_of_saving(Path(directory) / "memory"), flush=True)


if __name__ == "__main__":
    tyro.cli(main)
