"""The decoder of DeepSeek-V3 and GLM-4's mixtures of experts: first layers with a feed-forward
network, then layers with experts that each token passes and experts that it is routed to.

The families differ in their attention, which is in the file of each.
"""

import functools as ft
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any

import jax
import jax.numpy as jnp
from equinox import AbstractClassVar, AbstractVar
from jaxtyping import Array, Bool, Float, PRNGKeyArray, PyTree

from ._attention import Visible, as_array, real_tokens
from ._base_config import DecoderConfig, check_config
from ._basic import initial_tables, look_up, output_scale, rms_norm, split_key, wide
from ._by_layer import StackedLayers
from ._cache import Cache, LayerIndex
from ._decoder import Decoder, TableHead
from ._einsum import gated_feed_forward, gated_network, product
from ._inputs import HiddenStates, Key
from ._moe import dispatch, gated_experts
from ._rotary import RopeScaling, Yarn, scaled_angles
from ._scan_layers import scan_layers


@dataclass(frozen=True)
class SharedExpertsConfig(DecoderConfig):
    """The sizes and options of a `SharedExpertsDecoder`. Each family documents its own."""

    vocab: int
    width: int
    layers: int
    heads: int
    hidden: int
    expert_hidden: int
    dense_layers: int = 3
    experts: int = 256
    chosen: int = 8
    shared: int = 1
    groups: int = 8
    chosen_groups: int = 4
    weights_sum_to_one: bool = True
    route_scale: int | float = 2.5
    _: KW_ONLY
    rope_base: int | float = 10000.0
    rope_scaling: RopeScaling | Yarn | None = None
    norm_eps: int | float = 1e-6
    tied: bool = False
    attention_dropout: int | float = 0.0
    context: int = 4096

    def __post_init__(self):
        check_config(self, "experts", "chosen", "shared", "groups", "chosen_groups")
        if not 0 <= self.dense_layers < self.layers:
            raise ValueError(
                f"`dense_layers` must be at least 0 and less than `layers`, but they are "
                f"{self.dense_layers} and {self.layers}."
            )
        if self.experts % self.groups or self.experts // self.groups < 2:
            raise ValueError(
                f"`experts` must be a multiple of `groups` with at least two for each, but they "
                f"are {self.experts} and {self.groups}."
            )
        if self.chosen_groups > self.groups:
            raise ValueError(
                f"`chosen_groups` must be at most `groups`, but they are {self.chosen_groups} and "
                f"{self.groups}."
            )
        if self.chosen > (most := self.chosen_groups * (self.experts // self.groups)):
            raise ValueError(
                f"`chosen` must be at most {most}, the experts of `chosen_groups` groups, but is "
                f"{self.chosen}."
            )


Make = Callable[..., Float[Array, "..."]]


class SharedExpertsLayers(StackedLayers):
    """The parameters of layers with experts or of layers without, stacked along their first
    dimension. The feed-forward network of layers without experts has no dimension `experts`.

    Each family adds the parameters of attention.
    """

    attention_norm: Float[Array, "layers width"]
    mlp_norm: Float[Array, "layers width"]
    router: Float[Array, "layers width experts"] | None
    correction: Float[Array, "layers experts"] | None
    gate: Float[Array, "layers *experts width hidden"]
    up: Float[Array, "layers *experts width hidden"]
    down: Float[Array, "layers *experts hidden width"]
    shared_gate: Float[Array, "layers width shared_hidden"] | None
    shared_up: Float[Array, "layers width shared_hidden"] | None
    shared_down: Float[Array, "layers shared_hidden width"] | None

    def __init__(self, config: SharedExpertsConfig, layers: int, *, routed: bool, make: Make):
        """`make(fan_in, *shape, scale=1.0)` returns initial weights, stacked over the layers."""
        c = config
        out = output_scale(c.layers)
        self.attention_norm, self.mlp_norm = (jnp.ones((layers, c.width)) for _ in range(2))
        stack, hidden = (), c.hidden
        self.router = self.correction = None
        self.shared_gate = self.shared_up = self.shared_down = None
        if routed:
            stack, hidden = (c.experts,), c.expert_hidden
            self.router = make(c.width, c.width, c.experts)
            self.correction = jnp.zeros((layers, c.experts))
        self.gate = make(c.width, *stack, c.width, hidden)
        self.up = make(c.width, *stack, c.width, hidden)
        self.down = make(hidden, *stack, hidden, c.width, scale=out)
        if routed:
            size = c.shared * c.expert_hidden  # of all shared experts, which are one network
            self.shared_gate = make(c.width, c.width, size)
            self.shared_up = make(c.width, c.width, size)
            self.shared_down = make(size, size, c.width, scale=out)


class SharedExpertsDecoder(TableHead, Decoder):
    """A decoder whose first layers have a feed-forward network and whose other layers have
    experts."""

    embed: Float[Array, "vocab width"]
    dense: SharedExpertsLayers | None
    layers: SharedExpertsLayers
    norm: Float[Array, " width"]
    head: Float[Array, "width vocab"] | None
    config: AbstractVar[Any]
    # From the configuration, a number of layers, whether they have experts, and a key.
    _layers_of: AbstractClassVar[Callable[..., SharedExpertsLayers]]

    def __init__(self, config: SharedExpertsConfig, *, key: PRNGKeyArray):
        """Initialises the parameters: normal with variance 1 / fan-in, truncated at three standard
        deviations. The output projections of the layers are divided by sqrt(2 * layers)."""
        c = config
        embed, dense, layers, head = jax.random.split(key, 4)
        self.embed, self.head = initial_tables(c, embed, head)
        make, self.dense = ft.partial(self._layers_of, c), None
        if c.dense_layers:
            self.dense = make(c.dense_layers, routed=False, key=dense)
        self.layers = make(c.layers - c.dense_layers, routed=True, key=layers)
        self.norm = jnp.ones(c.width)
        self.config = config

    @staticmethod
    @abstractmethod
    def _attention(
        layer: PyTree,
        x: HiddenStates,
        angles: tuple[Array, Array],
        visible: Visible,
        cache: Cache | None,
        index: LayerIndex,
        key: Key,
        config: Any,
    ) -> tuple[HiddenStates, Cache | None]:
        """Returns the outputs of the attention of a layer, and the cache."""

    def _run(self, tokens, mask, positions, see, cache, key):
        c, visible = self.config, see()
        real = as_array(real_tokens(tokens.shape, mask))
        x = look_up(self.embed, tokens)  # (batch, seq, width)
        full = wide(x.dtype)
        angles = scaled_angles(positions, c.rotated, c.rope_base, c.rope_scaling, full)

        def layer_fn(first, x, cache, layer, index, key):
            y = rms_norm(x, layer.attention_norm, c.norm_eps)  # (batch, seq, width)
            y, cache = self._attention(layer, y, angles, visible, cache, first + index, key, c)
            x = x + y
            y = rms_norm(x, layer.mlp_norm, c.norm_eps)
            if layer.router is None:
                return x + gated_feed_forward(layer, y, "silu"), cache
            # The router may have an adapter, whose arrays are cast too.
            router = jax.tree.map(lambda w: w.astype(full), layer.router)
            # (batch, seq, experts)
            scores = jax.nn.sigmoid(product("bsd,de->bse", y.astype(full), router))
            weights = route(scores, layer.correction.astype(full), c)
            weights = jnp.where(real[..., None], weights, 0)  # padding is routed to no expert
            weights = jnp.swapaxes(weights, 1, 2)  # (batch, experts, seq)
            routed = dispatch(ft.partial(gated_experts, layer), y, weights, c.chosen)
            network = layer.shared_gate, layer.shared_up, layer.shared_down
            return x + (routed + gated_network(y, *network, "silu")), cache

        first, stacks = 0, [self.layers]
        if self.dense is not None:
            stacks = [self.dense, self.layers]
        for stack, own in zip(stacks, split_key(key, len(stacks)), strict=True):
            run = ft.partial(layer_fn, first)
            x, cache = scan_layers(run, x, stack, cache=cache, key=own, **c.loop_options)
            first = c.dense_layers  # the cache numbers the layers of both stacks
        return rms_norm(x, self.norm, c.norm_eps), cache, None


def route(
    scores: Float[Array, "batch seq experts"],
    correction: Float[Array, " experts"],
    config: SharedExpertsConfig,
) -> Float[Array, "batch seq experts"]:
    """Returns the weights of the experts for each token; 0 for experts that are not chosen.

    The correction only affects the choice. Groups are chosen by the sum of their two highest
    scores, and experts within these groups.
    """
    c = config
    choice = jax.lax.stop_gradient(scores + correction[None, None])  # (batch, seq, experts)
    if c.chosen_groups < c.groups:
        # (batch, seq, groups, experts)
        grouped = choice.reshape(*choice.shape[:2], c.groups, choice.shape[2] // c.groups)
        best = jnp.sum(jax.lax.top_k(grouped, 2)[0], axis=-1)  # (batch, seq, groups)
        choice = jnp.where(_highest(best, c.chosen_groups)[..., None], grouped, -jnp.inf)
        choice = choice.reshape(scores.shape)  # (batch, seq, experts)
    # Without the correction, which only balances the experts.
    weights = jnp.where(_highest(choice, c.chosen), scores, 0)
    if c.weights_sum_to_one:
        # As published. All scores may be 0.
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
    return weights * c.route_scale


def _highest(x: Float[Array, "batch seq many"], count: int) -> Bool[Array, "batch seq many"]:
    which = jax.lax.top_k(x, count)[1]  # (batch, seq, count)
    return jnp.any(jax.nn.one_hot(which, x.shape[-1], dtype=bool), axis=-2)
