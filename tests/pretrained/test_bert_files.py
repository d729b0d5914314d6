"""What published files say of BERT and RoBERTa, and what they hold."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from decoder_helpers import VOCAB, make
from safetensors.numpy import load_file, save_file

import redcoast as rc
from redcoast.models.bert import Bert, BertConfig
from redcoast.pretrained._registry import read_config, write_config
from redcoast.pretrained.hf import bert as hf_bert

CONFIG = BertConfig(vocab=VOCAB, width=16, layers=2, heads=4, hidden=24, positions=11, pad=0)
# As https://huggingface.co/google-bert/bert-base-uncased has it.
BERT = {
    "architectures": ["BertForMaskedLM"],
    "attention_probs_dropout_prob": 0.1,
    "gradient_checkpointing": False,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 768,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 512,
    "model_type": "bert",
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "pad_token_id": 0,
    "position_embedding_type": "absolute",
    "transformers_version": "4.6.0.dev0",
    "type_vocab_size": 2,
    "use_cache": True,
    "vocab_size": 30522,
}
# As https://huggingface.co/FacebookAI/roberta-large has it.
ROBERTA = {
    "architectures": ["RobertaForMaskedLM"],
    "attention_probs_dropout_prob": 0.1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 4096,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 514,
    "model_type": "roberta",
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "pad_token_id": 1,
    "type_vocab_size": 1,
    "vocab_size": 50265,
}


def test_published_settings_are_read():
    bert = BertConfig(30522, 768, 12, 12, 3072, head="masked", pad=0)
    assert read_config(BertConfig, BERT) == bert
    roberta = {"kind": "roberta", "types": 1, "norm_eps": 1e-5, "head": "masked"}
    roberta = BertConfig(50265, 1024, 24, 16, 4096, **roberta, pad=1, bos=0, eos=(2,))
    assert read_config(BertConfig, ROBERTA) == roberta
    assert roberta.positions == 512
    no_head = {name: value for name, value in BERT.items() if name != "architectures"}
    assert read_config(BertConfig, no_head) == dataclasses.replace(bert, head=None, pooler=True)


def test_xlm_roberta_is_read_as_a_roberta():
    names = {"model_type": "xlm-roberta", "architectures": ["XLMRobertaForMaskedLM"]}
    assert read_config(BertConfig, ROBERTA | names) == read_config(BertConfig, ROBERTA)


@pytest.mark.parametrize("head", [None, "masked", "pretraining", "classification", "tokens"])
@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_settings_are_read_back(kind, head):
    if (kind, head) == ("roberta", "pretraining"):
        return
    changes = {"types": 3, "activation": "relu", "norm_eps": 1e-6, "pad": 4, "bos": 5, "eos": (6,)}
    changes |= {"dropout": 0.2, "attention_dropout": 0.3, "head_dropout": 0.4}
    config = dataclasses.replace(CONFIG, kind=kind, head=head, pooler=head is None, **changes)
    assert read_config(BertConfig, write_config(config)) == config


def test_labels_are_read_with_their_names():
    named = BERT | {
        "architectures": ["BertForSequenceClassification"],
        "id2label": {"1": "good", "0": "bad", "2": "so-so"},
        "label2id": {"bad": 0, "good": 1, "so-so": 2},
        "problem_type": "single_label_classification",
    }
    config = read_config(BertConfig, named)
    assert (config.labels, config.label_names) == (3, ("bad", "good", "so-so"))
    assert write_config(config)["id2label"] == {"0": "bad", "1": "good", "2": "so-so"}
    numbered = named | {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    config = read_config(BertConfig, numbered)
    assert (config.labels, config.label_names) == (1, None)
    plain = {name: value for name, value in named.items() if "label" not in name}
    assert read_config(BertConfig, plain).labels == 2
    assert read_config(BertConfig, plain | {"num_labels": 4}).labels == 4
    with pytest.raises(ValueError, match=r"numbers its labels \[0, 2\], but must count from 0"):
        read_config(BertConfig, named | {"id2label": {"0": "a", "2": "b"}})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rotary": True}, "`rotary`, which is True, is unknown"),
        ({"model_type": "xlnet"}, "`model_type` is 'xlnet'"),
        ({"is_decoder": True}, "`is_decoder` is True"),
        ({"add_cross_attention": True}, "`add_cross_attention` is True"),
        (
            {"position_embedding_type": "relative_key"},
            "`position_embedding_type` is 'relative_key'",
        ),
        ({"tie_word_embeddings": False}, "`tie_word_embeddings` is False"),
        ({"hidden_act": "mish"}, "Unknown activation function 'mish'"),
        ({"architectures": ["BertForMultipleChoice"]}, r"is \['BertForMultipleChoice'\]"),
        ({"architectures": ["RobertaModel"]}, "but only BertModel or BertForMaskedLM or"),
    ],
)
def test_settings_that_would_change_results_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        read_config(BertConfig, BERT | change)


def test_missing_sizes_are_refused():
    settings = {name: value for name, value in BERT.items() if name != "num_hidden_layers"}
    with pytest.raises(ValueError, match="`num_hidden_layers` is missing"):
        read_config(BertConfig, settings)


def test_names_of_tensors_settle_what_settings_leave_open():
    masked = read_config(BertConfig, BERT)
    names = ["bert.pooler.dense.weight", "cls.predictions.bias"]
    assert hf_bert.settle(masked, names) == dataclasses.replace(masked, pooler=True)
    second = [*names, "cls.seq_relationship.weight"]
    assert hf_bert.settle(masked, second) == dataclasses.replace(masked, head="pretraining")
    assert hf_bert.settle(masked, ["cls.predictions.bias"]) == masked
    base = dataclasses.replace(masked, head=None, pooler=True)
    assert not hf_bert.settle(base, ["embeddings.word_embeddings.weight"]).pooler
    assert hf_bert.settle(base, ["pooler.dense.weight"]) == base
    labels = dataclasses.replace(masked, head="classification")
    assert hf_bert.settle(labels, ["bert.pooler.dense.weight"]) == labels


def assert_same(found, model):
    assert found.config == model.config
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(model), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("changes", "some"),
    [
        ({"pooler": True}, ("embeddings.LayerNorm.bias", "pooler.dense.weight")),
        (
            {"head": "pretraining"},
            (
                "bert.embeddings.word_embeddings.weight",
                "cls.predictions.transform.LayerNorm.weight",
                "cls.seq_relationship.bias",
            ),
        ),
        (
            {"head": "classification", "labels": 3},
            ("bert.encoder.layer.1.attention.self.key.bias", "bert.pooler.dense.bias"),
        ),
        ({"kind": "roberta", "head": "masked"}, ("lm_head.dense.weight", "lm_head.bias")),
        (
            {"kind": "roberta", "head": "classification"},
            ("classifier.dense.weight", "classifier.out_proj.bias"),
        ),
        ({"kind": "roberta", "head": "tokens", "labels": 3}, ("classifier.weight",)),
    ],
)
def test_is_saved_under_published_names_and_read_back(changes, some, tmp_path):
    model = make(Bert, CONFIG, **changes)
    rc.save_pretrained(model, tmp_path)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert names >= set(some)
    assert_same(rc.load_pretrained(tmp_path), model)


def rewrite(directory, change):
    """Gives a directory's tensors other names, or none."""
    tensors = load_file(directory / "model.safetensors")
    renamed = {change(name): x for name, x in tensors.items()}
    save_file({name: x for name, x in renamed.items() if name}, directory / "model.safetensors")


def test_names_of_the_oldest_files_are_known(tmp_path):
    model = make(Bert, CONFIG, head="pretraining")
    rc.save_pretrained(model, tmp_path)
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}

    def change(name):
        for new, former in old.items():
            name = name.replace(new, former)
        return name

    rewrite(tmp_path, change)
    # As the files of bert-base-uncased are: their settings name the one head, and they have both.
    settings = json.loads((tmp_path / "config.json").read_text())
    settings["architectures"] = ["BertForMaskedLM"]
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert_same(rc.load_pretrained(tmp_path), model)


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_copies_and_buffers_of_published_files_are_known(kind, tmp_path):
    model = make(Bert, CONFIG, kind=kind, head="masked")
    rc.save_pretrained(model, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    head = "lm_head." if kind == "roberta" else "cls.predictions."
    tensors[head + "decoder.weight"] = tensors[f"{kind}.embeddings.word_embeddings.weight"].copy()
    tensors[head + "decoder.bias"] = tensors[head + "bias"].copy()
    tensors[f"{kind}.embeddings.position_ids"] = np.arange(11)[None]
    save_file(tensors, tmp_path / "model.safetensors")
    assert_same(rc.load_pretrained(tmp_path), model)


def test_a_base_is_found_with_or_without_its_prefix(tmp_path):
    model = make(Bert, CONFIG, pooler=True)
    rc.save_pretrained(model, tmp_path)
    rewrite(tmp_path, "bert.{}".format)
    assert_same(rc.load_pretrained(tmp_path), model)
