"""Shared by the experiments: options of a run, its directory, its optimizer and its results."""

import atexit
import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import optax
from _options import existing_run, mesh_sizes, newest_name, refuse, resume_command, script_of
from jax.experimental.multihost_utils import broadcast_one_to_all
from jax.sharding import Mesh

import redcoast as rc


@dataclass(frozen=True)
class Started:
    """A run that has a directory, devices and a key."""

    directory: Path
    mesh: Mesh | Literal["auto"]
    key: jax.Array
    log: list[Callable[[dict[str, float], int], Any]]

    @property
    def fit_arguments(self) -> dict[str, Any]:
        """The arguments of `redcoast.fit` that are the same in all experiments."""
        checkpoints = rc.Checkpoints(self.directory)
        return {"mesh": self.mesh, "key": self.key, "checkpoints": checkpoints, "log": self.log}


def start(c: Any, name: str, *, split: Mapping[str, int] | None = None) -> Started:
    """Starts a run of the experiment `name`, whose configuration `c` has a `Run` as `c.run`.

    `split` has options, such as `--num-envs`, that are numbers of rows of sharded arrays.
    """
    try:
        rc.initialize(**vars(c.run.hosts))
        mesh = read_mesh(c.run.mesh)
    except ValueError as error:
        refuse(str(error))
    refuse_uneven(mesh, split or {})
    root = c.run.directory or Path("runs") / name
    directory = run_directory(root, resume=c.run.resume, config=c)
    log: list[Any] = [rc.console_logger()]
    if c.run.wandb:
        log.append(rc.wandb_logger(project=name, config=c))
    if c.run.tensorboard:
        log.append(rc.tensorboard_logger(directory / "tensorboard"))
    return Started(directory, mesh, jax.random.key(c.run.seed), log)


def read_mesh(text: str) -> Mesh | Literal["auto"]:
    """Makes the mesh that `--mesh` describes, of the first devices if it needs fewer than all."""
    if text == "auto":
        return "auto"
    sizes = {"data": -1} | mesh_sizes(text)
    count = math.prod(sizes.values())  # negative if an axis takes the devices that remain
    devices = None
    if 0 < count < jax.device_count() and jax.process_count() == 1:
        devices = jax.devices()[:count]
    return rc.make_mesh(**sizes, devices=devices)


def mesh_of_weights(mesh: Mesh | Literal["auto"]) -> Mesh:
    """The mesh that published weights are loaded to; `fit` moves them if it chooses another."""
    if isinstance(mesh, str):
        return rc.make_mesh(data=1, fsdp=-1)
    return mesh


def refuse_uneven_batch(c: Any) -> None:
    """Refuses a batch that does not divide into microbatches."""
    if c.batch_size % c.accumulate:
        refuse(f"--batch-size {c.batch_size} is not a multiple of --accumulate {c.accumulate}.")


def refuse_uneven(mesh: Mesh | Literal["auto"], split: Mapping[str, int]) -> None:
    """Refuses numbers of rows that the mesh cannot split; a mesh that is chosen later is not
    checked."""
    if isinstance(mesh, str):
        return
    shards = mesh.shape["data"] * mesh.shape["fsdp"]
    for option, rows in split.items():
        if rows % shards:
            refuse(
                f"{option} is {rows}, but --mesh splits it over data x fsdp = {shards} devices. "
                f"Use a multiple of {shards}."
            )


def run_directory(root: Path, *, resume: bool, config: Any) -> Path:
    """Creates a directory named after the time, with the configuration in it; to resume, returns
    the newest one."""
    # Process 0 chooses for all: clocks differ, and shared file systems may not be in sync.
    name = time.strftime("%Y%m%d-%H%M%S")
    if resume:
        name = newest_name(root)
    directory = existing_run(root, broadcast_text(name))
    if config is not None and jax.process_index() == 0:
        try:
            directory.mkdir(parents=True, exist_ok=resume)
        except OSError as error:
            refuse(f"The directory of the run cannot be created: {error}")
        write_options(directory, config)
    return directory


def write_options(directory: Path, config: Any) -> None:
    """Writes the options of a run, also of a resumed one, whose options may have been changed. If
    it then logs and saves nothing, such as because they do not fit its checkpoint, they are what
    they were."""
    file = directory / "config.json"
    if file.exists():
        options_before, results_before = file.read_text("utf-8"), results_of(directory)

        def restore() -> None:
            with contextlib.suppress(OSError):  # the directory may have been removed
                if results_of(directory) == results_before:
                    file.write_text(options_before, "utf-8")

        atexit.register(restore)
    options = {"script": script_of(type(config)).stem, **asdict(config)}
    file.write_text(json.dumps(options, default=str, indent=2), "utf-8")


def results_of(directory: Path) -> tuple[int, set[str]]:
    """The size of a run's metrics in bytes, and the names of its checkpoints."""
    metrics, checkpoints = directory / "metrics.jsonl", directory / "checkpoints"
    logged, saved = 0, set[str]()
    if metrics.exists():
        logged = metrics.stat().st_size
    if checkpoints.exists():
        saved.update(path.name for path in checkpoints.iterdir())
    return logged, saved


def broadcast_text(text: str) -> str:
    """Broadcasts a text from process 0 to all processes."""
    encoded = np.frombuffer(text.encode(), np.uint8)
    room = np.zeros(int(broadcast_one_to_all(np.int32(encoded.size))), np.uint8)
    room[: encoded.size] = encoded[: room.size]
    return bytes(np.asarray(broadcast_one_to_all(room), np.uint8)).decode(errors="replace")


def print_once(text: str, end: str = "\n") -> None:
    """Prints a text from process 0 only."""
    if jax.process_index() == 0:
        print(text, end=end, flush=True)


def exit_if_stopped(steps_done: int, steps: int) -> None:
    """Exits with `EX_TEMPFAIL` if the run was stopped, so that a launcher can start it again."""
    if steps_done < steps:
        print_once(f"To resume: {resume_command()}")
        raise SystemExit(os.EX_TEMPFAIL)


def end_training(run: Started, state: rc.TrainState, steps: int) -> None:
    """Exits if the run was stopped; plots its loss."""
    from _plots import plot_metric  # matplotlib takes a second, and is not needed before

    exit_if_stopped(int(state.step), steps)
    plot_metric(run.directory, "loss")


def report(directory: Path, **figures: float) -> None:
    """Prints the results of a run, and writes them to `results.json` in its directory."""
    if jax.process_index() == 0:
        (directory / "results.json").write_text(json.dumps(figures, indent=2))
        finish(directory, figures)
    for name, figure in figures.items():
        print_once(f"{name.replace('_', ' ').capitalize()}: {figure:.4g}")
    pictures = ", ".join(sorted(path.name for path in directory.glob("*.png")))
    if pictures:
        print_once(f"Pictures: {pictures}")
    print_once(f"Run: {directory}")
    print_once(f"To train further: {resume_command()} --steps N")


def finish(directory: Path, figures: dict[str, float]) -> None:
    """Plots what a run logged, and adds plots and samples to W&B and TensorBoard."""
    # Imported here: matplotlib takes a second, and is not needed before.
    from _plots import plot_run
    from _publish import publish

    if (directory / "metrics.jsonl").exists():
        plot_run(directory)
        publish(directory, figures)


def save_samples(directory: Path, text: str, shown: int = 24) -> None:
    """Writes text to `samples.txt` in the run's directory; prints and draws its first lines."""
    from _plots import draw_text

    first = "\n".join(text.splitlines()[:shown])
    print_once(f"Sample:\n{first}")
    if jax.process_index() == 0:
        (directory / "samples.txt").write_text(text, "utf-8")
        draw_text(directory / "samples.png", first)


def confidence_95(scores: np.ndarray) -> float:
    """Half the width of the 95 % confidence interval of a mean."""
    return 1.96 * float(np.std(scores)) / len(scores) ** 0.5


def make_optimizer(c: Any, examples: int, **adamw: float) -> optax.GradientTransformation:
    """Creates AdamW with gradient clipping and a logged learning-rate schedule."""
    learning_rate = rc.learning_rate_schedule(
        c.learning_rate, examples=examples, batch_size=c.batch_size, steps=c.steps
    )
    adamw_with_rate = optax.inject_hyperparams(optax.adamw)(learning_rate, **adamw)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw_with_rate)
