"""Log-probabilities of sampled tokens and of the loss that agree to the last bit."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from generate_helpers import prompts, tiny
from random_models import cast, random_model

import redcoast as rc
from redcoast import lora, losses
from redcoast.models import (
    GPT2,
    Gemma,
    GemmaConfig,
    GPT2Config,
    Llama,
    LlamaConfig,
    Mamba2,
    Mamba2Config,
    Mixtral,
    MixtralConfig,
    RopeScaling,
)

SIZES: Any = {"vocab": 97, "width": 64, "layers": 2, "heads": 4}
GROUPED: Any = SIZES | {"kv_heads": 2, "hidden": 96}
SMALL = LlamaConfig(vocab=31, width=16, layers=1, heads=2, kv_heads=1, hidden=32, eos=(1,), pad=0)
PROMPT, NEW = 7, 20
MESHES: dict[str, Any] = {"1": {"data": 1}, "8": {}, "2x4": {"model": 4}}


def mesh_of(name):
    devices = jax.devices()[:1] if name == "1" else None
    return rc.make_mesh(**MESHES[name], devices=devices)


def sampled_rows(model, mesh, *, rows, prompt, new, columns=0):
    """Rows of sampled answers to prompts of unequal lengths, and the log-probabilities of sampling,
    as in a loss; in another order, with `columns` more of padding."""
    rng = np.random.default_rng(0)
    vocab = model.config.vocab
    tokens = rng.integers(2, vocab, (rows, prompt))
    real = np.arange(prompt) >= rng.integers(0, prompt - 1, rows)[:, None]
    options: Any = {"mask": real, "key": jax.random.key(1), "temperature": 1.0, "eos": (1,)}
    actual = rc.generate(model, tokens, new, exact=True, log_probabilities=True, **options)

    order = rng.permutation(rows)

    def whole(of_prompt, of_answer):
        both = np.concatenate([of_prompt, np.asarray(of_answer)], axis=1)
        return np.pad(both, ((0, 0), (0, columns)))[order]

    nothing = np.zeros((rows, prompt))
    return {
        "tokens": whole(tokens, actual.tokens).astype(np.int32),
        "real": whole(real, actual.mask),
        "answer": whole(nothing, actual.mask)[:, 1:].astype(bool),
        "old": whole(nothing, actual.log_probabilities)[:, 1:].astype(np.float32),
        "advantage": rng.normal(size=rows).astype(np.float32),
    }


def loss_fn(model, batch, key):
    new = rc.log_probabilities(model, batch["tokens"], mask=batch["real"], exact=True)
    difference = jnp.where(batch["answer"], new - batch["old"], 0)
    loss = losses.grpo(new, batch["old"], batch["advantage"], mask=batch["answer"])
    ratio, off = jnp.exp(difference), jnp.max(jnp.abs(difference))
    return loss, {"off": off, "least": jnp.min(ratio), "most": jnp.max(ratio)}


def train(model, mesh, *, rows, minibatch, prompt=PROMPT, new=NEW, columns=0, trainable=None):
    """The metrics of minibatches of one rollout, before the first update of the weights."""
    shape = lambda *sizes, dtype: jax.ShapeDtypeStruct((minibatch, *sizes), dtype)
    length = prompt + new + columns
    batch = {
        "tokens": shape(length, dtype=jnp.int32),
        "real": shape(length, dtype=bool),
        "answer": shape(length - 1, dtype=bool),
        "old": shape(length - 1, dtype=jnp.float32),
        "advantage": shape(dtype=jnp.float32),
    }
    options = {} if trainable is None else {"trainable": trainable}
    state, step, _ = rc.prepare(
        model, optax.sgd(0.0), loss_fn, batch, key=jax.random.key(0), mesh=mesh, **options
    )
    size = {"rows": rows, "prompt": prompt, "new": new, "columns": columns}
    data = sampled_rows(state.model, mesh, **size)
    results = []
    for first in range(0, rows, minibatch):
        part = {name: x[first : first + minibatch] for name, x in data.items()}
        state, metrics = step(state, part)
        results.append({name: float(metrics[name]) for name in ("off", "least", "most")})
    return results, int(data["answer"].sum())


@pytest.mark.thorough
def test_the_first_update_has_a_ratio_of_exactly_1():
    """On a mesh, in minibatches of other rows in another order, under a plan."""
    model = random_model(Llama, SMALL)
    actual, _ = train(model, mesh_of("2x4"), rows=12, minibatch=4, prompt=4, new=6)
    assert actual == [{"off": 0, "least": 1, "most": 1}] * 3


def families():
    return {
        "llama": (Llama, LlamaConfig(**GROUPED)),
        "six layers": (Llama, LlamaConfig(**GROUPED | {"layers": 6, "heads": 2, "kv_heads": 1})),
        "window": (Llama, LlamaConfig(**GROUPED, window=8, qk_norm=True)),
        "gpt2": (GPT2, GPT2Config(**SIZES, hidden=96, positions=64)),
        "gemma": (Gemma, GemmaConfig(**GROUPED)),
        "mixtral": (Mixtral, MixtralConfig(**GROUPED, experts=4)),
        "mamba2": (Mamba2, Mamba2Config(vocab=97, width=64, layers=2, heads=4, head_size=16)),
    }


@pytest.mark.integration
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("family", families())
def test_a_thousand_tokens_have_the_same_bits(family, mesh):
    actual, tokens = train(random_model(*families()[family]), mesh_of(mesh), rows=80, minibatch=16)
    assert tokens > 1000
    assert actual == [{"off": 0, "least": 1, "most": 1}] * 5


@pytest.mark.integration
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("kind", ["adapters", "bfloat16", "other columns"])
def test_also_with_adapters_in_bfloat16_and_with_more_padding(kind, mesh):
    model, options = random_model(Llama, LlamaConfig(**GROUPED)), {}
    if kind == "adapters":
        model = lora.add_adapters(model, 4, targets="layers/w[qkvo]", key=jax.random.key(0))
        model = jax.tree.map(lambda x: x + 0.01, model)
        options = {"trainable": lora.trainable(model)}
    if kind == "bfloat16":
        model = cast(model, jnp.bfloat16)
    if kind == "other columns":
        options = {"columns": 30}
    actual, _ = train(model, mesh_of(mesh), rows=80, minibatch=16, **options)
    assert actual == [{"off": 0, "least": 1, "most": 1}] * 5


@pytest.mark.thorough
def test_the_gradient_is_that_of_the_forward_pass():
    model = random_model(Llama, SMALL)
    _, (tokens, mask), _ = prompts([3, 7, 1, 5], vocab=31)
    total = lambda model, exact: jnp.sum(
        rc.log_probabilities(model, tokens, mask=mask, exact=exact) ** 2
    )
    (value, actual), (plain, expected) = (
        eqx.filter_jit(eqx.filter_value_and_grad(total))(model, exact) for exact in (True, False)
    )
    np.testing.assert_allclose(value, plain, rtol=1e-5)
    close = lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)
    jax.tree.map(close, actual, expected)


@pytest.mark.thorough
def test_tokens_and_padding_are_as_without_it():
    """With copies, options that depend on earlier tokens, ends, and padding on both sides."""
    model = tiny(3)
    options: dict[str, Any] = {"max_new_tokens": 9, "num_return_sequences": 2}
    _, (tokens, mask), _ = prompts([3, 7, 1, 5])
    options |= {"temperature": 1.5, "top_k": 6, "key": jax.random.key(2), "eos": (4,)}
    options |= {"repetition_penalty": 1.2, "min_new_tokens": 2, "log_probabilities": True}
    expected = rc.generate(model, tokens, mask=mask, **options)
    for shift in (0, 2):
        columns = np.roll(np.pad(tokens, ((0, 0), (0, 2))), shift, axis=1)
        real = np.roll(np.pad(mask, ((0, 0), (0, 2))), shift, axis=1)
        actual = rc.generate(model, columns, mask=real, exact=True, **options)
        np.testing.assert_array_equal(actual.tokens, expected.tokens)
        np.testing.assert_array_equal(actual.mask, expected.mask)
        np.testing.assert_allclose(actual.log_probabilities, expected.log_probabilities, atol=1e-5)
    greedy = rc.generate(model, tokens, 4, mask=mask, exact=True)
    np.testing.assert_array_equal(greedy, rc.generate(model, tokens, 4, mask=mask))


def test_what_cannot_be_exact_is_refused():
    tokens = np.array([[3, 4, 5]])
    model = tiny(3)
    for name, value in {"rows": 1, "stream": print, "stop": print, "beams": 2}.items():
        with pytest.raises(ValueError, match=f"`exact` is not supported with `{name}"):
            rc.generate(model, tokens, 2, exact=True, **{name: value})
    by_length = RopeScaling("dynamic", 2.0, original=8)
    config = LlamaConfig(**GROUPED, rope_scaling=by_length)
    with pytest.raises(ValueError, match="depend on the final length"):
        rc.log_probabilities(random_model(Llama, config), tokens, exact=True)
