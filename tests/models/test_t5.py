"""T5 against NumPy, and the `config.json` files of all its versions."""

import dataclasses
import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pair_helpers import DECODER_TOKENS, TOKENS, VOCAB, in_float64, logits_of, quick_jit, softmax
from random_models import cast, random_model, to_device

from redcoast.models.t5 import T5, T5Config
from redcoast.pretrained._registry import read_config, write_config
from redcoast.pretrained._tensors import tensor_names, tensor_shape
from redcoast.pretrained.hf import t5 as hf_t5

CONFIG = T5Config(
    vocab=VOCAB,
    width=16,
    layers=1,
    decoder_layers=2,
    heads=2,
    hidden=24,
    head_size=6,
    buckets=8,
    distance=5,
)
# By hand, of 8 buckets and a farthest distance of 5: of the encoder's keys before a query (and
# with 4 more, behind it), and of the decoder's keys before a query.
BOTH_SIDES = [0, 1, 2, 2, 3, 3, 3]
BEFORE = [0, 1, 2, 3, 4, 7, 7]
GATED: dict[str, Any] = {"gated": True, "activation": "gelu_new", "tied": False}


def make(**changes):
    return random_model(T5, dataclasses.replace(CONFIG, **changes))


def relu(x):
    return np.maximum(x, 0)


def gelu(x):
    return x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2


def numpy_logits(model, tokens, decoder_tokens):
    """One sequence through the equations of the papers, in float64, one position at a time."""
    config, model = model.config, in_float64(model)
    act = {"relu": relu, "gelu_new": gelu}[config.activation]

    def norm(vector, scale):
        return vector / np.sqrt(np.mean(vector**2) + config.norm_eps) * scale

    def attention(part, index, stream, memory, bias):
        w = {name: value[index] for name, value in vars(part).items() if value is not None}
        queries = [norm(x, w["norm"]) for x in stream]
        added = [0.0 for _ in stream]
        for i, query in enumerate(queries):
            for head in range(config.heads):
                seen = [j for j in range(len(memory or queries)) if bias(i, j, head) is not None]
                keys = [(memory or queries)[j] for j in seen]
                q = query @ w["wq"][:, head]
                scores = [q @ (k @ w["wk"][:, head]) for k in keys]
                scores = np.array(scores) + [bias(i, j, head) for j in seen]
                values = np.stack([k @ w["wv"][:, head] for k in keys])
                added[i] = added[i] + softmax(scores) @ values @ w["wo"][head]
        return [x + y for x, y in zip(stream, added, strict=True)]

    def run(stack, tokens, bias, memory=None):
        stream = [model.embed[token] for token in np.asarray(tokens)]
        for index in range(len(stack.layers.mlp_norm)):
            stream = attention(stack.layers.attention, index, stream, None, bias)
            if memory is not None:
                stream = attention(stack.layers.cross, index, stream, memory, lambda i, j, h: 0.0)
            for i, x in enumerate(stream):
                h = norm(x, stack.layers.mlp_norm[index])
                up = h @ stack.layers.up[index]
                gated = stack.layers.gate is not None
                h = act(h @ stack.layers.gate[index]) * up if gated else act(up)
                stream[i] = x + h @ stack.layers.down[index]
        return [norm(x, stack.norm) for x in stream]

    def encoder_bias(i, j, head):
        bucket = BOTH_SIDES[abs(i - j)] + (4 if j > i else 0)
        return model.encoder.relative_bias[bucket, head]

    def decoder_bias(i, j, head):
        return None if j > i else model.decoder.relative_bias[BEFORE[i - j], head]

    memory = run(model.encoder, tokens, encoder_bias)
    hidden = np.stack(run(model.decoder, decoder_tokens, decoder_bias, memory))
    if model.head is None:
        return hidden @ model.embed.T * config.width**-0.5
    return hidden @ model.head


@pytest.mark.thorough
@pytest.mark.parametrize("changes", [{}, GATED], ids=["t5", "v1.1"])
def test_matches_numpy(changes):
    model = make(**changes)
    logits = logits_of(model)
    for row in range(2):
        expected = numpy_logits(model, TOKENS[row], DECODER_TOKENS[row])
        np.testing.assert_allclose(logits[row], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.thorough
def test_float64_matches_numpy():
    with jax.enable_x64(True):
        model = cast(make(**GATED), jnp.float64)
        logits = logits_of(model)
        assert logits.dtype == jnp.float64
        expected = numpy_logits(model, TOKENS[0], DECODER_TOKENS[0])
        np.testing.assert_allclose(logits[0], expected, atol=1e-11)


def test_only_a_tied_head_is_scaled_unless_it_is_said():
    tied, plain, own = make(), make(scale_head=False), make(tied=False)
    own = eqx.tree_at(lambda model: model.head, own, tied.embed.T)
    hidden = to_device(np.random.default_rng(0).normal(size=(2, 3, 16)), np.float32)
    np.testing.assert_allclose(plain.unembed(hidden), 4 * tied.unembed(hidden), rtol=1e-6)
    np.testing.assert_allclose(own.unembed(hidden), plain.unembed(hidden), rtol=1e-5, atol=1e-6)


@pytest.mark.thorough
def test_initial_scores_and_logits_are_of_order_one():
    config = T5Config(
        vocab=256, width=64, layers=4, decoder_layers=4, heads=4, hidden=128, tied=False
    )
    tokens = to_device(np.random.default_rng(1).integers(0, 256, (2, 32)))

    @quick_jit
    def deviations(key):
        model = T5(config, key=key)
        cross: Any = model.decoder.layers.cross
        arrays = model.embed, model.encoder.layers.attention.wq, cross.wk
        return [jnp.std(x) for x in (*arrays, model(tokens, tokens))]

    *of_arrays, of_logits = deviations(jax.random.key(0))
    np.testing.assert_allclose(of_arrays, [1, 1 / 32, 1 / 8], rtol=0.03)
    assert 0.8 < of_logits < 1.2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 3, "head_size": None}, "16 is not a multiple of 3"),
        ({"decoder_layers": 0}, "`decoder_layers` must be at least 1, but is 0"),
        ({"buckets": 2}, "at least 4 .* they are 2 and 5"),
        ({"distance": 4}, "`distance` more than `buckets / 2`, but they are 8 and 4"),
        ({"tied": False, "scale_head": True}, "`scale_head=True` needs `tied=True`"),
        ({"dropout": 1.0}, "`dropout` must be at least 0 and less than 1"),
        ({"activation": "gelo"}, "Unknown activation function 'gelo'"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **change)


# What the published files say, of each version the smallest.
T5_SMALL = {
    "architectures": ["T5ForConditionalGeneration"],
    "model_type": "t5",
    "d_ff": 2048,
    "d_kv": 64,
    "d_model": 512,
    "decoder_start_token_id": 0,
    "dropout_rate": 0.1,
    "eos_token_id": 1,
    "initializer_factor": 1.0,
    "is_encoder_decoder": True,
    "layer_norm_epsilon": 1e-06,
    "n_positions": 512,
    "num_heads": 8,
    "num_layers": 6,
    "output_past": True,
    "pad_token_id": 0,
    "relative_attention_num_buckets": 32,
    "task_specific_params": {"summarization": {"num_beams": 4}},
    "vocab_size": 32128,
}
FLAN_T5_SMALL = T5_SMALL | {
    "d_ff": 1024,
    "feed_forward_proj": "gated-gelu",
    "dense_act_fn": "gelu_new",
    "is_gated_act": True,
    "num_decoder_layers": 8,
    "num_heads": 6,
    "num_layers": 8,
    "relative_attention_max_distance": 128,
    "tie_word_embeddings": False,
}
MT5_SMALL = {k: v for k, v in FLAN_T5_SMALL.items() if k not in ("dense_act_fn", "is_gated_act")}
MT5_SMALL |= {"model_type": "mt5", "vocab_size": 250112, "tokenizer_class": "T5Tokenizer"}
MT5_SMALL |= {"architectures": ["MT5ForConditionalGeneration"]}
# As version 5 of `transformers` writes FLAN-T5 and mT5.
FLAN_T5_IN_5 = FLAN_T5_SMALL | {"tie_word_embeddings": True, "scale_decoder_outputs": False}
MT5_IN_5 = MT5_SMALL | {"tie_word_embeddings": True}
IDS: dict[str, Any] = {"eos": (1,), "pad": 0, "decoder_start": 0}


def test_reads_the_first_version():
    assert read_config(T5Config, T5_SMALL) == T5Config(
        vocab=32128,
        width=512,
        layers=6,
        decoder_layers=6,
        heads=8,
        hidden=2048,
        head_size=64,
        **IDS,
    )


@pytest.mark.parametrize(
    ("settings", "kind", "vocab"),
    [
        (FLAN_T5_SMALL, "t5", 32128),
        (FLAN_T5_IN_5, "t5", 32128),
        (MT5_SMALL, "mt5", 250112),
        (MT5_IN_5, "mt5", 250112),
    ],
    ids=["flan", "flan in 5", "mt5", "mt5 in 5"],
)
def test_reads_the_later_versions(settings, kind, vocab):
    config = T5Config(
        vocab=vocab,
        width=512,
        layers=8,
        decoder_layers=8,
        heads=6,
        hidden=1024,
        head_size=64,
        activation="gelu_new",
        gated=True,
        tied=False,
        kind=kind,
        **IDS,
    )
    assert read_config(T5Config, settings) == config
    assert not config.scaled


@pytest.mark.parametrize("settings", [T5_SMALL, FLAN_T5_SMALL, MT5_SMALL])
def test_written_settings_are_read_again(settings):
    config = read_config(T5Config, settings)
    written = write_config(config)
    assert read_config(T5Config, written) == config
    known = {k: v for k, v in settings.items() if k in written}
    assert {k: written[k] for k in known} == known


def test_a_file_without_a_head_has_a_tied_one():
    config = read_config(T5Config, FLAN_T5_IN_5)
    assert hf_t5.settle(config, {"shared.weight", "lm_head.weight"}) == config
    tied = hf_t5.settle(config, {"shared.weight"})
    assert tied.tied
    assert not tied.scaled
    written = write_config(tied)
    assert (written["tie_word_embeddings"], written["scale_decoder_outputs"]) == (True, False)
    first = read_config(T5Config, T5_SMALL)
    assert hf_t5.settle(first, {"shared.weight"}) == first


def test_names_of_activations():
    read = lambda **changes: read_config(T5Config, T5_SMALL | changes)
    for proj, gated, activation in (
        ("gated-silu", True, "silu"),
        ("gelu", False, "gelu"),
        ("gated-gelu", True, "gelu_new"),
    ):
        config = read(feed_forward_proj=proj)
        assert (config.gated, config.activation) == (gated, activation)
        assert write_config(config)["feed_forward_proj"] == proj
    exact = read(feed_forward_proj="gated-gelu", dense_act_fn="gelu")
    assert exact.activation == "gelu"
    assert read_config(T5Config, write_config(exact)) == exact


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"is_encoder_decoder": False}, "`is_encoder_decoder` is False"),
        ({"feed_forward_proj": "gated-mish"}, "Unknown activation function 'mish'"),
        ({"sparse_step": 2}, "`sparse_step`, which is 2, is unknown"),
        ({"model_type": "umt5"}, "`model_type` is 'umt5'"),
        ({"head_dim": 32}, "`head_dim` and `d_kv` are two names of one setting"),
    ],
)
def test_settings_that_are_not_implemented_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        read_config(T5Config, T5_SMALL | change)


def test_a_scaled_mt5_is_refused():
    config = dataclasses.replace(CONFIG, kind="mt5")
    with pytest.raises(ValueError, match="the head of an mT5 is never scaled"):
        write_config(config)
    with pytest.raises(ValueError, match="`d_ff` is missing"):
        read_config(T5Config, {k: v for k, v in T5_SMALL.items() if k != "d_ff"})


def test_published_tensors():
    config = dataclasses.replace(CONFIG, **GATED)
    model = eqx.filter_eval_shape(T5, config, key=jax.random.key(0))
    table = hf_t5.tensors(config)
    leaves = {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf.shape
        for path, leaf in jax.tree_util.tree_leaves_with_path(model)
    }
    assert table.keys() == leaves.keys()
    shapes = {
        name: tensor_shape(tensor, leaves[path])
        for path, tensor in table.items()
        for name in tensor_names(tensor, leaves[path]).values()
    }
    # Embedding and head; of each stack, table and norm; 9 or 14 of each layer.
    assert len(shapes) == 2 + 2 * 2 + 9 * 1 + 14 * 2
    attention = "decoder.block.1.layer.0.SelfAttention"
    assert shapes["shared.weight"] == shapes["lm_head.weight"] == (13, 16)
    assert shapes[f"{attention}.q.weight"] == (12, 16)
    assert shapes[f"{attention}.o.weight"] == (16, 12)
    assert shapes["encoder.block.0.layer.1.DenseReluDense.wi_0.weight"] == (24, 16)
    assert shapes["decoder.block.1.layer.2.DenseReluDense.wo.weight"] == (16, 24)
    table = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    assert shapes[table] == (8, 2)


def test_published_duplicates():
    copies = ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight"]
    assert hf_t5.duplicates(make(tied=False).config) == dict.fromkeys(copies, "shared.weight")
    copies.append("lm_head.weight")
    assert hf_t5.duplicates(CONFIG) == dict.fromkeys(copies, "shared.weight")
