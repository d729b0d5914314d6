"""Chat templates, and the directories that `sft.py` writes, against `transformers`."""

# pyright: reportMissingImports=false

import importlib
import json
import sys
from typing import Any

import pytest
from huggingface_hub import ModelCard
from paths import EXPERIMENTS
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from redcoast.pretrained._card import make_card

sys.path.append(str(EXPERIMENTS))
published = importlib.import_module("_published")
byte_tokenizer = importlib.import_module("_tokenizers").byte_tokenizer

SAY = [
    {"role": "system", "content": "Be brief. <b>&</b> \U0001f600"},
    {"role": "user", "content": " Hello\n"},
    {"role": "assistant", "content": "Hi!"},
    {"role": "user", "content": "é?"},
]
LOOP = """{{ bos_token }}
{%- for m in messages %}
    {%- if m.role == 'system' %}{% continue %}{% endif %}
{{ '<|' + m['role'] + '|>' + m['content'] | trim + eos_token }}
{%- endfor %}
{% if add_generation_prompt %}<|assistant|>{% endif %}"""
MARKED = """{% for m in messages %}
{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}
{% else %}[{{ m.role }}] {{ m | tojson }}
{% endif %}
{% endfor %}"""
DATED = """{% set day = strftime_now('%Y') %}{{ day }}
{%- for m in messages %}{% if loop.index0 > 9 %}{{ raise_exception('Too long.') }}{% endif %}
{{ m.content }}{% if loop.last %}{% break %}{% endif %}
{% endfor %}"""


@pytest.mark.parametrize("template", [LOOP, MARKED, DATED], ids=["loop", "marked", "dated"])
@pytest.mark.parametrize("add", [True, False])
def test_chats_are_rendered_as_by_transformers(template, add, tmp_path):
    ends = {"bos_token": "A", "eos_token": "B"}
    theirs = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(), **ends)
    theirs.chat_template = template
    theirs.save_pretrained(tmp_path)
    expected = theirs.apply_chat_template(SAY, tokenize=False, add_generation_prompt=add)
    render = published.chat_template(tmp_path)
    assert render(SAY, add_generation_prompt=add) == expected
    # As older versions have saved it.
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "chat_template.jinja").unlink()
    several = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": template}]
    for form in (template, several):
        text = json.dumps(settings | {"chat_template": form})
        (tmp_path / "tokenizer_config.json").write_text(text)
        assert published.chat_template(tmp_path)(SAY, add_generation_prompt=add) == expected


def test_tokenizers_are_those_of_transformers(tmp_path):
    PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer()).save_pretrained(tmp_path)
    text = "Ein Gitter, naïve 🎈"
    theirs = AutoTokenizer.from_pretrained(tmp_path)(text, add_special_tokens=False).input_ids
    assert published.read_tokenizer(tmp_path).encode(text, add_special_tokens=False).ids == theirs


def test_tokenizers_of_other_forms_are_converted(tmp_path):
    """Such as the `vocab.json` and `merges.txt` of older models, without a `tokenizer.json`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options: Any = {"special_tokens": ["<|endoftext|>"], "initial_alphabet": alphabet}
    trainer = trainers.BpeTrainer(vocab_size=300, show_progress=False, **options)
    tokenizer.train_from_iterator(["ein Gitter, noch ein Gitter"] * 20, trainer)
    tokenizer.model.save(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    text = "noch ein Gitter, naïve \U0001f388"
    actual = published.read_tokenizer(tmp_path)
    ids = actual.encode(text, add_special_tokens=False).ids
    assert ids == tokenizer.encode(text).ids
    assert len(ids) < len(text.encode())  # merges are used
    assert actual.decode(ids) == text
    (tmp_path / "vocab.json").unlink()
    (tmp_path / "merges.txt").unlink()
    with pytest.raises(SystemExit, match="no tokenizer that can be read"):
        published.read_tokenizer(tmp_path)


def test_cards_are_read_by_the_hubs_library():
    facts = {"license": "other", "license_name": "of its own", "datasets": ["a/b"], "steps": 3}
    text = make_card(facts, {"architectures": ["GPT2LMHeadModel"]}, "It", 5)
    data: Any = ModelCard(text).data
    assert (data.license, data.license_name) == ("other", "of its own")
    assert (data.library_name, data.pipeline_tag) == ("transformers", "text-generation")
    assert (data.datasets, data.tags) == (["a/b"], ["redcoast"])
