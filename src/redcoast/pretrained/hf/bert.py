"""The settings and tensors of BERT, RoBERTa and DistilBERT in Hugging Face's format."""

import dataclasses
import re
from collections.abc import Collection

from ...models.bert import BertConfig
from .._settings import Fields, Settings, read_settings, write_fields
from .._tensors import Tensor
from ._labels import LABELLED, architecture_of, read_architecture, read_labels, write_labels
from ._tables import BERT_FIELDS, TABLE, all_names, attention, dense, linear, norm

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
# The prefixes of the tensors of the heads for masked tokens.
_PREFIXES = {"bert": "cls.predictions.", "roberta": "lm_head."}
_HEADS = {
    None: "Model",
    "masked": "ForMaskedLM",
    "pretraining": "ForPreTraining",
    "classification": "ForSequenceClassification",
    "tokens": "ForTokenClassification",
}


def read(settings: Settings) -> Fields:
    if settings.get("model_type") == "distilbert":
        return read_distilbert(settings)
    if other := _ROBERTAS.get(settings.get("model_type", "")):
        names = settings.get("architectures") or ()
        names = [name.replace(other, "Roberta") for name in names]
        settings = settings | {"model_type": "roberta", "architectures": names}
    kind = settings.get("model_type", "bert")
    roberta = kind == "roberta"
    defaults: Settings = {"max_position_embeddings": 512}
    if roberta:
        defaults |= {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
    else:
        defaults |= {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
    only = {
        "model_type": ("bert", "roberta"),
        "is_decoder": (False,),
        "add_cross_attention": (False,),
        "position_embedding_type": ("absolute",),
        "tie_word_embeddings": (True,),
    }
    # Settings of poolers that were never implemented.
    ignored = """
        directionality pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers
        pooler_size_per_head pooler_type
    """
    c, fields = read_settings(settings, _FIELDS, defaults, only=only, ignored=ignored)
    known = {_name(kind, x): x for x in _HEADS if (kind, x) != ("roberta", "pretraining")}
    head = read_architecture(settings, known, _name(kind, None))
    fields |= {"kind": kind, "head": head, "pooler": head is None}
    fields["positions"] = c["max_position_embeddings"]
    if roberta:
        # RoBERTa's first position has the number after that of the padding token. The setting also
        # counts the rows before it.
        fields["positions"] -= c["pad_token_id"] + 1
    if head in LABELLED:
        fields |= read_labels(settings)
    return fields


def _name(kind: str, head: str | None) -> str:
    return kind.capitalize() + _HEADS[head]


def write(config: BertConfig) -> Settings:
    if config.kind == "distilbert":
        return write_distilbert(config)
    c = config
    settings = write_fields(c, _FIELDS) | write_labels(c)
    settings["max_position_embeddings"] = c.first_position + c.positions
    return settings | {"architectures": [_name(c.kind, c.head)], "model_type": c.kind}


def settle(config: BertConfig, names: Collection[str]) -> BertConfig:
    """The settings do not state whether there is a pooler, and describe files with BERT's
    next-sentence head as a masked language model.
    """
    if config.kind == "distilbert":
        return config
    pooler = any(re.fullmatch(r"(bert\.|roberta\.)?pooler\.dense\.weight", name) for name in names)
    head = config.head
    if head == "masked" and "cls.seq_relationship.weight" in names:
        head = "pretraining"
    pooler = pooler and head in (None, "masked", "tokens")
    return dataclasses.replace(config, head=head, pooler=pooler)


def tensors(config: BertConfig) -> dict[str, Tensor]:
    if config.kind == "distilbert":
        return distilbert_tensors(config)
    base = ""
    if config.head:
        base = f"{config.kind}."
    layer = base + "encoder.layer.{layer}."
    return {
        "embed": Tensor(base + "embeddings.word_embeddings.weight", TABLE),
        "position_embed": Tensor(base + "embeddings.position_embeddings.weight", TABLE),
        "type_embed": Tensor(base + "embeddings.token_type_embeddings.weight", TABLE),
        **norm("norm", base + "embeddings.LayerNorm"),
        **attention("layers/", layer + "attention.", _ATTENTION, biases="qkvo", heads=config.heads),
        **norm("layers/attention_norm", layer + "attention.output.LayerNorm"),
        **dense("layers/up", layer + "intermediate.dense"),
        **dense("layers/down", layer + "output.dense"),
        **norm("layers/mlp_norm", layer + "output.LayerNorm"),
        **_heads(config, base),
    }


def _heads(config: BertConfig, base: str) -> dict[str, Tensor]:
    roberta, head = config.kind == "roberta", config.head
    table = {}
    if head == "classification" and roberta:  # its classifier includes the pooler
        table |= linear("pooler", "classifier.dense") | linear("head", "classifier.out_proj")
    elif config.pools:
        table |= linear("pooler", base + "pooler.dense")
    if head in LABELLED and "head/w" not in table:
        table |= linear("head", "classifier")
    if head in ("masked", "pretraining"):
        prefix = _PREFIXES[config.kind]
        if roberta:
            table |= linear("head", prefix + "dense") | norm("head/norm", prefix + "layer_norm")
        else:
            middle = prefix + "transform."
            table |= linear("head", middle + "dense") | norm("head/norm", middle + "LayerNorm")
        table["head/vocab_bias"] = Tensor(prefix + "bias", "vocab -> vocab")
    if head == "pretraining":
        table |= linear("head/follows", "cls.seq_relationship")
    return table


def duplicates(config: BertConfig) -> dict[str, str]:
    names, base = {}, f"{config.kind}."
    # Files of the base model may have the prefix of models with a head.
    prefix = ""
    if not config.head:
        prefix = base
    for name in all_names(tensors(config), config.layers):
        # The names in Google's original files.
        old = name.replace("LayerNorm.weight", "LayerNorm.gamma")
        old = old.replace("LayerNorm.bias", "LayerNorm.beta")
        names |= dict.fromkeys((name, prefix + name, old, prefix + old), name)
        del names[name]
    if config.kind == "distilbert" and config.head == "masked":
        names["vocab_projector.weight"] = base + "embeddings.word_embeddings.weight"
    elif config.head in ("masked", "pretraining"):
        prefix = _PREFIXES[config.kind]
        names[prefix + "decoder.weight"] = base + "embeddings.word_embeddings.weight"
        names[prefix + "decoder.bias"] = prefix + "bias"
    return names


_DISTILBERT = {
    "vocab": "vocab_size",
    "width": "dim",
    "layers": "n_layers",
    "heads": "n_heads",
    "hidden": "hidden_dim",
    "positions": ("max_position_embeddings", 512),
    "activation": ("activation", "gelu"),
    "dropout": ("dropout", 0.1),
    "attention_dropout": ("attention_dropout", 0.1),
    "pad": ("pad_token_id", 0),
    "bos": ("bos_token_id", None),
}
_RATE = "seq_classif_dropout"  # of the classifier of texts, and not of the one of tokens
_ARCHITECTURES = {
    "DistilBertModel": None,
    "DistilBertForMaskedLM": "masked",
    "DistilBertForSequenceClassification": "classification",
    "DistilBertForTokenClassification": "tokens",
}
_LETTERS = {"q": "q_lin", "k": "k_lin", "v": "v_lin", "o": "out_lin"}


def read_distilbert(settings: Settings) -> Fields:
    defaults = {"eos_token_id": None, _RATE: 0.2}
    only = {"tie_word_embeddings": (True,), "tie_weights_": (True,)}
    # The positions are in a table of the file, whatever their initialisation was.
    ignored = "sinusoidal_pos_embds"
    c, fields = read_settings(settings, _DISTILBERT, defaults, only=only, ignored=ignored)
    head = read_architecture(settings, _ARCHITECTURES, "DistilBertModel")
    fields |= {"kind": "distilbert", "types": 1, "head": head}
    if head in LABELLED:
        fields |= read_labels(settings)
    fields["head_dropout"] = None
    if head == "classification":
        fields["head_dropout"] = c[_RATE]
    return fields


def write_distilbert(config: BertConfig) -> Settings:
    name = architecture_of(config.head, _ARCHITECTURES)
    settings = write_fields(config, _DISTILBERT) | write_labels(config) | {_RATE: config.head_rate}
    return settings | {"architectures": [name], "model_type": "distilbert"}


def distilbert_tensors(config: BertConfig) -> dict[str, Tensor]:
    base = ""
    if config.head:
        base = "distilbert."
    layer = base + "transformer.layer.{layer}."
    tables = {
        "embed": Tensor(base + "embeddings.word_embeddings.weight", TABLE),
        "position_embed": Tensor(base + "embeddings.position_embeddings.weight", TABLE),
        **norm("norm", base + "embeddings.LayerNorm"),
        **attention("layers/", layer + "attention.", _LETTERS, biases="qkvo", heads=config.heads),
        **norm("layers/attention_norm", layer + "sa_layer_norm"),
        **dense("layers/up", layer + "ffn.lin1"),
        **dense("layers/down", layer + "ffn.lin2"),
        **norm("layers/mlp_norm", layer + "output_layer_norm"),
    }
    if config.head in LABELLED:
        tables |= linear("head", "classifier")
    if config.head == "classification":
        tables |= linear("pooler", "pre_classifier")
    if config.head == "masked":
        tables |= linear("head", "vocab_transform") | norm("head/norm", "vocab_layer_norm")
        tables["head/vocab_bias"] = Tensor("vocab_projector.bias", "vocab -> vocab")
    return tables
