"""The settings and tensors of DistilBERT in Hugging Face's format."""

from ...models.bert import BertConfig
from .._settings import Fields, Settings, read_settings, write_fields
from .._tensors import Tensor
from ._labels import LABELLED, architecture_of, read_architecture, read_labels, write_labels
from ._tables import attention, dense, linear, norm

_FIELDS = {
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
    c, fields = read_settings(settings, _FIELDS, defaults, only=only, ignored=ignored)
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
    settings = write_fields(config, _FIELDS) | write_labels(config) | {_RATE: config.head_rate}
    return settings | {"architectures": [name], "model_type": "distilbert"}


def distilbert_tensors(config: BertConfig) -> dict[str, Tensor]:
    """Maps each array to its published tensors."""
    base = "distilbert." if config.head else ""
    layer = base + "transformer.layer.{layer}."
    kept, heads = "rows width -> rows width", config.heads
    tables = {
        "embed": Tensor(base + "embeddings.word_embeddings.weight", kept),
        "position_embed": Tensor(base + "embeddings.position_embeddings.weight", kept),
        **norm("norm", base + "embeddings.LayerNorm"),
        **attention("layers/", layer + "attention.", _LETTERS, biases="qkvo", heads=heads),
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
