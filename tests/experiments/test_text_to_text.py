"""`experiments/text_to_text.py`: a short run, the data, the scores."""

import json
import math

import jax
import jax.numpy as jnp
import pytest

SIZES = {"seq": 8, "vocab": 300, "width": 32, "layers": 1, "tests": 8}


@pytest.fixture
def module(script):
    return script("text_to_text")


@pytest.mark.integration  # a whole run
@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("mesh", ["1", "2x4"])
@pytest.mark.parametrize("beams", [None, 2])
def test_short_run_leaves_samples(mesh, beams, module, script, monkeypatch, tmp_path):
    options = script("_options")
    pairs = [(f"add {a}", f"{a}, {b}") for a in "abcd" for b in "efgh"]
    monkeypatch.setattr(module, "read_characters", lambda: pairs)
    if beams is None:  # beam search takes long to compile, so the source is copied
        monkeypatch.setattr(module.rc, "generate", lambda model, tokens, **options: tokens)
    run = options.Run(mesh=mesh, directory=tmp_path)
    module.main(module.Config(beams=beams or 1, batch_size=8, steps=2, run=run, **SIZES))
    (directory,) = tmp_path.iterdir()
    results = json.loads((directory / "results.json").read_text())
    names = {"chrf", "rouge_l"}
    assert {*results} == names | {f"{name}_of_a_copy" for name in names}
    assert all(map(math.isfinite, results.values()))
    if beams is None:
        assert results["chrf"] == results["chrf_of_a_copy"]
        assert results["rouge_l"] == results["rouge_l_of_a_copy"]
    samples = (directory / "samples.txt").read_text().split("\n\n")
    lines = [dict(line.split(": ", 1) for line in sample.split("\n")) for sample in samples]
    assert len(lines) == 8
    assert {(x["source"], x["target"]) for x in lines} < {*pairs}
    assert (directory / "loss.png").is_file()


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_models_have_the_sizes_and_tokens_of_the_options(name, module):
    config = module.Config(model=name, **SIZES)
    make = lambda key: module.make_model(config, key)(jnp.ones((2, 8), int), jnp.ones((2, 5), int))
    assert jax.eval_shape(make, jax.random.key(0)).shape == (2, 5, 300)
    made = jax.eval_shape(lambda key: module.make_model(config, key).embed, jax.random.key(0))
    assert made.shape == (300, 32)


def test_characters_are_composed_of_named_characters(module):
    pairs = dict(module.read_characters())
    name = "latin small letter u with diaeresis and acute"
    assert pairs[name] == "latin small letter u with diaeresis, combining acute accent"
    assert pairs["vulgar fraction one half"] == "digit one, fraction slash, digit two"
    assert "latin small letter u" not in pairs
    assert len(pairs) > 4000


def test_verses_are_aligned(module, monkeypatch, tmp_path):
    verses = {"kjv": ["Thou shalt go.", "And he went."], "web": ["You shall go.", "He went."]}
    for version, texts in verses.items():
        starts, ends, text = {}, {}, "\n"
        # The first version has one more verse.
        for number, verse in enumerate(texts + ["Selah."] * (version == "kjv"), 1001001):
            starts[number] = len(text)
            text += f"{verse}\n  "
            ends[number] = len(text)
        rows = ["\n".join(f"        {x}: {y}," for x, y in z.items()) for z in (starts, ends)]
        code = f'bible = Bible(\n    """{text}""",\n    {{\n{rows[0]}\n    }},\n    {{\n{rows[1]}\n'
        folder = tmp_path / f"pythonbible-{version}==0.0.2"
        folder.mkdir()
        (folder / "plain_text_readers_bible.py").write_text(code)
    monkeypatch.setattr(module, "fetch", lambda name: tmp_path / name)
    assert module.read_bible() == [*zip(verses["kjv"], verses["web"], strict=True)]


def test_scores_of_texts(module):
    score = module.score
    assert score(["name, mode"], ["name, mode"]) == pytest.approx({"chrf": 100, "rouge_l": 100})
    assert score(["xyz"], ["name"]) == {"chrf": 0, "rouge_l": 0}
    # The longest common subsequence has two of three words: precision and recall are 2/3.
    assert score(["a b c"], ["a x c"])["rouge_l"] == pytest.approx(200 / 3)
