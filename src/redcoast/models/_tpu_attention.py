"""Splash attention, the kernel for attention on TPUs that is part of JAX.

The scores of one block of queries and one block of keys are in the memory of the core at a time
(Dao et al., 2022, <https://arxiv.org/abs/2205.14135>). Blocks in which no query sees a key, because
the attention is causal or has a window, are skipped.

The forward and the backward pass are primitives with the dimensions of cuDNN's, so that planning
and rematerialisation treat them alike. XLA cannot partition a kernel. A plan runs it in
`jax.shard_map`, on the rows and heads of each device; in other programs for several devices, the
primitives stand for attention in blocks. On a CPU, the kernel is interpreted.
"""

import functools as ft
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jaxtyping import Array, PyTree

from ._blockwise import KEPT, attend_with_sums, pad_to_blocks
from ._inputs import Keys, Queries
from ._view import View

# The number of queries and keys in a block, largest first.
_BLOCKS = (512, 256, 128)
# A sequence is padded by at most this fraction, unless the smallest block needs more.
_MOST_PADDED = 1 / 16
# The fewest queries and keys for which the kernel is used.
FEWEST = 512
# The segment of padding.
_PADDING = np.iinfo(np.int32).min

Segments = tuple[Array, Array] | None
Run = Callable[..., Sequence[PyTree]]


@dataclass(frozen=True)
class SplashOptions:
    """The options of the kernel.

    - `rows`, `columns`: the number of queries and of keys in a block.
    - `window`: the number of keys before and behind each query that it sees, or None for all.
    """

    rows: int
    columns: int
    causal: bool
    window: tuple[int, int] | None
    softcap: float | None


def fits_splash(q: Array, k: Array, v: Array, view: View) -> bool:
    """Whether the kernel supports these arrays and this view."""
    if view.slots is not None or (view.causal and q.shape[1] != k.shape[1]):
        return False
    is_known = q.dtype in (jnp.bfloat16, jnp.float32) and q.dtype == k.dtype == v.dtype
    sizes = q.shape[-1] == k.shape[-1] == v.shape[-1] and q.shape[-1] <= 256
    return is_known and sizes and min(q.shape[1], k.shape[1]) >= FEWEST


def attend_in_splash(
    q: Queries, k: Keys, v: Keys, view: View, *, scale: float, softcap: float | None = None
) -> Queries:
    """Scaled dot-product attention by the kernel. The arguments are as for `attend`."""
    queries, keys = q.shape[1], k.shape[1]
    rows, columns = _block_size(queries), _block_size(keys)
    window = None
    if view.window is not None and view.causal:
        window = (view.window - 1, 0)  # keys before and behind a query, without its own
    elif view.window is not None:
        window = (view.window - 1, view.window - 1)
    segments = _segments(view, q.shape[0], queries, keys, columns)
    options = SplashOptions(rows, columns, view.causal, window, softcap)
    q = pad_to_blocks(q * jnp.asarray(scale, q.dtype), rows)
    k, v = pad_to_blocks(k, columns), pad_to_blocks(v, columns)
    if segments is not None:
        of_queries = pad_to_blocks(segments[0], rows, value=_PADDING)
        segments = of_queries, pad_to_blocks(segments[1], columns, value=_PADDING)
    out: PyTree = _attention(options, q, k, v, segments)  # (batch, padded queries, heads, head_dim)
    return out[:, :queries]


def _block_size(size: int) -> int:
    """The largest block that pads a sequence little."""
    fits = [block for block in _BLOCKS if -size % block <= size * _MOST_PADDED]
    return max(fits, default=_BLOCKS[-1])


def _segments(view: View, batch: int, queries: int, keys: int, columns: int) -> Segments:
    """The segments of queries and keys, of which padding is one; None if all see each other."""
    # Causal queries do not see the keys behind them, which padding at the end is.
    is_hidden = view.causal or keys % columns == 0
    if view.real is None and view.segments is None and is_hidden:
        return None
    # Without segments, all tokens are in one.
    segments = view.segments or (jnp.zeros((1, queries)), jnp.zeros((1, keys)))
    of_queries = jnp.broadcast_to(jnp.asarray(segments[0]).astype(jnp.int32), (batch, queries))
    of_keys = jnp.broadcast_to(jnp.asarray(segments[1]).astype(jnp.int32), (batch, keys))
    if view.real is not None:
        of_keys = jnp.where(view.real, of_keys, _PADDING)
    return of_queries, of_keys


@ft.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(options: SplashOptions, q: Array, k: Array, v: Array, segments: Segments) -> Array:
    return _forward(options, q, k, v, segments)[0]


def _forward(
    options: SplashOptions, q: Array, k: Array, v: Array, segments: Segments
) -> tuple[Array, PyTree]:
    results = _forward_p.bind(q, k, v, *(segments or ()), options=options)
    out, log_sum = (checkpoint_name(x, KEPT) for x in results)
    return out, (q, k, v, segments, out, log_sum)


def _backward(options: SplashOptions, residuals: PyTree, grad: Array) -> tuple[Array | None, ...]:
    q, k, v, segments, out, log_sum = residuals
    arrays = (q, k, v, out, grad, log_sum, *(segments or ()))
    return (*_backward_p.bind(*arrays, options=options), None)


_attention.defvjp(_forward, _backward)


@ft.cache
def _kernel(options: SplashOptions, queries: int, keys: int, interpret: bool) -> PyTree:
    """Returns the kernel for the heads of one row, whose masks are alike."""
    shape = (queries, keys)
    if options.window is not None:
        mask = masks.LocalMask(shape, options.window, 0)
    elif options.causal:
        mask = masks.CausalMask(shape)
    else:
        mask = masks.FullMask(shape)
    sizes = splash.BlockSizes(
        block_q=options.rows,
        block_kv=options.columns,
        block_q_dkv=options.rows,
        block_kv_dkv=options.columns,
        block_q_dq=options.rows,
        block_kv_dq=options.columns,
    )
    # The kernel's tables of masks are constants, also if it is created in a trace.
    with jax.ensure_compile_time_eval():
        kernel = splash.make_splash_mha_single_device(
            masks.MultiHeadMask([mask]),
            block_sizes=sizes,
            save_residuals=True,
            attn_logits_soft_cap=options.softcap,
            interpret=interpret,
        )
        # NumPy arrays belong to no device, so that the cached kernel serves all.
        return jax.tree.map(np.asarray, kernel)


def _swap(x: Array) -> Array:
    """From (batch, seq, heads, head_dim) to (batch, heads, seq, head_dim), and back."""
    return jnp.swapaxes(x, 1, 2)


def _run_forward(
    options: SplashOptions, interpret: bool, q: Array, k: Array, v: Array, *segments: Array
) -> tuple[Array, Array]:
    kernel = _kernel(options, q.shape[1], k.shape[1], interpret)
    # Over the rows of the batch.
    out, (log_sum,) = jax.vmap(kernel)(_swap(q), _swap(k), _swap(v), _as_ids(segments))
    return _swap(out), log_sum


def _run_backward(options: SplashOptions, interpret: bool, *arrays: Array) -> tuple[Array, ...]:
    """Returns the gradients of queries, keys and values."""
    q, k, v, out, grad, log_sum, *segments = arrays
    kernel = _kernel(options, q.shape[1], k.shape[1], interpret)
    blocks = kernel.dq_mask_info, kernel.dkv_mask_info

    def of_row(q, k, v, out, grad, log_sum, segments):
        residuals = (q, k, v, segments, None, out, log_sum, *blocks)
        # JAX has no public function for it.
        grads = splash._splash_attention_bwd(**kernel.kwargs, res=residuals, do=grad)
        return grads[3:6]  # of the queries, keys and values

    swapped = tuple(map(_swap, (q, k, v, out, grad)))
    grads = jax.vmap(of_row)(*swapped, log_sum, _as_ids(segments))  # pyright: ignore[reportCallIssue]
    return tuple(map(_swap, grads))


def _as_ids(segments: Sequence[Array]) -> splash.SegmentIds | None:
    if segments:
        return splash.SegmentIds(*segments)
    return None


def _forward_in_blocks(
    options: SplashOptions, q: Array, k: Array, v: Array, *segments: Array
) -> tuple[Array, Array]:
    """What the kernel computes, by operations that XLA partitions."""
    window = None
    if options.window is not None:
        window = options.window[0] + 1
    pair = None
    if segments:
        pair = segments[0], segments[1]
    view = View(segments=pair, causal=options.causal, window=window)
    return attend_with_sums(q, k, v, view, scale=1.0, softcap=options.softcap)


def _backward_in_blocks(options: SplashOptions, *arrays: Array) -> tuple[Array, ...]:
    q, k, v, _, grad, _, *segments = arrays
    run = lambda q, k, v: _forward_in_blocks(options, q, k, v, *segments)[0]
    return jax.vjp(run, q, k, v)[1](grad)


def _primitive(name: str, run: Run, run_in_blocks: Run, results_of: Run) -> Primitive:
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(
        lambda *arrays, **params: jax.jit(ft.partial(primitive.bind, **params))(*arrays)
    )
    primitive.def_abstract_eval(results_of)
    batching.primitive_batchers[primitive] = ft.partial(_map_rows, primitive)

    def lower(
        interpret: bool, context: mlir.LoweringRuleContext, *values: Any, options: SplashOptions
    ) -> Any:
        on_device = ft.partial(run, options, interpret)
        # XLA cannot partition a kernel.
        if not _is_on_one_device(context):
            on_device = ft.partial(run_in_blocks, options)
        return mlir.lower_fun(on_device, multiple_results=True)(context, *values)

    mlir.register_lowering(primitive, ft.partial(lower, False), platform="tpu")
    # On a CPU the kernel is interpreted, for tests.
    mlir.register_lowering(primitive, ft.partial(lower, True), platform="cpu")
    return primitive


def _is_on_one_device(context: mlir.LoweringRuleContext) -> bool:
    """Whether a program is lowered for one device, or for each device in `jax.shard_map`."""
    axes: PyTree = context.module_context.axis_context
    if hasattr(axes, "manual_axes"):
        return set(axes.manual_axes) == set(axes.mesh.axis_names)
    return getattr(axes, "num_devices", None) == 1


def _map_rows(
    primitive: Primitive,
    arrays: Sequence[Array],
    dims: Sequence[int | None],
    **params: SplashOptions,
) -> tuple[list[Array], list[int]]:
    """Runs the kernel under `jax.vmap`, with more rows."""
    pairs = list(zip(arrays, dims, strict=True))
    count = next(x.shape[d] for x, d in pairs if d is not None)
    merged = []
    for x, d in pairs:
        if d is None:
            x = jnp.broadcast_to(x[None], (count, *x.shape))
        else:
            x = jnp.moveaxis(x, d, 0)
        merged.append(x.reshape(-1, *x.shape[2:]))  # (count * batch, ...)
    results = primitive.bind(*merged, **params)
    return [x.reshape(count, -1, *x.shape[1:]) for x in results], [0] * len(results)


def _forward_results(q: PyTree, *rest: PyTree, options: SplashOptions) -> list[PyTree]:
    batch, queries, heads, _ = q.shape
    return [q, q.update(shape=(batch, heads, queries), dtype=np.dtype(np.float32))]


def _backward_results(*arrays: PyTree, options: SplashOptions) -> list[PyTree]:
    return list(arrays[:3])  # as the queries, keys and values


_forward_p = _primitive(
    "dot_product_attention_fwd_splash", _run_forward, _forward_in_blocks, _forward_results
)
_backward_p = _primitive(
    "dot_product_attention_bwd_splash", _run_backward, _backward_in_blocks, _backward_results
)
