"""Weights in FP8 and MXFP4, bit for bit as `transformers` dequantises them."""

# pyright: reportMissingImports=false

import json

import ml_dtypes
import numpy as np
import pytest
import torch
from published import uniform
from raw_files import write_raw
from safetensors.numpy import load_file
from transformers import DeepseekV3ForCausalLM, GptOssForCausalLM, LlamaForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import redcoast as rc
from redcoast.pretrained._dequantise import read_mxfp4, read_scaled
from redcoast.pretrained._lazy_tensor import Stored

COMMON = {
    "vocab_size": 48,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
OF_EXPERTS = {"num_local_experts": 3, "num_experts_per_tok": 2, "head_dim": 32}
OF_LATENTS = {"num_key_value_heads": 4, "moe_intermediate_size": 32, "n_routed_experts": 4}
OF_LATENTS |= {"num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
OF_LATENTS |= {"q_lora_rank": 64, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "v_head_dim": 32}
OF_LATENTS |= {"qk_rope_head_dim": 32, "n_shared_experts": 1}
BLOCKS = {"quant_method": "fp8", "weight_block_size": [32, 32], "activation_scheme": "dynamic"}
WHOLE = {"quant_method": "fp8", "weight_block_size": None, "activation_scheme": "static"}
MXFP4 = {"quant_method": "mxfp4"}
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)


def random_bytes(name, shape, most=256):
    values = (uniform(name, int(np.prod(shape))) + 1) / 2 * (most - 0.01)
    return values.astype(np.uint8).reshape(shape)


def in_fp8(name, x, size):
    linear = name.endswith("_proj.weight") or "a_proj_with_mqa" in name
    if not linear:
        return {name: x}
    grid = [n // m for n, m in zip(x.shape, size, strict=True)] if size else []
    scale = np.asarray(0.01 * (1.5 + uniform(name + "s", int(np.prod(grid)))), np.float32)
    return {
        name: random_bytes(name, x.shape, 120).view(FP8),
        name + "_scale_inv": scale.reshape(grid),
    }


def in_mxfp4(name, x):
    if x.ndim != 3:
        return {name: x}
    experts, inputs, outputs = x.shape
    blocks = random_bytes(name, (experts, outputs, inputs // 32, 16))
    scales = 118 + random_bytes(name + "s", blocks.shape[:-1], 6)
    return {name + "_blocks": blocks, name + "_scales": scales}


def write(path, kind, sizes, quantisation):
    """A directory with random numbers in place of the quantised weights of a random model."""
    torch.manual_seed(0)
    model = kind(kind.config_class(**{**COMMON, **sizes})).to(torch.bfloat16)
    model.save_pretrained(path)
    change = lambda name, x: (
        in_mxfp4(name, x)
        if quantisation is MXFP4
        else in_fp8(name, x, quantisation["weight_block_size"])
    )
    tensors = {}
    for name, x in load_file(path / "model.safetensors").items():
        tensors |= change(name, x)
    write_raw(path / "model.safetensors", tensors)
    settings = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(settings | {"quantization_config": quantisation}))


def bits(tensor):  # routers are float32
    return tensor.detach().to(torch.bfloat16).contiguous().view(torch.int16).numpy()


@pytest.mark.parametrize(
    ("kind", "sizes", "quantisation"),
    [
        (LlamaForCausalLM, {}, BLOCKS),
        (LlamaForCausalLM, {}, WHOLE),
        (DeepseekV3ForCausalLM, OF_LATENTS, BLOCKS),
        (GptOssForCausalLM, {**OF_EXPERTS, "intermediate_size": 64}, MXFP4),
    ],
    ids=["llama fp8 blocks", "llama fp8", "deepseek v3 fp8 blocks", "gpt oss mxfp4"],
)
def test_every_weight_has_the_same_bits(kind, sizes, quantisation, tmp_path):
    write(tmp_path / "theirs", kind, sizes, quantisation)
    theirs = kind.from_pretrained(tmp_path / "theirs", dtype=torch.bfloat16).state_dict()
    rc.save_pretrained(rc.load_pretrained(tmp_path / "theirs"), tmp_path / "ours")
    ours = kind.from_pretrained(tmp_path / "ours", dtype=torch.bfloat16).state_dict()
    assert ours.keys() == theirs.keys()
    for name, x in theirs.items():
        np.testing.assert_array_equal(bits(ours[name]), bits(x), err_msg=name)


def of(array):
    return Stored(array.shape, array.dtype, lambda box, out: np.copyto(out, array[box]))


def everything(shape):
    return tuple(slice(0, n) for n in shape)


def same(ours, theirs):
    theirs = theirs.float().numpy()
    np.testing.assert_array_equal(np.isnan(ours.astype(np.float32)), np.isnan(theirs))
    np.testing.assert_array_equal(ours.astype(np.float32), theirs)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_every_byte_with_every_exponent(dtype):
    blocks = np.broadcast_to(np.arange(256, dtype=np.uint8).reshape(1, 1, 16, 16), (1, 256, 16, 16))
    scales = np.broadcast_to(np.arange(256, dtype=np.uint8)[None, :, None], (1, 256, 16))
    out = np.empty((1, 512, 256), np.dtype(dtype))
    with np.errstate(over="ignore"):
        read_mxfp4(of(blocks), of(scales), everything(out.shape), out)
    torch_dtype = getattr(torch, dtype)
    same(out, convert_moe_packed_tensors(*map(torch.tensor, (blocks, scales)), dtype=torch_dtype))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("scale_dtype", ["float32", "bfloat16", "uint8"])
def test_every_number_of_8_bits(dtype, scale_dtype):
    weight = np.tile(np.arange(256, dtype=np.uint8), (64, 1))
    scale = np.exp(10 * uniform("scale", 8 * 32)).reshape(8, 32)
    scale = random_bytes("s", (8, 32)) if scale_dtype == "uint8" else scale.astype(scale_dtype)
    out = np.empty(weight.shape, np.dtype(dtype))
    with np.errstate(over="ignore"):
        read_scaled(of(weight.view(FP8)), of(scale), (8, 8), everything(out.shape), out)
    theirs = torch.tensor(scale.astype(np.float32)).to(getattr(torch, scale_dtype))
    quantised = torch.tensor(weight).view(torch.float8_e4m3fn)
    same(out, Fp8Dequantize(None)._dequantize_one(quantised, theirs, getattr(torch, dtype)))
