"""BERT and RoBERTa against `transformers`: heads, pooler, and what it makes of pairs of texts."""

# pyright: reportMissingImports=false

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from harness import TOLERANCE, Case, check_outputs, check_training, make_reference
from published import make_tokens, ragged
from transformers import (
    BertForMaskedLM,
    BertForPreTraining,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
    CamembertForMaskedLM,
    DistilBertForMaskedLM,
    DistilBertForSequenceClassification,
    DistilBertForTokenClassification,
    DistilBertModel,
    RobertaForMaskedLM,
    RobertaForSequenceClassification,
    RobertaForTokenClassification,
    RobertaModel,
    XLMRobertaForSequenceClassification,
)

from redcoast import load_pretrained

SIZES = {"vocab_size": 48, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"intermediate_size": 56, "max_position_embeddings": 40}
ROBERTA = SIZES | {"type_vocab_size": 1, "layer_norm_eps": 1e-5}
DISTILBERT = {"vocab_size": 48, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 56}
DISTILBERT |= {"max_position_embeddings": 40}

CASES = [
    Case("bert masked", BertForMaskedLM, SIZES | {"vocab_size": 51, "hidden_act": "gelu_new"}),
    Case("bert labels", BertForSequenceClassification, SIZES | {"num_labels": 5}),
    Case("bert regression", BertForSequenceClassification, SIZES | {"num_labels": 1}),
    Case("bert tokens", BertForTokenClassification, SIZES | {"num_labels": 5}),
    Case("roberta masked", RobertaForMaskedLM, ROBERTA | {"pad_token_id": 2, "hidden_act": "relu"}),
    Case("roberta labels", RobertaForSequenceClassification, ROBERTA | {"num_labels": 3}),
    Case("xlm-roberta labels", XLMRobertaForSequenceClassification, ROBERTA | {"num_labels": 3}),
    Case("camembert masked", CamembertForMaskedLM, ROBERTA | {"pad_token_id": 1}),
    Case("distilbert", DistilBertModel, DISTILBERT),
    Case("distilbert masked", DistilBertForMaskedLM, DISTILBERT | {"activation": "gelu_new"}),
    Case("distilbert labels", DistilBertForSequenceClassification, DISTILBERT | {"num_labels": 3}),
    Case("distilbert tokens", DistilBertForTokenClassification, DISTILBERT | {"num_labels": 5}),
    Case("roberta tokens", RobertaForTokenClassification, ROBERTA | {"num_labels": 3}),
]
PAIRS = [
    Case("bert", BertModel, SIZES | {"type_vocab_size": 3}),
    Case("bert pretraining", BertForPreTraining, SIZES),
    Case("roberta", RobertaModel, ROBERTA | {"type_vocab_size": 2}),
]


@pytest.mark.parametrize("check", [check_outputs, check_training])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_bert(case, check, tmp_path):
    check(case, tmp_path)


@pytest.mark.parametrize("case", PAIRS, ids=str)
def test_bert_without_head(case, tmp_path):
    reference = make_reference(case, tmp_path)
    model = load_pretrained(tmp_path)
    tokens, mask = make_tokens("tokens", 48), ragged((0, -3, 0, -5))
    types = (np.arange(tokens.shape[1]) > 4).astype(np.int32)[None].repeat(len(tokens), 0)
    with torch.no_grad():
        out = reference(*(torch.tensor(x.astype("l")) for x in (tokens, mask, types)))
    tokens, mask, types = map(jnp.asarray, (tokens, mask, types))
    result = model(tokens, mask=mask, types=types)
    hidden = model.hidden(tokens, mask=mask, types=types)
    pooled = model.pool(hidden, mask=mask)
    pairs = [(out[0], result), (out[1], pooled)]
    if case.model is BertForPreTraining:
        pairs[1] = (out[1], model.head.follows(pooled))
    for theirs, ours in pairs:
        real = np.asarray(mask) == 1 if ours.ndim == 3 else slice(None)
        assert np.abs(np.asarray(ours) - theirs.numpy())[real].max() < TOLERANCE
