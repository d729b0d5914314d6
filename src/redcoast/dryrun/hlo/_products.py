"""The floating point operations of products in compiled HLO.

A product is a `dot`, a `convolution` (as which the TPU compiler writes dots too), a call of cuBLAS,
or one of cuDNN's attention kernels. Those of Pallas state their own operations.
"""

import re
from collections import Counter
from math import prod

from ._parse import (
    ArrayShape,
    Computation,
    Instruction,
    Module,
    array_shapes,
    attributes,
    called,
    computation,
    first_array,
    lookup,
    operands,
)

_WINDOW = re.compile(r"\bwindow=\{([^{}]*)\}")  # `window={size=3x3 pad=1_1x1_1}`
# `dim_labels=b01f_01io->b01f`: of the input, the kernel and the result, where `b` is the batch,
# `f`, `i` and `o` are features, and digits are spatial dimensions.
_LABELS = re.compile(r"\bdim_labels=(\w+)_(\w+)->(\w+)")
_TARGET = re.compile(r'custom_call_target="([^"]+)"')
# What Pallas and cuDNN say in the JSON of `backend_config`.
_COST = re.compile(r'"cost_estimate":\s*\{"flops":\s*"?(\d+)')
_CAUSAL = re.compile(r'"mask_type":\s*"(?:PADDING_)?CAUSAL"')
_SLIDING = re.compile(r'"sliding_window_length":\s*"?(\d+)')
# cuDNN's forward pass of attention has two products, its backward pass five: it computes the scores
# again.
_FORWARD, _BACKWARD = 2, 5


def call_target(instruction: Instruction) -> str:
    """The name of the function that a custom call calls; `""` for other instructions."""
    if instruction.opcode != "custom-call":
        return ""
    match = _TARGET.search(instruction.rest)
    if match is None:
        return ""
    return match[1]


def is_attention(instruction: Instruction) -> bool:
    """Whether an instruction is a kernel that computes attention, of cuDNN or of Pallas."""
    stated = _COST.search(instruction.rest) is not None
    pallas = stated or _is_splash(instruction)
    target = call_target(instruction)
    return target.startswith("__cudnn$fmha") or (target == "tpu_custom_call" and pallas)


def _is_splash(instruction: Instruction) -> bool:
    """Whether an instruction is JAX's splash attention, whose metadata are its block sizes."""
    return "block_kv_dkv" in instruction.rest


def product_flops(module: Module, within: Computation, instruction: Instruction) -> Counter[str]:
    """The floating point operations of the products of an instruction, by dtype of the operands.

    Those of a fusion are the sum over what it fuses.
    """
    match instruction.opcode:
        case "dot":
            return _dot(within, instruction)
        case "convolution":
            return _convolution(within, instruction)
        case "fusion" | "call" | "async-start":
            total: Counter[str] = Counter()
            for name in called(instruction, "calls", "to_apply"):
                inner = computation(module, name)
                for each in inner.instructions.values():
                    total += product_flops(module, inner, each)
            return total
        case "custom-call":
            return _custom_call(module, within, instruction)
    return Counter()


def _custom_call(module: Module, within: Computation, instruction: Instruction) -> Counter[str]:
    target = call_target(instruction)
    if target.startswith("__cudnn$fmha"):
        return _cudnn_attention(within, instruction, backward="Backward" in target)
    if target.startswith("__cublas"):
        return _dot(within, instruction)
    if target.startswith("__cudnn$conv"):
        return _convolution(within, instruction)
    if _is_splash(instruction):
        return _splash_attention(module, within, instruction)
    stated = _COST.search(instruction.rest)
    if stated is None:
        return Counter()
    return Counter({first_array(instruction.shape).dtype: int(stated[1])})


def _dot(within: Computation, instruction: Instruction) -> Counter[str]:
    """Two operations for each element of the result and each contracted element."""
    left = first_array(lookup(within, operands(instruction)[0]).shape)
    multiply_adds = prod(first_array(instruction.shape).sizes)
    for dim in dimension_numbers(instruction, "lhs_contracting"):
        multiply_adds *= left.sizes[dim]
    return Counter({left.dtype: 2 * multiply_adds})


def dimension_numbers(instruction: Instruction, name: str) -> list[int]:
    """The dimensions `lhs_contracting`, `rhs_contracting`, `lhs_batch` or `rhs_batch` of a `dot` or
    of a call of cuBLAS."""
    # `lhs_contracting_dims={1}` of a dot, or `"lhs_contracting_dimensions":["1"]` of cuBLAS.
    settings = instruction.rest
    if instruction.opcode == "dot":
        settings = attributes(instruction)
    written = rf'"?\b{name}_dim(?:ension)?s"?[=:][\[{{]([^\]}}]*)[\]}}]'
    match = re.search(written, settings)
    if match is None:
        return []
    return list(map(int, re.findall(r"\d+", match[1])))


def _convolution(within: Computation, instruction: Instruction) -> Counter[str]:
    """Two operations for each element of the result, input feature and place of the window that is
    neither padding nor a gap of dilation."""
    text = attributes(instruction)
    labels = _LABELS.search(text)
    if labels is None:
        return Counter()
    inputs, kernels, results = labels.groups()
    left, right = (first_array(lookup(within, name).shape) for name in operands(instruction)[:2])
    dtype, returned = left.dtype, first_array(instruction.shape).sizes
    size, kernel, result = left.sizes, right.sizes, returned
    # cuDNN's backward passes have the labels and the window of the forward pass. They take the
    # gradient of its result, and return that of its kernel or of its input.
    target = call_target(instruction)
    if target == "__cudnn$convBackwardFilter":
        kernel, result = returned, right.sizes
    elif target == "__cudnn$convBackwardInput":
        size, result = returned, left.sizes
    window = _window(text)
    # With groups of features, the kernel has only the input features of a group.
    count = result[results.index("b")] * result[results.index("f")] * kernel[kernels.index("i")]
    spatial = list(filter(str.isdigit, results))  # the labels of spatial dimensions are digits
    for place, label in enumerate(spatial):
        input_size = size[inputs.index(label)]
        kernel_size = kernel[kernels.index(label)]
        result_size = result[results.index(label)]
        count *= _overlaps(input_size, kernel_size, result_size, window, place)
    return Counter({dtype: 2 * count})


def _window(text: str) -> dict[str, list[str]]:
    """The settings of a window, such as `size=3x3 pad=1_1x1_1`, by their names."""
    match = _WINDOW.search(text)
    settings: dict[str, list[str]] = {}
    if match is None:
        return settings
    for setting in match[1].split():
        name, values = setting.split("=")
        settings[name] = values.split("x")
    return settings


def _window_setting(
    window: dict[str, list[str]], name: str, place: int, *, default: int = 1
) -> int:
    """A setting along one dimension; of padding, `1_2`, the number of elements before."""
    if name not in window:
        return default
    return int(window[name][place].split("_")[0])


def _overlaps(size: int, kernel: int, result: int, window: dict[str, list[str]], place: int) -> int:
    """The number of pairs of a place in the result and in the window that meet an element."""
    stride = _window_setting(window, "stride", place)
    spread = _window_setting(window, "rhs_dilate", place)
    gap = _window_setting(window, "lhs_dilate", place)
    before = _window_setting(window, "pad", place, default=0)
    end = (size - 1) * gap  # of the dilated input: elements are at multiples of the gap
    count = 0
    for tap in range(kernel):
        first = tap * spread - before
        last = first + (result - 1) * stride
        if gap == 1:
            # The steps whose position, first + step * stride, is in the input.
            low = max(0, -(first // stride))
            high = min(result - 1, (size - 1 - first) // stride)
            count += max(0, high - low + 1)
        elif stride == 1:
            # The multiples of the gap from `low` to `high`.
            low = max(first, 0)
            high = min(last, end)
            count += max(0, high // gap - (low - 1) // gap)
        else:
            for step in range(result):
                position = first + step * stride
                count += position % gap == 0 and 0 <= position <= end
    return count


def _cudnn_attention(
    within: Computation, instruction: Instruction, *, backward: bool
) -> Counter[str]:
    """The products of queries with keys and of weights with values, without masked halves."""
    # (batch, length, heads, features), as `jax.nn.dot_product_attention` passes them.
    queries, keys = (first_array(lookup(within, name).shape) for name in operands(instruction)[:2])
    batch, length, heads, features = queries.sizes
    key_length = keys.sizes[1]
    pairs = float(batch * heads * length * key_length)
    if _CAUSAL.search(instruction.rest):
        window = 0
        sliding = _SLIDING.search(instruction.rest)
        if sliding is not None:
            window = int(sliding[1])
        pairs *= _causal_share(key_length, window)
    products = _FORWARD
    if backward:
        products = _BACKWARD
    return Counter({queries.dtype: round(products * 2 * pairs * features)})


# The products of splash attention's backward kernels, by the number of gradients that they return:
# of queries; of keys and values; of all three. Each computes the scores again and multiplies the
# gradient of the outputs with the values, and needs one more product for each gradient.
_SPLASH_BACKWARD = {1: 3, 2: 4, 3: 5}


def _splash_attention(
    module: Module, within: Computation, instruction: Instruction
) -> Counter[str]:
    """The products of the blocks that the mask leaves."""
    sequences: list[ArrayShape] = []  # queries, keys and values: (..., length, features)
    masks: list[ArrayShape] = []
    for name in operands(instruction):
        for array in array_shapes(lookup(within, name).shape)[:1]:
            if array.dtype.startswith(("bf", "f")) and len(array.sizes) >= 3:
                sequences.append(array)
            elif array.dtype.startswith("s") and len(array.sizes) == 3:
                masks.append(array)
    half = [array for array in sequences if array.dtype != "f32"]
    if len(half) >= 3:
        # Logarithms of sums and the like are in float32.
        sequences = half
    queries, keys = sequences[:2]
    products = _FORWARD
    if len(sequences) > 3:  # a backward kernel reads the gradient of the outputs too
        dtypes = [result.dtype for result in array_shapes(instruction.shape)]
        products = _SPLASH_BACKWARD[dtypes.count(queries.dtype)]
    features = queries.sizes[-1]
    pairs = prod(queries.sizes[:-1]) * keys.sizes[-2]
    share = 1.0
    if masks:
        share = _block_share(module, masks[0].sizes)
    return Counter({queries.dtype: round(products * 2 * pairs * features * share)})


def _block_share(module: Module, shape: tuple[int, ...]) -> float:
    """The part of all blocks that are not masked entirely: of the program's constants with the
    shape of a mask of blocks, the largest part that is not zero."""
    dims = ",".join(map(str, shape))
    shares = [0.0]
    for each in module.computations.values():
        for instruction in each.instructions.values():
            if instruction.opcode == "constant" and f"[{dims}]" in instruction.shape:
                blocks = re.findall(r"\d+", instruction.rest.partition("})")[0])
                computed = len(blocks) - blocks.count("0")  # a block of 0 is masked entirely
                shares.append(computed / prod(shape))
    return min(1.0, max(shares)) or 1.0


def _causal_share(length: int, window: int) -> float:
    """The part of all pairs of positions that a causal mask leaves, with a window if it is > 0."""
    # Position i sees i + 1 positions, or `window` if these are fewer.
    if not 0 < window < length:
        return (length + 1) / (2 * length)
    return (window * length - window * (window - 1) / 2) / length**2
