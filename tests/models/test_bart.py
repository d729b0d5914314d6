"""BART against NumPy, and its `config.json` files."""

import dataclasses
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pair_helpers import DECODER_TOKENS, TOKENS, VOCAB, in_float64, logits_of, quick_jit, softmax
from random_models import cast, random_model, to_device

from redcoast.models.bart import Bart, BartConfig
from redcoast.pretrained._registry import read_config, write_config
from redcoast.pretrained._tensors import tensor_names, tensor_shape
from redcoast.pretrained.hf import bart as hf_bart

CONFIG = BartConfig(
    vocab=VOCAB, width=16, layers=1, decoder_layers=2, heads=2, hidden=24, positions=9
)


def make(**changes):
    return random_model(Bart, dataclasses.replace(CONFIG, **changes))


def gelu(x):
    return x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2


def numpy_logits(model, tokens, decoder_tokens):
    """One sequence through the equations of the paper, in float64, one position at a time."""
    config, model = model.config, in_float64(model)

    def norm(vector, scale, shift):
        return (vector - vector.mean()) / np.sqrt(vector.var() + 1e-5) * scale + shift

    def attention(part, index, stream, memory, causal):
        w = {name: value[index] for name, value in vars(part).items()}
        out = []
        for i, x in enumerate(stream):
            added = w["bo"]
            for head in range(config.heads):
                seen = (memory or stream)[: i + 1 if causal else None]
                query = x @ w["wq"][:, head] + w["bq"][head]
                keys = [y @ w["wk"][:, head] + w["bk"][head] for y in seen]
                values = np.stack([y @ w["wv"][:, head] + w["bv"][head] for y in seen])
                scores = np.array([query @ key for key in keys]) / math.sqrt(len(query))
                added = added + softmax(scores) @ values @ w["wo"][head]
            out.append(norm(x + added, w["norm"], w["norm_shift"]))
        return out

    def run(stack, tokens, causal, memory=None):
        stream = []
        for position, token in enumerate(np.asarray(tokens)):
            x = model.embed[token] * (4 if config.scale_embedding else 1)
            x = x + stack.position_embed[2 + position]
            stream.append(norm(x, stack.embed_norm, stack.embed_norm_shift))
        layers = stack.layers
        for index in range(len(layers.mlp_norm)):
            stream = attention(layers.attention, index, stream, None, causal)
            if memory is not None:
                stream = attention(layers.cross, index, stream, memory, False)
            for i, x in enumerate(stream):
                h = gelu(x @ layers.up[index] + layers.up_bias[index])
                y = x + h @ layers.down[index] + layers.down_bias[index]
                stream[i] = norm(y, layers.mlp_norm[index], layers.mlp_norm_shift[index])
        return stream

    memory = run(model.encoder, tokens, False)
    hidden = np.stack(run(model.decoder, decoder_tokens, True, memory))
    return hidden @ model.embed.T + model.logits_bias


@pytest.mark.thorough
@pytest.mark.parametrize("scale", [False, True])
def test_matches_numpy(scale):
    model = make(scale_embedding=scale)
    logits = logits_of(model)
    for row in range(2):
        expected = numpy_logits(model, TOKENS[row], DECODER_TOKENS[row])
        np.testing.assert_allclose(logits[row], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.thorough
def test_float64_matches_numpy():
    with jax.enable_x64(True):
        model = cast(make(), jnp.float64)
        logits = logits_of(model)
        assert logits.dtype == jnp.float64
        expected = numpy_logits(model, TOKENS[0], DECODER_TOKENS[0])
        np.testing.assert_allclose(logits[0], expected, atol=1e-11)


@pytest.mark.thorough
def test_the_bias_of_logits_is_not_trained():
    hidden = to_device(np.random.default_rng(0).normal(size=(1, 3, 16)), np.float32)
    gradient = eqx.filter_grad(lambda model: jnp.sum(jnp.sin(model.unembed(hidden))))(make())
    np.testing.assert_array_equal(gradient.logits_bias, 0)
    assert jnp.all(jnp.any(gradient.embed != 0, axis=1))


@pytest.mark.thorough
def test_more_tokens_than_positions_are_refused():
    model = make()
    tokens = jnp.zeros((1, 10), jnp.int32)
    with pytest.raises(ValueError, match="10 tokens in a row, but the model has 9 positions"):
        model(tokens, tokens[:, :9])
    with pytest.raises(ValueError, match="10 tokens in a row, but the model has 9 positions"):
        model(tokens[:, :9], tokens)
    # Packed, each text counts for itself; one that is too long gets NaN.
    segments = jnp.array([[0] * 4 + [1] * 6])
    packed = {"segments": segments, "decoder_segments": segments}
    assert jnp.all(jnp.isfinite(logits_of(model, tokens, tokens, **packed)))
    one = {name: jnp.zeros_like(segments) for name in packed}
    assert jnp.all(jnp.isnan(logits_of(model, tokens, tokens, **one)))


@pytest.mark.thorough
def test_initial_parameters():
    config = dataclasses.replace(CONFIG, vocab=64, width=32)
    make_embed = quick_jit(lambda key: Bart(config, key=key).embed)
    np.testing.assert_allclose(jnp.std(make_embed(jax.random.key(0))), 0.02, rtol=0.05)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 3}, "16 is not a multiple of 3"),
        ({"decoder_layers": 0}, "`decoder_layers` must be at least 1, but is 0"),
        ({"activation_dropout": -0.1}, "`activation_dropout` must be at least 0"),
        ({"activation": "gelo"}, "Unknown activation function 'gelo'"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **change)


# What the published file of the large one says.
BART_LARGE = {
    "_num_labels": 3,
    "activation_dropout": 0.1,
    "activation_function": "gelu",
    "add_bias_logits": False,
    "add_final_layer_norm": False,
    "architectures": ["BartModel"],
    "attention_dropout": 0.1,
    "bos_token_id": 0,
    "classif_dropout": 0.1,
    "classifier_dropout": 0.0,
    "d_model": 1024,
    "decoder_attention_heads": 16,
    "decoder_ffn_dim": 4096,
    "decoder_layerdrop": 0.0,
    "decoder_layers": 12,
    "decoder_start_token_id": 2,
    "dropout": 0.1,
    "early_stopping": True,
    "encoder_attention_heads": 16,
    "encoder_ffn_dim": 4096,
    "encoder_layerdrop": 0.0,
    "encoder_layers": 12,
    "eos_token_id": 2,
    "forced_eos_token_id": 2,
    "gradient_checkpointing": False,
    "id2label": {"0": "LABEL_0", "1": "LABEL_1", "2": "LABEL_2"},
    "init_std": 0.02,
    "is_encoder_decoder": True,
    "label2id": {"LABEL_0": 0, "LABEL_1": 1, "LABEL_2": 2},
    "max_position_embeddings": 1024,
    "model_type": "bart",
    "no_repeat_ngram_size": 3,
    "normalize_before": False,
    "num_beams": 4,
    "num_hidden_layers": 12,
    "pad_token_id": 1,
    "scale_embedding": False,
    "task_specific_params": {"summarization": {"length_penalty": 1.0}},
    "transformers_version": "4.7.0.dev0",
    "use_cache": True,
    "vocab_size": 50265,
}


def test_reads_the_published_settings():
    config = read_config(BartConfig, BART_LARGE)
    assert config == BartConfig(
        vocab=50265,
        width=1024,
        layers=12,
        decoder_layers=12,
        heads=16,
        hidden=4096,
        attention_dropout=0.1,
        activation_dropout=0.1,
        eos=(2,),
        bos=0,
        pad=1,
    )
    written = write_config(config)
    assert read_config(BartConfig, written) == config
    names = written.keys() & BART_LARGE.keys() - {"architectures"}
    assert {name: written[name] for name in names} == {name: BART_LARGE[name] for name in names}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"normalize_before": True}, "`normalize_before` is True"),
        ({"normalize_embedding": False}, "`normalize_embedding` is False"),
        ({"tie_word_embeddings": False}, "`tie_word_embeddings` is False"),
        ({"encoder_layerdrop": 0.1}, "`encoder_layerdrop` is 0.1"),
        ({"decoder_ffn_dim": 2048}, "`decoder_ffn_dim` is 2048, but only 4096"),
        ({"num_hidden_layers": 6}, "`num_hidden_layers` and `encoder_layers` are two names"),
        ({"model_type": "mbart"}, "`model_type` is 'mbart'"),
        ({"rotary": True}, "`rotary`, which is True, is unknown"),
    ],
)
def test_settings_that_are_not_implemented_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        read_config(BartConfig, BART_LARGE | change)


def test_published_tensors():
    model = eqx.filter_eval_shape(Bart, CONFIG, key=jax.random.key(0))
    leaves = {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf.shape
        for path, leaf in jax.tree_util.tree_leaves_with_path(model)
    }
    table = hf_bart.tensors(CONFIG)
    assert table.keys() == leaves.keys()
    shapes = {
        name: tensor_shape(tensor, leaves[path])
        for path, tensor in table.items()
        for name in tensor_names(tensor, leaves[path]).values()
    }
    # The embedding and the logits' bias; of each stack 3; 16 or 26 of each layer.
    assert len(shapes) == 2 + 2 * 3 + 16 * 1 + 26 * 2
    assert shapes["final_logits_bias"] == (1, 13)
    assert shapes["model.encoder.embed_positions.weight"] == (11, 16)
    assert shapes["model.decoder.layers.1.encoder_attn.k_proj.bias"] == (16,)
    assert shapes["model.decoder.layers.1.fc1.weight"] == (24, 16)
    copies = {"model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"}
    copies = dict.fromkeys((*copies, "lm_head.weight"), "model.shared.weight")
    assert hf_bart.duplicates(CONFIG) == copies
