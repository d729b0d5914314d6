"""Encoders with a fresh head, where fine-tuning begins."""

import decoder_helpers as helpers
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoder_helpers import TOKENS, VOCAB, close, logits_of, make
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import redcoast as rc
from redcoast.lora import LowRank
from redcoast.models import with_head
from redcoast.models.bert import Bert, BertConfig
from redcoast.models.llama import Llama, LlamaConfig
from redcoast.models.modernbert import ModernBert, ModernBertConfig
from redcoast.models.vit import ViT, ViTConfig
from redcoast.pretrained._registry import write_config

BERT = BertConfig(vocab=VOCAB, width=16, layers=2, heads=4, hidden=24, positions=11, pad=1)
MODERN = ModernBertConfig(vocab=VOCAB, width=16, layers=2, heads=4, hidden=24)
VIT = ViTConfig(width=16, layers=2, heads=4, hidden=24, image=(4, 4), patch=(2, 2))
# Keys of this kind take less to compile.
KEY, OTHER = (jax.random.key(seed, impl="unsafe_rbg") for seed in (0, 1))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "head"), [("bert", None), ("bert", "masked"), ("roberta", "classification")]
)
def test_only_the_head_of_a_bert_is_fresh(kind, head):
    model = make(Bert, BERT, kind=kind, head=head, labels=3)
    actual = with_head(model, labels=5, key=KEY)
    assert jax.tree.leaves(actual.layers) == jax.tree.leaves(model.layers)
    assert actual.embed is model.embed
    assert (actual.config.head, actual.config.labels) == ("classification", 5)
    assert logits_of(actual, TOKENS).shape == (2, 5)
    np.testing.assert_allclose(jnp.std(actual.head.w), 0.02, rtol=0.3)
    other = with_head(model, labels=5, key=OTHER)
    assert jnp.max(jnp.abs(other.head.w - actual.head.w)) > 0.01
    # It is what one of this configuration is.
    fresh = eqx.filter_eval_shape(Bert, actual.config, key=KEY)
    assert jax.tree.structure(fresh) == jax.tree.structure(actual)


@pytest.mark.thorough
@pytest.mark.parametrize(("head", "pooler"), [(None, True), ("pretraining", False)])
def test_a_pooler_is_kept(head, pooler):
    model = make(Bert, BERT, head=head, pooler=pooler)
    assert with_head(model, labels=2, key=KEY).pooler.w is model.pooler.w


@pytest.mark.thorough
def test_one_label_is_regression():
    actual = with_head(make(Bert, BERT, head="masked"), labels=1, key=KEY)
    assert logits_of(actual, TOKENS).shape == (2, 1)
    assert write_config(actual.config)["id2label"] == {"0": "LABEL_0"}


@pytest.mark.parametrize("kind", ["bert", "modernbert"])
@pytest.mark.few("modernbert")
@pytest.mark.thorough
def test_labels_of_tokens(kind):
    """Those of a token depend on its hidden state alone, and padding changes nothing."""
    model = make(Bert, BERT, pooler=True) if kind == "bert" else make(ModernBert, MODERN)
    actual = with_head(model, labels=["O", "B", "I"], of_tokens=True, key=KEY)
    assert actual.config.head == "tokens"
    assert not getattr(actual.config, "pooler", False)
    padded, mask = jnp.pad(TOKENS, ((0, 0), (2, 0))), jnp.pad(TOKENS * 0 + 1, ((0, 0), (2, 0)))
    logits = eqx.filter_jit(lambda model, tokens, mask: model(tokens, mask=mask))
    assert logits(actual, TOKENS, None).shape == (*TOKENS.shape, 3)
    close(logits(actual, padded, mask)[:, 2:], logits(actual, TOKENS, None))
    shifted = eqx.tree_at(lambda m: m.head.b, actual, actual.head.b + 1)
    close(logits(shifted, TOKENS, None), logits(actual, TOKENS, None) + 1)
    assert write_config(actual.config)["id2label"] == {"0": "O", "1": "B", "2": "I"}


@pytest.mark.thorough
def test_labels_may_have_names():
    actual = with_head(make(Bert, BERT), labels=["bad", "good"], key=KEY)
    assert logits_of(actual, TOKENS).shape == (2, 2)
    assert write_config(actual.config)["id2label"] == {"0": "bad", "1": "good"}


@pytest.mark.thorough
def test_only_the_head_of_a_vit_is_fresh():
    model = make(ViT, VIT, pooler=True)
    actual = with_head(model, labels=3, key=KEY)
    assert actual.pooler is None
    assert actual.patch_embed is model.patch_embed
    assert logits_of(actual, jnp.ones((2, 3, 4, 4))).shape == (2, 3)


@pytest.mark.thorough
def test_a_fresh_head_is_of_the_models_dtype():
    actual = with_head(helpers.cast(make(Bert, BERT), jnp.bfloat16), labels=2, key=KEY)
    assert {x.dtype for x in jax.tree.leaves(actual)} == {np.dtype(jnp.bfloat16)}


@pytest.mark.thorough
def test_a_fresh_head_is_on_the_models_devices():
    mesh = rc.make_mesh(model=4)
    model = make(Bert, BERT)
    actual = with_head(jax.device_put(model, NamedSharding(mesh, P())), labels=2, key=KEY)
    assert actual.head.w.sharding == NamedSharding(mesh, P())
    close(logits_of(actual, TOKENS), logits_of(with_head(model, labels=2, key=KEY), TOKENS))


def test_an_abstract_model_gets_an_abstract_head():
    abstract = eqx.filter_eval_shape(Bert, BERT, key=KEY)
    actual = eqx.filter_eval_shape(with_head, abstract, labels=3, key=KEY)
    assert actual.head.w.shape == (16, 3)


def test_adapted_weights_stay_adapted():
    model = make(Bert, BERT)
    adapted = LowRank(model.layers.up, jnp.ones((2, 16, 1)), jnp.ones((2, 1, 24)), 0.5)
    model = eqx.tree_at(lambda m: m.layers.up, model, adapted)
    assert with_head(model, labels=2, key=KEY).layers.up.a is adapted.a


def test_models_without_labels_are_refused():
    config = LlamaConfig(vocab=8, width=8, layers=1, heads=1, kv_heads=1, hidden=8)
    with pytest.raises(TypeError, match="A Llama cannot have a head for labels"):
        with_head(make(Llama, config), labels=2, key=KEY)
    with pytest.raises(ValueError, match="`labels` must be at least 1, but is 0"):
        with_head(make(Bert, BERT), labels=0, key=KEY)
    with pytest.raises(ValueError, match="`of_tokens` needs an encoder of text, but a ViT has no"):
        with_head(make(ViT, VIT), labels=2, of_tokens=True, key=KEY)
