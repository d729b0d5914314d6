"""Texts of `sft.py` and its samples begin as the tokenizer begins texts."""

import gguf
import numpy as np
import pytest
from tokenizers import pre_tokenizers, processors

NAME = "sft"
BEGIN, END = 256, 257
IDS = {"special_tokens": [("<s>", BEGIN), ("</s>", END)]}
BYTES = processors.ByteLevel(trim_offsets=False)
PROCESSORS = {
    "none": (None, [], []),
    "bytes": (BYTES, [], []),
    "begins": (processors.TemplateProcessing("<s> $0", **IDS), [BEGIN], []),
    "after bytes": (
        processors.Sequence([BYTES, processors.TemplateProcessing("<s> $0", **IDS)]),
        [BEGIN],
        [],
    ),
    "begins and ends": (processors.BertProcessing(("</s>", END), ("<s>", BEGIN)), [BEGIN], [END]),
}


@pytest.fixture(params=PROCESSORS)
def case(request, script):
    tokenizer = script("_tokenizers").byte_tokenizer()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    processor, begin, end = PROCESSORS[request.param]
    if processor is not None:
        tokenizer.post_processor = processor
    return tokenizer, begin, end


def test_documents_begin_as_the_tokenizer_begins_them(case, experiment, tmp_path):
    """And windows within a document have no such token."""
    tokenizer, begin, end = case
    for name in "abcdef":
        (tmp_path / name).write_text(name * 20)
    config = experiment.Config(text=tmp_path, seq=8)
    train, valid = experiment.read_examples(config, tmp_path, tokenizer)
    for rows in (train, valid):
        windows = np.stack([tokens for tokens, _ in rows])
        tokens = [*windows[0], *windows[1:, 1:].ravel()]  # each begins with the last one's end
        document = len(begin) + 20 + len(end)
        for start in range(0, len(tokens) - document, document):
            assert tokens[start : start + len(begin)] == begin
            assert tokens[start + document - len(end) : start + document] == end
        assert tokens.count(BEGIN) == len(begin) * (5 if rows is train else 1)


def test_samples_begin_as_texts_do(case, experiment, tmp_path, monkeypatch):
    """And do not end: the model is to continue them."""
    tokenizer, begin, _ = case
    prompts = []

    def generate(model, tokens, *, max_new_tokens):
        prompts.append(tokens[0].tolist())
        return np.full((1, max_new_tokens), 33)

    monkeypatch.setattr(experiment.rc, "generate", generate)
    config = experiment.Config(prompt="ab", new_tokens=2)
    experiment.show_sample("before", None, tokenizer, tmp_path, config)
    assert prompts == [[*begin, *tokenizer.encode("ab", add_special_tokens=False).ids]]
    assert (tmp_path / "samples_before.txt").read_text().startswith("ab")


@pytest.mark.parametrize("add", [{}, {"bos": True}, {"bos": True, "eos": True}, {"bos": False}])
def test_tokenizers_of_gguf_files_begin_as_their_metadata_say(add, script, tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<s>", "</s>", "ab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(words)
    writer.add_token_merges(["a b"])
    writer.add_token_types([1] * 256 + [3, 3, 1])
    writer.add_bos_token_id(BEGIN)
    writer.add_eos_token_id(END)
    for name, value in add.items():
        writer.add_bool(f"tokenizer.ggml.add_{name}_token", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    tokenizer = script("_published").read_tokenizer(tmp_path / "model.gguf")
    begin, end = ([token] * add.get(name, 0) for name, token in (("bos", BEGIN), ("eos", END)))
    plain = tokenizer.encode("xy", add_special_tokens=False).ids
    assert tokenizer.encode("xy").ids == [*begin, *plain, *end]
    assert script("_corpus").beginning_of_text(tokenizer) == begin
