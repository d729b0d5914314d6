"""Runs whose machine loses its power shortly after a save, resumed from what the disk holds.

A run saves to an ext4 file system in an image, over a loop device. It is frozen at a random instant
up to four seconds after a save, and the image is copied as it is: what the kernel has not written
to it is lost, as in a power loss. The copy is mounted and the run is resumed from it.

    python experiments/benchmarks/power_loss.py --keep 1 --trials 12

It mounts file systems, which needs root, and Linux.
"""

import dataclasses
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro

import redcoast as rc

EVERY = 50  # steps between saves
DELAYS = (0.0, 0.0, 0.5, 1.0, 2.0, 4.0)  # seconds from a save to the loss
PATIENCE = 600.0  # seconds


@dataclasses.dataclass
class Options:
    """Loses power after saves, and counts the runs that resume."""

    trials: int = 12
    """How many runs lose their power."""
    keep: int = rc.Checkpoints("").keep
    """How many checkpoints are kept."""
    seed: int = 0
    """Draws the instants."""
    child: Path | None = None
    """Trains in this directory, in a process of its own."""
    steps: int = 1_000_000
    """The length of that run."""


def loss_fn(model: eqx.nn.MLP, batch: jax.Array, key: jax.Array) -> jax.Array:
    return jnp.mean((jax.vmap(model)(batch) - batch) ** 2)


def collate_fn(examples: list[np.ndarray]) -> np.ndarray:
    time.sleep(0.01)
    return np.stack(examples)


def train(directory: Path, keep: int, steps: int) -> None:
    """The run whose machine loses its power: two devices, and optimizer state."""
    examples = np.random.default_rng(0).normal(size=(400, 64)).astype(np.float32)
    rc.fit(
        eqx.nn.MLP(64, 64, 300, 2, key=jax.random.key(0)),
        optax.adamw(1e-3),
        examples,
        collate_fn=collate_fn,
        loss_fn=loss_fn,
        batch_size=16,
        steps=steps,
        mesh=rc.make_mesh(data=1, fsdp=-1),
        checkpoints=rc.Checkpoints(directory, every=EVERY, keep=keep),
    )


def start(directory: Path, output: Path, keep: int, steps: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, __file__, "--child", str(directory)]
    command += ["--keep", str(keep), "--steps", str(steps)]
    emulated = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "NPROC": "32"}
    with output.open("wb") as file:
        return subprocess.Popen(command, stdout=file, stderr=file, env=os.environ | emulated)


def saved_steps(checkpoints: Path) -> list[int]:
    if not checkpoints.is_dir():
        return []
    return sorted(int(x.name) for x in checkpoints.iterdir() if x.name.isdigit())


def shell(*command: object) -> None:
    subprocess.run([str(word) for word in command], check=True, capture_output=True)


def copy_frozen(image: Path, copy: Path) -> None:
    """Copies an image that the kernel still writes to, until two copies in a row are equal."""
    before = b""
    while (now := image.read_bytes()) != before:
        before = now
    copy.write_bytes(now)


def lose_power(folder: Path, keep: int, draw: random.Random) -> str:
    """One run, one power loss, one resumption; returns what came of it."""
    image, mounted = folder / "disk.img", folder / "mounted"
    mounted.mkdir()
    shell("truncate", "-s", "200M", image)
    shell("mkfs.ext4", "-q", image)
    shell("mount", "-o", "loop", image, mounted)
    checkpoints = mounted / "run" / "checkpoints"
    process = start(mounted / "run", folder / "first.txt", keep, 1_000_000)
    first_save = EVERY * draw.randrange(2, 5)
    deadline = time.monotonic() + PATIENCE
    try:
        while max(saved_steps(checkpoints), default=0) < first_save:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError((folder / "first.txt").read_text())
            time.sleep(0.005)
        time.sleep(draw.choice(DELAYS))
        process.send_signal(signal.SIGSTOP)
        newest = max(saved_steps(checkpoints))
        copy_frozen(image, folder / "after.img")
    finally:
        process.kill()
        process.wait()
        shell("umount", "-l", mounted)
    shell("mount", "-o", "loop", folder / "after.img", mounted)
    try:
        output = folder / "second.txt"
        code = start(mounted / "run", output, keep, newest + EVERY + 3).wait(PATIENCE)
    finally:
        shell("umount", "-l", mounted)
    text = output.read_text(errors="replace")
    if code != 0 or "Resumed at step" not in text:
        print(text, flush=True)
        return "lost"
    return "an older checkpoint was used" if "is used instead" in text else "resumed"


def main(options: Options) -> None:
    if options.child is not None:
        return train(options.child, options.keep, options.steps)
    draw = random.Random(options.seed)
    counts: Counter[str] = Counter()
    for trial in range(options.trials):
        with tempfile.TemporaryDirectory() as folder:
            result = lose_power(Path(folder), options.keep, draw)
        counts[result] += 1
        print(f"power loss {trial + 1}: {result}", flush=True)
    print(f"keep={options.keep}: {dict(counts)}")


if __name__ == "__main__":
    main(tyro.cli(Options))
