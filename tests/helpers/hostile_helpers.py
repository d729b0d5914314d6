"""Small valid files of every kind that is read, and the function that reads each."""

import shutil
from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import numpy as np
from random_models import random_model

import redcoast as rc
from redcoast import lora
from redcoast.models import Llama, LlamaConfig

CONFIG = LlamaConfig(vocab=32, width=16, layers=2, heads=2, kv_heads=1, hidden=24)
TREE = {"up": jnp.ones((8, 16)), "down": jnp.arange(3), "key": jax.random.key(1)}
PLANNED = {"up": jnp.zeros((8, 16)), "down": jnp.zeros((16, 8))}
MESH = rc.make_mesh(devices=jax.devices()[:1])


def model() -> Llama:
    return random_model(Llama, CONFIG)


def make(directory: Path) -> dict[str, Path]:
    """The files, below a directory."""
    actual = {name: directory / name for name in READERS}
    rc.save_checkpoint(actual["checkpoint"], TREE, metadata={"step": 1})
    shutil.copytree(actual["checkpoint"], actual["unsummed"])
    (actual["unsummed"] / "checksums.json").unlink()
    metadata = actual["unsummed"] / "metadata" / "metadata"
    metadata.write_text(metadata.read_text().replace('"checksums": "crc32c", ', ""))
    rc.save_pretrained(model(), actual["model"])
    rc.save_pretrained(model(), actual["sharded"], max_file_bytes=4000)
    adapted = lora.add_adapters(model(), 2, targets=".", key=jax.random.key(2))
    lora.save_adapters(adapted, actual["adapters"])
    rc.save_plan(rc.plan_shardings(PLANNED, MESH), actual["plan"])
    write_gguf(actual["tiny.gguf"])
    return actual


def write_gguf(path: Path) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in {
        "block_count": 1,
        "context_length": 16,
        "embedding_length": 16,
        "feed_forward_length": 24,
        "attention.head_count": 2,
        "attention.head_count_kv": 1,
        "vocab_size": 32,
    }.items():
        writer.add_uint32(f"llama.{name}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    shapes = {"token_embd": (32, 16), "output_norm": (16,), "blk.0.attn_q": (16, 16)}
    shapes |= {"blk.0.attn_k": (8, 16), "blk.0.attn_v": (8, 16), "blk.0.attn_output": (16, 16)}
    shapes |= {"blk.0.ffn_gate": (24, 16), "blk.0.ffn_up": (24, 16), "blk.0.ffn_down": (16, 24)}
    shapes |= {"blk.0.attn_norm": (16,), "blk.0.ffn_norm": (16,)}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", np.ones(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


READERS = {
    "checkpoint": rc.load_checkpoint,
    "unsummed": rc.load_checkpoint,
    "model": rc.load_pretrained,
    "sharded": rc.load_pretrained,
    "adapters": lambda path: lora.load_adapters(model(), path),
    "plan": lambda path: rc.load_plan(path, PLANNED, MESH),
    "tiny.gguf": rc.load_pretrained,
}
