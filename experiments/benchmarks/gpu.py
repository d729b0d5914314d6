"""Training, generation and memory on one GPU, compared with what the card could do.

    pip install "redcoast[experiments,cuda12]" && python experiments/benchmarks/gpu.py

Takes less than ten minutes and needs no network: the weights and the tokens are random. It prints
one table and writes a JSON. The model is a LLaMA with the sizes of TinyLlama, 1.1 billion
parameters, which are kept in float32 and computed in bfloat16. The least rematerialisation with
which the dry run says that the step fits is used.

- MFU: model operations per second, 6 for each parameter (without the embedding) and token, and
  `12 * layers * width * length` for attention (Chowdhery et al., 2022, appendix B), divided by the
  published peak rate.
- Time of a step: the dry run's estimate from the schedule of the compiled program, for the whole
  step, by kind of kernel, and for the kernels that take longest. A profile of three steps has the
  measured times of the kernels.
- Equal bits: the parameters of two layers after two runs of one program.
- Limit of generation: the bytes of the weights and of the cache, which each new token reads,
  divided by the bandwidth of a copy on this card.

A part that fails is reported, and the others go on. `--size tiny` runs in seconds on a CPU.
"""

import contextlib
import functools as ft
import json
import math
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from _complete import complete
from bandwidth import bytes_read, copy_bandwidth, parameters, seconds_of
from loop import Case, hand_written, make_examples, with_fit
from real_peak import target_of

import redcoast as rc
from redcoast import losses
from redcoast.dryrun._efficiencies import efficiencies_of
from redcoast.dryrun._step_time import AttainedRates, estimate_step_time, kernel_seconds
from redcoast.dryrun.hlo._events import Event, Loop, read_schedule
from redcoast.dryrun.hlo._kernels import KernelWork
from redcoast.models import Llama, LlamaConfig, _attention

sys.path.append(str(Path(__file__).parents[1]))
from _cells import markdown
from jaxtyping import PyTree

WARM_UP = 3
OPTIMIZER = optax.adamw(1e-4)
REMATS = ("none", "dots", "full")
PARTS = (
    "dry run",
    "training, cuDNN attention",
    "training, attention without cuDNN",
    "memory",
    "a bare loop",
    "the loop",
    "kernels",
    "generation",
    "equal bits",
    "training in float8",
)
Row = dict[str, Any]


@dataclass(frozen=True)
class Size:
    model: LlamaConfig
    batch: int  # sequences in a training step
    seq: int  # tokens in a sequence
    prompt: int  # tokens in a prompt
    new: tuple[int, int]  # the numbers of new tokens whose times are subtracted
    batches: tuple[int, ...]  # batch sizes of generation
    copied: int  # bytes of the array that is copied
    steps: int  # of the small network that measures the overhead of the loop


SIZES = {
    "1b": Size(
        LlamaConfig(vocab=32000, width=2048, layers=22, heads=32, kv_heads=4, hidden=5632),
        batch=8,
        seq=2048,
        prompt=128,
        new=(16, 256),
        batches=(1, 8, 64),
        copied=2**30,
        steps=1000,
    ),
    "tiny": Size(
        LlamaConfig(vocab=64, width=32, layers=2, heads=2, kv_heads=1, hidden=64),
        batch=2,
        seq=16,
        prompt=8,
        new=(1, 16),
        batches=(1, 2),
        copied=2**20,
        steps=20,
    ),
}


@dataclass(frozen=True)
class Config:
    size: Literal["1b", "tiny"] = "1b"
    batch: int | None = None  # sequences in a training step, if not the usual number
    steps: int = 20  # measured training steps
    target: str | None = None  # the card as a dry run calls it, such as h100:1; by default its name
    seconds: int = 400  # no part begins later than this
    only: tuple[str, ...] = ()  # the parts to measure; by default all
    peaks: Path | None = None  # the output of --foretell, if the dry runs have been done already
    out: Path = Path("runs/gpu")
    foretell: bool = False  # only print the foretold memory as JSON; for the child process


def main(c: Config) -> list[Row]:
    """Measures all parts, prints a table and writes a JSON."""
    unknown = [name for name in c.only if name not in PARTS]
    if unknown:
        parts = ", ".join(map(repr, PARTS))
        raise SystemExit(f"No part is named {unknown[0]!r}. The parts are {parts}.")
    size = SIZES[c.size] if c.batch is None else replace(SIZES[c.size], batch=c.batch)
    device = jax.devices()[0]
    target = c.target or ("cpu:1" if device.platform == "cpu" else target_of(device.device_kind))
    if c.foretell:
        print(json.dumps(foretold(size, target)))
        return []
    # Another platform has no kernel, so it has nothing to compare.
    kernels = (True, False) if device.platform == "gpu" else (False,)
    report: dict[str, Any] = {"device": device.device_kind, "target": target, "size": asdict(size)}
    report |= {"versions": versions(), "rows": [], "failed": {}, "seconds": 0.0}
    chip, begin = rc.CHIPS[target.partition(":")[0]], time.perf_counter()

    def part(name: str, measure: Callable[[], list[Row]]) -> None:
        if c.only and name not in c.only:
            return
        if time.perf_counter() - begin > c.seconds:
            report["failed"][name] = f"not begun within {c.seconds} s"
            return
        print(f"{time.perf_counter() - begin:.0f} s: {name}", file=sys.stderr)
        try:
            report["rows"] += measure()
        except Exception:
            report["failed"][name] = traceback.format_exc()
        report["seconds"] = time.perf_counter() - begin
        write(c.out, report)

    peaks: dict[str, int] = {}
    if c.peaks is None:
        part("dry run", lambda: peaks.update(foretell(c, size, target)) or [])
    else:
        peaks.update(json.loads(c.peaks.read_text()))
    # The first part that trains, because a device reports the peak of the whole process.
    for kernel in kernels:
        name = "cuDNN attention" if kernel else "attention without cuDNN"
        remat = least_remat(peaks, kernel, chip.usable)
        train = ft.partial(train_rows, size, c.steps, chip, kernel, remat, name)
        part(f"training, {name}", train)
        if kernel == kernels[0]:
            part("memory", ft.partial(memory_rows, device, peaks, kernel, remat))
            part("a bare loop", ft.partial(bare_rows, size, c.steps, chip, kernel, remat, name))
            part("the loop", lambda: loop_rows(size))
            part("kernels", ft.partial(kernel_rows, size, chip, kernel, remat))
            part("generation", lambda: generation_rows(size))
            part("equal bits", lambda: bits_rows(size))
            if kernel:
                float8 = ft.partial(train_rows, size, c.steps, chip, kernel, remat, "float8")
                part("training in float8", ft.partial(float8, low_precision="float8"))
    print(show(report))
    return report["rows"]


def row(what: str, measured: float, unit: str, reference: float | None = None, of: str = "") -> Row:
    ratio = measured / reference if reference else None
    names = {"what": what, "measured": measured, "unit": unit}
    return names | {"compared with": of, "reference": reference, "ratio": ratio}


# Training


def init_fn(config: LlamaConfig, remat: Any) -> Callable[[Any], Llama]:
    return lambda key: Llama(replace(config, remat=remat), key=key)


def make_loss() -> Callable[..., Any]:
    """A loss function of its own for each variant, for which nothing is compiled yet."""

    def loss_fn(model: Llama, tokens: jax.Array, key: jax.Array) -> jax.Array:
        return losses.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])

    return loss_fn


@contextlib.contextmanager
def attention(kernel: bool) -> Iterator[None]:
    """Attention with cuDNN's kernel, where the device has it, or without."""
    has_kernel = _attention._has_kernel
    chosen = lambda *qkv: kernel and has_kernel(*qkv)
    with mock.patch.object(_attention, "_has_kernel", chosen):
        yield


def foretold(size: Size, target: str) -> dict[str, int]:
    """The peak memory of a step by a dry run, for each kind of attention, with the least
    rematerialisation that fits, or the most."""
    batch = jax.ShapeDtypeStruct((size.batch, size.seq + 1), jnp.int32)
    options: dict[str, Any] = {"target": target, "compute_dtype": jnp.bfloat16, "suggest": False}
    peaks = {}
    for kernel in (True, False) if rc.CHIPS[target.partition(":")[0]].kind == "gpu" else (False,):
        for remat in REMATS:
            with attention(kernel):
                make = init_fn(size.model, remat)
                run = rc.dry_run(make, make_loss(), batch, OPTIMIZER, **options)
            peaks[f"{kernel} {remat}"] = run.memory["peak"]
            if run.fits:
                break
    return peaks


def foretell(c: Config, size: Size, target: str) -> dict[str, int]:
    """`foretold`, in a process that leaves the card alone."""
    if target.startswith("cpu"):
        return foretold(size, target)
    command = [sys.executable, __file__, "--foretell", "--size", c.size, "--target", target]
    command += ["--batch", str(size.batch)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    result = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(result.stdout.splitlines()[-1])


def least_remat(peaks: dict[str, int], kernel: bool, usable: int) -> str:
    fits = [remat for remat in REMATS if peaks.get(f"{kernel} {remat}", usable + 1) <= usable]
    return fits[0] if fits else REMATS[-1]


def tokens_of(size: Size, steps: int) -> np.ndarray:
    """Synthetic sequences for so many steps."""
    shape = (steps * size.batch, size.seq + 1)
    return np.random.default_rng(0).integers(0, size.model.vocab, shape, np.int32)


def train_rows(
    size: Size,
    steps: int,
    chip: rc.Chip,
    kernel: bool,
    remat: str,
    name: str,
    *,
    low_precision: Literal["float8"] | None = None,
) -> list[Row]:
    """Training with `fit`, and the time until its first step is done."""
    times: list[float] = []
    loss_fn = make_loss()
    if low_precision is not None:
        loss_fn = rc.low_precision(loss_fn, low_precision, exclude=["embed", "head"])
    with attention(kernel):
        begin = time.perf_counter()
        state = rc.fit(
            init_fn(size.model, remat),
            OPTIMIZER,
            tokens_of(size, steps + WARM_UP),
            collate_fn=np.stack,
            loss_fn=loss_fn,
            batch_size=size.batch,
            steps=steps + WARM_UP,
            mesh=rc.make_mesh(devices=jax.devices()[:1]),
            compute_dtype=jnp.bfloat16,
            log=[rc.progress_logger(False), lambda *_: times.append(time.perf_counter())],
        )
    complete(state, steps + WARM_UP)
    seconds = (times[-1] - times[WARM_UP - 1]) / steps
    what = f"fit, {name}, remat {remat}"
    first = row(f"time to the first step, {what}", times[0] - begin, "s")
    return [*speed_rows(what, size, seconds, chip), first]


def bare_rows(size: Size, steps: int, chip: rc.Chip, kernel: bool, remat: str, name: str):
    """The same training in a loop of `jax.jit` and optax."""
    batches = tokens_of(size, steps + WARM_UP).reshape(-1, size.batch, size.seq + 1)
    begin, loss = 0.0, None
    with attention(kernel):
        model = jax.jit(init_fn(size.model, remat))(jax.random.key(0))
        opt_state, step = OPTIMIZER.init(model), bare_step()
        for i, tokens in enumerate(batches):
            model, opt_state, loss = step(model, opt_state, tokens)
            if i + 1 == WARM_UP:
                jax.block_until_ready(loss)
                begin = time.perf_counter()
        jax.block_until_ready(loss)
    seconds = (time.perf_counter() - begin) / steps
    return speed_rows(f"bare jit, {name}, remat {remat}", size, seconds, chip)


def bare_step() -> PyTree:
    """A training step without redcoast: no plan, no guard, no metrics."""
    loss_fn = make_loss()

    def step(model: PyTree, opt_state: PyTree, tokens: jax.Array) -> PyTree:
        def loss(model: PyTree) -> jax.Array:
            return loss_fn(jax.tree.map(lambda x: x.astype(jnp.bfloat16), model), tokens, None)

        value, grads = jax.value_and_grad(loss)(model)
        with jax.numpy_dtype_promotion("standard"):
            updates, opt_state = OPTIMIZER.update(grads, opt_state, model)
        return optax.apply_updates(model, updates), opt_state, value

    return jax.jit(step, donate_argnums=(0, 1))


def speed_rows(what: str, size: Size, seconds: float, chip: rc.Chip) -> list[Row]:
    tokens = size.batch * size.seq
    rate = model_flops(size.model, size.seq) * tokens / seconds
    peak = chip.flops["bfloat16"] / 1e12
    return [
        row(what, tokens / seconds, "tokens/s"),
        row(f"MFU, {what}", rate / 1e12, "TFLOP/s", peak, "peak rate"),
    ]


def model_flops(config: LlamaConfig, seq: int) -> int:
    """Operations for each token of a training step, without rematerialisation."""
    attention = 12 * config.layers * config.heads * config.head_dim * seq
    return 6 * (parameters(abstract(config)) - config.vocab * config.width) + attention


def abstract(config: LlamaConfig) -> PyTree:
    return eqx.filter_eval_shape(init_fn(config, "none"), jax.random.key(0))


def memory_rows(device: Any, peaks: dict[str, int], kernel: bool, remat: str) -> list[Row]:
    """The peak that the card reports after the first training, against the dry run's."""
    stats = device.memory_stats() or {}
    if "peak_bytes_in_use" not in stats or f"{kernel} {remat}" not in peaks:
        return []
    foretold = peaks[f"{kernel} {remat}"] / 2**30
    return [row("peak memory", stats["peak_bytes_in_use"] / 2**30, "GiB", foretold, "dry run")]


# Kernels

PROFILED = 3  # steps
LONGEST = 10  # kernels with a row of their own


def kernel_rows(size: Size, chip: rc.Chip, kernel: bool, remat: str) -> list[Row]:
    """The time of a step and of its kernels in a profile, against the estimates of a dry run."""
    tokens = tokens_of(size, 1)
    with attention(kernel):
        model = jax.jit(init_fn(size.model, remat))(jax.random.key(0))
        opt_state, step = OPTIMIZER.init(model), bare_step()
        lowered = step.lower(model, opt_state, tokens)
        # A profile does not name the kernels of a CUDA graph.
        options = {}
        if jax.devices()[0].platform == "gpu":
            options["xla_gpu_enable_command_buffer"] = ""
        compiled = lowered.compile(compiler_options=options)
    events = read_schedule(compiled.as_text(), {"data": 1})
    estimate = estimate_step_time(events, chip=chip, bandwidths={"data": 1.0})
    rates = AttainedRates(chip, {"data": 1.0}, efficiencies_of(chip))
    foretold: dict[str, float] = {}
    for name, seconds in kernel_times(events, rates):
        foretold[name] = foretold.get(name, 0.0) + seconds
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(WARM_UP):
            model, opt_state, _ = compiled(model, opt_state, tokens)
        jax.block_until_ready(model)
        jax.profiler.start_trace(folder)
        begin = time.perf_counter()
        for _ in range(PROFILED):
            model, opt_state, _ = compiled(model, opt_state, tokens)
        jax.block_until_ready(model)
        elapsed = (time.perf_counter() - begin) / PROFILED
        jax.profiler.stop_trace()
        measured = profiled_times(Path(folder), set(foretold))
    rows = [row(f"a step, remat {remat}", 1e3 * elapsed, "ms", 1e3 * estimate.seconds, "dry run")]
    if not measured:
        rows[0]["what"] += "; the profile names no kernel of the program"
        return rows
    kinds: dict[str, set[str]] = {}
    for each in kernels_of(events):
        kinds.setdefault(each.kind, set()).add(each.name)
    for kind, names in kinds.items():
        sums = [1e3 * sum(times.get(x, 0.0) for x in names) for times in (measured, foretold)]
        rows.append(row(f"kernels of a step: {kind}", sums[0], "ms", sums[1], "dry run"))
    longest = sorted(measured, key=lambda name: -measured[name])[:LONGEST]
    for name in longest:
        rows.append(row(name, 1e3 * measured[name], "ms", 1e3 * foretold[name], "dry run"))
    return rows


def kernel_times(
    events: Sequence[Event], rates: AttainedRates, times: int = 1
) -> Iterator[tuple[str, float]]:
    """The name and the estimated time of each kernel, as often as it runs in a step."""
    for event in events:
        if isinstance(event, KernelWork):
            yield event.name, times * kernel_seconds(event, rates)
        elif isinstance(event, Loop):
            yield from kernel_times(event.events, rates, times * event.times)


def kernels_of(events: Sequence[Event]) -> Iterator[KernelWork]:
    for event in events:
        if isinstance(event, KernelWork):
            yield event
        elif isinstance(event, Loop):
            yield from kernels_of(event.events)


def profiled_times(folder: Path, names: set[str]) -> dict[str, float]:
    """The seconds of each kernel in a step, from a profile. Kernels of a device have a line of
    their own on a GPU; on a CPU, their events are named for them."""
    times: dict[str, float] = {}
    for path in folder.rglob("*.xplane.pb"):
        profile = jax.profiler.ProfileData.from_file(str(path))
        on_device = [plane for plane in profile.planes if plane.name.startswith("/device:")]
        for plane in on_device or profile.planes:
            for line in plane.lines:
                for event in line.events:
                    name = event.name
                    if on_device:
                        name = str(dict(event.stats).get("hlo_op", ""))
                    if name in names:
                        times[name] = times.get(name, 0.0) + event.duration_ns / 1e9 / PROFILED
    return times


# Generation


def generation_rows(size: Size) -> list[Row]:
    """New tokens per second in bfloat16, without the prompt, against the bandwidth's limit."""
    bandwidth = copy_bandwidth(size.copied)
    rows = [row("bandwidth of a copy", bandwidth / 1e9, "GB/s")]
    half = lambda key: jax.tree.map(lambda x: x.astype(jnp.bfloat16), Llama(size.model, key=key))
    model = jax.jit(half)(jax.random.key(0))
    for batch in size.batches:
        tokens = tokens_of(replace(size, batch=batch, seq=size.prompt - 1), 1)
        few, many = (generation_seconds(model, tokens, new) for new in size.new)
        per_token = (many - few) / (size.new[1] - size.new[0])
        length = size.prompt + sum(size.new) // 2
        limit = bandwidth / bytes_read(model, batch=batch, length=length)
        speeds = (batch / per_token, "tokens/s", batch * limit, "bandwidth")
        rows.append(row(f"generation, batch {batch}", *speeds))
    return rows


def generation_seconds(model: PyTree, tokens: np.ndarray, new: int, rounds: int = 5) -> float:
    run = ft.partial(rc.generate, model, tokens, max_new_tokens=new, eos=())
    return seconds_of(lambda: np.asarray(run()), rounds)


# The loop


def loop_rows(size: Size) -> list[Row]:
    """The time between the steps of a network that takes the card no time."""
    case = Case("small MLP", width=64, depth=1, batch_size=32, steps=size.steps, target=0.0)
    model = eqx.nn.MLP(32, 10, case.width, case.depth, key=jax.random.key(0))
    examples = make_examples(2000)
    with jax.numpy_dtype_promotion("standard"):  # optax promotes
        by_hand = hand_written(model, examples, case, time.perf_counter)
        fit = with_fit(model, examples, case, time.perf_counter)
    return [row("fit, 32-64-10 MLP", 1e3 * fit, "ms/step", 1e3 * by_hand, "bare jit")]


# Two runs of one program

DETERMINISTIC = {"xla_gpu_exclude_nondeterministic_ops": True}


def bits_rows(size: Size) -> list[Row]:
    """The arrays with equal bits after two runs, by default, and with XLA's option to exclude
    nondeterministic operations."""
    config = replace(size.model, layers=2)
    rows = []
    for dtype in (jnp.float32, jnp.bfloat16):
        for what, options in (("by default", None), ("with the option", DETERMINISTIC)):
            name = f"equal arrays after two runs in {dtype.__name__}, {what}"
            try:
                first, second = (trained_arrays(config, dtype, options) for _ in range(2))
            except Exception as error:
                print(f"{name}: {error}", file=sys.stderr)
                rows.append(row(f"{name}: {type(error).__name__}", math.nan, "arrays"))
                continue
            equal = sum(np.array_equal(x, y) for x, y in zip(first, second, strict=True))
            rows.append(row(name, float(equal), "arrays", float(len(first)), "all"))
    return rows


def trained_arrays(
    config: LlamaConfig, dtype: Any, options: dict[str, bool] | None
) -> list[np.ndarray]:
    """The parameters of a small LLaMA after four steps."""
    tokens = np.random.default_rng(0).integers(0, config.vocab, (32, 129), np.int32)
    state = rc.fit(
        init_fn(config, "none"),
        OPTIMIZER,
        tokens,
        collate_fn=np.stack,
        loss_fn=make_loss(),
        batch_size=8,
        steps=4,
        mesh=rc.make_mesh(devices=jax.devices()[:1]),
        compute_dtype=dtype,
        compiler_options=options,
        log=rc.progress_logger(False),
    )
    complete(state, 4)
    return [np.asarray(x) for x in jax.tree.leaves(state.model)]


# Results


def versions() -> dict[str, str]:
    return {"jax": jax.__version__, "equinox": eqx.__version__, "optax": optax.__version__}


def write(out: Path, report: dict[str, Any]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "gpu.json").write_text(json.dumps(report, indent=1, default=str))


def show(report: dict[str, Any]) -> str:
    """The table, and what failed."""
    keys = ("measured", "unit", "compared with", "reference", "ratio")
    body = [[r["what"], *(_shown(r[key]) for key in keys)] for r in report["rows"]]
    size = report["size"]
    about = f"{report['device']}; {size['batch']} x {size['seq']:,} tokens; {report['versions']}"
    failed = [f"{name} failed: {why}" for name, why in report["failed"].items()]
    return "\n".join(
        [about, f"{report['seconds']:.0f} s", "", markdown(["", *keys], body), *failed]
    )


def _shown(x: float | str | None) -> str:
    return "" if x is None else x if isinstance(x, str) else f"{x:,.4g}"


if __name__ == "__main__":
    # JAX reserves three quarters of the memory unless told otherwise.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", ".95")
    main(tyro.cli(Config, description=__doc__))
