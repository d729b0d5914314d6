"""Replaces the quantised tensors of a file by the tensors that they represent.

MXFP4, 8-bit floating-point numbers (FP8), and the integers of bitsandbytes, GPTQ and AWQ are
supported. Other methods are rejected.
"""

import dataclasses
import functools as ft
from collections.abc import Mapping
from math import prod

import jax.numpy as jnp
import numpy as np

from ..core._errors import several, short_repr
from ._dequantise import EXPONENTS, FP8, Misfit, QuantisedTensor, read_mxfp4, read_scaled
from ._lazy_tensor import Box, Source, Stored, bytes_by_dtype
from ._packed_integers import bitsandbytes_weight, weight_of_groups
from ._settings import Implemented, Settings

# The settings that describe a quantisation.
QUANTISATION = ("quantization_config", "compression_config")
# The supported methods, each with the settings that it requires.
_METHODS: dict[str, Implemented] = {
    "awq": {"bits": (4,), "version": ("gemm", "GEMM", None)},
    "bitsandbytes": {},
    "compressed-tensors": {"transform_config": ({}, None)},
    "fbgemm_fp8": {},
    "fp8": {"fmt": ("e4m3", "e5m2", None), "expert_dtype": ("fp8", None)},
    "gptq": {"bits": (2, 4, 8), "checkpoint_format": ("gptq", "gptq_v2", None)},
    "modelopt": {"quant_algo": ("FP8",)},
    "mxfp4": {},
    "mxfp8": {},
}
# Names of the scales of `x` and of `x.weight`.
# All are factors of the weight, also `weight_scale_inv` of DeepSeek's files.
_SCALES = ("{}_scale_inv", "{}_scale")
_SCALES_OF_MODULES = ("{}.scale", "{}.qscale_weight")
# Scales for quantised activations and caches, which have no effect here.
_OF_ACTIVATIONS = (".input_scale", ".input_scale_ub", ".activation_scale", ".output_scale")
_OF_ACTIVATIONS += (".k_scale", ".v_scale", ".q_scale", ".qscale_act")


def dequantised(source: Source, dtype: np.dtype | None, where: object) -> Source:
    """Returns a source with dequantised tensors.

    - `dtype`: the dtype of these tensors; by default, the dtype of the tensors that are not
      quantised (of several, the one with the most bytes), or bfloat16 if there are none.
    - `where`: the path of the model, for messages.

    Raises `ValueError` if the method is not implemented, or if its tensors do not match.
    """
    settings, quantisation = split_quantisation(source.settings, where)
    if quantisation is None:
        return source
    method = str(_method_of(quantisation))
    find, words = _FINDERS.get(method, (_fp8_weight, "in FP8"))
    ignored = _IGNORED.get(method, _OF_ACTIVATIONS)
    stored = {name: x for name, x in source.stored.items() if not name.endswith(ignored)}
    tensors: list[QuantisedTensor] = []
    problems: list[str] = []
    for name in source.stored:
        try:
            tensor = find(name, source.stored, quantisation)
        except Misfit as error:
            problems.append(error.args[0])
            continue
        if tensor is not None:
            tensors.append(tensor)
            for part in tensor.parts:
                stored.pop(part, None)
    if problems:
        raise ValueError(f"{where} has weights {words} that cannot be read: {several(problems)}.")
    # Only now, when the scales and the codes are no longer among the others.
    dtype = dtype or _dtype_of_others(stored)
    for tensor in tensors:
        stored[tensor.name] = Stored(tensor.shape, dtype, tensor.read)
    return dataclasses.replace(source, settings=settings, stored=stored)


def split_quantisation(settings: Settings, where: object) -> tuple[Settings, Settings | None]:
    """Separates the settings of the quantisation, if there are any, from the others.

    Raises `ValueError` if the method is not implemented.
    """
    rest, description = dict(settings), None
    for name in QUANTISATION:
        older = rest.pop(name, None)
        description = description or older
    if not description:
        return rest, None
    quantisation = {}
    if isinstance(description, dict):
        quantisation = description
    method = _method_of(quantisation)
    odd = _odd_settings(method, quantisation)
    if isinstance(method, str) and not odd and method in _METHODS:
        return rest, quantisation
    name = str(method or "an unnamed method")
    if odd:
        name += f" ({', '.join(odd)})"
    raise ValueError(
        f"{where} contains weights that are quantised with {name}. This is not "
        "supported; MXFP4, 8-bit floating-point numbers (FP8), and the integers of bitsandbytes, "
        "GPTQ and AWQ (`bits`: 4; of GPTQ also 2 and 8) are. Load the model that they "
        "were made from, or a `.gguf` file of it; or dequantise the weights with a program that "
        "reads them, and save that model as safetensors."
    )


def _method_of(quantisation: Settings) -> object:
    method = quantisation.get("quant_method")
    if method is None and (quantisation.get("load_in_8bit") or quantisation.get("load_in_4bit")):
        return "bitsandbytes"  # files of its first versions name no method
    return method


def _odd_settings(method: object, quantisation: Settings) -> list[str]:
    """Returns the settings by which a method stores weights in another format than FP8."""
    odd = []
    if not isinstance(method, str):
        return odd
    for name, values in _METHODS.get(method, {}).items():
        if quantisation.get(name) not in values:
            odd.append(f"`{name}` is {short_repr(quantisation.get(name))}")
    if method != "compressed-tensors":
        return odd
    groups = quantisation.get("config_groups")
    if isinstance(groups, dict):
        for name, group in groups.items():
            numbers = "unknown"
            if isinstance(group, dict) and isinstance(weights := group.get("weights"), dict):
                numbers = f"{weights.get('type')} of {weights.get('num_bits')} bits"
            if numbers != "float of 8 bits":
                odd.append(f"the weights of `{name}` are {numbers}")
    sparsity = quantisation.get("sparsity_config") or {}
    if not isinstance(sparsity, dict) or sparsity.get("format", "dense") != "dense":
        odd.append(f"`sparsity_config` is {short_repr(sparsity)}")
    if not groups:
        odd.append("without `config_groups`")
    return odd


def _block_size(quantisation: Settings) -> tuple[int, int] | None:
    size = quantisation.get("weight_block_size")
    if not isinstance(size, list) or len(size) != 2:
        return None
    rows, columns = size
    if not all(isinstance(n, int) and n > 0 for n in size):
        return None
    return rows, columns


def _dtype_of_others(stored: Mapping[str, Stored]) -> np.dtype:
    for dtype, _ in bytes_by_dtype(stored.values()).most_common():
        if dtype not in FP8 | EXPONENTS and jnp.issubdtype(dtype, np.floating):
            return dtype
    return np.dtype(jnp.bfloat16)


def _mxfp4_weight(
    name: str, stored: Mapping[str, Stored], quantisation: Settings
) -> QuantisedTensor | None:
    """Finds `x`, whose last two dimensions are swapped, by `x_blocks` and `x_scales`."""
    base, blocks = name.removesuffix("_blocks"), stored[name]
    if base == name or len(blocks.shape) != 4 or blocks.dtype != np.uint8:
        return None
    scales = stored.get(base + "_scales")
    if scales is None or (scales.shape, scales.dtype) != (blocks.shape[:3], np.uint8):
        kind = "none"
        if scales is not None:
            kind = f"some of shape {scales.shape} of {scales.dtype}"
        raise Misfit(f"{name} needs scales of shape {blocks.shape[:3]} of uint8; has {kind}")
    experts, outputs, groups, size = blocks.shape
    shape = (experts, groups * size * 2, outputs)  # two numbers in a byte
    read = ft.partial(read_mxfp4, blocks, scales)
    return QuantisedTensor(base, (name, base + "_scales"), shape, read)


def _fp8_weight(
    name: str, stored: Mapping[str, Stored], quantisation: Settings
) -> QuantisedTensor | None:
    """Finds a weight in FP8 and its scales."""
    weight = stored[name]
    if weight.dtype not in FP8:
        return None
    scale_name = _scale_of(name, stored)
    if scale_name is None:
        raise Misfit(f"{name} of {weight.dtype} has no scale")
    scale = _as_grid(stored[scale_name], weight.shape)
    block = _block_of(weight.shape, scale, _block_size(quantisation))
    if block is None:
        kind = f"{stored[scale_name].shape} of {stored[scale_name].dtype}"
        raise Misfit(f"{name} of shape {weight.shape} has scales of shape {kind}")
    read = ft.partial(read_scaled, weight, scale, block)
    return QuantisedTensor(name, (scale_name,), weight.shape, read)


# For each method, the function that finds a weight by the name of one of its tensors, and what its
# weights are called in messages. All others are in FP8.
_FINDERS = {
    "mxfp4": (_mxfp4_weight, "in MXFP4"),
    "bitsandbytes": (bitsandbytes_weight, "of bitsandbytes"),
    "awq": (weight_of_groups, "in groups of integers"),
    "gptq": (weight_of_groups, "in groups of integers"),
}
# The ends of the names of tensors that have no effect here, where not of activations.
_IGNORED = {"bitsandbytes": (".SCB", ".weight_format"), "mxfp4": (), "awq": (), "gptq": ()}


def _scale_of(name: str, stored: Mapping[str, Stored]) -> str | None:
    """The name of the tensor with the scales of a weight, if there is one."""
    for pattern in _SCALES:
        if pattern.format(name) in stored:
            return pattern.format(name)
    if not name.endswith(".weight"):
        return None
    module = name.removesuffix(".weight")
    for pattern in _SCALES_OF_MODULES:
        if pattern.format(module) in stored:
            return pattern.format(module)
    return None


def _as_grid(scale: Stored, shape: tuple[int, ...]) -> Stored:
    """Returns scales with as many dimensions as their weight. A scale for all of the weight, or one
    for each row, may have fewer."""
    if prod(scale.shape) == 1:
        everything = (slice(0, 1),) * len(scale.shape)

        def read(_: Box, out: np.ndarray) -> None:
            out[...] = scale.take(everything).reshape(())

        return Stored((1,) * len(shape), scale.dtype, read)
    if scale.shape == shape[:-1]:

        def read_rows(box: Box, out: np.ndarray) -> None:
            scale.read(box[:-1], out[..., 0])

        return Stored((*scale.shape, 1), scale.dtype, read_rows)
    return scale


def _block_of(
    shape: tuple[int, ...], scale: Stored, size: tuple[int, int] | None
) -> tuple[int, int] | None:
    """Returns the rows and columns of a block with one scale, or None if the shapes do not match.

    The last block of a dimension may be smaller if the block size is stated.
    """
    if not (scale.dtype in EXPONENTS or jnp.issubdtype(scale.dtype, np.floating)):
        return None
    if len(shape) < 2 or len(scale.shape) != len(shape) or 0 in scale.shape:
        return None
    for n, blocks in zip(shape[:-2], scale.shape[:-2], strict=True):
        if blocks not in (n, 1):
            return None
    rows, columns = shape[-2:]
    blocks_down, blocks_across = scale.shape[-2:]
    # By the stated size, or else in blocks of equal size.
    if size and (blocks_down, blocks_across) == (-(-rows // size[0]), -(-columns // size[1])):
        return size
    if rows % blocks_down or columns % blocks_across:
        return None
    return rows // blocks_down, columns // blocks_across
