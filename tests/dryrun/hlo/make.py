"""Writes the HLO that `test_hlo.py` reads, from compilers for hardware that is not there.

    pip install "redcoast[tpu]" && cd tests/dryrun/hlo && python make.py v4 && python make.py v5e
    pip install "redcoast[cuda12]" && python tests/dryrun/hlo/make.py a100

The text is what `compiled.as_text()` returns, less the computations that hold no collective and
count no loop, and less attributes that say nothing about either.
"""

import os
import re
import sys
from functools import partial
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"

sys.path.insert(0, str(Path(__file__).parents[3] / "experiments/benchmarks"))

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from traffic.targets import target_devices

from redcoast.dryrun.hlo import collectives
from redcoast.dryrun.hlo._parse import called, parse_module

AXES = ("data", "fsdp", "model")
ALL = P(AXES)
BATCH = ("data", "fsdp")


def programs(mesh):
    array = lambda shape, *spec, dtype=jnp.float32: jax.ShapeDtypeStruct(
        shape, dtype, sharding=NamedSharding(mesh, P(*spec))
    )
    constrain = lambda x, *spec: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))
    manual = partial(jax.shard_map, mesh=mesh, in_specs=ALL, out_specs=ALL, check_vma=False)

    def scans(x):
        inner = lambda c, _: (jnp.tanh(jax.lax.psum(c, "model")), None)
        outer = lambda c, _: (
            jnp.sin(jax.lax.psum(jax.lax.scan(inner, c, length=3)[0], "data")),
            None,
        )
        return jax.lax.scan(outer, x, length=5)[0]

    def counters(x):
        """From 12 by -2 while positive; from 1 by 3 up to 12; then as long as the data says."""
        body = lambda step, axis: lambda c: (c[0] + step, jnp.tanh(jax.lax.psum(c[1], axis)))
        _, x = jax.lax.while_loop(lambda c: c[0] > 0, body(-2, "data"), (12, x))
        _, x = jax.lax.while_loop(lambda c: c[0] <= 12, body(3, "fsdp"), (1, x))
        _, x = jax.lax.while_loop(lambda c: c[1].sum() < 1, body(1, "model"), (0, x))
        return x

    def exchange(x, packed):
        x = jax.lax.all_to_all(x, ("fsdp", "model"), 0, 1, tiled=True).reshape(x.shape)
        x = jax.lax.ppermute(x, "data", [(0, 1), (1, 0)])
        return x, jax.lax.all_gather(packed, "fsdp", tiled=True)

    def sequence(weights, x):
        """A feed-forward network whose residual stream is split along the sequence."""
        up, down = weights
        x = constrain(x, BATCH, "model")
        hidden = constrain(jnp.tanh(jnp.einsum("bsd,df->bsf", x, up)), BATCH, None, "model")
        x += constrain(jnp.einsum("bsf,fd->bsd", hidden, down), BATCH, "model")
        return jnp.mean(x.astype(jnp.float32) ** 2)

    def layers(weights, x):
        """Six layers, split over `model` for arithmetic and over `fsdp` for storage."""
        layer = lambda x, w: (x + jnp.tanh(x @ w[0]) @ w[1], None)
        return jnp.mean(jax.lax.scan(jax.checkpoint(layer), x, weights)[0] ** 2)

    def windowed(weight, x):
        return jnp.tanh(x @ weight)

    half = partial(array, dtype=jnp.bfloat16)
    stacked = (
        array((6, 256, 512), None, "fsdp", "model"),
        array((6, 512, 256), None, "model", "fsdp"),
    )
    split = (half((4096, 16384), None, "model"), half((16384, 4096), "model", None))
    packed = array((64, 256), AXES, dtype=jnp.int4)
    return {
        "scans": (manual(scans), (array((64, 32), AXES),)),
        "counters": (manual(counters), (array((64, 32), AXES),)),
        "exchange": (manual(exchange), (array((64, 32), AXES), packed)),
        "sequence": (jax.grad(sequence), (split, half((64, 256, 4096), BATCH))),
        "layers": (jax.grad(layers), (stacked, array((64, 256), BATCH))),
        "windowed": (windowed, (half((4096, 16384), AXES), half((16384, 4096), AXES))),
    }


def trimmed(text):
    module = parse_module(text)
    bodies = dict(re.findall(r"^(?:ENTRY )?%([\w.-]+) (\(.*?^\}.*?$)", text, re.M | re.S))
    wanted, waiting = set(), [module.entry]
    while waiting:
        name = waiting.pop()
        wanted.add(name)
        for each in module.computations[name].instructions.values():
            names = called(each, "body", "condition", "branch_computations", "calls", "to_apply")
            waiting += [n for n in names if _matters(each, bodies[n]) and n not in wanted]
    header = re.search(r"^HloModule ([\w.-]+).*\b(num_partitions=\d+)", text)
    assert header is not None
    kept = [f"HloModule {header[1]}, is_scheduled=true, {header[2]}\n"]
    for name in bodies:
        if name in wanted:
            entry = "ENTRY " if name == module.entry else ""
            kept.append(f"{entry}%{name} {_plain(bodies[name], wanted)}\n")
    return "\n".join(kept)


def _matters(caller, body):
    """Whether a computation has to do with collectives, with loops, or with what counts them."""
    if caller.opcode in ("while", "conditional"):
        return True
    counts = re.match(r"\w+\[\]", caller.shape)
    holds = re.search(r" (all-|collective-|reduce-scatter)[a-z-]*\(", body)
    return caller.opcode == "fusion" and bool(counts or holds)


def _plain(body, wanted):
    lines = []
    for line in body.split("\n"):
        trips = re.search(r'"known_trip_count":\{"n":"\d+"\}', line)
        line = re.sub(r", backend_config=\{.*$", "", line)
        line = re.sub(r", sharding=\{[^}]*\}", "", line)
        line = re.sub(r', metadata=\{op_name="([^"]*)"[^}]*\}', r', metadata={op_name="\1"}', line)
        for name in re.findall(r", (?:calls|to_apply)=%([\w.-]+)", line):
            line = line if name in wanted else re.sub(rf", (calls|to_apply)=%{name}\b", "", line)
        lines.append(line + (f", backend_config={{{trips[0]}}}" if trips else ""))
    return "\n".join(lines)


def main(platform):
    devices = np.array(target_devices(platform)).reshape(2, 2, 2)
    mesh = Mesh(devices, AXES, axis_types=(AxisType.Auto,) * 3)
    made = programs(mesh)
    # Of the newer chips' programs only this one differs: they start collectives inside fusions.
    for name in ["layers"] if platform == "v5e" else made:
        fn, args = made[name]
        whole = jax.jit(fn).lower(*args).compile().as_text()
        text = trimmed(whole)
        assert collectives(text, mesh) == collectives(whole, mesh)
        (Path(__file__).parent / f"{platform}_{name}.txt").write_text(text)
        print(platform, name, len(text))


if __name__ == "__main__":
    main(sys.argv[1])
