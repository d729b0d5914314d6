"""Collectives read from programs of GPU and TPU compilers, stored by `hlo/make.py`.

The mesh is data=2, fsdp=2, model=2. float32 has 4 bytes, bfloat16 2, and int4 half of one.
"""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType

import redcoast as rc
from redcoast.dryrun.hlo import collectives, sent_bytes

AXES = ("data", "fsdp", "model")
SIZES: dict[str, int] = dict.fromkeys(AXES, 2)
STORED = Path(__file__).parent / "hlo"


def stored(platform, name):
    return collectives((STORED / f"{platform}_{name}.txt").read_text(), SIZES)


def by_kind_and_axes(of_program):
    """Sums the collectives of a program by kind and axes, those that send the most bytes first."""
    rows = {}
    for each in of_program:
        key = each.kind, each.axes
        if key not in rows:
            rows[key] = row(each.kind, list(each.axes), 0, 0, 0)
        rows[key]["count"] += each.count
        rows[key]["operand_bytes"] += each.count * each.operand_bytes
        rows[key]["sent_bytes"] += each.count * each.sent_bytes
        rows[key]["exact"] &= each.exact
    return sorted(rows.values(), key=lambda row: -row["sent_bytes"])


def table(platform, name):
    return by_kind_and_axes(stored(platform, name))


def row(kind, axes, count, operand, sent, exact=True):
    return {
        "kind": kind,
        "axes": axes,
        "count": count,
        "operand_bytes": operand,
        "sent_bytes": sent,
        "exact": exact,
    }


def totals(row):
    return row["count"], row["operand_bytes"], row["sent_bytes"]


def brief(found):
    return [(each.kind, each.axes, each.count, each.operand_bytes) for each in found]


@pytest.mark.parametrize("platform", ["a100", "v4"])
def test_stored_scans(platform):
    assert brief(stored(platform, "scans")) == [
        ("all-reduce", ("model",), 15, 1024),
        ("all-reduce", ("data",), 5, 1024),
    ]


@pytest.mark.parametrize("platform", ["a100", "v4"])
def test_stored_loops_with_counters_of_all_kinds(platform):
    """12, 10, ..., 2; then 1, 4, 7, 10; then a number that depends on the data."""
    found = stored(platform, "counters")
    assert [(each.axes, each.count, each.exact) for each in found] == [
        (("data",), 6, True),
        (("fsdp",), 4, True),
        (("model",), 1, False),
    ]


@pytest.mark.parametrize("platform", ["a100", "v4"])
def test_stored_exchanges_of_started_and_packed_arrays(platform):
    assert sorted(brief(stored(platform, "exchange"))) == [
        ("all-gather", ("fsdp",), 1, 8 * 256 // 2),
        ("all-to-all", ("fsdp", "model"), 1, 1024),
        ("collective-permute", ("data",), 1, 1024),
    ]


@pytest.mark.parametrize("platform", ["a100", "v4"])
def test_stored_sequence_parallel_network(platform):
    """A gather before and a reduce-scatter after, in both passes, and two gradients."""
    tokens, weight = 16 * 256 * 4096 * 2, 4096 * 8192 * 2
    assert table(platform, "sequence") == [
        row("all-reduce", ["data", "fsdp"], 2, 2 * weight, 2 * weight * 2 * 3 // 4),
        row("all-gather", ["model"], 2, tokens, tokens),
        row("reduce-scatter", ["model"], 1, tokens, tokens // 2),
    ]


@pytest.mark.parametrize("platform", ["a100", "v4"])
def test_stored_layers_with_weights_gathered_in_each(platform):
    """Six layers of two matrices, of which a device computes with halves of 256 x 256.

    TPU gathers both forward and both backward, in bfloat16. A100 gathers them in float32, forward
    in one instruction of two, and backward in one of three since one is there twice.
    """
    gathers, arrays, width = (2, 5, 4) if platform == "a100" else (4, 4, 2)
    gathered, weight, rows = arrays * 128 * 256 * width, 256 * 256 * 4, 16 * 256 * 4
    assert {(each["kind"], *each["axes"]): totals(each) for each in table(platform, "layers")} == {
        ("all-gather", "fsdp"): (6 * gathers, 6 * gathered, 6 * gathered),
        ("all-reduce", "model"): (6 * 2, 6 * 2 * rows, 6 * 2 * rows),
        ("all-reduce", "data", "fsdp"): (6, 6 * 2 * weight, 6 * 2 * weight * 2 * 3 // 4),
    }


def test_a_collective_beside_several_fusions_counts_once():
    """On v5e a gather is written into four fusions, in one of which it starts."""
    assert (STORED / "v5e_layers.txt").read_text().count(" all-gather(") == 7
    assert stored("v5e", "layers") == stored("v4", "layers")


def test_stored_product_in_windows():
    """A100 gathers 8 shards. TPU passes them on in a loop of 2, two at a time, each way."""
    shard = 4096 // 8 * 16384 * 2
    assert brief(stored("a100", "windowed")) == [("all-gather", AXES, 1, shard)]
    assert table("v4", "windowed") == [
        row("collective-permute", list(AXES), 1 + 2 * 4, 9 * shard, 9 * shard)
    ]


def test_the_mesh_may_be_abstract_or_a_dict():
    text = (STORED / "v4_exchange.txt").read_text()
    abstract = AbstractMesh((2, 2, 2), AXES, axis_types=(AxisType.Auto,) * 3)
    found = collectives(text, SIZES)
    assert collectives(text, abstract) == found
    assert collectives(text, rc.make_mesh(data=2, fsdp=2, model=2)) == found


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_damaged_text_is_rejected_or_harmless(data):
    name = data.draw(st.sampled_from(["v4_counters", "a100_exchange", "v4_sequence"]))
    text = (STORED / f"{name}.txt").read_text()
    start = data.draw(st.integers(0, len(text)))
    damaged = text[:start] + text[start + data.draw(st.integers(1, 60)) :]
    try:
        found = collectives(damaged, SIZES)
    except ValueError:
        return
    assert sent_bytes(found) >= 0
