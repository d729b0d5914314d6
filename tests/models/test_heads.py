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
    found = with_head(model, labels=5, key=KEY)
    assert jax.tree.leaves(found.layers) == jax.tree.leaves(model.layers)
    assert found.embed is model.embed
    assert (found.config.head, found.config.labels) == ("classification", 5)
    assert logits_of(found, TOKENS).shape == (2, 5)
    np.testing.assert_allclose(jnp.std(found.head.w), 0.02, rtol=0.3)
    other = with_head(model, labels=5, key=OTHER)
    assert jnp.max(jnp.abs(other.head.w - found.head.w)) > 0.01
    # It is what one of this configuration is.
    fresh = eqx.filter_eval_shape(Bert, found.config, key=KEY)
    assert jax.tree.structure(fresh) == jax.tree.structure(found)


@pytest.mark.thorough
@pytest.mark.parametrize(("head", "pooler"), [(None, True), ("pretraining", False)])
def test_a_pooler_is_kept(head, pooler):
    model = make(Bert, BERT, head=head, pooler=pooler)
    assert with_head(model, labels=2, key=KEY).pooler.w is model.pooler.w


@pytest.mark.thorough
def test_one_label_is_regression():
    found = with_head(make(Bert, BERT, head="masked"), labels=1, key=KEY)
    assert logits_of(found, TOKENS).shape == (2, 1)
    assert write_config(found.config)["id2label"] == {"0": "LABEL_0"}


@pytest.mark.parametrize("kind", ["bert", "modernbert"])
@pytest.mark.few("modernbert")
@pytest.mark.thorough
def test_labels_of_tokens(kind):
    """Those of a token depend on its hidden state alone, and padding changes nothing."""
    model = make(Bert, BERT, pooler=True) if kind == "bert" else make(ModernBert, MODERN)
    found = with_head(model, labels=["O", "B", "I"], of_tokens=True, key=KEY)
    assert found.config.head == "tokens"
    assert not getattr(found.config, "pooler", False)
    padded, mask = jnp.pad(TOKENS, ((0, 0), (2, 0))), jnp.pad(TOKENS * 0 + 1, ((0, 0), (2, 0)))
    logits = eqx.filter_jit(lambda model, tokens, mask: model(tokens, mask=mask))
    assert logits(found, TOKENS, None).shape == (*TOKENS.shape, 3)
    close(logits(found, padded, mask)[:, 2:], logits(found, TOKENS, None))
    shifted = eqx.tree_at(lambda m: m.head.b, found, found.head.b + 1)
    close(logits(shifted, TOKENS, None), logits(found, TOKENS, None) + 1)
    assert write_config(found.config)["id2label"] == {"0": "O", "1": "B", "2": "I"}


@pytest.mark.thorough
def test_labels_may_have_names():
    found = with_head(make(Bert, BERT), labels=["bad", "good"], key=KEY)
    assert logits_of(found, TOKENS).shape == (2, 2)
    assert write_config(found.config)["id2label"] == {"0": "bad", "1": "good"}


@pytest.mark.thorough
def test_only_the_head_of_a_vit_is_fresh():
    model = make(ViT, VIT, pooler=True)
    found = with_head(model, labels=3, key=KEY)
    assert found.pooler is None
    assert found.patch_embed is model.patch_embed
    assert logits_of(found, jnp.ones((2, 3, 4, 4))).shape == (2, 3)


@pytest.mark.thorough
def test_a_fresh_head_is_of_the_models_dtype():
    found = with_head(helpers.cast(make(Bert, BERT), jnp.bfloat16), labels=2, key=KEY)
    assert {x.dtype for x in jax.tree.leaves(found)} == {np.dtype(jnp.bfloat16)}


@pytest.mark.thorough
def test_a_fresh_head_is_on_the_models_devices():
    mesh = rc.make_mesh(model=4)
    model = make(Bert, BERT)
    found = with_head(jax.device_put(model, NamedSharding(mesh, P())), labels=2, key=KEY)
    assert found.head.w.sharding == NamedSharding(mesh, P())
    close(logits_of(found, TOKENS), logits_of(with_head(model, labels=2, key=KEY), TOKENS))


def test_an_abstract_model_gets_an_abstract_head():
    abstract = eqx.filter_eval_shape(Bert, BERT, key=KEY)
    found = eqx.filter_eval_shape(with_head, abstract, labels=3, key=KEY)
    assert found.head.w.shape == (16, 3)


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
