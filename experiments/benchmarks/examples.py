"""Runs the experiments with several seeds, and writes the table of docs/examples.md.

    python experiments/benchmarks/examples.py --names contrastive
    python experiments/benchmarks/examples.py --names            # only writes the table

Results are kept in `runs/examples/results.json`. Where they are missing or have not all seeds, the
figures that are already in the page stay. The step time is that of `rc.fit` on one device,
divided by that of a hand-written `jax.jit` loop on batches that are already collated: 1 means that
`fit` costs nothing. For loops of their own, it is that of `rc.compile_step`, divided by that of the
same step in `jax.jit`. `--redco` counts the lines of a clone of https://github.com/tanyuqian/redco.
"""

import dataclasses
import importlib
import inspect
import io
import itertools as it
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import tokenize
from pathlib import Path
from typing import Any
from unittest import mock

import equinox as eqx
import jax
import optax
import tyro
from _complete import complete
from _pages import between_marks
from jaxtyping import PyTree

import redcoast as rc

SCRIPTS = Path(__file__).parents[1]
DOCS = Path(__file__).parents[2] / "docs"
sys.path.insert(0, str(SCRIPTS))
REPEATS, WARM_UP, TIMED = 3, 5, 20


@dataclasses.dataclass(frozen=True)
class Example:
    """An experiment, the figure that it is judged by, and what Redco has for the same task."""

    name: str
    figure: str  # a key of its results.json
    threshold: float  # what each seed has to reach
    picture: str  # the file of a run directory that the gallery shows
    # Redco's files for the task, with their numbers of lines and of lines with code.
    redco: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    lower_is_better: bool = False
    plot: str = "loss.png"  # the plot of the training
    curve: str = ""  # the metric that curves.py draws for each seed
    # Discrete actions and hundreds of gradient steps amplify rounding: the meshes are compared in
    # float64 then, with these options.
    double: tuple[str, ...] | None = None
    # PPO, DDPG, the evolution strategy and GRPO were tuned on seeds 0, 1 and 2, so others are
    # reported.
    seeds: tuple[int, ...] = (0, 1, 2)
    fits_before: int = 0  # calls of `rc.fit` before the one whose step is timed

    def reached(self, results: dict[str, float]) -> bool:
        if self.lower_is_better:
            return results[self.figure] <= self.threshold
        return results[self.figure] >= self.threshold


EXAMPLES = (
    Example(
        "image_classification", "accuracy", 0.97, "predictions.png", {"mnist/main.py": (108, 80)}
    ),
    Example(
        "language_modeling",
        "validation_bits_per_byte",
        2,
        "bits_per_byte.png",
        {"language_modeling/main.py": (129, 113)},
        lower_is_better=True,
        plot="bits_per_byte.png",
    ),
    Example(
        "text_classification",
        "accuracy",
        0.5,
        "samples.png",
        {"classification_regression/main.py": (179, 154)},
    ),
    Example("text_to_text", "chrf", 70, "samples.png", {"text_to_text/main.py": (196, 170)}),
    Example(
        "image_to_text", "exact_match", 0.12, "captions.png", {"image_to_text/main.py": (206, 179)}
    ),
    Example("text_to_image", "accuracy", 0.9, "samples.png", {"text_to_image/main.py": (269, 238)}),
    Example("contrastive", "image_to_text_recall_at_1", 0.4, "nearest_names.png"),
    Example(
        "differential_privacy",
        "accuracy",
        0.87,
        "accuracy_by_epsilon.png",
        {
            "differential_private_training/main.py": (126, 95),
            "differential_private_training/dp_utils.py": (88, 70),
        },
    ),
    Example("distillation", "gain", 0.05, "teacher.png", fits_before=1),  # of the teacher
    Example(
        "ppo",
        "mean_return",
        475,
        "return.png",
        {
            "reinforcement_learning/ppo_main.py": (82, 56),
            "reinforcement_learning/ppo_agent.py": (170, 128),
            "reinforcement_learning/ppo_pipeline.py": (63, 34),
        },
        plot="return.png",
        curve="return",
        double=("--on-device", "--rollout", "64", "--minibatches", "4"),
        seeds=(3, 4, 5),
    ),
    Example(
        "ddpg",
        "mean_return",
        -250,
        "return.png",
        {
            "reinforcement_learning/ddpg_main.py": (85, 59),
            "reinforcement_learning/ddpg_agent.py": (159, 122),
            "reinforcement_learning/ddpg_pipeline.py": (94, 59),
        },
        plot="return.png",
        curve="return",
        double=("--on-device", "--gradient-steps", "8"),
        seeds=(3, 4, 5),
    ),
    Example(
        "maddpg",
        "gain",
        0,
        "returns.png",
        plot="returns.png",
        curve="return",
        double=("--gradient-steps", "5"),
    ),
    Example(
        "evolution",
        "mean_return",
        475,
        "return.png",
        plot="return.png",
        curve="return",
        seeds=(3, 4, 5),
    ),
    Example(
        "maml",
        "after_5_steps",
        0.4,
        "scores.png",
        {"meta_learning/main.py": (198, 161)},
        lower_is_better=True,
        curve="eval/after_5_steps",
    ),
    Example(
        "federated",
        "accuracy",
        0.9,
        "accuracy.png",
        {
            "faderated_learning/main.py": (157, 119),
            "faderated_learning/data_utils.py": (140, 67),
            "faderated_learning/model_utils.py": (56, 30),
        },
        curve="eval/accuracy",
    ),
    Example("preferences", "preferred", 0.9, "preferred.png", fits_before=1),  # of imitation
    Example(
        "grpo",
        "accuracy",
        0.9,
        "reward.png",
        plot="reward.png",
        curve="reward",
        double=("--imitation-steps", "50"),
        fits_before=1,
        seeds=(3, 4, 5),
    ),
    Example(
        "distill_on_policy",
        "accuracy",
        0.9,
        "loss.png",
        curve="reward",
        double=("--imitation-steps", "50", "--teacher-steps", "50"),
        fits_before=2,
    ),
)


def example_of(name: str) -> Example:
    (example,) = (example for example in EXAMPLES if example.name == name)
    return example


def count_lines(text: str) -> tuple[int, int]:
    """The number of lines, and of those with code: neither empty, nor comment, nor docstring."""
    ignored = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    code: set[int] = set()
    statement: list[tokenize.TokenInfo] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.NEWLINE, tokenize.ENDMARKER):
            if [x.type for x in statement] != [tokenize.STRING]:  # which is a docstring
                for x in statement:
                    code.update(range(x.start[0], x.end[0] + 1))
            statement = []
        elif token.type not in ignored:
            statement.append(token)
    return text.count("\n"), len(code)


def run(name: str, seed: int, directory: Path, *options: str) -> dict[str, float]:
    """Runs an experiment in a process of its own; returns its results and how long it took."""
    script = str(SCRIPTS / f"{name}.py")
    command = [sys.executable, script, "--directory", str(directory), "--seed", str(seed), *options]
    begin, before = time.perf_counter(), os.times()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    used = os.times()
    (results,) = directory.glob("*/results.json")
    processor = sum(used[2:4]) - sum(before[2:4])
    spent = {"minutes": (time.perf_counter() - begin) / 60, "processor_minutes": processor / 60}
    return json.loads(results.read_text()) | spent


def step_time_ratio(name: str) -> float:
    """The time of a step of `rc.fit`, divided by that of a hand-written loop; the median of a few
    turns, in which both take turns."""
    arguments = loop_arguments(name)
    ours, theirs = (time_of_fit, time_of_loop)
    if "step" in arguments:  # a loop of its own
        ours, theirs = (time_of_compiled_step, time_of_jitted_step)
    return statistics.median(ours(arguments) / theirs(arguments) for _ in range(REPEATS))


def loop_arguments(name: str) -> dict[str, Any]:
    """The arguments with which an experiment calls `rc.fit` or `run_learner`."""
    fit, before = rc.fit, it.count(-example_of(name).fits_before)

    class Called(BaseException):
        pass

    def record(model, optimizer, examples, **arguments):
        if next(before) < 0:
            return fit(model, optimizer, examples, **arguments)
        raise Called({"model": model, "optimizer": optimizer, "examples": examples} | arguments)

    def record_learner(c, run, step, state, shardings, *, plan, collect=lambda *_: ()):
        raise Called({"step": step, "state": state, "shardings": shardings, "collect": collect})

    module = importlib.import_module(name)
    with tempfile.TemporaryDirectory() as directory, mock.patch.object(rc, "fit", record):
        learner = mock.patch.object(module, "run_learner", record_learner, create=True)
        try:
            with learner:
                module.main(tyro.cli(module.Config, args=["--mesh", "1", "--directory", directory]))
        except Called as called:
            return called.args[0]
    raise SystemExit(f"{name} called neither `rc.fit` nor `run_learner`.")


def time_of_fit(arguments: dict[str, Any]) -> float:
    """Seconds of a step of `fit`, without evaluation and checkpoints."""
    times: list[float] = []
    log = [rc.progress_logger(False), lambda metrics, step: times.append(time.perf_counter())]
    changed = {"evaluation": None, "checkpoints": None, "log": log, "steps": WARM_UP + TIMED}
    arguments = arguments | changed
    essential = [arguments.pop(name) for name in ("model", "optimizer", "examples")]
    complete(rc.fit(*essential, **arguments), WARM_UP + TIMED)
    return (times[-1] - times[WARM_UP - 1]) / TIMED


def time_of_loop(arguments: dict[str, Any]) -> float:
    """Seconds of a step of a hand-written loop over batches that are already collated."""
    batches = collated(arguments)
    model, optimizer, key = arguments["model"], arguments["optimizer"], arguments["key"]
    if inspect.isfunction(model):
        model = model(key)
    chosen = eqx.filter(model, arguments.get("trainable", eqx.is_inexact_array))
    is_trained = lambda x: eqx.is_inexact_array(x) and any(x is y for y in jax.tree.leaves(chosen))
    trainable, frozen = eqx.partition(model, is_trained)
    opt_state = optimizer.init(trainable)

    def loss_of(trainable: PyTree, frozen: PyTree, batch: PyTree, key: jax.Array) -> PyTree:
        result = arguments["loss_fn"](eqx.combine(trainable, frozen), batch, key)
        if isinstance(result, tuple):
            return result[0]
        return result

    @eqx.filter_jit(donate="all-except-first")
    def step(constant: PyTree, trainable: PyTree, opt_state: PyTree) -> PyTree:
        value, gradient = eqx.filter_value_and_grad(loss_of)(trainable, *constant)
        updates, opt_state = optimizer.update(gradient, opt_state, trainable)
        return optax.apply_updates(trainable, updates), opt_state, value

    begin = 0.0
    trainable = copied(trainable)
    for i in range(WARM_UP + TIMED):
        constant = (frozen, batches[i % len(batches)], jax.random.fold_in(key, i))
        trainable, opt_state, value = step(constant, trainable, opt_state)
        if i + 1 == WARM_UP:
            jax.block_until_ready(value)
            begin = time.perf_counter()
    jax.block_until_ready(trainable)
    return (time.perf_counter() - begin) / TIMED


def time_of_compiled_step(arguments: dict[str, Any]) -> float:
    """Seconds of a step of a learner's own loop, with its metrics read, on the same inputs."""
    step = rc.compile_step(arguments["step"], arguments["shardings"])
    with rc.metrics_reader(False) as reader:
        return time_of_steps(step, arguments, lambda i, metrics: reader.push(i + 1, metrics))


def time_of_jitted_step(arguments: dict[str, Any]) -> float:
    """The same with `jax.jit` alone."""
    step = eqx.filter_jit(arguments["step"], donate="all")
    return time_of_steps(step, arguments, lambda i, metrics: None)


def time_of_steps(step: Any, arguments: dict[str, Any], log: Any) -> float:
    state = copied(arguments["state"])
    inputs = arguments["collect"](state, 1)
    begin = 0.0
    for i in range(WARM_UP + TIMED):
        state, metrics = step(state, *inputs)
        log(i, metrics)
        if i + 1 == WARM_UP:
            jax.block_until_ready(metrics)
            begin = time.perf_counter()
    jax.block_until_ready(state)
    return (time.perf_counter() - begin) / TIMED


def copied(state: PyTree) -> PyTree:
    """Copies the arrays of a state, which a step donates."""
    arrays, static = eqx.partition(state, eqx.is_array)
    return eqx.combine(jax.tree.map(lambda x: x.copy(), arrays), static)


def collated(arguments: dict[str, Any]) -> list[Any]:
    """The first batches of the run, on the device."""
    data = rc.batches(
        arguments["examples"],
        arguments.get("collate_fn"),
        batch_size=arguments["batch_size"],
        mesh=arguments["mesh"],
        key=arguments["key"],
        steps=WARM_UP + TIMED,
    )
    return [batch.arrays for batch in data]


def table(results: dict[str, Any], page: str) -> str:
    """The results as a Markdown table; rows without new figures keep those of the page."""
    head = ["experiment", "lines", "Redco", "threshold", "three seeds", "minutes", "step time"]
    rows = [head, ["---"] + ["---:"] * (len(head) - 1)]
    old = {name: row.split("|") for row, name in re.findall(r"^\|( \[`(\w+)\.py`\].*)", page, re.M)}
    for example in EXAMPLES:
        old_figures = [cell.strip() for cell in old.get(example.name, [""] * 7)[4:7]]
        rows.append(table_row(example, results.get(example.name, {}), old_figures))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def table_row(example: Example, measured: dict[str, Any], old_figures: list[str]) -> list[str]:
    lines = count_lines((SCRIPTS / f"{example.name}.py").read_text("utf-8"))
    redco = ""
    if example.redco:
        redco = "{} ({})".format(*map(sum, zip(*example.redco.values(), strict=True)))
    sign = "≥"
    if example.lower_is_better:
        sign = "≤"
    return [
        f"[`{example.name}.py`](#{example.name.replace('_', '-')})",
        "{} ({})".format(*lines),
        redco,
        f"{example.figure.replace('_', ' ')} {sign} {example.threshold:g}",
        *table_figures(example, measured, old_figures),
    ]


def table_figures(example: Example, measured: dict[str, Any], old: list[str]) -> list[str]:
    """The figure of each seed, the minutes and the step time; the old ones where not measured."""
    of_seeds, minutes, step = old
    seeds = [measured.get("seeds", {}).get(str(seed), {}) for seed in example.seeds]
    if all(example.figure in run for run in seeds):
        of_seeds = ", ".join(f"{run[example.figure]:.3g}" for run in seeds)
        minutes = f"{statistics.median(run['processor_minutes'] for run in seeds):.1f}"
    if "step" in measured:
        step = f"{measured['step']:.2f}"
    return [of_seeds, minutes, step]


def check_redco(clone: Path) -> None:
    """Exits if Redco's files in a clone do not have the numbers of lines that are recorded."""
    for example in EXAMPLES:
        for file, recorded in example.redco.items():
            counted = count_lines((clone / "examples" / file).read_text("utf-8"))
            print(f"{file}: {counted[0]} lines, {counted[1]} with code")
            if counted != recorded:
                raise SystemExit(f"Recorded are {recorded}. Correct {__file__}.")


def measure(name: str, seeds: tuple[int, ...] | None, out: Path, results: dict[str, Any]) -> None:
    """Adds the results of an experiment, and copies the picture of the first seed to the docs."""
    example = example_of(name)
    cell = results.setdefault(name, {"seeds": {}})
    if seeds is None:
        seeds = example.seeds
    for seed in seeds:
        directory = out / name / str(seed)
        shutil.rmtree(directory, ignore_errors=True)
        figures = run(name, seed, directory)
        cell["seeds"][str(seed)] = figures
        print(f"{name}, seed {seed}: {figures}", flush=True)
        if seed == example.seeds[0] and example.picture.endswith(".png"):
            (picture,) = directory.glob(f"*/{example.picture}")
            shutil.copy(picture, DOCS / "images" / f"{name}.png")


def main(
    names: list[str] | None = None,
    seeds: tuple[int, ...] | None = None,
    step_times: bool = True,
    out: Path = Path("runs/examples"),
    redco: Path | None = None,
) -> None:
    """Measures experiments, and writes the table of docs/examples.md.

    Args:
        names: The experiments to run; by default all.
        seeds: The seeds to run them with; by default those of the table.
        step_times: Also compare the time of a step with a hand-written loop.
        out: Directory for the runs and their results.
        redco: A clone of Redco, whose lines are counted.
    """
    if redco is not None:
        check_redco(redco)
    out.mkdir(parents=True, exist_ok=True)
    file = out / "results.json"
    results = {}
    if file.exists():
        results = json.loads(file.read_text())
    if names is None:
        names = [example.name for example in EXAMPLES]
    for name in names:
        measure(name, seeds, out, results)
        if step_times:
            results[name]["step"] = step_time_ratio(name)
        file.write_text(json.dumps(results, indent=1))
    page = DOCS / "examples.md"
    text = page.read_text("utf-8")
    page.write_text(between_marks(text, "table", table(results, text)), "utf-8")


if __name__ == "__main__":
    tyro.cli(main)
