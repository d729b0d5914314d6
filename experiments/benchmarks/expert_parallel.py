"""The communication of training steps of a mixture of experts, with planned and written shardings.

A small Mixtral is compiled for meshes of 8 emulated CPU devices, and the bytes that a device sends
in one step are read from the compiled programs. The planned program is also run, and its loss and
gradients are compared with those of one device.

    python experiments/benchmarks/expert_parallel.py
"""

from collections.abc import Mapping
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from architectures import Case
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree
from traffic.columns import Layout, also_shard, batch_shardings, fsdp, redcoast, replicated
from traffic.measure import measure_layout

import redcoast as rc
from redcoast.losses import cross_entropy
from redcoast.models import Mixtral, MixtralConfig, _moe, mixtral

EVERY_AXIS = ("data", "fsdp", "model")
ATTENTION = {
    "embed": P("model"),
    "head": P(None, "model"),
    "wq": P(None, None, "model"),
    "wk": P(None, None, "model"),
    "wv": P(None, None, "model"),
    "wo": P(None, "model"),
}
HIDDEN = ATTENTION | {
    "gate": P(None, None, None, "model"),
    "up": P(None, None, None, "model"),
    "down": P(None, None, "model"),
}
EXPERTS = ATTENTION | dict.fromkeys(("gate", "up", "down"), P(None, "model"))
ALL_TO_ALL: dict[str, P] = dict.fromkeys(("gate", "up", "down"), P(None, EVERY_AXIS))


def main(
    data: int = 1,
    width: int = 128,
    hidden: int = 256,
    experts: int = 8,
    rows: int = 16,
    length: int = 64,
) -> None:
    """Prints a table of the megabytes that a device sends, by sharding.

    Args:
        data: Size of the axis `data`; the axis `model` has the other devices.
        width: Size of the residual stream.
        hidden: Hidden size of each expert.
        experts: Number of experts in each layer.
        rows: Rows of a batch.
        length: Tokens in a row.
    """
    rc.emulate_devices(8)
    case = make_case(width, hidden, experts, (rows, length))
    errors = ""
    mesh = rc.make_mesh(data=data, fsdp=1, model=-1)
    print("| sharding | MB sent | MB of parameters | MB by kind |\n|---|---:|---:|---|")
    for name, make in LAYOUTS.items():
        row = measure(case, mesh, name, make)
        kinds = sorted(row["sent_by_kind"].items(), key=lambda item: -item[1])
        listed = ", ".join(f"{kind} {sent / 1e6:.2f}" for kind, sent in kinds)
        megabytes = [f"{row[key] / 1e6:.2f}" for key in ("sent_bytes", "param_bytes")]
        print(f"| {name} | {' | '.join(megabytes)} | {listed} |", flush=True)
        if name == "redcoast":
            errors = f"loss {row['loss_error']:.0e}, gradients {row['grad_error']:.0e}"
    print(f"\nThe largest differences of the planned step from one device: {errors}.")


def make_case(width: int, hidden: int, experts: int, shape: tuple[int, int]) -> Case:
    config = MixtralConfig(
        vocab=1024, width=width, layers=2, heads=8, kv_heads=8, hidden=hidden, experts=experts
    )
    tokens = np.random.default_rng(0).integers(0, config.vocab, shape)
    init = lambda key: Mixtral(config, key=key)
    return Case("Mixtral", "transformer", init, loss_fn, lambda: jnp.asarray(tokens, jnp.int32))


def loss_fn(model: PyTree, tokens: jax.Array, key: jax.Array) -> jax.Array:
    hidden, balance = model.hidden_and_router_loss(tokens)
    entropy = cross_entropy(model.unembed(hidden)[:, :-1], tokens[:, 1:])
    return entropy + 0.02 * balance


def written(case: Case, mesh: Mesh, specs: Mapping[str, P], axes: tuple[str, ...]) -> Layout:
    """Shardings by the names of arrays, with the batch over `axes`."""
    place = lambda path, _: NamedSharding(mesh, specs.get(path[-1].name, P()))
    params = jax.tree.map_with_path(place, case.abstract_params())
    return Layout(params, batch_shardings(case, mesh, axes), case.loss)


def by_hidden(case: Case, mesh: Mesh) -> Layout:
    """Megatron's split, in which each device holds a part of every expert."""
    return written(case, mesh, HIDDEN, ("data", "fsdp"))


def by_experts(case: Case, mesh: Mesh) -> Layout:
    """Megatron's split of the attention, and entire experts on each device."""
    return written(case, mesh, EXPERTS, ("data", "fsdp"))


def by_all_to_all(case: Case, mesh: Mesh) -> Layout:
    """Data parallelism, except that each token is sent to the devices of its experts."""
    return written(case, mesh, ALL_TO_ALL, EVERY_AXIS)


def all_to_all_and_fsdp(case: Case, mesh: Mesh) -> Layout:
    """The same, with all other arrays split over all devices and gathered for use."""
    layout = by_all_to_all(case, mesh)
    shard = lambda array, old: (
        old if old.spec else NamedSharding(mesh, also_shard(P(), array.shape, 0, EVERY_AXIS, 8))
    )
    params = jax.tree.map(shard, case.abstract_params(), layout.params)
    return Layout(params, layout.batch, layout.loss)


LAYOUTS = {
    "redcoast": redcoast,
    "replicated": replicated,
    "fsdp": fsdp,
    "hidden sizes": by_hidden,
    "experts": by_experts,
    "all-to-all": by_all_to_all,
    "all-to-all, fsdp": all_to_all_and_fsdp,
}


def measure(case: Case, mesh: Mesh, name: str, make: Any) -> dict[str, Any]:
    layout = make(case, mesh)
    if not name.startswith("all-to-all"):
        return measure_layout(case, mesh, layout, name)
    run = _moe.gated_experts

    def send(layer: PyTree, x: jax.Array) -> jax.Array:
        """Applies the experts where they are; `x` is `"batch experts tokens width"`."""
        to = lambda x, *spec: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))
        return to(run(layer, to(x, None, EVERY_AXIS)), EVERY_AXIS)

    with mock.patch.object(mixtral, "gated_experts", send):
        return measure_layout(case, mesh, layout, name)


if __name__ == "__main__":
    tyro.cli(main)
