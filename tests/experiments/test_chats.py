"""What `sft.py` learns from chats: the tokens of the template's whole text, and of these the
assistant's."""

import importlib
import json
import sys

import pytest
from paths import EXPERIMENTS
from tokenizers import Tokenizer, decoders, models, normalizers

from redcoast.pretrained.text._chat_template import read_template, renderer

sys.path.append(str(EXPERIMENTS))
_corpus, _tokenizers = map(importlib.import_module, ("_corpus", "_tokenizers"))
chat_windows, byte_tokenizer = _corpus.chat_windows, _tokenizers.byte_tokenizer

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "How many legs?"},
    {"role": "assistant", "content": "It has six legs."},
    {"role": "user", "content": "And wings?"},
    {"role": "assistant", "content": "Two pairs of wings."},
]
ANSWERS = [m["content"] for m in CHAT if m["role"] == "assistant"]
BYTES = byte_tokenizer()
START = "{% for m in messages %}"
CHATML = START + "<|{{m.role}}|>\n{{m.content}}<|end|>\n{% endfor %}"
CHATML += "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
OPENED = START + "<|{{m.role}}|>{{m.content}}<|end|>{% endfor %}"
OPENED += "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
# Thoughts of all answers but the last are left out, and an empty block of them is put before that.
QWEN = START + "<|{{m.role}}|>{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n"
QWEN += "{% endif %}{{m.content.split('</think>')[-1].strip()}}<|end|>{% endfor %}"
QWEN += "{% if add_generation_prompt %}<|assistant|>{% endif %}"
MARKED = START + "<|{{m.role}}|>{% if m.role == 'assistant' %}{% generation %}{{m.content}}"
MARKED += "<|end|>{% endgeneration %}{% else %}{{m.content}}<|end|>{% endif %}{% endfor %}"
LEARNED = {
    "chatml": (CHATML, "".join(f"{x}<|end|>\n" for x in ANSWERS)),
    "opened": (OPENED, "".join(f"{x}<|end|>" for x in ANSWERS)),
    "qwen": (QWEN, f"{ANSWERS[0]}<|end|><think>\n\n</think>\n{ANSWERS[1]}<|end|>"),
    "marked": (MARKED, "".join(f"{x}<|end|>" for x in ANSWERS)),
    "trimmed": (CHATML.replace("m.content", "m.content | trim"), None),
    "alternating": (START + "[{{m.content}}]{% if m.role == 'assistant' %}</s>{% endif %}"
                    "{% endfor %}", "".join(f"[{x}]</s>" for x in ANSWERS)),
}  # fmt: skip


def encode(text):
    return BYTES.encode(text, add_special_tokens=False).ids


def learn(render, chat, encode=encode, seq=600):
    ((tokens, learned),) = chat_windows([chat], render, encode, seq)
    real = tokens >= 0
    return tokens[real], learned[real]


@pytest.mark.parametrize("name", LEARNED)
def test_all_of_the_text_is_there_and_the_answers_are_learned(name):
    template, expected = LEARNED[name]
    render = renderer(template, {})
    tokens, learned = learn(render, CHAT)
    assert BYTES.decode(tokens.tolist()) == render(CHAT, add_generation_prompt=False)
    actual = BYTES.decode(tokens[learned].tolist())
    assert actual == (LEARNED["chatml"][1] if expected is None else expected)


def test_chats_with_spaces_and_thoughts_are_learned():
    chat = [*CHAT[:2], {"role": "assistant", "content": " <think>legs</think> Six. \n"}]
    for name in ("qwen", "trimmed", "chatml"):
        render = renderer(LEARNED[name][0], {})
        tokens, learned = learn(render, chat)
        assert BYTES.decode(tokens.tolist()) == render(chat, add_generation_prompt=False)
        assert "Six." in BYTES.decode(tokens[learned].tolist())


def sentencepiece():
    """A tokenizer that begins each text with a space, and merges across spaces."""
    vocab = {"<unk>": 0, **{f"<0x{i:02X}>": i + 1 for i in range(256)}, "▁": 257}
    for sign in "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ[]/?.<>|_":
        vocab.setdefault(sign, len(vocab))
    merges = [("▁", "I"), ("▁", "T"), ("s", ".")]
    vocab |= {a + b: len(vocab) + i for i, (a, b) in enumerate(merges)}
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence(steps)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    return tokenizer


def test_tokens_are_those_of_the_whole_text():
    """A tokenizer that begins each text with a space would put one into every piece."""
    tokenizer = sentencepiece()
    template = START + "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} "
    render = renderer(template + "{{ m.content }} {% endif %}{% endfor %}", {})
    of = lambda text: tokenizer.encode(text, add_special_tokens=False).ids
    tokens, learned = learn(render, CHAT[1:], of)
    assert tokens.tolist() == of(render(CHAT[1:], add_generation_prompt=False))
    actual = tokenizer.decode(tokens[learned].tolist())
    assert all(answer in actual for answer in ANSWERS)
    assert "legs?" not in actual


def test_templates_whose_answers_cannot_be_told_apart_are_refused(refused):
    template = START + "{{m.content | upper}}{% endfor %}"
    with refused(r"message 2 of a chat.*Mark what is learned"):
        learn(renderer(template, {}), CHAT)


def test_special_tokens_may_stand_in_a_file_of_their_own(tmp_path):
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}|{{ eos_token }}|{{ unk_token }}")
    settings = {"bos_token": None, "eos_token": "<end>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    special = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "unk_token": "<unk>"}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(special))
    template, words = read_template(tmp_path)
    assert template is not None
    assert renderer(template, words)([]) == "<s>|<end>|<unk>"


def test_packed_chats_are_all_there_and_apart():
    """Each chat in one row, with tokens and masks as alone, and numbers that tell chats apart."""
    render, seq = renderer(CHATML, {}), 260
    chats = [CHAT[: 2 * i + 3] for i in (0, 0, 1, 0, 1)]
    alone = [learn(render, chat, seq=seq) for chat in chats]
    rows = _corpus.packed_chats(chats, render, encode, seq)
    assert len(rows) < len(chats)
    actual = []
    for tokens, learned, segments in rows:
        assert tokens.shape == learned.shape == segments.shape == (seq + 1,)
        assert ((segments == 0) == (tokens < 0)).all()
        assert not learned[segments == 0].any()
        for number in range(1, segments.max() + 1):
            here = segments == number
            actual.append((tokens[here].tolist(), learned[here].tolist()))
    expected = [(tokens.tolist(), learned.tolist()) for tokens, learned in alone]
    assert sorted(actual) == sorted(expected)
