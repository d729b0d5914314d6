"""The schedule of a compiled program and the time that is estimated from it, compared with times
computed by hand."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType

from redcoast import Chip
from redcoast.dryrun._efficiencies import Efficiencies
from redcoast.dryrun._step_time import estimate_step_time, show_step_time
from redcoast.dryrun.hlo import collectives
from redcoast.dryrun.hlo._events import Done, Event, Loop, Start, Transfer, read_schedule
from redcoast.dryrun.hlo._kernels import KernelWork
from redcoast.models._tpu_attention import attend_in_splash
from redcoast.models._view import View

MESH = AbstractMesh((1, 4, 1), ("data", "fsdp", "model"), axis_types=(AxisType.Auto,) * 3)
# Everything at its full rate: 1000 operations and 1000 bytes of memory a second.
CHIP = Chip(
    name="made up",
    kind="gpu",
    memory=10**9,
    usable=10**9,
    flops={"float32": 1e3, "bfloat16": 2e3},
    memory_bandwidth=1e3,
    link_bandwidth=1e2,
    host_bandwidth=1e1,
    per_host=4,
    source="none",
)
FULL = Efficiencies(
    product=1.0,
    attention=1.0,
    memory=1.0,
    network=1.0,
    between=1.0,
    launch=0.0,
    latency=0.0,
    per_doubling=0.0,
)


def program(body: str, more: str = "") -> str:
    """A program of four devices, with the instructions of its entry."""
    add = """
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}
"""
    head = "HloModule made_up, is_scheduled=true, num_partitions=4\n"
    entry = "ENTRY %main (x: f32[8,16], w: f32[4,16]) -> f32[8,16] {\n"
    inputs = "  %x = f32[8,16]{1,0} parameter(0)\n  %w = f32[4,16]{1,0} parameter(1)\n"
    return f"{head}{add}{more}\n{entry}{inputs}{body}\n}}\n"


GROUPS = "channel_id=1, replica_groups={{0,1,2,3}}, use_global_device_ids=true"
GATHER = f"""
  %start = (f32[4,16]{{1,0}}, f32[16,16]{{1,0}}) all-gather-start(%w), {GROUPS}, dimensions={{0}}
  %square = f32[8,8]{{1,0}} dot(%x, %x), lhs_contracting_dims={{1}}, rhs_contracting_dims={{1}}
  %whole = f32[16,16]{{1,0}} all-gather-done(%start)
  %y = f32[8,16]{{1,0}} dot(%x, %whole), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  ROOT %sum = f32[8,16]{{1,0}} all-reduce(%y), {GROUPS}, to_apply=%add"""


def times(text: str, **changes):
    events = read_schedule(text, MESH)
    options = {"chip": CHIP, "bandwidths": {"fsdp": 1e2}, "efficiencies": FULL}
    return estimate_step_time(events, **{**options, **changes})


def test_events_are_in_the_order_of_their_start():
    gather = Transfer("all-gather", ("fsdp",), 3 * 4 * 4 * 16, 4)
    assert read_schedule(program(GATHER), MESH) == (
        Start("start", gather),
        KernelWork("square", "product", (("f32", 2 * 8 * 8 * 16),), 4 * (8 * 16 + 8 * 8)),
        Done("start"),
        KernelWork("y", "product", (("f32", 2 * 8 * 16 * 16),), 4 * (2 * 8 * 16 + 16 * 16)),
        Transfer("all-reduce", ("fsdp",), 2 * 4 * 8 * 16 * 3 // 4, 4),
    )


def test_kernels_hide_a_transfer_that_has_started():
    """The gather takes 7.68 s, of which a product of 2.048 s hides a part. Nothing hides the
    all-reduce of 7.68 s."""
    step = times(program(GATHER))
    assert step.products == pytest.approx(2.048 + 4.096)
    assert step.hidden == pytest.approx({"fsdp": 2.048})
    assert step.exposed == pytest.approx({"fsdp": 7.68 - 2.048 + 7.68})
    assert step.seconds == pytest.approx(7.68 + 4.096 + 7.68)
    assert step.utilisation == pytest.approx((2.048 + 4.096) / step.seconds)
    assert step.kernels == 2


def test_efficiencies_divide_the_rates():
    slow = replace(FULL, product=0.5, network=0.25, launch=1.0, latency=2.0)
    step = times(program(GATHER), efficiencies=slow)
    assert step.products == pytest.approx(2 * (2.048 + 4.096) + 2)
    wait = 4 * 7.68 + 2
    assert step.seconds == pytest.approx(wait + (2 * 4.096 + 1) + wait)
    # Between hosts, another share of the bandwidth is attained.
    between = replace(FULL, between=0.5, per_doubling=0.1)
    options = {"slow_axes": frozenset({"fsdp"}), "groups": 4, "efficiencies": between}
    step = times(program(GATHER), **options)
    whole = 2 * 7.68 + 4.096 + 2 * 7.68
    assert step.waiting == pytest.approx(0.2 * whole)
    assert step.seconds == pytest.approx(1.2 * whole)


def test_a_kernel_of_little_arithmetic_takes_as_long_as_its_bytes():
    body = "  ROOT %y = f32[8,16]{1,0} exponential(%x)"
    step = times(program(body))
    assert step.other == pytest.approx(2 * 4 * 8 * 16 / 1e3)
    assert (step.products, step.exposed, step.hidden) == (0.0, {}, {})


LOOP = """
%body (state: (s32[], f32[8,16], f32[10,8,16])) -> (s32[], f32[8,16], f32[10,8,16]) {
  %state = (s32[], f32[8,16]{1,0}, f32[10,8,16]{2,1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %h = f32[8,16]{1,0} get-tuple-element(%state), index=1
  %stack = f32[10,8,16]{2,1,0} get-tuple-element(%state), index=2
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %kept = f32[10,8,16]{2,1,0} fusion(%stack, %h, %i), kind=kLoop, calls=%keep
  %scaled = f32[8,16]{1,0} fusion(%kept, %i), kind=kLoop, calls=%take
  ROOT %after = (s32[], f32[8,16]{1,0}, f32[10,8,16]{2,1,0}) tuple(%next, %scaled, %kept)
}

%condition (state.1: (s32[], f32[8,16], f32[10,8,16])) -> pred[] {
  %state.1 = (s32[], f32[8,16]{1,0}, f32[10,8,16]{2,1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%state.1), index=0
  %ten = s32[] constant(10)
  ROOT %less = pred[] compare(%i.1, %ten), direction=LT
}

%keep (p0: f32[10,8,16], p1: f32[8,16], p2: s32[]) -> f32[10,8,16] {
  %p0 = f32[10,8,16]{2,1,0} parameter(0)
  %p1 = f32[8,16]{1,0} parameter(1)
  %p2 = s32[] parameter(2)
  %row = f32[1,8,16]{2,1,0} bitcast(%p1)
  %zero = s32[] constant(0)
  ROOT %put = f32[10,8,16]{2,1,0} dynamic-update-slice(%p0, %row, %p2, %zero, %zero)
}

%take (q0: f32[10,8,16], q1: s32[]) -> f32[8,16] {
  %q0 = f32[10,8,16]{2,1,0} parameter(0)
  %q1 = s32[] parameter(1)
  %nought = s32[] constant(0)
  %part = f32[1,8,16]{2,1,0} dynamic-slice(%q0, %q1, %nought, %nought), dynamic_slice_sizes={1,8,16}
  ROOT %flat = f32[8,16]{1,0} bitcast(%part)
}
"""


def test_a_loop_repeats_its_kernels_which_touch_only_slices_of_a_stack():
    body = """
  %zero = s32[] constant(0)
  %stack = f32[10,8,16]{2,1,0} broadcast(%zero), dimensions={}
  %state = (s32[], f32[8,16]{1,0}, f32[10,8,16]{2,1,0}) tuple(%zero, %x, %stack)
  %out = (s32[], f32[8,16]{1,0}, f32[10,8,16]{2,1,0}) while(%state), condition=%condition, body=%body
  ROOT %h = f32[8,16]{1,0} get-tuple-element(%out), index=1"""  # noqa: E501
    first, loop = read_schedule(program(body, LOOP), MESH)
    assert isinstance(first, KernelWork)
    assert isinstance(loop, Loop)
    row = 4 * 8 * 16
    assert first.memory_bytes == 10 * row
    assert (loop.times, loop.exact) == (10, True)
    sizes = {one.name: one.memory_bytes for one in loop.events if isinstance(one, KernelWork)}
    assert sizes == {"next": 12, "kept": 2 * row + 4, "scaled": 2 * row + 4}
    assert times(program(body, LOOP)).kernels == 31


CUDNN = """
  %q = bf16[2,64,4,8]{3,2,1,0} bitcast(%x)
  %k = bf16[2,32,4,8]{3,2,1,0} bitcast(%w)
  %out = (bf16[2,4,64,8]{3,1,2,0}, u8[0]{0}) custom-call(%q, %k, %k), custom_call_target="__cudnn$fmhaSoftmaxBackward", backend_config={"cudnn_fmha_backend_config": {"mask_type": "NO_MASK"}}
  ROOT %y = bf16[2,4,64,8]{3,1,2,0} get-tuple-element(%out), index=0"""  # noqa: E501


def test_attention_of_cudnn_counts_the_pairs_that_its_mask_leaves():
    pairs = 2 * 4 * 64 * 32
    (kernel,) = read_schedule(program(CUDNN), MESH)
    assert isinstance(kernel, KernelWork)
    assert (kernel.kind, kernel.flops) == ("attention", (("bf16", 5 * 2 * pairs * 8),))
    forward = CUDNN.replace("Backward", "").replace("NO_MASK", "CAUSAL")
    (kernel,) = read_schedule(program(forward), MESH)
    assert isinstance(kernel, KernelWork)
    assert kernel.flops == (("bf16", round(2 * 2 * pairs * 8 * 33 / 64)),)


@pytest.mark.parametrize(
    ("shapes", "attributes", "count"),
    [
        # A product of (8, 16) and (16, 32), as TPUs write it.
        (("8,16", "16,32", "8,32"), "dim_labels=bf_io->bf", 8 * 16 * 32),
        # Three places of a window on ten elements, of which one is padding at each end.
        (("1,10,4", "3,4,5", "1,10,5"), "window={size=3 pad=1_1}, dim_labels=b0f_0io->b0f", 560),
        # A batch of four products, as a window that meets one element of a dilated input.
        (
            ("4,8,16", "4,16,32", "4,8,32"),
            "window={size=4 stride=3 pad=3_3 lhs_dilate=4 rhs_reversal=1}, dim_labels=0bf_0io->0bf",
            4 * 8 * 16 * 32,
        ),
    ],
)
def test_operations_of_convolutions(shapes, attributes, count):
    inputs, kernel, result = shapes
    body = f"""
  %a = f32[{inputs}] bitcast(%x)
  %b = f32[{kernel}] bitcast(%w)
  ROOT %y = f32[{result}] convolution(%a, %b), {attributes}"""
    (actual,) = read_schedule(program(body), MESH)
    assert isinstance(actual, KernelWork)
    assert actual.flops == (("f32", 2 * count),)


@pytest.mark.parametrize(
    ("target", "left", "right", "result"),
    [
        ("Forward", "2,3,8,8", "5,3,3,3", "2,5,4,4"),
        ("BackwardFilter", "2,3,8,8", "2,5,4,4", "5,3,3,3"),
        ("BackwardInput", "2,5,4,4", "5,3,3,3", "2,3,8,8"),
    ],
)
def test_backward_passes_of_convolutions_have_the_operations_of_the_forward_pass(
    target, left, right, result
):
    """cuDNN writes all three with the window of the forward pass."""
    window = "window={size=3x3 stride=2x2 pad=0_1x0_1}, dim_labels=bf01_oi01->bf01"
    call = f'{window}, custom_call_target="__cudnn$conv{target}"'
    body = f"""
  %a = f32[{left}] bitcast(%x)
  %b = f32[{right}] bitcast(%w)
  ROOT %y = (f32[{result}], u8[0]) custom-call(%a, %b), {call}"""
    (actual,) = read_schedule(program(body), MESH)
    assert isinstance(actual, KernelWork)
    # Of the four steps of three taps along each dimension, one meets the padding.
    assert actual.flops == (("f32", 2 * 2 * 5 * 3 * 11**2),)


TPU = f"""
%begin (p: f32[4,16]) -> (f32[4,16], f32[16,16]) {{
  %p = f32[4,16]{{1,0:S(1)}} parameter(0)
  %gather = f32[16,16]{{1,0}} all-gather(%p), {GROUPS}, dimensions={{0}}, frontend_attributes={{chain_id="0"}}
  ROOT %c = (f32[4,16]{{1,0}}, f32[16,16]{{1,0}}) custom-call(%gather), custom_call_target="AsyncCollectiveStart"
}}

%middle (p0: f32[4,16], p1: f32[16,16], p2: f32[8,16]) -> (f32[8,8], f32[16,16]) {{
  %p0 = f32[4,16]{{1,0}} parameter(0)
  %p1 = f32[16,16]{{1,0}} parameter(1)
  %p2 = f32[8,16]{{1,0}} parameter(2)
  %gather.1 = f32[16,16]{{1,0}} all-gather(%p0), {GROUPS}, dimensions={{0}}, frontend_attributes={{chain_id="0"}}
  %square = f32[8,8]{{1,0}} convolution(%p2, %p2), dim_labels=bf_oi->bf
  ROOT %t = (f32[8,8]{{1,0}}, f32[16,16]{{1,0}}) tuple(%square, %gather.1)
}}

%finish (r0: f32[4,16], r1: f32[16,16]) -> f32[16,16] {{
  %r0 = f32[4,16]{{1,0}} parameter(0)
  %r1 = f32[16,16]{{1,0}} parameter(1)
  %gather.2 = f32[16,16]{{1,0}} all-gather(%r0), {GROUPS}, dimensions={{0}}, frontend_attributes={{chain_id="0"}}
  ROOT %d = f32[16,16]{{1,0}} custom-call(%r0, %r1, %gather.2), custom_call_target="AsyncCollectiveDone"
}}
"""  # noqa: E501


def test_a_collective_that_a_tpu_spreads_over_several_fusions():
    """It is one transfer from its start to its end, and the product in between hides it. Arrays in
    vector memory take no bandwidth of the main memory."""
    body = """
  %b = (f32[4,16]{1,0}, f32[16,16]{1,0}) fusion(%w), kind=kCustom, calls=%begin
  %b0 = f32[4,16]{1,0:S(1)} get-tuple-element(%b), index=0
  %b1 = f32[16,16]{1,0:S(1)} get-tuple-element(%b), index=1
  %m = (f32[8,8]{1,0:S(1)}, f32[16,16]{1,0:S(1)}) fusion(%b0, %b1, %x), kind=kCustom, calls=%middle
  %m1 = f32[16,16]{1,0:S(1)} get-tuple-element(%m), index=1
  %f = f32[16,16]{1,0:S(1)} fusion(%b0, %m1), kind=kCustom, calls=%finish
  ROOT %out = f32[8,16]{1,0} bitcast(%x)"""
    start, product, done = read_schedule(program(body, TPU), MESH)
    assert start == Start("channel 1", Transfer("all-gather", ("fsdp",), 3 * 4 * 4 * 16, 4))
    assert product == KernelWork("m", "product", (("f32", 2 * 8 * 8 * 16),), 4 * 8 * 16)
    assert done == Done("channel 1")


SLICES = """
  %half = f32[16]{0} bitcast(%w)
  %token = token[] after-all()
  %out = (f32[16]{0}, u32[], token[]) send(%half, %token), channel_id=2, is_host_transfer=true, frontend_attributes={_xla_megascale_target="{1,2,3}x{0:3}",_xla_megascale_transfer_type="ALL_REDUCE"}
  %in = (f32[16]{0}, u32[], token[]) recv(%token), channel_id=1, is_host_transfer=true, frontend_attributes={_xla_megascale_transfer_type="ALL_REDUCE"}
  %sent = token[] send-done(%out), channel_id=2
  %received = (f32[16]{0}, token[]) recv-done(%in), channel_id=1
  %whole = f32[16,16]{1,0} all-gather(%w), channel_id=3, replica_groups={{0,1,2,3}}, use_global_device_ids=true, dimensions={0}
  ROOT %y = f32[8,16]{1,0} bitcast(%x)"""  # noqa: E501


def test_slices_send_through_their_hosts():
    """The program is that of one of three slices, which have four devices each."""
    mesh = {"data": 3, "fsdp": 4, "model": 1}
    between = Transfer("all-reduce", ("data",), 2 * 4 * 16 * 2 // 3 + 1, 3)
    inside = Transfer("all-gather", ("fsdp",), 3 * 4 * 4 * 16, 4)
    actual = read_schedule(program(SLICES), mesh)
    assert actual == (Start("out", between), Done("out"), Done("in"), inside)
    assert [each.axes for each in collectives(program(SLICES), mesh)] == [("data",), ("fsdp",)]


BRANCHES = """
%small (h: f32[8,16]) -> f32[8,16] {
  %h = f32[8,16]{1,0} parameter(0)
  %once = f32[8,16]{1,0} negate(%h)
  %twice = f32[8,16]{1,0} negate(%once)
  ROOT %thrice = f32[8,16]{1,0} negate(%twice)
}

%large (k: f32[8,16]) -> f32[8,16] {
  %k = f32[8,16]{1,0} parameter(0)
  %row = f32[8,65536]{1,0} broadcast(%k), dimensions={0}
  ROOT %product = f32[8,16]{1,0} dot(%row, %row), lhs_contracting_dims={1}, rhs_contracting_dims={1}
}
"""


def test_the_branch_with_the_most_work_is_timed_and_not_that_with_the_most_kernels():
    body = """
  %i = s32[] constant(0)
  ROOT %y = f32[8,16]{1,0} conditional(%i, %x, %x), branch_computations={%small, %large}"""
    row, product = read_schedule(program(body, BRANCHES), MESH)
    assert isinstance(row, KernelWork)
    assert isinstance(product, KernelWork)
    assert (row.name, product.name) == ("row", "product")


def test_copies_to_the_host_run_beside_kernels():
    body = """
  %away = (f32[8,16]{1,0:S(5)}, f32[8,16]{1,0}, u32[]) copy-start(%x)
  %gone = f32[8,16]{1,0:S(5)} copy-done(%away)
  ROOT %out = f32[8,16]{1,0} bitcast(%x)"""
    assert read_schedule(program(body), MESH) == (
        Start("away", Transfer("host", (), 4 * 8 * 16, 1)),
        Done("away"),
    )


def test_the_table_shows_what_matters():
    text = "\n".join(show_step_time(times(program(GATHER))))
    assert "Estimated time of a step: 1.946e+04 ms" in text
    assert "exposed communication (fsdp)" in text
    assert "2,048 ms are hidden" in text
    assert "attention" not in text


def test_text_that_is_no_program():
    with pytest.raises(ValueError, match="not compiled HLO"):
        read_schedule("nothing", MESH)
    with pytest.raises(ValueError, match="compiled for 4 devices"):
        read_schedule(program(GATHER), {"data": 2})


# As JAX's splash attention is printed: its metadata take several lines. Of the four blocks of the
# causal mask, one is masked.
SPLASH = r"""
  %mask = s8[1,2,2]{2,1,0} constant({ { { 1, 0 }, { 2, 1 } } })
  %next = s8[1,2,2]{2,1,0} constant({ { { 0, 0 }, { 0, 1 } } })
  %q = bf16[2,4,64,8]{3,2,1,0} bitcast(%x)
  %k = bf16[2,4,32,8]{3,2,1,0} bitcast(%w)
  %out = (bf16[2,4,64,8]{3,2,1,0}, f32[2,4,64]{2,1,0}) custom-call(%next, %mask, %q, %k, %k), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"xprof_metadata":"{\"block_kv\": 16, \"block_kv_dkv\": 16}"
}}, metadata={op_name="attention"}
  %dq = bf16[2,4,64,8]{3,2,1,0} custom-call(%next, %mask, %q, %k, %k, %q), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"xprof_metadata":"{\"block_kv\": 16, \"block_kv_dkv\": 16}"
}}, metadata={op_name="attention"}
  ROOT %y = bf16[2,4,64,8]{3,2,1,0} get-tuple-element(%out), index=0"""  # noqa: E501


def test_splash_attention_counts_the_blocks_that_its_mask_leaves():
    """Without its kernel's cost, which Pallas does not state, attention would take no time."""
    forward, backward = read_schedule(program(SPLASH), MESH)
    blocks = 2 * 4 * 64 * 32 * 8 * 3 // 4
    assert isinstance(forward, KernelWork)
    assert isinstance(backward, KernelWork)
    assert (forward.kind, forward.flops) == ("attention", (("bf16", 2 * 2 * blocks),))
    assert backward.flops == (("bf16", 3 * 2 * blocks),)


# Vocabularies of 20 and 24: a row of logits in bfloat16 takes 40 and 48 bytes.
LOGITS = """
  %x16 = bf16[8,16]{{1,0}} convert(%x)
  %t = bf16[{vocab},16]{{1,0}} broadcast(%x16), dimensions={{}}
  %logits = bf16[8,{vocab}]{{{layout}}} dot(%x16, %t), lhs_contracting_dims={{1}}, rhs_contracting_dims={{1}}
  ROOT %out = f32[8,16]{{1,0}} bitcast(%x)"""  # noqa: E501


def logits(vocab: int, layout: str = "1,0") -> KernelWork:
    events = read_schedule(program(LOGITS.format(vocab=vocab, layout=layout)), MESH)
    return the_product(events)


def the_product(events: tuple[Event, ...]) -> KernelWork:
    kernels = [event for event in events if isinstance(event, KernelWork)]
    (product,) = [kernel for kernel in kernels if kernel.kind == "product"]
    return product


def test_rows_of_a_product_that_are_no_multiple_of_16_bytes():
    """Those of the result count too, in the order in which it is in memory."""
    assert logits(20).is_misaligned
    assert not logits(24).is_misaligned
    assert not logits(20, layout="0,1").is_misaligned  # columns of 8 elements


def test_dimensions_of_one_side_are_one_row():
    """Rows of 3 heads of 8 are 48 bytes, and those of 3 heads of 4 are 24 bytes."""
    body = """
  %q = bf16[8,3,{size}]{{2,1,0}} convert(%x)
  %k = bf16[8,3,{size}]{{2,1,0}} convert(%x)
  %scores = bf16[8,8]{{1,0}} custom-call(%q, %k), custom_call_target="__cublas$gemm", backend_config={{"dot_dimension_numbers":{{"lhs_contracting_dimensions":["1","2"],"rhs_contracting_dimensions":["1","2"]}}}}
  ROOT %out = f32[8,16]{{1,0}} bitcast(%x)"""  # noqa: E501
    for size, expected in ((8, False), (4, True)):
        events = read_schedule(program(body.format(size=size)), MESH)
        product = the_product(events)
        assert product.is_misaligned == expected


def test_misaligned_products_take_longer_on_tensor_cores():
    """The lost time is told apart; products in float32 lose none."""
    slow = replace(FULL, misaligned=3.0)
    body = LOGITS.format(vocab=20, layout="1,0")
    step = times(program(body), efficiencies=slow)
    whole = 2 * 8 * 20 * 16 / 2000
    assert step.products == pytest.approx(3 * whole)
    assert step.misaligned == pytest.approx(2 * whole)
    assert "5,120 ms are lost because rows of matrices" in "\n".join(show_step_time(step))
    step = times(program(body.replace("bf16", "f32")), efficiencies=slow)
    assert step.misaligned == 0


@pytest.mark.thorough
def test_attention_that_a_cpu_interprets_is_one_kernel():
    """Each block of it would be a kernel otherwise, and most of the estimated time of a step."""
    q = jax.ShapeDtypeStruct((1, 1024, 2, 64), jnp.float32)
    attend = lambda q: attend_in_splash(q, q, q, View(causal=True), scale=1.0)
    text = jax.jit(attend).lower(q).compile().as_text()
    mesh = AbstractMesh((1, 1, 1), ("data", "fsdp", "model"), axis_types=(AxisType.Auto,) * 3)
    events = read_schedule(text, mesh)
    assert not any(isinstance(event, Loop) for event in events)
    (kernel,) = [event for event in events if getattr(event, "kind", "") == "attention"]
    assert isinstance(kernel, KernelWork)
    assert kernel.flops == (("f32", 2 * 2 * 2 * 1024 * 1024 * 64),)
    # Queries, keys, values and results, and tables of positions and sums.
    assert 4 * q.size * 4 < kernel.memory_bytes < 10 * q.size * 4


UPDATED = """
%update (layers: bf16[4,8,16], new: f32[1,8,16], place: s32[]) -> bf16[4,8,16] {
  %layers = bf16[4,8,16]{2,1,0} parameter(0)
  %new = f32[1,8,16]{2,1,0} parameter(1)
  %place = s32[] parameter(2)
  %zero = s32[] constant(0)
  %wide = f32[4,8,16]{2,1,0} convert(%layers)
  %updated = f32[4,8,16]{2,1,0} dynamic-update-slice(%wide, %new, %place, %zero, %zero)
  ROOT %narrow = bf16[4,8,16]{2,1,0} convert(%updated)
}
"""


def test_an_update_in_a_wider_dtype_writes_the_update_alone():
    """The compiler for CPUs, which may stand in for another, has no updates in bfloat16."""
    body = """
  %layers = bf16[4,8,16]{2,1,0} broadcast(%x), dimensions={}
  %new = f32[1,8,16]{2,1,0} bitcast(%x)
  %place = s32[] constant(1)
  %stored = bf16[4,8,16]{2,1,0} fusion(%layers, %new, %place), kind=kLoop, calls=%update
  ROOT %out = f32[8,16]{1,0} bitcast(%x)"""
    _, stored = read_schedule(program(body, UPDATED), MESH)
    update = 4 * 8 * 16
    assert isinstance(stored, KernelWork)
    assert stored.memory_bytes == 4 + 2 * update
