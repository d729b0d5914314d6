"""BERT and RoBERTa against NumPy, with each head, and what must leave them unchanged."""

import dataclasses

import decoder_helpers as helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoder_helpers import TOKENS, VOCAB, close, logits_of, slow_attention, slow_norm
from random_models import to_device

from redcoast.models.bert import Bert, BertConfig

CONFIG = BertConfig(vocab=VOCAB, width=16, layers=2, heads=4, hidden=24, positions=11, pad=0)


def make(**changes):
    """A random model whose norms' scales are about 1, so that what comes late says what came
    early."""

    def lift(path, x):
        return x + 1 if jax.tree_util.keystr(path).endswith("norm") else x

    return jax.tree_util.tree_map_with_path(lift, helpers.make(Bert, CONFIG, **changes))


@helpers.jit
def pooled_of(model, tokens, **options):
    return model.pool(model.hidden(tokens, **options), **options)


MODEL = make(pooler=True)
TYPES = to_device((np.arange(7) > 3).astype(np.int32)[None].repeat(2, 0))


def slow_hidden(model, tokens, types):
    c, w = model.config, helpers.in_numpy(model)
    act = {"gelu": helpers.slow_gelu, "relu": lambda x: np.maximum(x, 0)}[c.activation]
    first = c.pad + 1 if c.kind == "roberta" else 0
    x = w.embed[tokens] + w.position_embed[first : first + len(tokens)] + w.type_embed[types]
    x = slow_norm(x, w.norm, w.norm_shift, c.norm_eps)
    for index in range(c.layers):
        layer = helpers.one_layer(w.layers, index)
        project = lambda w, b, x=x: np.einsum("sd,dhk->shk", x, w) + b
        qkv = [(layer.wq, layer.bq), (layer.wk, layer.bk), (layer.wv, layer.bv)]
        out = slow_attention(*(project(*pair) for pair in qkv), scale=0.5, causal=False)
        x = x + np.einsum("shk,hkd->sd", out, layer.wo) + layer.bo
        x = slow_norm(x, layer.attention_norm, layer.attention_norm_shift, c.norm_eps)
        x = x + act(x @ layer.up + layer.up_bias) @ layer.down + layer.down_bias
        x = slow_norm(x, layer.mlp_norm, layer.mlp_norm_shift, c.norm_eps)
    return x


def slow_results(model, tokens, types):
    x, w, c = slow_hidden(model, tokens, types), helpers.in_numpy(model), model.config
    if c.head is None:
        return x
    if c.head == "classification":
        return np.tanh(x[0] @ w.pooler.w + w.pooler.b) @ w.head.w + w.head.b
    act = helpers.slow_gelu if c.kind == "roberta" else lambda x: np.maximum(x, 0)
    x = slow_norm(act(x @ w.head.w + w.head.b), w.head.norm, w.head.norm_shift, c.norm_eps)
    return x @ w.embed.T + w.head.vocab_bias


@pytest.mark.few("masked-roberta")
@pytest.mark.parametrize("kind", ["bert", "roberta"])
@pytest.mark.parametrize("head", [None, "masked", "classification"])
def test_matches_numpy(kind, head):
    # RoBERTa's head for tokens has one activation function, whatever the layers'.
    model = make(kind=kind, head=head, activation="relu", pad=2, labels=3)
    results = logits_of(model, TOKENS, types=TYPES)
    for row, actual in zip(TOKENS, results, strict=True):
        close(actual, slow_results(model, np.asarray(row), np.asarray(TYPES[0])), 1e-4)


@pytest.mark.thorough
def test_types_are_0_by_default():
    close(logits_of(MODEL, TOKENS), logits_of(MODEL, TOKENS, types=TYPES * 0))


@pytest.mark.thorough
def test_pooler_and_second_head_match_numpy():
    model = make(head="pretraining")
    pooled = pooled_of(model, TOKENS)
    w = helpers.in_numpy(model)
    first = slow_hidden(model, np.asarray(TOKENS[1]), np.zeros(7, int))[0]
    expected = np.tanh(first @ w.pooler.w + w.pooler.b)
    close(pooled[1], expected, 1e-4)
    close(model.head.follows(pooled)[1], expected @ w.head.follows.w + w.head.follows.b, 1e-4)
    masked = make(head="masked")
    close(logits_of(model, TOKENS), logits_of(masked, TOKENS))


def test_parts_that_are_not_there_are_refused():
    with pytest.raises(ValueError, match="no pooler: its configuration has `pooler=False`"):
        make().pool(jnp.zeros((1, 3, 16)))
    with pytest.raises(
        ValueError, match="needs the head .masked. or .pretraining., but this model.s head is None"
    ):
        MODEL.unembed(jnp.zeros((1, 3, 16)))


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_padding_changes_nothing(kind):
    helpers.check_padding(make(kind=kind, positions=7))


@pytest.mark.thorough
def test_classification_reads_the_first_real_token():
    model = make(head="classification")
    expected = logits_of(model, TOKENS)
    for widths in (((0, 0), (3, 0)), ((0, 0), (0, 3))):
        padded, mask = jnp.pad(TOKENS, widths), jnp.pad(jnp.ones_like(TOKENS), widths)
        close(logits_of(model, padded, mask=mask), expected)
        close(pooled_of(MODEL, padded, mask=mask), pooled_of(MODEL, TOKENS))


@pytest.mark.thorough
def test_packed_texts_are_as_apart():
    segments = to_device((np.arange(7) > 3).astype(np.int32)[None].repeat(2, 0))
    packed = logits_of(MODEL, TOKENS, segments=segments)
    close(packed[:, :4], logits_of(MODEL, TOKENS[:, :4]))
    close(packed[:, 4:], logits_of(MODEL, TOKENS[:, 4:]))


def test_packed_texts_are_not_classified():
    model = make(head="classification")
    with pytest.raises(ValueError, match="Put each text into its own row"):
        model(TOKENS, segments=TYPES)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_positions_count_from_0_and_end(kind):
    model = make(kind=kind, pad=2)
    close(logits_of(model, TOKENS, positions=jnp.arange(7)[None]), logits_of(model, TOKENS))
    shifted = logits_of(model, TOKENS, positions=jnp.arange(4, 11)[None])
    assert jnp.all(jnp.isfinite(shifted))
    assert jnp.max(jnp.abs(shifted - logits_of(model, TOKENS))) > 0.1
    assert jnp.all(jnp.isnan(logits_of(model, TOKENS, positions=jnp.arange(5, 12)[None])))
    with pytest.raises(ValueError, match="12 tokens in a row, but the model has 11 positions"):
        model(jnp.zeros((1, 12), jnp.int32))


@pytest.mark.thorough
def test_token_outside_the_vocabulary_gives_nan():
    results = logits_of(MODEL, TOKENS.at[1, 3].set(VOCAB))
    assert jnp.all(jnp.isnan(results[1]))
    assert jnp.all(jnp.isfinite(results[0]))


@pytest.mark.thorough
def test_dropout_by_key():
    model = helpers.make(Bert, CONFIG, kind="roberta", pad=1, head="classification")
    helpers.check_dropout(model, ("dropout", "attention_dropout", "head_dropout"))


def test_a_heads_dropout_is_that_of_the_layers_unless_it_is_said():
    assert dataclasses.replace(CONFIG, dropout=0.3).head_rate == 0.3
    assert dataclasses.replace(CONFIG, dropout=0.3, head_dropout=0.0).head_rate == 0.0


@pytest.mark.thorough
def test_remat_saves_less_and_changes_no_gradient():
    helpers.check_remat(helpers.make(Bert, CONFIG, head="masked"))


@pytest.mark.thorough
def test_half_precision_is_close_to_float32():
    helpers.check_half_precision(make(head="masked", norm_eps=1e-5))


@pytest.mark.thorough
def test_is_split_over_a_mesh():
    helpers.check_plan(make(width=32, hidden=128, head="masked"))


@pytest.mark.thorough
def test_a_classifier_of_padded_texts_is_split_over_a_mesh():
    model = make(width=32, hidden=128, head="classification", labels=4)
    helpers.check_plan(model, mask=jnp.tile(jnp.array([[0, 1, 1, 1, 1, 1, 0]]), (4, 1)))


@pytest.mark.thorough
def test_initial_deviation():
    config = dataclasses.replace(CONFIG, width=64, layers=4, hidden=64, head="pretraining")
    # A key of this kind takes less to compile.
    key = jax.random.key(0, impl="unsafe_rbg")
    model = jax.jit(Bert, static_argnums=0)(config, key=key)
    layers, heads = model.layers, (model.pooler.w, model.head.w)
    for array in (model.embed, model.position_embed, layers.wq, layers.wo, layers.down, *heads):
        np.testing.assert_allclose(jnp.std(array), 0.02, rtol=0.1)
    assert not jnp.any(layers.up_bias)
    assert jnp.all(layers.mlp_norm == 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 3}, "16 is not a multiple of 3"),
        ({"types": 0}, "`types` must be at least 1, but is 0"),
        ({"activation": "gelu_10"}, "Unknown activation function 'gelu_10'"),
        ({"labels": 0}, "`labels` must be at least 1, but is 0"),
        ({"label_names": ("a",)}, "`label_names` has 1 names, but there are 2 `labels`"),
        ({"kind": "roberta", "pad": None}, "RoBERTa needs `pad`"),
        ({"kind": "roberta", "head": "pretraining"}, "RoBERTa has no head .pretraining."),
        ({"dropout": 1.0}, "`dropout` must be at least 0 and less than 1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **change)
