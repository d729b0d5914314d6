"""The settings and tensors of BERT, RoBERTa and DistilBERT in Hugging Face's format."""

import dataclasses
import re
from collections.abc import Collection
from typing import Any

from ...models.bert import BertConfig
from .._settings import defaults_of, read_fields, read_settings, write_fields
from .._tensors import Tensor
from ._distilbert import distilbert_tensors, read_distilbert, write_distilbert
from ._labels import LABELLED, read_architecture, read_labels, write_labels
from ._tables import BERT_FIELDS, all_names, attention, dense, linear, norm

BUFFERS = (r"(^|\.)embeddings\.(position_ids|token_type_ids)$",)

_FIELDS = {
    **BERT_FIELDS,
    "vocab": "vocab_size",
    "types": ("type_vocab_size", 2),
    "head_dropout": ("classifier_dropout", None),
    "pad": "pad_token_id",
    "bos": "bos_token_id",
    "dropout": ("hidden_dropout_prob", 0.1),
    "attention_dropout": ("attention_probs_dropout_prob", 0.1),
}
KINDS = ("bert", "roberta", "xlm-roberta", "camembert", "distilbert")
_ATTENTION = {"q": "self.query", "k": "self.key", "v": "self.value", "o": "output.dense"}
# RoBERTa with other names and tokenizers.
_ROBERTAS = {"xlm-roberta": "XLMRoberta", "camembert": "Camembert"}
_HEADS = {
    None: "Model",
    "masked": "ForMaskedLM",
    "pretraining": "ForPreTraining",
    "classification": "ForSequenceClassification",
    "tokens": "ForTokenClassification",
}


def read(settings: dict[str, Any]) -> dict[str, Any]:
    if settings.get("model_type") == "distilbert":
        return read_distilbert(settings)
    if other := _ROBERTAS.get(settings.get("model_type", "")):
        names = settings.get("architectures") or ()
        names = [name.replace(other, "Roberta") for name in names]
        settings = settings | {"model_type": "roberta", "architectures": names}
    kind = settings.get("model_type", "bert")
    roberta = kind == "roberta"
    defaults = {
        **defaults_of(_FIELDS),
        "max_position_embeddings": 512,
        "pad_token_id": 1 if roberta else 0,
        "bos_token_id": 0 if roberta else None,
        "eos_token_id": 2 if roberta else None,
    }
    only = {
        "model_type": ("bert", "roberta"),
        "is_decoder": (False,),
        "add_cross_attention": (False,),
        "position_embedding_type": ("absolute",),
        "tie_word_embeddings": (True,),
    }
    # Settings of poolers that were never implemented, and of old versions of `transformers`.
    ignored = """
        directionality pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers
        pooler_size_per_head pooler_type output_past _num_labels
    """
    c = read_settings(settings, defaults, only, tuple(ignored.split()))
    known = {_name(kind, x): x for x in _HEADS if (kind, x) != ("roberta", "pretraining")}
    head = read_architecture(settings, known, _name(kind, None))
    fields = read_fields(c, _FIELDS)
    fields |= read_labels(settings) if head in LABELLED else {}
    positions = c["max_position_embeddings"] - (c["pad_token_id"] + 1 if roberta else 0)
    return fields | {"positions": positions, "kind": kind, "head": head, "pooler": head is None}


def _name(kind: str, head: str | None) -> str:
    return kind.capitalize() + _HEADS[head]


def write(config: BertConfig) -> dict[str, Any]:
    if config.kind == "distilbert":
        return write_distilbert(config)
    c = config
    settings = write_fields(c, _FIELDS) | write_labels(c)
    settings["max_position_embeddings"] = c.first_position + c.positions
    return settings | {"architectures": [_name(c.kind, c.head)], "model_type": c.kind}


def settle(config: BertConfig, names: Collection[str]) -> BertConfig:
    """Completes a configuration from the names of the tensors in the files.

    The settings do not state whether there is a pooler, and describe files with BERT's
    next-sentence head as a masked language model.
    """
    if config.kind == "distilbert":
        return config
    pooler = any(re.fullmatch(r"(bert\.|roberta\.)?pooler\.dense\.weight", name) for name in names)
    second = config.head == "masked" and "cls.seq_relationship.weight" in names
    head = "pretraining" if second else config.head
    return dataclasses.replace(
        config, head=head, pooler=pooler and head in (None, "masked", "tokens")
    )


def tensors(config: BertConfig) -> dict[str, Tensor]:
    """Maps each array to its published tensors."""
    if config.kind == "distilbert":
        return distilbert_tensors(config)
    base = f"{config.kind}." if config.head else ""
    layer = base + "encoder.layer.{layer}."
    kept, fixed = "rows width -> rows width", {"heads": config.heads}
    return {
        "embed": Tensor(base + "embeddings.word_embeddings.weight", kept),
        "position_embed": Tensor(base + "embeddings.position_embeddings.weight", kept),
        "type_embed": Tensor(base + "embeddings.token_type_embeddings.weight", kept),
        **norm("norm", base + "embeddings.LayerNorm"),
        **attention("layers/", layer + "attention.", _ATTENTION, biases="qkvo", **fixed),
        **norm("layers/attention_norm", layer + "attention.output.LayerNorm"),
        **dense("layers/up", layer + "intermediate.dense"),
        **dense("layers/down", layer + "output.dense"),
        **norm("layers/mlp_norm", layer + "output.LayerNorm"),
        **_heads(config, base),
    }


def _heads(config: BertConfig, base: str) -> dict[str, Tensor]:
    roberta, head = config.kind == "roberta", config.head
    found = {}
    if head == "classification":
        # RoBERTa's classifier includes the pooler.
        pooler = "classifier.dense" if roberta else base + "pooler.dense"
        found |= linear("pooler", pooler)
        found |= linear("head", "classifier.out_proj" if roberta else "classifier")
    elif config.pools:
        found |= linear("pooler", base + "pooler.dense")
    if head == "tokens":
        found |= linear("head", "classifier")
    if head in ("masked", "pretraining"):
        prefix = "lm_head." if roberta else "cls.predictions."
        middle = prefix if roberta else prefix + "transform."
        found |= linear("head", middle + "dense")
        found |= norm("head/norm", middle + ("layer_norm" if roberta else "LayerNorm"))
        found["head/vocab_bias"] = Tensor(prefix + "bias", "vocab -> vocab")
    if head == "pretraining":
        found |= linear("head/follows", "cls.seq_relationship")
    return found


def duplicates(config: BertConfig) -> dict[str, str]:
    """Maps other names under which a file may contain a tensor to the tensor's own name."""
    found, base = {}, f"{config.kind}."
    for name in all_names(tensors(config), config.layers):
        others = [name, name if config.head else base + name]
        # The names in Google's original files.
        old = name.replace("LayerNorm.weight", "LayerNorm.gamma")
        old = old.replace("LayerNorm.bias", "LayerNorm.beta")
        others += [old, old if config.head else base + old]
        found |= {other: name for other in others if other != name}
    if config.kind == "distilbert" and config.head == "masked":
        found["vocab_projector.weight"] = base + "embeddings.word_embeddings.weight"
    elif config.head in ("masked", "pretraining"):
        prefix = "lm_head." if config.kind == "roberta" else "cls.predictions."
        found[prefix + "decoder.weight"] = base + "embeddings.word_embeddings.weight"
        found[prefix + "decoder.bias"] = prefix + "bias"
    return found
