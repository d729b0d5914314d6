"""What is in memory at the peak of a compiled program."""

import jax
import jax.numpy as jnp
import pytest

from redcoast.dryrun.hlo import peak_buffers

HLO = """HloModule jit_step, is_scheduled=true

%body (p: (f32[64], f32[16])) -> (f32[64], f32[16]) {
  %p = (f32[64], f32[16]) parameter(0)
  %x = f32[64] get-tuple-element(%p), index=0
  %y = f32[16] get-tuple-element(%p), index=1
  %wide = f32[256] broadcast(%y), dimensions={}, metadata={op_name="wide"}
  %new = f32[64] slice(%wide), slice={[0:64]}
  ROOT %out = (f32[64], f32[16]) tuple(%new, %y)
}

%condition (p: (f32[64], f32[16])) -> pred[] {
  %p = (f32[64], f32[16]) parameter(0)
  ROOT %go = pred[] constant(true)
}

ENTRY %main (a: f32[64], b: f32[16]) -> f32[64] {
  %a = f32[64] parameter(0)
  %b = f32[16] parameter(1)
  %first = f32[64] negate(%a), metadata={op_name="first"}
  %second = f32[64] add(%first, %a), metadata={op_name="second"}
  %copy = f32[16] copy(%b), metadata={op_name="copy"}
  %carry = (f32[64], f32[16]) tuple(%second, %copy)
  %loop = (f32[64], f32[16]) while(%carry), condition=%condition, body=%body
  %x = f32[64] get-tuple-element(%loop), index=0
  ROOT %result = f32[64] sort(%x), dimensions={0}
}
"""


def test_buffers_are_written_over_shared_by_loops_and_larger_inside_of_them():
    """`add` has the buffer of `negate`, and the loop those of its operands."""
    held = {one.source: one.bytes for one in peak_buffers(HLO)}
    assert held == {"wide": 1024, "first": 256, "copy": 64}


def test_an_element_of_a_tuple_is_not_kept_until_the_last_read_of_another():
    """After the loop, the memory of what only the loop reads is free."""
    before = "%x = f32[64] get-tuple-element(%loop), index=0\n  ROOT %result = f32[64] sort(%x)"
    after = """%large = f32[256] broadcast(%b), dimensions={}, metadata={op_name="large"}
  %y = f32[16] get-tuple-element(%loop), index=1
  ROOT %result = f32[16] sort(%y)"""
    assert before in HLO
    text = HLO.replace(before, after).replace("%wide = f32[256]", "%wide = f32[64]")
    alive = {buffer.source: buffer.bytes for buffer in peak_buffers(text)}
    assert alive == {"large": 1024, "copy": 64}


@pytest.mark.parametrize("text", ["", HLO[: HLO.index("ROOT %result")]])
def test_text_that_is_not_one_program(text):
    with pytest.raises(ValueError, match="HLO"):
        peak_buffers(text)


def test_the_sum_is_what_the_compiler_reports():
    def step(w, x):
        for _ in range(3):
            x = jnp.tanh(x @ w)
        return jnp.sum(jax.lax.scan(lambda x, _: (jnp.sin(x @ w), None), x, length=4)[0])

    shapes = jax.ShapeDtypeStruct((64, 64), "float32"), jax.ShapeDtypeStruct((256, 64), "float32")
    compiled = jax.jit(jax.grad(step)).lower(*shapes).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    held = peak_buffers(compiled.as_text() or "")
    total = sum(one.bytes for one in held)
    assert total == pytest.approx(memory.temp_size_in_bytes, rel=0.15)


def test_operands_are_kept_until_an_asynchronous_operation_is_done():
    """Of several arrays in one collective, the results are the second tuple."""
    text = """HloModule jit_step, is_scheduled=true, num_partitions=2

ENTRY %main (a: f32[64], b: f32[32]) -> f32[64] {
  %a = f32[64] parameter(0)
  %b = f32[32] parameter(1)
  %x = f32[64] sort(%a), dimensions={0}, metadata={op_name="x"}
  %y = f32[32] sort(%b), dimensions={0}, metadata={op_name="y"}
  %start = ((f32[64], f32[32]), (f32[128], f32[64])) all-gather-start(%x, %y), dimensions={0}, metadata={op_name="gathered"}
  %busy = f32[16] slice(%a), slice={[0:16]}, metadata={op_name="busy"}
  %done = (f32[128], f32[64]) all-gather-done(%start)
  %second = f32[64] get-tuple-element(%done), index=1
  ROOT %result = f32[64] sort(%second), dimensions={0}
}
"""  # noqa: E501
    held = [(one.source, one.bytes) for one in peak_buffers(text)]
    gathered = [("gathered", 256), ("gathered", 512)]
    assert sorted(held) == [("busy", 64), *gathered, ("x", 256), ("y", 128)]
