"""Hand-written HLO: syntax that the compiled programs do not contain, and errors."""

from pathlib import Path

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from redcoast.dryrun.hlo import collectives
from redcoast.dryrun.hlo._parse import size_in_bytes
from redcoast.dryrun.hlo._trip_counts import iterations

AXES = ("data", "fsdp", "model")
SIZES: dict[str, int] = dict.fromkeys(AXES, 2)
STORED = Path(__file__).parent / "hlo"


def brief(found):
    return [(each.kind, each.axes, each.count, each.operand_bytes) for each in found]


def module(*lines, header="num_partitions=8", more=""):
    """A program with these lines and an array `%x` of 1024 bytes."""
    return "\n".join(
        [
            f"HloModule jit_f, {header}",
            more,
            "ENTRY %main (x: f32[256]) -> f32[256] {",
            "  %x = f32[256]{0} parameter(0)",
            *(f"  {line}" for line in lines),
            "  ROOT %end = f32[256]{0} copy(%x)",
            "}",
        ]
    )


def read(*lines, sizes=SIZES, **options):
    return collectives(module(*lines, **options), sizes)


def reduced(attributes, **options):
    (found,) = read(f"%s = f32[256]{{0}} all-reduce(%x), {attributes}", **options)
    return found.axes, found.group_size


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ("{{0,1},{2,3},{4,5},{6,7}}", ("model",)),
        ("{{0,4,2,6},{1,5,3,7}}", ("data", "fsdp")),
        ("{}", AXES),
        ("[1,8]<=[8]", AXES),
        ("[4,2]<=[8]", ("model",)),
        ("[4,2]<=[2,4]T(1,0)", ("data",)),
        ("[4,2]<=[2,2,2]T(0,2,1)", ("fsdp",)),
        ("[2,4]<=[2,2,2]T(1,0,2)", ("data", "model")),
        ("mesh['a'=4,'b'=1,'c'=2] {'a'}", ("data", "fsdp")),
        ("mesh['a'=2,'b'=2,'c'=2] {'c','a'}", ("data", "model")),
        ("mesh['a'=8] {'a':(2)2}", ("fsdp",)),
        ("mesh['a'=8] {'a':(4)2,'a':(1)2}", ("data", "model")),
        ("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}", ("data",)),
        ("mesh['a'=4,'b'=2], device_ids=(0,4,1,5,2,6,3,7) {'b'}", ("data",)),
        ("mesh[a=4,b=2] {b}", ("model",)),
    ],
)
def test_every_way_to_write_groups(groups, axes):
    attributes = f"channel_id=1, replica_groups={groups}, use_global_device_ids=true, to_apply=%add"
    assert reduced(attributes) == (axes, 2 ** len(axes))


def test_groups_of_one_device_do_not_communicate():
    flags = "channel_id=1, use_global_device_ids=true"
    (found,) = read(f"%s = f32[256]{{0}} all-gather(%x), {flags}, replica_groups=[8,1]<=[8]")
    assert (found.axes, found.group_size, found.sent_bytes) == ((), 1, 0)
    permute = "channel_id=1, source_target_pairs={{0,0},{1,1}}"
    (found,) = read(f"%s = f32[256]{{0}} collective-permute(%x), {permute}")
    assert (found.axes, found.group_size, found.sent_bytes) == ((), 1, 0)


def test_a_permutation_in_which_half_of_the_devices_send():
    line = (
        "%s = f32[256]{0} collective-permute(%x), channel_id=1, source_target_pairs={{0,4},{1,5}}"
    )
    (found,) = read(line)
    assert (found.axes, found.group_size, found.sent_bytes) == (("data",), 2, 1024)


def test_numbers_in_groups_are_of_devices_or_of_replicas():
    replicas = {"header": "replica_count=8"}
    assert reduced("replica_groups={{0,1},{2,3},{4,5},{6,7}}", **replicas) == (("model",), 2)
    assert reduced("replica_groups={{0}}") == ((), 1)
    assert reduced("channel_id=1, replica_groups={{0}}") == (AXES, 8)
    # For these kinds a channel is enough for the numbers to be of devices.
    line = "%s = f32[256]{0} all-to-all(%x), channel_id=1, replica_groups={{0,4},{1,5},{2,6},{3,7}}"
    assert [each.axes for each in read(line)] == [("data",)]


FLAGS = "channel_id=1, replica_groups=[4,2]<=[8], use_global_device_ids=true"


def test_a_pair_of_start_and_done_counts_once_by_its_operands():
    started = "((f32[256]{0}, f32[256]{0}), (f32[512]{0}, f32[512]{0}), u32[])"
    found = read(
        f"%s = {started} all-gather-start(%x, %x), {FLAGS}, dimensions={{0}}",
        "%d = (f32[512]{0}, f32[512]{0}) all-gather-done(%s)",
    )
    assert brief(found) == [("all-gather", ("model",), 1, 2048)]


def test_a_started_computation_counts_where_it_starts():
    wrapped = f"""%wrapped (p: f32[256]) -> f32[128] {{
  %p = f32[256]{{0}} parameter(0)
  ROOT %r = f32[128]{{0}} reduce-scatter(%p), {FLAGS}, to_apply=%add
}}, execution_thread="other"
"""
    started = "((f32[256]{0}), f32[128]{0}, u32[])"
    found = read(
        f"%s = {started} async-start(%x), calls=%wrapped",
        f"%u = {started} async-update(%s), calls=%wrapped",
        "%d = f32[128]{0} async-done(%u), calls=%wrapped",
        more=wrapped,
    )
    assert brief(found) == [("reduce-scatter", ("model",), 1, 1024)]
    assert found[0].sent_bytes == 512


def test_kinds_that_this_cpu_cannot_run():
    ragged = "%r = f32[256]{0} ragged-all-to-all(%x, %x, %o, %o, %o, %o)"
    found = read(
        "%o = s32[2]{0} constant({0, 1})",
        f"{ragged}, {FLAGS}",
        f"%b = f32[256]{{0}} collective-broadcast(%x), {FLAGS}",
    )
    assert [(each.kind, each.operand_bytes, each.sent_bytes) for each in found] == [
        ("ragged-all-to-all", 1024, 512),
        ("collective-broadcast", 1024, 1024),
    ]


def counted(init, bound, direction, move="add(%one, %i)", backend="", more=""):
    """The number of sums in a loop, by the comparison of its counter."""
    computations = f"""%body (p: (s32[], f32[256], s32[])) -> (s32[], f32[256], s32[]) {{
  %p = (s32[], f32[256], s32[]) parameter(0)
  %one = s32[] constant(1)
  %i = s32[] get-tuple-element(%p), index=0
  %b = f32[256] get-tuple-element(%p), index=1
  %n = s32[] get-tuple-element(%p), index=2
  %next = s32[] {move}
  %s = f32[256] all-reduce(%b), {FLAGS}
  ROOT %t = (s32[], f32[256], s32[]) tuple(%next, %s, %n)
}}

%condition (p: (s32[], f32[256], s32[])) -> pred[] {{
  %p = (s32[], f32[256], s32[]) parameter(0)
  %seven = s32[] constant(7)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] get-tuple-element(%p), index=2
  {more}
  ROOT %c = pred[] compare({bound}), direction={direction}
}}
"""
    found = read(
        f"%a = s32[] {init}",
        "%m = s32[] constant(10)",
        "%t = (s32[], f32[256], s32[]) tuple(%a, %x, %m)",
        f"%w = (s32[], f32[256], s32[]) while(%t), condition=%condition, body=%body{backend}",
        more=computations,
    )
    return (*(each.count for each in found), found[0].exact)


def test_counters_of_loops():
    assert counted("constant(0)", "%i, %seven", "LT") == (7, True)
    assert counted("constant(0)", "%seven, %i", "GT") == (7, True)
    assert counted("constant(2)", "%i, %n", "LE") == (9, True)
    assert counted("constant(2)", "%n, %i", "NE") == (8, True)
    assert counted("constant(9)", "%i, %seven", "LT") == (0, True)
    backwards = "subtract(%i, %one)"
    assert counted("constant(9)", "%i, %seven", "GT", move=backwards) == (2, True)
    ahead = "%one = s32[] constant(1)\n  %next = s32[] add(%i, %one)"
    assert counted("constant(0)", "%next, %seven", "LT", more=ahead) == (6, True)
    known = ', backend_config={"known_trip_count":{"n":"4"}}'
    assert counted("custom-call()", "%i, %seven", "LT", backend=known) == (4, True)


def test_a_condition_of_a_counted_loop_runs_once_more():
    """Ahead of the sum in the body, of which there are 7."""
    summed = f"%s = s32[] all-reduce(%i), {FLAGS}"
    assert counted("constant(0)", "%i, %seven", "LT", more=summed) == (8, 7, True)


def test_loops_that_cannot_be_counted():
    unknown = (1, False)
    assert counted("custom-call()", "%i, %seven", "LT") == unknown
    assert counted("constant(0)", "%i, %i", "LT") == unknown
    assert counted("constant(0)", "%i, %seven", "GT") == unknown  # One that never ends.
    assert counted("constant(0)", "%i, %seven", "EQ") == unknown
    assert counted("constant(0)", "%i, %seven", "LT", move="add(%n, %i)") == unknown
    assert counted("constant(9)", "%i, %seven", "GT", move="subtract(%one, %i)") == unknown


@given(
    start=st.integers(-9, 9),
    step=st.integers(-3, 3),
    direction=st.sampled_from(["LT", "LE", "GT", "GE", "NE"]),
    bound=st.integers(-9, 9),
)
def test_iterations_are_those_of_the_loop(start, step, direction, bound):
    going_on = {
        "LT": lambda i: i < bound,
        "LE": lambda i: i <= bound,
        "GT": lambda i: i > bound,
        "GE": lambda i: i >= bound,
        "NE": lambda i: i != bound,
    }[direction]
    i, count = start, 0
    while going_on(i) and count < 99:
        i, count = i + step, count + 1
    found = iterations(start, step, direction, bound)
    assert found == (count if count < 99 else None) or (found is None and count == 0)


@pytest.mark.parametrize(
    ("array", "size"),
    [
        ("f32[8,32]{1,0}", 1024),
        ("bf16[8,32]{1,0:T(8,128)(2,1)S(3)}", 512),
        ("f64[3]", 24),
        ("c64[3]{0}", 24),
        ("c128[]", 16),
        ("pred[5]{0}", 5),
        ("s4[5]{0:E(4)}", 3),
        ("u2[5]{0:E(2)}", 2),
        ("s4[5]{0}", 5),
        ("f8e4m3b11fnuz[6]{0}", 6),
        ("f4e2m1fn[6]{0:E(4)}", 3),
        ("u8[<=6,2]{1,0}", 12),
        ("f32[0,4]{1,0}", 0),
        ("token[]", 0),
        ("((f32[4]{0}, s8[3]{0}), /*index=1*/u32[], token[])", 23),
    ],
)
def test_sizes_of_arrays(array, size):
    assert size_in_bytes(array) == size


def test_text_that_is_not_a_compiled_program():
    with pytest.raises(ValueError, match="This is not compiled HLO.*compile\\(\\).as_text"):
        collectives(jax.jit(lambda x: x * 2).lower(1.0).as_text(), SIZES)
    with pytest.raises(ValueError, match="returned None"):
        collectives(None, SIZES)


def test_text_that_is_cut_off_or_damaged():
    text = (STORED / "a100_scans.txt").read_text()
    with pytest.raises(ValueError, match="cut off: it ends inside the computation `region_0"):
        collectives(text[: text.index("%get-tuple-element.36")], SIZES)
    with pytest.raises(ValueError, match="0 computations marked ENTRY"):
        collectives(text.replace("ENTRY ", ""), SIZES)
    with pytest.raises(ValueError, match="no instruction marked ROOT"):
        collectives(text.replace("ROOT ", ""), SIZES)
    with pytest.raises(ValueError, match=r"Line 4 of the HLO text is not an instruction: '%x f32"):
        collectives(module().replace("%x =", "%x"), SIZES)


def test_references_to_missing_instructions():
    with pytest.raises(ValueError, match="a missing instruction `y`"):
        read(f"%s = f32[256]{{0}} all-reduce(%y), {FLAGS}")
    with pytest.raises(ValueError, match="a missing computation `y`"):
        read("%s = f32[256]{0} fusion(%x), kind=kLoop, calls=%y")
    with pytest.raises(ValueError, match="is inconsistent"):
        read("%s = f32[256]{0} call(%x), to_apply=%main")
    with pytest.raises(ValueError, match="Unterminated operand list for `s` in the HLO text"):
        read(f"%s = f32[256]{{0}} all-reduce(%x, {FLAGS}")


def test_groups_that_cannot_be_read():
    with pytest.raises(ValueError, match="has replica groups in an unknown format"):
        reduced("channel_id=1, replica_groups=<0,1>, use_global_device_ids=true")
    with pytest.raises(ValueError, match="invalid replica groups"):
        reduced("channel_id=1, replica_groups=[4,2]<=[3,2], use_global_device_ids=true")
    with pytest.raises(ValueError, match="invalid replica groups"):
        reduced("channel_id=1, replica_groups=mesh['a'=8] {'b'}, use_global_device_ids=true")
    with pytest.raises(ValueError, match="names device 9, but the mesh has 8 devices"):
        reduced("channel_id=1, replica_groups={{0,9}}, use_global_device_ids=true")


def test_arrays_of_a_type_of_unknown_size():
    with pytest.raises(ValueError, match="arrays of type `weird`, whose size is unknown"):
        read("%y = weird[8]{0} convert(%x)", f"%s = weird[8]{{0}} all-reduce(%y), {FLAGS}")


def test_another_mesh_than_the_program_was_compiled_for():
    text = (STORED / "v4_scans.txt").read_text()
    with pytest.raises(ValueError, match="for 8 devices, but a mesh of data=2, model=2 has 4"):
        collectives(text, {"data": 2, "model": 2})
    with pytest.raises(ValueError, match="2 replicas of 4 partitions"):
        read(header="replica_count=2, num_partitions=4")
