"""Safetensors files with numbers of 8 bits, which the package does not write from NumPy."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np

KINDS = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "int8": "I8",
    "uint8": "U8",
    "int32": "I32",
}


def write_raw(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    header, start = {}, 0
    for name, x in tensors.items():
        offsets = [start, start + x.nbytes]
        header[name] = {"dtype": KINDS[x.dtype.name], "shape": x.shape, "data_offsets": offsets}
        start += x.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for x in tensors.values():
            file.write(np.ascontiguousarray(x).tobytes())
