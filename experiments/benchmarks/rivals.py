"""Training steps of other libraries, of the same sizes as those in `step.py`.

Each function returns a `Turn`, which trains for some steps and waits for the last one, and the
number of parameters. All train on the same tokens with AdamW, in float32 and without dropout, and
the loss is the mean cross-entropy of all tokens.
"""

# pyright: reportMissingImports=false

import functools as ft
from collections.abc import Callable
from typing import Any
from unittest import mock

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import PyTree

from redcoast import losses

VOCAB, WIDTH, HEADS, HIDDEN, LENGTH = 512, 256, 4, 1024, 128
RATE = 1e-4
BART = {"encoder_ffn_dim": HIDDEN, "decoder_ffn_dim": HIDDEN, "max_position_embeddings": LENGTH}
BART |= {"encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS, "d_model": WIDTH}
# The names of the class in transformers and of its sizes.
HEADED = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "max_position_embeddings": LENGTH}
SIZES: dict[str, tuple[str, str, dict[str, int]]] = {
    "gpt2": ("GPT2", "LMHeadModel", {"n_embd": WIDTH, "n_head": HEADS, "n_positions": LENGTH}),
    "llama": ("Llama", "ForCausalLM", {**HEADED, "intermediate_size": HIDDEN}),
    "gptj": ("GPTJ", "ForCausalLM", {"n_embd": WIDTH, "n_head": HEADS, "rotary_dim": 32}),
    "opt": ("OPT", "ForCausalLM", {**HEADED, "ffn_dim": HIDDEN, "word_embed_proj_dim": WIDTH}),
    "bert": ("Bert", "ForMaskedLM", {**HEADED, "intermediate_size": HIDDEN}),
    "bart": ("Bart", "ForConditionalGeneration", BART),
    "t5": ("T5", "ForConditionalGeneration", {"d_model": WIDTH, "d_kv": WIDTH // HEADS}),
}
SIZES["t5"][2].update(d_ff=HIDDEN, num_heads=HEADS)
# How each family calls its number of layers.
LAYERS = {"gpt2": ("n_layer",), "gptj": ("n_layer",), "t5": ("num_layers", "num_decoder_layers")}
LAYERS["bart"] = ("encoder_layers", "decoder_layers")
# Dropout by its names in the two families that are compared with torch.
UNDROPPED = {"gpt2": ("resid_pdrop", "embd_pdrop", "attn_pdrop"), "llama": ("attention_dropout",)}
Turn = Callable[[int], None]


def sized_config(family: str, layers: int) -> Any:
    """The configuration of transformers for a family."""
    import transformers

    name, _, sizes = SIZES[family]
    deep = dict.fromkeys(LAYERS.get(family, ("num_hidden_layers",)), layers)
    return getattr(transformers, f"{name}Config")(vocab_size=VOCAB, **sizes, **deep)


def flax_model(family: str, layers: int) -> PyTree:
    import transformers

    name, suffix, _ = SIZES[family]
    with mock.patch("jax.numpy.clip", _clip):
        kind = getattr(transformers, f"Flax{name}{suffix}")
        return kind(sized_config(family, layers), seed=0)


def _clip(x: jax.Array, a_min: Any = None, a_max: Any = None, clip: Any = jnp.clip) -> Any:
    """`jnp.clip` with the names of its arguments in transformers' T5, which JAX has removed."""
    return clip(x, a_min, a_max)


def with_flax(family: str, layers: int, tokens: np.ndarray) -> tuple[Turn, int]:
    """The Flax model of transformers 4.57."""
    model = flax_model(family, layers)
    options = {}
    if family in ("bart", "t5"):
        options["decoder_input_ids"] = tokens

    def logits_of(params: PyTree) -> PyTree:
        with mock.patch("jax.numpy.clip", _clip):
            return model(tokens, **options, params=params).logits

    return jax_turn(model.params, logits_of, tokens)


def with_levanter(family: str, layers: int, tokens: np.ndarray, **setting: Any) -> tuple[Turn, int]:
    """Levanter's LLaMA; `setting` says whether its layers are scanned and rematerialised."""
    import haliax
    from levanter.layers.attention import AttentionMask
    from levanter.models.llama import LlamaConfig, LlamaLMHeadModel

    assert family == "llama"
    sizes = {"hidden_dim": WIDTH, "intermediate_dim": HIDDEN, "num_heads": HEADS}
    config = LlamaConfig(
        **sizes, seq_len=tokens.shape[1], num_layers=layers, num_kv_heads=HEADS, **setting
    )
    vocab, rows = haliax.Axis("vocab", VOCAB), haliax.Axis("batch", len(tokens))
    model = LlamaLMHeadModel.init(vocab, config, key=jax.random.key(0))
    named = haliax.named(jnp.asarray(tokens), (rows, config.Pos))
    mask = AttentionMask.causal()
    return jax_turn(model, lambda model: model(named, attn_mask=mask).array, tokens)


def jax_turn(
    model: PyTree, logits_of: Callable[[Any], Any], tokens: np.ndarray
) -> tuple[Turn, int]:
    """A jitted AdamW step; the same program around all models in JAX."""
    optimizer = optax.adamw(RATE)
    params, static = eqx.partition(model, eqx.is_inexact_array)
    count = sum(x.size for x in jax.tree.leaves(params))

    @ft.partial(jax.jit, donate_argnums=0)
    def step(state: PyTree) -> PyTree:
        params, opt_state = state
        loss_fn = lambda params: losses.cross_entropy(
            logits_of(eqx.combine(params, static)), jnp.asarray(tokens)
        )
        loss, gradient = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = optimizer.update(gradient, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    state = (params, optimizer.init(params))

    def turn(steps: int) -> None:
        nonlocal state
        loss = None
        for _ in range(steps):
            state, loss = step(state)
        jax.block_until_ready(loss)

    return turn, count


def with_torch(
    family: str, layers: int, tokens: np.ndarray, *, compiled: bool = False
) -> tuple[Turn, int]:
    """The torch model of transformers 5, with the fused AdamW."""
    import torch
    import transformers

    name, suffix, _ = SIZES[family]
    config = sized_config(family, layers)
    for dropout in UNDROPPED[family]:
        setattr(config, dropout, 0.0)
    config.use_cache = False
    model = getattr(transformers, f"{name}{suffix}")(config).train()
    adamw = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=1e-4, fused=True)
    ids = torch.tensor(tokens, dtype=torch.long)

    def loss_of(ids: Any) -> Any:
        logits = model(input_ids=ids).logits
        return torch.nn.functional.cross_entropy(logits.view(-1, VOCAB), ids.view(-1))

    if compiled:
        loss_of = torch.compile(loss_of)

    def turn(steps: int) -> None:
        for _ in range(steps):
            loss_of(ids).backward()
            adamw.step()
            adamw.zero_grad()

    return turn, sum(x.numel() for x in model.parameters())
