"""The floating point operations of products in compiled HLO.

A product is a `dot`, a `convolution` (as which the TPU compiler writes dots too), a call of cuBLAS,
or one of cuDNN's attention kernels. Those of Pallas state their own operations.
"""

import re
from collections import Counter
from math import prod

from ._parse import (
    Computation,
    Instruction,
    Module,
    array_shapes,
    attributes,
    called,
    computation,
    lookup,
    operands,
)

_WINDOW = re.compile(r"\bwindow=\{([^{}]*)\}")
_LABELS = re.compile(r"\bdim_labels=(\w+)_(\w+)->(\w+)")
_GROUPS = re.compile(r"\bfeature_group_count=(\d+)")
_TARGET = re.compile(r'custom_call_target="([^"]+)"')
_COST = re.compile(r'"cost_estimate":\s*\{"flops":\s*"?(\d+)')
_CAUSAL = re.compile(r'"mask_type":\s*"(?:PADDING_)?CAUSAL"')
_SLIDING = re.compile(r'"sliding_window_length":\s*"?(\d+)')
# cuDNN's forward pass of attention has two products, its backward pass five: it computes the scores
# again.
_FORWARD, _BACKWARD = 2, 5


def call_target(instruction: Instruction) -> str:
    """The name of the function that a custom call calls; `""` for other instructions."""
    match = _TARGET.search(instruction.rest) if instruction.opcode == "custom-call" else None
    return match[1] if match else ""


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
            return _dot(within, instruction, attributes(instruction))
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
        return _dot(within, instruction, instruction.rest)
    if target.startswith("__cudnn$conv"):
        return _convolution(within, instruction)
    if _is_splash(instruction):
        return _splash_attention(module, within, instruction)
    stated = _COST.search(instruction.rest)
    if stated is None:
        return Counter()
    dtype, _ = _first_array(instruction.shape)
    return Counter({dtype: int(stated[1])})


def _dot(within: Computation, instruction: Instruction, settings: str) -> Counter[str]:
    """Two operations for each element of the result and each contracted element."""
    dtype, shape = _first_array(lookup(within, operands(instruction)[0]).shape)
    _, result = _first_array(instruction.shape)
    contracted = _numbers(settings, "lhs_contracting_dim(?:ension)?s")
    return Counter({dtype: 2 * prod(result) * prod(shape[dim] for dim in contracted)})


def _convolution(within: Computation, instruction: Instruction) -> Counter[str]:
    """Two operations for each element of the result, input feature and place of the window that is
    neither padding nor a gap of dilation."""
    text = attributes(instruction)
    labels = _LABELS.search(text)
    if labels is None:
        return Counter()
    inputs, kernels, results = labels.groups()
    dtype, shape = _first_array(lookup(within, operands(instruction)[0]).shape)
    _, kernel = _first_array(lookup(within, operands(instruction)[1]).shape)
    _, result = _first_array(instruction.shape)
    window = _window(text)
    count = result[results.index("b")] * result[results.index("f")] * kernel[kernels.index("i")]
    for place, label in enumerate(label for label in results if label.isdigit()):
        sizes = (shape[inputs.index(label)], kernel[kernels.index(label)])
        count *= _overlaps(*sizes, result[results.index(label)], window, place)
    return Counter({dtype: 2 * count})


def _window(text: str) -> dict[str, list[str]]:
    """The settings of a window, such as `size=3x3 pad=1_1x1_1`, by their names."""
    match = _WINDOW.search(text)
    settings = match[1].split() if match else []
    pairs = (setting.split("=") for setting in settings)
    return {name: values.split("x") for name, values in pairs}


def _overlaps(size: int, kernel: int, result: int, window: dict[str, list[str]], place: int) -> int:
    """The number of pairs of a place in the result and in the window that meet an element."""
    value = lambda name, default: window[name][place] if name in window else default
    stride, spread = int(value("stride", "1")), int(value("rhs_dilate", "1"))
    gap, before = int(value("lhs_dilate", "1")), int(value("pad", "0_0").split("_")[0])
    count = 0
    for tap in range(kernel):
        first = tap * spread - before
        last = first + (result - 1) * stride
        if gap == 1:
            low = max(0, -(first // stride) if first < 0 else 0)
            high = min(result - 1, (size - 1 - first) // stride)
            count += max(0, high - low + 1)
        elif stride == 1:
            # Elements are at multiples of the gap.
            low, high = max(first, 0), min(last, (size - 1) * gap)
            count += max(0, high // gap - (low - 1) // gap)
        else:
            inside = (first + step * stride for step in range(result))
            count += sum(at % gap == 0 and 0 <= at <= (size - 1) * gap for at in inside)
    return count


def _cudnn_attention(
    within: Computation, instruction: Instruction, *, backward: bool
) -> Counter[str]:
    """The products of queries with keys and of weights with values, without masked halves."""
    arrays = operands(instruction)
    dtype, queries = _first_array(lookup(within, arrays[0]).shape)
    _, keys = _first_array(lookup(within, arrays[1]).shape)
    # (batch, length, heads, features), as `jax.nn.dot_product_attention` passes them.
    batch, length, heads, features = queries
    pairs = float(batch * heads * length * keys[1])
    if _CAUSAL.search(instruction.rest):
        window = _SLIDING.search(instruction.rest)
        pairs *= _causal_share(keys[1], int(window[1]) if window else 0)
    products = _BACKWARD if backward else _FORWARD
    return Counter({dtype: round(products * 2 * pairs * features)})


# The products of splash attention's backward kernels, by the number of gradients that they return:
# of queries; of keys and values; of all three.
_SPLASH_BACKWARD = {1: 3, 2: 4, 3: 5}


def _splash_attention(
    module: Module, within: Computation, instruction: Instruction
) -> Counter[str]:
    """The products of the blocks that the mask leaves."""
    shapes = [array_shapes(lookup(within, name).shape) for name in operands(instruction)]
    arrays = [found[0] for found in shapes if found]
    # (..., length, features); logarithms of sums and the like are in float32.
    sequences = [one for one in arrays if one[0].startswith(("bf", "f")) and len(one[1]) >= 3]
    half = [one for one in sequences if one[0] != "f32"]
    if len(half) >= 3:
        sequences = half
    (dtype, queries), (_, keys) = sequences[:2]
    gradients = sum(one == dtype for one, _ in array_shapes(instruction.shape))
    # A backward kernel reads the gradient of the outputs too.
    backward = len(sequences) > 3
    products = _SPLASH_BACKWARD[gradients] if backward else _FORWARD
    features = queries[-1]
    pairs = prod(queries[:-1]) * keys[-2]
    masks = [shape for one, shape in arrays if one.startswith("s") and len(shape) == 3]
    share = _block_share(module, masks[0]) if masks else 1.0
    return Counter({dtype: round(products * 2 * pairs * features * share)})


def _block_share(module: Module, shape: tuple[int, ...]) -> float:
    """The part of all blocks that are not masked entirely: of the program's constants with the
    shape of a mask of blocks, the largest part that is not zero."""
    dims = ",".join(map(str, shape))
    shares = [0.0]
    for each in module.computations.values():
        for instruction in each.instructions.values():
            if instruction.opcode == "constant" and f"[{dims}]" in instruction.shape:
                numbers = re.findall(r"\d+", instruction.rest.partition("})")[0])
                shares.append(sum(number != "0" for number in numbers) / prod(shape))
    return min(1.0, max(shares)) or 1.0


def _causal_share(length: int, window: int) -> float:
    """The part of all pairs of positions that a causal mask leaves, with a window if it is > 0."""
    if not 0 < window < length:
        return (length + 1) / (2 * length)
    return (window * length - window * (window - 1) / 2) / length**2


def _first_array(shape: str) -> tuple[str, tuple[int, ...]]:
    return array_shapes(shape)[0]


def _numbers(text: str, name: str) -> list[int]:
    match = re.search(rf'"?\b{name}"?[=:][\[{{]([^\]}}]*)[\]}}]', text)
    return [int(number) for number in re.findall(r"\d+", match[1])] if match else []
