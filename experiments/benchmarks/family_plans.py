"""The communication of the families of `redcoast.models`, planned and by Megatron's shardings.

Small models are compiled for meshes of 8 emulated CPU devices, and the bytes that a device sends in
a step of the loss and its gradients are read from the compiled programs. By default, plans shard
all large arrays, and gather those that Megatron replicates; with a budget of memory, plans
replicate them too where this communicates less. Megatron's shardings
(arXiv:1909.08053) split heads, hidden features and the vocabulary over `model`. Of a mixture of
experts, they split either the hidden features of all experts or the experts; the better counts.
Of a Mamba-2, they split the heads, and gather the inputs and outputs of the states, which all heads
share.

    python experiments/benchmarks/family_plans.py
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import tyro
from _pages import Printed
from architectures import Case
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree
from traffic.columns import Layout, also_shard, batch_shardings, redcoast
from traffic.measure import measure_layout

import redcoast as rc
from redcoast import models
from redcoast.losses import cross_entropy, pairwise_sigmoid

# The dimension that is split, from the end.
COLUMNS = dict.fromkeys(("wq", "wk", "wv", "wz", "bq", "bk", "bv"), -2)
COLUMNS |= dict.fromkeys(("up", "gate", "up_bias", "gate_bias", "head", "sinks"), -1)
COLUMNS |= dict.fromkeys(("shared_gate", "shared_up"), -1)
SPLIT = COLUMNS | {"wo": -3, "down": -2, "shared_down": -2, "embed": -2}
STATES = ("x", "steps", "steps_bias", "conv_x", "conv_x_bias", "log_decay", "skip", "inner_norm")
STATES += ("strength", "conv_q", "conv_k", "conv_v")
STACKS = ("layers", "dense", "linear", "attention")
EXPERTS = ("gate", "up", "down")  # with a dimension of experts where they have four
BIASES_OF_EXPERTS = ("gate_bias", "up_bias", "down_bias")
BUDGET = 2**34  # bytes on a device: far more than any of the models needs
MESHES: tuple[dict[str, Any], ...] = ({"data": 2, "model": 4}, {"data": 1, "fsdp": 2, "model": 4})


def main(
    families: tuple[str, ...] = (),
    target: str = "cpu:8",
    rows: int = 16,
    length: int = 64,
    page: Path | None = None,
) -> None:
    """Prints a table of the megabytes that a device sends, and of those of parameters it holds.

    Args:
        families: Names of the table's rows; all by default.
        target: The devices, as for `redcoast.dry_run`.
        rows: Rows of a batch.
        length: Tokens in a row.
        page: A page of `docs/measured/` to write the table into.
    """
    rc.emulate_devices(8)
    devices = rc.target_devices(target)
    cases = make_cases(rows, length)
    table = Printed()
    table.add("| model | mesh | redcoast, MB | with a budget, MB | Megatron, MB | ratios |")
    table.add("|---|---|---:|---:|---:|---:|")
    for name in families or cases:
        for axes in MESHES:
            mesh = rc.make_mesh(**axes, devices=devices)
            sent, stored = measure(cases[name], mesh)
            sizes = " x ".join(f"{axis} {size}" for axis, size in axes.items() if size > 1)
            cells = (f"{a:.2f} ({b:.1f})" for a, b in zip(sent, stored, strict=True))
            ratios = ", ".join(f"{megabytes / sent[-1]:.3f}" for megabytes in sent[:-1])
            table.row(name, sizes, *cells, ratios)
    table.write(page, target.partition(":")[0])


def measure(case: Case, mesh: Mesh) -> tuple[list[float], list[float]]:
    """The megabytes that a device sends, and those of parameters that it holds: as planned, as
    planned with a budget, and by Megatron's shardings."""
    take = lambda layout: measure_layout(case, mesh, layout, "")
    by_hand = min(map(take, written(case, mesh)), key=lambda row: row["sent_bytes"])
    rows = take(redcoast(case, mesh)), take(redcoast(case, mesh, BUDGET)), by_hand
    sent, stored = ([row[of] / 1e6 for row in rows] for of in ("sent_bytes", "param_bytes"))
    return sent, stored


def written(case: Case, mesh: Mesh) -> list[Layout]:
    """Megatron's shardings; two for a mixture of experts. Large arrays are split over `fsdp`."""
    params = case.abstract_params()
    names = [path[-1].name for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    choices = (False, True) if "router" in names else (False,)
    return [by_hand(case, mesh, params, experts=choice) for choice in choices]


def by_hand(case: Case, mesh: Mesh, params: PyTree, *, experts: bool) -> Layout:
    states = "log_decay" in [p[-1].name for p, _ in jax.tree_util.tree_leaves_with_path(params)]
    dims = SPLIT | (dict.fromkeys(STATES, -1) if states else {})

    def place(path: Any, array: jax.Array) -> NamedSharding:
        name = path[-1].name
        stack = int(any(getattr(entry, "name", "") in STACKS for entry in path))
        dim = dims.get(name)
        of_experts = (name in EXPERTS and array.ndim == 4) or (
            name in BIASES_OF_EXPERTS and array.ndim == 3
        )
        if of_experts and experts:
            dim = 1 - array.ndim
        if path[0].name == "linear" and name in (
            "wq",
            "wk",
            "wv",
            "wz",
        ):  # all heads are one dimension
            dim = -1
        if name == "wo" and path[0].name == "linear":
            dim = -2
        if name in ("q_norm", "k_norm") and array.ndim == 3:  # of all heads
            dim = -2
        return NamedSharding(mesh, spec_of(array.shape, dim, stack, mesh.shape))

    shardings = jax.tree.map_with_path(place, params)
    return Layout(shardings, batch_shardings(case, mesh), case.loss)


def spec_of(shape: tuple[int, ...], dim: int | None, stack: int, mesh: Mapping[str, int]) -> P:
    spec = P()
    if dim is not None and shape[dim] % mesh["model"] == 0:
        spec = P(*("model" if d == len(shape) + dim else None for d in range(len(shape))))
    return also_shard(spec, shape, stack, "fsdp", mesh["fsdp"]) if mesh["fsdp"] > 1 else spec


def make_cases(rows: int, length: int) -> dict[str, Case]:
    text = jax.random.randint(jax.random.key(0), (rows, length), 0, 4096)
    images = jax.random.normal(jax.random.key(1), (rows, 3, 64, 64))
    sounds = jax.random.normal(jax.random.key(2), (rows, 80, 128))
    sizes: dict[str, Any] = {"width": 256, "layers": 4, "heads": 8, "hidden": 1024}
    words: dict[str, Any] = {"vocab": 4096, **sizes}
    grouped: dict[str, Any] = words | {"kv_heads": 4}
    experts: dict[str, Any] = grouped | {"hidden": 512, "experts": 8}
    shared: dict[str, Any] = {"expert_hidden": 256, "dense_layers": 1, "experts": 8, "groups": 1}
    shared |= {"chosen": 2, "chosen_groups": 1}
    latent: dict[str, Any] = shared | {"q_rank": 64, "kv_rank": 64}
    latent |= {"plain_size": 32, "rope_size": 16, "value_size": 32}
    glm: dict[str, Any] = grouped | shared | {"rotary_dim": 16, "qkv_bias": True, "qk_norm": True}
    states: dict[str, Any] = {"vocab": 4096, "width": 256, "layers": 4, "heads": 16, "state": 32}
    delta: dict[str, Any] = {"key_heads": 4, "value_heads": 8, "key_size": 32, "value_size": 32}
    image: dict[str, Any] = {"width": 256, "layers": 4, "heads": 8, "image": 64, "patch": 8}
    gemma: dict[str, Any] = {"local": (True, True, True, False), "window": 32, "tied": True}
    siglip = models.SiglipConfig(
        models.SiglipImageConfig(**image, hidden=1024),
        models.SiglipTextConfig(**words, positions=length),
    )
    labels: dict[str, Any] = {"head": "classification", "labels": 10}
    m = models
    configs: dict[str, tuple[Any, Any, Any, Any]] = {
        "Phi-3": (m.Phi3, m.Phi3Config(**grouped), text, of_text),
        "OLMo-2": (
            m.Llama,
            m.LlamaConfig(**grouped, qk_norm=True, output_norms=True),
            text,
            of_text,
        ),
        "SmolLM3": (
            m.Llama,
            m.LlamaConfig(**grouped, rope_layers=(True, True, True, False), tied=True),
            text,
            of_text,
        ),
        "Gemma 3": (
            m.Gemma,
            m.GemmaConfig(**grouped, head_dim=32, qk_norm=True, post_norms=True, **gemma),
            text,
            of_text,
        ),
        "Qwen3-MoE": (m.Mixtral, m.MixtralConfig(**experts, qk_norm=True), text, of_text),
        "GPT-OSS": (m.GptOss, m.GptOssConfig(**experts), text, of_text),
        "DeepSeek-V3": (m.DeepseekV3, m.DeepseekV3Config(**words, **latent), text, of_text),
        "GLM-4 MoE": (m.Glm4Moe, m.Glm4MoeConfig(**glm), text, of_text),
        "Mamba-2": (m.Mamba2, m.Mamba2Config(**states, head_size=32), text, of_text),
        "Qwen3.5": (m.Qwen3_5, m.Qwen3_5Config(**grouped, **delta), text, of_text),
        "ModernBERT": (m.ModernBert, m.ModernBertConfig(**words, head="masked"), text, of_text),
        "DINOv2": (m.Dinov2, m.Dinov2Config(**image, **labels), images, of_labels),
        "DINOv2, gated": (
            m.Dinov2,
            m.Dinov2Config(**image, gated=True, **labels),
            images,
            of_labels,
        ),
        "SigLIP": (m.Siglip, siglip, (images, text), of_pairs),
        "Whisper": (
            m.Whisper,
            m.WhisperConfig(**words, decoder_layers=4, frames=128, positions=length),
            (sounds, text),
            of_both,
        ),
    }
    return {name: make_case(name, *parts) for name, parts in configs.items()}


def make_case(
    name: str, model: PyTree, config: Any, batch: PyTree, loss: Callable[..., Any]
) -> Case:
    init = lambda key: eqx.filter(model(config, key=key), eqx.is_array)
    return Case(name, "transformer", init, loss, lambda: batch)


def of_text(model: PyTree, tokens: jax.Array, key: jax.Array) -> jax.Array:
    return cross_entropy(model(tokens)[:, :-1], tokens[:, 1:])


def of_labels(model: PyTree, pixels: Any, key: jax.Array) -> jax.Array:
    return cross_entropy(model(pixels), jnp.zeros(pixels.shape[0], jnp.int32))


def of_pairs(model: PyTree, batch: PyTree, key: jax.Array) -> jax.Array:
    return pairwise_sigmoid(model(*batch))


def of_both(model: PyTree, batch: PyTree, key: jax.Array) -> jax.Array:
    return cross_entropy(model(*batch)[:, :-1], batch[1][:, 1:])


if __name__ == "__main__":
    tyro.cli(main)
