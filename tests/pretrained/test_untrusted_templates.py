"""Templates and tokenizers that may be damaged, hostile, or of another form."""

import json
import os

import jax
import numpy as np
import pytest
from grids import few_of
from serve_helpers import byte_level
from tokenizers import pre_tokenizers

import redcoast as rc
from redcoast.pretrained.text import _chat_template
from redcoast.pretrained.text._chat_template import read_template, renderer

SAY = [{"role": "user", "content": "Hi"}]
DOUBLED = (
    "{% set ns = namespace(x='aaaaaaaaaa') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}"
    "{% endfor %}"
)


HOSTILE = [
    ("{{ 'a' * 3000000000 }}", "more than 512 MiB of memory"),
    ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "0.3 s"),
    ("{{ 'a'.rjust(3000000000) }}", "more than 512 MiB of memory"),
    (DOUBLED, "more than 512 MiB of memory"),
    ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
    ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "nested too deeply"),
    ("{{ 'a' * 20000000 }}", "more than 16777216 characters"),
    ("{{ '\\ud800' }}", "surrogates not allowed"),
    ("{{ messages.__class__.__mro__ }}", "unsafe"),
]


@pytest.mark.parametrize(("template", "words"), few_of(HOSTILE, *HOSTILE[:2], several=True))
def test_renderings_that_take_too_much_are_ended(template, words, monkeypatch):
    monkeypatch.setattr(_chat_template, "SECONDS", 0.3 if words == "0.3 s" else 60.0)
    render = renderer("{% if messages %}" + template + "{% endif %}good", {})
    with pytest.raises(ValueError, match=words):
        render(SAY)
    assert render([]) == "good"  # the process goes on, or is started again


@pytest.mark.thorough
def test_the_tokenizer_of_a_split_gguf_is_found_from_any_part_and_from_its_directory(tmp_path):
    """The other parts have only their numbers, so that a tokenizer of them would be empty."""
    gguf = pytest.importorskip("gguf")
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama", split_max_tensors=1)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(words)
    writer.add_token_types([1] * len(words))
    writer.add_token_merges(["a b"])
    writer.add_chat_template("{{ messages[0].content }}!")
    for name in "abc":
        writer.add_tensor(name, np.ones(3, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    parts = sorted(tmp_path.iterdir())
    assert len(parts) == 3
    for path in (*parts, tmp_path):
        assert rc.load_tokenizer(path).encode("cab").tokens == ["c", "ab"]
        render = rc.load_chat_template(path)
        assert render is not None
        assert render(SAY) == "Hi!"
    # A model that is saved with it has the same tokenizer and template, as files.
    config = rc.models.LlamaConfig(vocab=8, width=4, layers=1, heads=1, kv_heads=1, hidden=4)
    model = rc.models.Llama(config, key=jax.random.key(0))
    for name, path in (("of_a_part", parts[1]), ("of_the_directory", tmp_path)):
        rc.save_pretrained(model, tmp_path / name, tokenizer=path)
        assert rc.load_tokenizer(tmp_path / name).encode("cab").tokens == ["c", "ab"]
        render = rc.load_chat_template(tmp_path / name)
        assert render is not None
        assert render(SAY) == "Hi!"
    parts[0].unlink()
    with pytest.raises(ValueError, match="lacks model-00001-of-00003.gguf"):
        rc.load_tokenizer(parts[1])


def test_a_template_that_cannot_be_compiled_is_refused_with_its_file(tmp_path):
    with pytest.raises(ValueError, match="has a chat template that cannot be used: unexpected"):
        renderer("{% if", {}, tmp_path)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"chat_template": 5}, "`chat_template` of type int"),
        ({"chat_template": [5]}, "`chat_template` without a name"),
        ({"chat_template": [{"name": "default", "template": 3}]}, "`chat_template` of type int"),
        ({"chat_template": "a", "eos_token": {"content": 3}}, "the `eos_token` {'content': 3}"),
        ({"chat_template": "a", "eos_token": [1]}, "the `eos_token`"),
        ([1], "must contain a JSON object"),
    ],
)
def test_settings_of_another_form_are_refused_in_a_sentence(tmp_path, settings, words):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=words) as refused:
        rc.load_chat_template(tmp_path)
    assert str(tmp_path) in str(refused.value)


@pytest.mark.parametrize(
    "name", ["tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"]
)
def test_links_out_of_the_directory_are_not_followed(tmp_path, name):
    secret, directory = tmp_path / "secret", tmp_path / "model"
    secret.write_text('{"chat_template": "secret"}')
    directory.mkdir()
    (directory / name).symlink_to(secret)
    with pytest.raises(ValueError, match="leads out of its directory"):
        read_template(directory)
    (directory / "tokenizer.json").symlink_to(secret)
    with pytest.raises(ValueError, match="leads out of its directory"):
        rc.load_tokenizer(directory)


def test_pipes_large_files_and_other_bytes_are_refused(tmp_path):
    path = tmp_path / "chat_template.jinja"
    os.mkfifo(path)
    with pytest.raises(ValueError, match="is a pipe"):
        read_template(tmp_path)
    path.unlink()
    path.write_bytes(b"a" * (2**20 + 1))
    with pytest.raises(ValueError, match="larger than 1 MiB"):
        read_template(tmp_path)
    path.write_bytes(b"\xff")
    with pytest.raises(ValueError, match="not text in UTF-8"):
        read_template(tmp_path)


NEGATIVE = '{"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}'
MISSING = """{"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "x", "type_id":
0}}, {"Sequence": {"id": "A", "type_id": 0}}], "pair": [], "special_tokens": {}}"""
UNKNOWN = '{"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": ["a b"]}}'


# Its `tokenizers` panics only when it encodes.
PANICS = byte_level().to_str().replace('"post_processor":null', f'"post_processor":{MISSING}')


@pytest.mark.parametrize("text", ["", "[]", "{}", "\xff", NEGATIVE, UNKNOWN, PANICS])
def test_a_tokenizer_of_another_form_is_refused_in_a_sentence(tmp_path, text):
    (tmp_path / "tokenizer.json").write_bytes(text.encode("latin-1" if text == "\xff" else "utf-8"))
    with pytest.raises(ValueError, match="tokenizer.json is not a tokenizer"):
        rc.load_tokenizer(tmp_path)
