"""How the compiler for TPUs sums the gradient of a matrix that is split over `fsdp`.

    pip install -e ".[experiments,tpu]"
    python experiments/benchmarks/scatter_ahead.py --page docs/measured/ahead.md

The compiler comes with JAX and needs no device: the programs are compiled, and not run. Each has
one product, the gradient of a matrix by rows that are split over `data` and `fsdp`.
"""

import os

# JAX reads these when it is first imported; no accelerator is looked for.
os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "2", "JAX_PLATFORMS": "cpu"}

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import tyro
from _pages import Printed
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float
from traffic.measure import count_collectives
from traffic.tables import markdown

import redcoast as rc

WIDTH = 1024
ROWS = 4096
MESHES: tuple[tuple[str, dict[str, int]], ...] = (
    ("v5e:2x4", {"fsdp": 8}),
    ("v6e:2x4", {"fsdp": 8}),
    ("v4:2x2x1", {"fsdp": 4}),
    ("v4:2x2x2", {"fsdp": 8}),
    ("v4:2x2x2", {"data": 2, "fsdp": 4}),
    ("v4:2x2x2", {"fsdp": 4, "model": 2}),
    ("v4:2x2x4", {"fsdp": 16}),
    ("v4:4x4x4", {"fsdp": 64}),
    ("v4:4x4x4", {"fsdp": 32, "model": 2}),
    ("v4:4x4x4", {"fsdp": 16, "model": 4}),
    ("v4:4x4x4", {"data": 2, "fsdp": 32}),
    ("v4:4x4x4", {"data": 4, "fsdp": 16}),
    ("v5p:2x2x2", {"fsdp": 8}),
    ("v5p:4x4x4", {"fsdp": 64}),
    ("v5p:4x4x4", {"fsdp": 16, "model": 4}),
    ("tpu7x:2x2x2", {"fsdp": 16}),
)
# Options of the compiler that concern how sums are scattered, with the value that is not the
# default.
OPTIONS: dict[str, bool] = {
    "xla_pf_enable_nd_allreduce": False,
    "xla_jf_use_multi_colors_in_all_reduce_if_supported": False,
    "xla_sdy_export_all_reduce_scatter": True,
    "xla_tpu_assign_all_reduce_scatter_layout": True,
    "xla_tpu_check_legacy_constraints_in_reduce_scatter_legalizer": False,
    "xla_tpu_decompose_every_reduce_scatters_hlos": True,
    "xla_tpu_enable_2d_cross_module_reduce_scatter": False,
    "xla_tpu_enable_3d_reduce_scatter_decomposer": True,
    "xla_tpu_enable_all_reduce_scatter_fusion_debug_mode": True,
    "xla_tpu_enable_data_parallel_all_reduce_opt": True,
    "xla_tpu_enable_nd_wus_on_partial_active_dims": True,
    "xla_tpu_enable_reduce_scatter_legalizer": False,
    "xla_tpu_enable_windowed_einsum_for_reduce_scatter": False,
    "xla_tpu_fuse_only_phase0_in_2d_reduce_scatter": True,
    "xla_tpu_prefer_einsum_reduce_scatter": True,
}


def main(page: Path | None = None) -> None:
    """Prints a row for each mesh, and the options that change how `fsdp=8` is summed on v4:2x2x2.

    Args:
        page: A page of `docs/measured/` to write the table into.
    """
    rows: list[list[str]] = []
    for target, sizes in MESHES:
        mesh = mesh_of(target, sizes)
        by_kind = sent_by_kind(mesh)
        name = ", ".join(f"{axis} {size}" for axis, size in sizes.items())
        sent = ", ".join(f"{kind} {size / 1e6:.1f}" for kind, size in sorted(by_kind.items()))
        rows.append([target, name, sent])
    printed = Printed()
    printed.add(markdown(["target", "mesh", "MB sent for 4.2 MB"], rows))
    mesh = mesh_of("v4:2x2x2", {"fsdp": 8})
    usual = sent_by_kind(mesh)
    changed: list[str] = []
    for option, value in OPTIONS.items():
        if sent_by_kind(mesh, {option: value}) != usual:
            changed.append(f"{option}={value}")
    names = ", ".join(changed) or "none"
    printed.add("", f"Of {len(OPTIONS)} options, these change it on v4:2x2x2: {names}.")
    printed.write(page, "scatter")


def mesh_of(target: str, sizes: dict[str, int]) -> Mesh:
    return rc.make_mesh(**({"data": 1} | sizes), devices=rc.target_devices(target))


def sent_by_kind(mesh: Mesh, options: Any = None) -> dict[str, int]:
    """The bytes that a device sends for the gradient of a matrix, by the kind of collective."""
    by_rows = NamedSharding(mesh, P(("data", "fsdp")))
    split = NamedSharding(mesh, P("fsdp"))
    rows = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32, sharding=by_rows)

    @jax.jit
    def gradient(
        x: Float[Array, "rows width"], y: Float[Array, "rows width"]
    ) -> Float[Array, "width width"]:
        return jax.lax.with_sharding_constraint(jnp.tanh(x).T @ y, split)

    compiled: Any = gradient.lower(rows, rows).compile(compiler_options=options)
    return count_collectives(compiled.as_text(), mesh)["sent_by_kind"]


if __name__ == "__main__":
    tyro.cli(main)
