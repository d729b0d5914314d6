"""The least time that a step could take, to which the measured time is compared as MFU."""

import functools as ft
from collections.abc import Callable
from typing import Any

import equinox as eqx
from jax.sharding import Mesh
from jaxtyping import PyTree

from ..core._tracing import abstract_key, traced_over
from ..train._loss import evaluate_loss
from ..train._step import TrainState


def seconds_at_peak(
    state: TrainState,
    loss_fn: Callable[..., Any],
    batch: PyTree,
    mesh: Mesh,
    *,
    compute_dtype: Any,
    trainable: PyTree,
) -> float | None:
    """Seconds of a training step in which all devices compute at their peak rate.

    `None` if that rate is not known, as for CPUs, or if only a part of the model is trained. The
    backward pass counts twice the forward pass, and rematerialisation does not count, as is usual
    for model FLOPs utilisation (arXiv:2204.02311).
    """
    # Imported where it is used, so that importing redcoast stays fast.
    from ..dryrun._chips import CHIPS
    from ..dryrun._flops import contractions

    kind = mesh.devices.flat[0].device_kind
    rates = next((x.flops for x in CHIPS.values() if x.device_kind == kind and x.kind != "cpu"), {})
    if not rates or trainable is not eqx.is_inexact_array:
        return None
    measure = ft.partial(evaluate_loss, loss_fn, compute_dtype=compute_dtype)
    loss = lambda *args: measure(*args).loss
    with traced_over(mesh):
        jaxpr, _, _ = eqx.filter_make_jaxpr(loss)(state.model, batch, abstract_key())
    flops = contractions(jaxpr).flops
    if not flops or not flops.keys() <= rates.keys():
        return None
    return sum(3 * count / rates[dtype] for dtype, count in flops.items()) / mesh.size
