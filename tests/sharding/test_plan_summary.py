"""The summary that `print(plan)` shows, and the report as data."""

import json
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P
from sharding_helpers import Transformer, array, mesh_of, stock, train_state

import redcoast as rc


def mlp(width=64, hidden=256):
    return {"down": array(hidden, width), "up": array(width, hidden)}


def loss_fn(model, batch, key):
    return jnp.mean((batch + jax.nn.relu(batch @ model["up"]) @ model["down"]) ** 2)


def plan_of(sizes, batch=512, model=None, **options):
    model = mlp() if model is None else model
    args = (array(batch, 64), None)
    return rc.plan_shardings(model, mesh_of(*sizes), fn=loss_fn, args=args, **options)


def lines_of(plan):
    lines = str(plan).splitlines()
    assert len(lines) <= 10
    assert max(map(len, lines)) <= 80
    return lines


def shares(lines):
    return [int(actual[1]) for line in lines if (actual := re.match(r" +<?(\d+)% ", line))]


def not_done(lines):
    return " ".join(" ".join(lines).partition("Not done: ")[2].split())


def test_a_plan_in_the_words_of_the_field():
    lines = lines_of(plan_of((2, 1, 4)))
    assert lines == [
        "8 devices = 2-way data parallel x 4-way tensor parallel (mesh data=2, model=4)",
        "Parameters     32,768 (131 kB), 32.8 kB on each device (4.0x less)",
        "   100% tensor-parallel  {down,up}",
        "Memory         about 377 kB on each device (limit unknown; 80 GB assumed)",
        "Communication  about 131 kB per device and step: 75% activations, 25% gradients",
        "Details: plan.table(), plan.report",
    ]


@pytest.mark.parametrize(
    ("sizes", "batch", "use"),
    [
        ((8, 1, 1), 512, "8-way data parallel (mesh data=8)"),
        ((1, 8, 1), 512, "8-way FSDP (mesh fsdp=8)"),
        ((1, 2, 4), 100_000, "8-way FSDP (mesh fsdp=2, model=4)"),
        ((2, 2, 2), 100_000, "2-way data parallel x 4-way FSDP"),
        ((1, 1, 4), 6, "4-way tensor parallel (mesh model=4)"),
        ((4, 1, 1), 6, "4-way replication (mesh data=4)"),
        ((1, 4, 1), 6, "4-way tensor parallel (mesh fsdp=4)"),
    ],
)
def test_the_first_line_says_how_the_devices_are_used(sizes, batch, use):
    lines = lines_of(plan_of(sizes, batch))
    assert use in " ".join(lines[:2])
    assert sum(shares(lines)) == 100


def test_shares_name_arrays_and_the_reason_for_replicating_some():
    model = mlp() | {"head": array(64, 6), "scale": array(64, 1)}
    fn = lambda m, x, key: loss_fn(m, x, key) + jnp.mean(x @ m["head"]) + jnp.mean(x @ m["scale"])
    plan = rc.plan_shardings(model, mesh_of(model=4), fn=fn, args=(array(6, 64), None))
    lines = lines_of(plan)
    assert lines[2:4] == [
        "    99% tensor-parallel  {down,up}",
        "     1% replicated       head: 6 does not divide over model=4 (4 or 8 would); 1",
    ]
    assert sum(shares(lines)) == 100


def test_a_large_model_fits_into_the_lines():
    model = mlp(64, 2**33)
    (line,) = lines_of(plan_of((1, 1, 1), 8, model, hardware=rc.Hardware(memory=80e9)))
    assert line == "1 device: 1,099,511,627,776 parameters (4.4 TB), memory about 9.07 TB of 80 GB"
    for sizes in ((64, 32, 8), (1, 512, 1), (4, 1, 512)):
        assert sum(shares(lines_of(plan_of(sizes, 4096, model)))) == 100
    assert "MORE THAN the assumed limit of 80 GB" in str(plan_of((1, 1, 4), 4096, model))


def test_one_device_takes_one_line():
    state = train_state(mlp(), optax.adam(1e-3))
    (line,) = lines_of(rc.plan_shardings(state, mesh_of()))
    assert line == "1 device: 32,768 parameters (131 kB), 262 kB of optimizer state"
    (line,) = lines_of(plan_of((1, 1, 1), model=state))
    assert line.endswith("memory about 2.29 MB")
    (line,) = lines_of(plan_of((1, 1, 1), hardware=rc.Hardware(memory=1e5)))
    assert line.endswith("MB of 100 kB")


def test_a_plan_without_a_function_has_no_estimates():
    state = train_state(stock(Transformer, layers=3), optax.adamw(1e-3))
    plan = rc.plan_shardings(state, mesh_of(2, 2, 4))
    lines = lines_of(plan)
    assert lines[0] == "16 devices = 2-way data parallel x 2-way FSDP x 4-way tensor parallel"
    assert any("pass `fn` for estimates" in line for line in lines)
    assert not any(line.startswith("Communication") for line in lines)
    assert sum(shares(lines)) == 100
    assert plan.report.program_or_none is None
    with pytest.raises(ValueError, match="made without a function: pass `fn` and `args`"):
        _ = plan.report.program


def test_memory_is_compared_with_that_of_the_device():
    enough, little = (plan_of((2, 1, 1), hardware=rc.Hardware(memory=m)) for m in (16e9, 1e5))
    assert "Memory         about 1.11 MB, of the 16 GB of each device" in lines_of(enough)
    assert "Memory         about 1.11 MB, MORE THAN the 100 kB of each device" in lines_of(little)


def test_tensor_parallelism_that_was_asked_for_and_is_not_done():
    plan = plan_of((1, 2, 4), batch=100_000)
    said = (
        "tensor parallelism over model=4, because FSDP over the same devices is estimated to cost "
        "less. An override with `model` in its spec forces it."
    )
    assert said in not_done(lines_of(plan))
    (actual,) = plan.report.not_done
    assert actual.asked == "tensor parallelism over model=4"
    # What is said to force it does.
    forced = plan_of((1, 2, 4), batch=100_000, overrides=[("up", P(None, "model"))])
    assert "2-way FSDP x 4-way tensor parallel" in lines_of(forced)[0]
    assert forced.report.not_done == ()


def test_tensor_parallelism_that_does_not_fit_into_memory():
    """The reason was said to be its cost, which is lower."""
    assert "4-way tensor parallel" in lines_of(plan_of((1, 1, 4)))[0]
    plan = plan_of((1, 1, 4), hardware=rc.Hardware(memory=8e5))
    assert "4-way FSDP" in lines_of(plan)[0]
    (entry,) = plan.report.not_done
    assert entry.why == (
        "by estimate, a step fits into memory only with FSDP over the same devices"
    )
    assert plan.report.program.axes_for_memory


def test_fsdp_that_was_asked_for_and_is_not_done():
    tight = rc.Hardware(memory=1e5)
    plan = plan_of((1, 4, 2), batch=8, hardware=tight)
    assert "8-way tensor parallel" in lines_of(plan)[0]
    said = "FSDP over fsdp=4, because tensor parallelism over the same devices needs less memory"
    assert said in not_done(lines_of(plan))
    overrides = [("up", P(None, "model"))]
    forced = plan_of((1, 4, 2), batch=8, hardware=tight, overrides=overrides)
    assert "4-way FSDP x 2-way tensor parallel" in lines_of(forced)[0]
    assert forced.report.not_done == ()


def test_nothing_is_said_to_force_what_nothing_forces():
    """FSDP over `fsdp` alone: an override with `model` would shard over one device."""
    plan = plan_of((1, 8, 1), batch=8, hardware=rc.Hardware(memory=1e5))
    assert "8-way tensor parallel" in lines_of(plan)[0]
    assert plan.report.not_done[0].asked == "FSDP over fsdp=8"
    assert plan.report.not_done[0].forced_by == ""
    forced = plan_of((1, 8, 1), batch=8, overrides=[("up|down", P(None, "model"))])
    assert "100% replicated" in str(forced)


def test_overrides_that_shard_two_dimensions_of_one_array():
    """The outputs of a layer are the inputs of the next, so that an array has both in one class."""
    model = {str(i): array(256, 256) for i in range(3)}

    def loss(model, x, key):
        for w in model.values():
            x = jax.nn.relu(x @ w)
        return jnp.mean(x**2)

    overrides = [(".", P(None, "model"))]
    plan = rc.plan_shardings(
        model, mesh_of(2, 1, 4), fn=loss, args=(array(64, 256), None), overrides=overrides
    )
    assert "arrays of overrides" in plan.table()


def test_an_axis_that_divides_nothing_and_one_that_is_too_large():
    odd = rc.plan_shardings({"w": array(333, 333)}, mesh_of(model=8))
    said = "tensor parallelism over model=8, because it is not possible or not worth its cost"
    assert said in not_done(lines_of(odd))
    assert "333 is not a multiple of model=8" in not_done(lines_of(odd))
    assert odd.report.not_done[0].forced_by == ""
    small = plan_of((1, 4, 1), batch=100_000, model=mlp(hidden=16))
    assert "FSDP over fsdp=4, because it is not possible" in not_done(lines_of(small))
    assert "small, fewer than 4,096 elements" in not_done(lines_of(small))
    forced = plan_of((1, 4, 1), 100_000, mlp(hidden=16), overrides=[("up", P("fsdp"))])
    assert "4-way FSDP" in lines_of(forced)[0]


def test_a_batch_that_does_not_divide():
    lines = lines_of(plan_of((4, 1, 1), batch=6))
    assert "a batch split over data=4, because a batch of 6 does not divide." in not_done(lines)


def test_a_batch_that_divides_over_fewer_axes_is_costed_as_it_runs():
    """Over `data`, and not over `fsdp` too: arithmetic is that of `data` alone."""
    actual = [plan_of(sizes, batch=8).report.program for sizes in ((8, 2, 1), (8, 1, 1))]
    for program in actual:
        assert "data" in program.batch_axes
        assert "fsdp" not in program.batch_axes
        assert not program.repeated
    several, alone = (program.arithmetic.per_device for program in actual)
    assert several <= alone


def test_nothing_is_cut_off_silently():
    """Of many lines, those of small shares are one, and the last line names what has them all."""
    layers = {"w1": array(4, 1024, 4096), "w2": array(4, 4096, 1024), "b": array(4, 4096)}
    model = {"l": layers, "emb": array(64, 1024), "out": array(1024, 64), "g": array(1024)}

    def loss(p, x, key):
        layer = lambda h, l: (h + jnp.tanh(h @ l["w1"] + l["b"][None]) @ l["w2"], None)
        h = jax.lax.scan(layer, x @ p["emb"], p["l"])[0]
        return jnp.mean((h * p["g"][None] @ p["out"]) ** 2)

    mesh = jax.sharding.AbstractMesh((2, 2, 3, 2), ("pipe", "data", "fsdp", "model"))
    plan = rc.plan_shardings(model, mesh, fn=loss, args=(array(768, 64), None))
    lines = lines_of(plan)
    assert any(line.startswith("Communication") for line in lines)
    assert not_done(lines)
    assert "    <1% each: " in "\n".join(lines)


def test_trees_without_parameters_have_a_summary():
    for sizes in ((1, 1, 1), (2, 2, 2)):
        assert lines_of(rc.plan_shardings({"n": 3, "key": jax.random.key(0)}, mesh_of(*sizes)))


@pytest.mark.parametrize("overrides", [(), [("up", P(None, ("fsdp", "model"))), ("down", None)]])
def test_the_report_is_data_that_json_takes(overrides):
    plan = plan_of((2, 2, 2), batch=7, overrides=overrides)
    data = plan.report.to_json()
    assert json.loads(json.dumps(data)) == data
    assert [row["path"] for row in data["rows"]] == ["down", "up"]
    assert [row["kind"] for row in data["rows"]] == [x.reason.kind for x in plan.report.arrays]
    assert data["memory"]["total"] == plan.report.program.memory.total
    assert data["not_done"][-1]["asked"].startswith("a batch split over data=2")
    without = rc.plan_shardings(mlp(), mesh_of(2, 2, 2)).report.to_json()
    assert json.loads(json.dumps(without)) == without
    assert "memory" not in without
