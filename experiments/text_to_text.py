"""Trains an encoder-decoder, T5 or BART, to write one text from another by beam search."""

import itertools as it
import re
import unicodedata
from dataclasses import dataclass, field
from typing import Literal

import _options
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _common import end_training, make_optimizer, report, save_samples, start
from _extras import from_extra
from _options import Existing, Maybe, MultipleOf32, Positive, refuse
from _packages import fetch
from _published import read_model, read_tokenizer
from _tokenizers import END, PAD, encode, train_tokenizer
from sklearn.model_selection import train_test_split

import redcoast as rc
from redcoast.models import T5, Bart, BartConfig, T5Config, shift_right

with from_extra("text"):
    from rouge_score.rouge_scorer import RougeScorer
    from sacrebleu import corpus_chrf


@dataclass(frozen=True)
class Config:
    data: Literal["characters", "bible"] = "characters"  # names to parts, or old to new English
    model: Literal["t5", "bart"] = "t5"  # architecture (without weights)
    weights: Maybe[Existing] = None  # Hugging Face directory to fine-tune
    seq: int = 32  # maximum length in tokens (use about 64 for the bible)
    vocab: int = 1000  # vocabulary size of the tokenizer (without weights)
    width: MultipleOf32 = 96  # size of the residual stream, a multiple of 32 (without weights)
    layers: int = 2  # number of layers in the encoder and in the decoder (without weights)
    beams: int = 4  # number of beams in beam search
    tests: int = 512  # number of test examples
    batch_size: int = 32  # global batch size in examples
    steps: int = 600  # number of training steps
    learning_rate: Positive = 2e-3  # peak learning rate after the warmup (about 1e-4 with weights)
    run: _options.RunOptions = field(default_factory=_options.Run)


def main(c: Config) -> None:
    run = start(c, "text_to_text")
    if c.data == "bible":
        pairs = read_bible()
    else:
        pairs = read_characters()
    if c.tests >= len(pairs):
        refuse(f"--tests is {c.tests}, but there are {len(pairs)} examples.")
    train, test = train_test_split(pairs, test_size=c.tests, random_state=c.run.seed)
    if c.weights:
        tokenizer = read_tokenizer(c.weights)
        model = read_model(c.weights, dtype=jnp.float32)
    else:
        tokenizer = train_tokenizer(it.chain.from_iterable(train), c.vocab, start=False)
        model = lambda key: make_model(c, key)

    def collate_fn(examples):
        sources, targets = zip(*examples, strict=True)
        tokens, mask = encode(tokenizer, sources, c.seq)
        labels, real = encode(tokenizer, targets, c.seq)
        return {"tokens": tokens, "mask": mask, "labels": labels, "real": real > 0}

    def loss_fn(model, batch, key):
        inputs = shift_right(batch["labels"], start=model.config.decoder_start)  # (batch, seq)
        logits = model(batch["tokens"], inputs, mask=batch["mask"], key=key)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
        return jnp.mean(losses, where=batch["real"]), {"weight": jnp.sum(batch["real"])}

    def predict_fn(model, batch, key):
        tokens, mask = batch["tokens"], batch["mask"]
        return rc.generate(model, tokens, mask=mask, max_new_tokens=c.seq, beams=c.beams)

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
    sources, references = zip(*test, strict=True)
    written, samples = [], []
    for source, tokens, reference in zip(sources, outputs, references, strict=True):
        text = tokenizer.decode(tokens.tolist()).strip()
        written.append(text)
        samples.append(f"source: {source}\nwritten: {text}\ntarget: {reference}")
    save_samples(run.directory, "\n\n".join(samples))
    copied = score(sources, references, "_of_a_copy")  # a baseline
    report(run.directory, **score(written, references), **copied)


def score(texts, references, suffix: str = "") -> dict[str, float]:
    """Returns chrF and ROUGE-L, from 0 to 100."""
    chrf = corpus_chrf(texts, [references]).score
    scorer, rouge_l = RougeScorer(["rougeL"]), []
    for reference, text in zip(references, texts, strict=True):
        rouge_l.append(scorer.score(reference, text)["rougeL"].fmeasure)
    return {f"chrf{suffix}": chrf, f"rouge_l{suffix}": 100 * float(np.mean(rouge_l))}


def make_model(c: Config, key: jax.Array) -> T5 | Bart:
    sizes = (c.vocab, c.width, c.layers, c.layers, c.width // 32, 4 * c.width)
    tokens = {"decoder_start": PAD, "pad": PAD, "eos": (END,)}
    if c.model == "t5":
        return T5(T5Config(*sizes, **tokens), key=key)
    return Bart(BartConfig(*sizes, positions=c.seq, **tokens), key=key)


def read_characters() -> list[tuple[str, str]]:
    """Returns names of Unicode characters, each with the names of what it is composed of."""
    pairs = []
    for character in map(chr, range(0x20000)):
        name = unicodedata.name(character, "")
        codes = re.findall(r"\b[0-9A-F]{4,}", unicodedata.decomposition(character))
        parts = ", ".join(unicodedata.name(chr(int(code, 16)), "") for code in codes)
        # The names of Chinese and Korean characters are numbers or sounds.
        if parts and not re.search("CJK|HANGUL", name + parts):
            pairs.append((name.lower(), parts.lower()))
    return pairs


def read_bible() -> list[tuple[str, str]]:
    """Returns verses of the King James Bible (1611), each with its World English version."""
    old, new = read_verses("kjv"), read_verses("web")
    return [(text, new[verse]) for verse, text in old.items() if verse in new]


def read_verses(version: str) -> dict[str, str]:
    """Returns the text of each verse, by its number."""
    (path,) = fetch(f"pythonbible-{version}==0.0.2").rglob("plain_text_readers_bible.py")
    _, text, tables = path.read_text("utf-8").split('"""')
    rows = re.findall(r"^ {8}(\d+): (\d+),$", tables, re.MULTILINE)
    # Two tables, of where each verse begins and of where it ends.
    begins, ends = rows[: len(rows) // 2], rows[len(rows) // 2 :]
    verses = {}
    for (verse, begin), (_, end) in zip(begins, ends, strict=True):
        verses[verse] = " ".join(text[int(begin) : int(end)].split())
    return verses


if __name__ == "__main__":
    _options.run(main, Config, __doc__)
