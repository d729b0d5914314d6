"""Reads weights that bitsandbytes, GPTQ and AWQ store as integers with scales.

Only the bytes of a part of a weight are read. Products are computed in float32 and rounded once.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

import numpy as np

from ._dequantise import CACHED, Misfit, QuantisedTensor
from ._lazy_tensor import Box, Stored
from ._settings import Settings

# The state of a 4-bit weight is a tensor with the bytes of a JSON object.
_STATES = (".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4")
# The tensors that describe a 4-bit weight, behind its name.
_OF_BLOCKS = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", *_STATES)
# In AWQ, the place of each of eight neighbouring outputs in an int32.
_AWQ_PLACES = np.array([0, 4, 1, 5, 2, 6, 3, 7])
# The largest tensor that is read whole when a file is opened.
_MOST_OF_STATE = 2**16


@dataclass(frozen=True)
class Blocks:
    """A weight of 4-bit codes, two in a byte, in blocks of its elements in storage order."""

    codes: Stored  # (bytes, 1)
    shape: tuple[int, ...]
    size: int  # elements in a block
    values: np.ndarray  # of each code, (16,)
    scales: np.ndarray  # of each block, (blocks,)

    def read(self, box: Box, out: np.ndarray) -> None:
        width = prod(self.shape[1:])
        rest = (slice(None), *box[1:])
        step = max(1, CACHED // width)
        for start in range(box[0].start, box[0].stop, step):
            stop = min(start + step, box[0].stop)
            first, last = start * width, stop * width
            raw = self.codes.take((slice(first // 2, -(-last // 2)), slice(0, 1)))[:, 0]
            # The first of two codes is in the upper bits.
            codes = np.stack([raw >> 4, raw & 15], axis=1).reshape(-1)
            codes = codes[first % 2 :][: last - first]  # a row may begin within a byte
            # Blocks follow the order of storage, and do not end with a row.
            scales = self.scales[np.arange(first, last) // self.size]
            rows = (self.values[codes] * scales).reshape(stop - start, *self.shape[1:])
            # Rows are read whole, since their codes are contiguous, and then cut.
            out[start - box[0].start : stop - box[0].start] = rows[rest]


def bitsandbytes_weight(
    name: str, stored: Mapping[str, Stored], quantisation: Settings
) -> QuantisedTensor | None:
    """Finds `x` with its state (4 bits), or with its scales (8 bits)."""
    x, scales = stored[name], name.removesuffix(".weight") + ".SCB"
    for end in _STATES:
        if name + end in stored:
            blocks = _blocks(name, name + end, stored)
            parts = tuple(name + end for end in _OF_BLOCKS)
            return QuantisedTensor(name, parts, blocks.shape, blocks.read)
    if x.dtype == np.int8 and scales in stored:
        return QuantisedTensor(name, (), x.shape, _rows(name, x, stored[scales]))
    return None


def _whole(name: str, stored: Mapping[str, Stored]) -> np.ndarray:
    if name not in stored:
        raise Misfit(f"{name} is missing")
    return stored[name].take_whole()


def _blocks(name: str, state: str, stored: Mapping[str, Stored]) -> Blocks:
    if stored[state].nbytes > _MOST_OF_STATE:
        raise Misfit(f"{state} has {stored[state].nbytes} bytes")
    try:
        about = json.loads(_whole(state, stored).tobytes())
        shape, size = tuple(map(int, about["shape"])), int(about["blocksize"])
        # Of scales that are quantised, too (double quantisation).
        of_scales = int(about.get("nested_blocksize", 1)), float(about.get("nested_offset", 0))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise Misfit(f"{state} does not describe a weight ({error})") from error
    codes, values = stored[name], _whole(f"{name}.quant_map", stored)
    count = prod(shape)
    fits = codes.shape == (-(-count // 2), 1) and values.shape == (16,)
    if codes.dtype != np.uint8 or not fits or min(size, of_scales[0], count) <= 0:
        raise Misfit(f"{name} has shape {codes.shape}, which does not match its state")
    scales = _whole(f"{name}.absmax", stored).reshape(-1)
    if f"{name}.nested_absmax" in stored:
        nested = _whole(f"{name}.nested_absmax", stored).astype(np.float32)
        at = np.arange(len(scales)) // of_scales[0]
        of_codes = _whole(f"{name}.nested_quant_map", stored).astype(np.float32)
        if scales.dtype != np.uint8 or len(of_codes) != 256 or at[-1:] >= len(nested):
            raise Misfit(f"{name}.absmax does not match its own scales")
        # A scale is one of 256 values, times the scale of its own block, plus the mean of all.
        scales = of_codes[scales] * nested[at] + np.float32(of_scales[1])
    if len(scales) != -(-count // size):
        raise Misfit(f"{name} has {len(scales)} scales, but {-(-count // size)} blocks")
    return Blocks(codes, shape, size, values.astype(np.float32), scales.astype(np.float32))


def _rows(name: str, x: Stored, scales: Stored) -> Callable[[Box, np.ndarray], None]:
    """Reads rows of 8-bit integers, each of which has a scale, its largest absolute value."""
    if len(x.shape) != 2 or scales.shape != x.shape[:1]:
        raise Misfit(f"{name} of shape {x.shape} has scales of shape {scales.shape}")

    def read(box: Box, out: np.ndarray) -> None:
        of_rows = scales.take(box[:1]).astype(np.float32) / np.float32(127)  # (rows,)
        out[...] = x.take(box) * of_rows[:, None]

    return read


@dataclass(frozen=True)
class Groups:
    """A weight (outputs, inputs), of which groups of inputs have a scale and a zero.

    Integers are packed into int32: of neighbouring inputs in GPTQ, of neighbouring outputs in AWQ.
    """

    weight: Stored  # GPTQ: (inputs / packed, outputs), AWQ: (inputs, outputs / packed)
    zeros: Stored  # (groups, outputs / packed)
    scales: Stored  # (groups, outputs)
    of_inputs: np.ndarray  # the group of each input, (inputs,)
    bits: int
    awq: bool
    offset: int  # what is added to the stored zeros

    def read(self, box: Box, out: np.ndarray) -> None:
        outputs, inputs = box
        packed = 32 // self.bits  # integers in an int32
        # The int32 that have these outputs, and where the outputs are among their integers.
        part = slice(outputs.start // packed, -(-outputs.stop // packed))
        inside = slice(outputs.start - part.start * packed, outputs.stop - part.start * packed)
        every = slice(0, self.scales.shape[0])
        zeros = self._unpack(self.zeros.take((every, part)), 1)[:, inside] + self.offset
        scales = self.scales.take((every, outputs)).astype(np.float32)
        if self.awq:
            numbers = self._unpack(self.weight.take((inputs, part)), 1)[:, inside]
        else:
            rows = slice(inputs.start // packed, -(-inputs.stop // packed))
            first = inputs.start - rows.start * packed
            numbers = self._unpack(self.weight.take((rows, outputs)), 0)
            numbers = numbers[first : first + inputs.stop - inputs.start]
        # `numbers` are (inputs, outputs) in both formats.
        at = self.of_inputs[inputs]
        out[...] = ((numbers - zeros[at]) * scales[at]).T

    def _unpack(self, x: np.ndarray, axis: int) -> np.ndarray:
        """Integers from int32, along an axis."""
        places = np.arange(32 // self.bits)
        if self.awq:
            places = _AWQ_PLACES
        shifts = (places * self.bits).astype(np.uint32)
        # The integers of an int32 get a dimension behind its own, which is then merged into it.
        parts = np.expand_dims(x.view(np.uint32), axis + 1)
        along = [1] * parts.ndim
        along[axis + 1] = len(shifts)
        numbers = (parts >> shifts.reshape(along)) & np.uint32(2**self.bits - 1)
        shape = list(x.shape)
        shape[axis] *= len(shifts)
        return numbers.astype(np.int32).reshape(shape)


def weight_of_groups(
    name: str, stored: Mapping[str, Stored], quantisation: Settings
) -> QuantisedTensor | None:
    """Finds `x.weight` by `x.qweight`, `x.qzeros`, `x.scales` and `x.g_idx` of GPTQ and AWQ."""
    module = name.removesuffix(".qweight")
    if module == name:
        return None
    weight = stored[name]
    bits, awq = quantisation["bits"], quantisation["quant_method"] == "awq"
    try:
        zeros, scales = stored[f"{module}.qzeros"], stored[f"{module}.scales"]
    except KeyError as error:
        raise Misfit(f"{error.args[0]} is missing") from error
    packed = 32 // bits
    if len(weight.shape) != 2 or len(scales.shape) != 2 or 0 in scales.shape + weight.shape:
        raise Misfit(f"{module}.qweight has shape {weight.shape}, its scales {scales.shape}")
    groups, outputs = scales.shape
    inputs, right = weight.shape[0] * packed, (weight.shape[0], outputs)
    if awq:
        inputs, right = weight.shape[0], (weight.shape[0], outputs // packed)
    are_integers = weight.dtype == zeros.dtype == np.int32
    if weight.shape != right or zeros.shape != (groups, outputs // packed) or not are_integers:
        raise Misfit(
            f"{module}.qweight of shape {weight.shape} has zeros of shape {zeros.shape} and scales "
            f"of shape {scales.shape}"
        )
    of_inputs = np.arange(inputs) // -(-inputs // groups)
    # GPTQ may quantise inputs in the order of their activations; then groups are not contiguous.
    if f"{module}.g_idx" in stored:
        of_inputs = _whole(f"{module}.g_idx", stored)
    if of_inputs.shape != (inputs,) or of_inputs.min() < 0 or of_inputs.max() >= groups:
        raise Misfit(f"{module}.g_idx does not give each of {inputs} inputs one of {groups} groups")
    # The first format of GPTQ stores zeros less one.
    is_first = not awq and quantisation.get("checkpoint_format", "gptq") == "gptq"
    read = Groups(weight, zeros, scales, of_inputs, bits, awq, int(is_first)).read
    parts = name, f"{module}.qzeros", f"{module}.scales", f"{module}.g_idx"
    return QuantisedTensor(f"{module}.weight", parts, (outputs, inputs), read)
