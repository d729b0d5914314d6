"""Runs small versions of the experiments, as a user would."""

import json
import math
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np
import pytest
import tyro
from paths import EXPERIMENTS
from PIL import Image
from processes import run_processes
from tokenizers import Tokenizer, models, pre_tokenizers

import redcoast as rc
from redcoast.loop._stop import STOPPED
from redcoast.models import Llama, LlamaConfig

FOLDER = EXPERIMENTS
SMALL = ["--width", "32", "--layers", "2", "--seq", "16", "--batch-size", "8"]


def run(script, *options):
    # The script sets the number of emulated devices itself. Nothing runs for long enough to be
    # worth optimising.
    environment = os.environ | {"XLA_FLAGS": "--xla_backend_optimization_level=0"}
    command = [sys.executable, str(FOLDER / script), *map(str, options)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture
def texts(tmp_path):
    """A folder with texts, one of them in a subfolder."""
    folder = tmp_path / "texts"
    (folder / "inner").mkdir(parents=True)
    for index, name in enumerate(["a.txt", "b.md", "c", "inner/d.txt"]):
        line = f"Text number {index} is about the numbers up to {index + 3}.\n"
        (folder / name).write_text(line * 20)
    return folder


def number_after(words, output):
    return float(output.split(words)[1].split()[0].rstrip("%"))


def only_run(directory):
    (actual,) = directory.iterdir()
    return actual


SCRIPTS = [
    "contrastive",
    "ddpg",
    "differential_privacy",
    "distill_on_policy",
    "distillation",
    "evolution",
    "federated",
    "grpo",
    "image_classification",
    "image_to_text",
    "language_modeling",
    "maddpg",
    "maml",
    "ppo",
    "preferences",
    "score",
    "serve_prompt",
    "sft",
    "text_classification",
    "text_to_image",
    "text_to_text",
]


@pytest.mark.few("contrastive", "grpo", "language_modeling", "score", "text_to_image")
@pytest.mark.parametrize("name", SCRIPTS)
def test_help_explains_every_option(name, script, capsys):
    config = script(name).Config
    with pytest.raises(SystemExit) as stopped:
        tyro.cli(config, args=["--help"])
    assert stopped.value.code == 0
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    options = script("_options")
    fields = dict(config.__dataclass_fields__)
    if fields.keys() & {"run", "hosts"}:
        fields |= options.Hosts.__dataclass_fields__
    if "run" in fields:
        fields |= options.Run.__dataclass_fields__
    assert "(default: None)" not in text
    for field in fields.keys() - {"run", "hosts"}:  # whose fields are options themselves
        option = "--" + field.replace("_", "-")
        # The option, its type, its description, and its default unless the description has that.
        rest = (
            r" (?:(?!--).)*\b[a-z]{2,} "
            if fields[field].default is None
            else "[^(]* [a-z]{2,} [^(]*\\("
        )
        assert re.search(rf"{option}\b{rest}", text), option


def test_help_and_wrong_options_need_no_jax():
    """They take as long as Python and tyro, not as long as JAX."""
    program = """
import contextlib, runpy, sys
for name in sys.argv[1:]:
    for option in ("--help", "--stepz"):
        sys.argv = [f"{sys.path[0]}/{name}.py", option]
        with contextlib.suppress(SystemExit):
            runpy.run_path(sys.argv[0], run_name="__main__")
print([name for name in ("jax", "numpy", "redcoast") if name in sys.modules])
"""
    code = f"import sys; sys.path.insert(0, {str(FOLDER)!r}){program}"
    ran = subprocess.run(
        [sys.executable, "-c", code, *SCRIPTS], capture_output=True, text=True, check=True
    )
    assert ran.stdout.splitlines()[-1] == "[]"
    for name in SCRIPTS:
        assert f"/{name}.py [-h] [OPTIONS]" in ran.stdout
    assert ran.stderr.count("--stepz") >= len(SCRIPTS)


@pytest.mark.parametrize(
    ("name", "passed", "words"),
    [
        ("language_modeling", ["--batch-size", "0"], "--batch-size must be at least 1, but is 0"),
        ("language_modeling", ["--learning-rate", "nan"], "--learning-rate must be more than 0"),
        ("language_modeling", ["--learning-rate", "inf"], "--learning-rate must be at most 1e+30"),
        ("language_modeling", ["--seed", "-1"], "--seed must be at least 0, but is -1"),
        ("language_modeling", ["--seed", str(2**70)], "--seed must be at most 4,294,967,295"),
        ("language_modeling", ["--batch-size", str(2**31)], "--batch-size must be at most 2,147"),
        ("text_to_image", ["--names", "["], "--names must be a regular expression, but is '['"),
        ("text_to_text", ["--width", "33"], "--width must be a multiple of 32, but is 33"),
        ("ppo", ["--discount", "1.5"], "--discount must be at most 1, but is 1.5"),
        ("federated", ["--data", "digit"], "--data is digit, which does not exist"),
        ("language_modeling", ["--process-id", "-1"], "--process-id must be at least 0"),
        ("language_modeling", ["--text", "missing"], "--text is missing, which does not exist"),
        ("maml", ["--steps", "-3"], "--steps must be at least 1, but is -3"),  # it may be left out
        ("grpo", ["--rank", "-1"], "--rank must be at least 0, but is -1"),
        ("grpo", ["--weights", "missing"], "--weights is missing, which does not exist"),
        ("image_classification", ["--data", "digit"], "--data is digit, which does not exist"),
    ],
)
def test_impossible_values_are_refused_as_unknown_options_are(script, refused, name, passed, words):
    """They were errors of a run that had been started."""
    module, options = script(name), script("_options")
    with refused(re.escape(words)):
        options.parse(module.Config, "", passed)


def test_values_at_the_limits_are_taken(script):
    options = script("_options")
    c = options.parse(script("grpo").Config, "", ["--rank", "0", "--weights", "smollm2"])
    assert (c.rank, c.weights, c.run.seed) == (0, "smollm2", 0)
    words = ["--seed", str(2**32 - 1), "--shift", "0", "--data", "mnist"]
    c = options.parse(script("image_classification").Config, "", words)
    assert (c.run.seed, c.shift, c.data) == (2**32 - 1, 0, "mnist")
    c = options.parse(script("differential_privacy").Config, "", ["--clip", "inf", "--delta", "0"])
    assert (c.clip, c.delta) == (math.inf, 0)


def test_resuming_takes_the_options_of_the_run(script, tmp_path):
    module, options = script("image_classification"), script("_options")
    given = ["--directory", str(tmp_path), "--steps", "5", "--mesh", "2x4", "--seed", "3"]
    given += ["--local-devices", "8", "--coordinator", "a:1", "--wandb"]
    before = options.parse(module.Config, "", given)
    directory = script("_common").run_directory(tmp_path, resume=False, config=before)
    again = ["--directory", str(tmp_path), "--resume", "--steps", "9"]
    c = options.parse(module.Config, "", again)
    assert (c.steps, c.run.mesh, c.run.seed, c.run.wandb) == (9, "2x4", 3, True)
    assert c.run.resume
    assert c.run.directory == tmp_path
    # The address of a launcher is another one when a run is resumed.
    assert c.run.hosts == options.Hosts(local_devices=8)
    assert script("_common").run_directory(tmp_path, resume=True, config=c) == directory
    assert json.loads((directory / "config.json").read_text())["steps"] == 9


@pytest.mark.parametrize(
    ("stored", "words"),
    [
        ('{"steps": 5,', "cannot be read: Expecting property name"),
        ("[1]", "it has [1] in place of options"),
        ('{"model_type": "llama"}', "it has none that all scripts have"),
        ('{"run": {}, "steps": "many"}', "its steps is 'many'"),
        ('{"run": {"wandb": 1}}', "its wandb is 1"),
        ('{"run": {}, "script": "maml"}', "it is a run of maml.py"),
        ('{"run": {}, "text": "gone"}', "--text is gone, which does not exist"),
    ],
)
def test_a_run_whose_options_are_damaged_or_of_another_program(
    script, refused, tmp_path, stored, words
):
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "config.json").write_text(stored)
    with refused(re.escape(words)):
        again = ["--directory", str(tmp_path), "--resume"]
        script("_options").parse(script("language_modeling").Config, "", again)


@pytest.mark.parametrize(
    ("written", "width"), [("", 16), ("metrics.jsonl", 8), ("checkpoints/9", 8)]
)
def test_options_of_a_resumed_run_without_results_are_those_of_before(
    script, tmp_path, monkeypatch, written, width
):
    """With a width that does not fit the checkpoint, the run could not be resumed any more."""
    common, config = script("_common"), script("evolution").Config
    at_exit = []
    monkeypatch.setattr(common.atexit, "register", at_exit.append)
    common.write_options(tmp_path, config(width=16))
    common.write_options(tmp_path, config(width=8))
    (tmp_path / "checkpoints").mkdir()
    if written:
        (tmp_path / written).write_text("{}\n")
    (restore,) = at_exit
    restore()
    assert json.loads((tmp_path / "config.json").read_text())["width"] == width


def test_options_that_do_not_fit_a_checkpoint_are_refused(script, refused, monkeypatch):
    def main(c):
        raise rc.CheckpointMismatch("The shapes differ.")

    monkeypatch.setattr(sys, "argv", ["evolution.py", "--width", "8"])
    with refused("The run cannot be resumed with these options. The shapes differ."):
        script("_options").run(main, script("evolution").Config, "")


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("language_modeling", {"heads": 3}, "--width must be a multiple of 2 x --heads"),
        (
            "language_modeling",
            {"accumulate": 3},
            "--batch-size 32 is not a multiple of --accumulat",
        ),
        ("sft", {"accumulate": 3}, "--batch-size 4 is not a multiple of --accumulate 3"),
        ("text_to_image", {"symbol": "ab"}, "--symbol must be one character with a name"),
    ],
)
def test_options_that_do_not_fit_each_other_start_no_run(
    script, refused, tmp_path, name, options, words
):
    module = script(name)
    with refused(words):
        module.main(module.Config(**options, run=script("_options").Run(directory=tmp_path)))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", [b"", b"ab", bytes(range(256))])
def test_files_that_are_no_text_to_train_on_are_refused(script, refused, tmp_path, content):
    file = tmp_path / "text"
    file.write_bytes(content)
    corpus = script("_corpus")
    with refused("tokens. Pass a longer one|is not text in UTF-8"):
        for texts in corpus.read_texts(file):
            corpus.windows(map(str.encode, texts), 4)


def test_folders_without_classes_of_images_are_refused(script, refused, tmp_path):
    read_images = script("_images").read_images
    with refused("must be a folder of two or more folders of images"):
        read_images(str(tmp_path), 8)
    (tmp_path / "cats").mkdir()
    (tmp_path / "cats" / "cat.png").write_text("no image")
    with refused("must be a folder that has a folder of images for each class"):
        read_images(str(tmp_path), 8)


def test_paths_and_tuples_of_stored_options(script):
    parsed = script("_options").from_json(
        script("dry_run").Config, {"out": "runs/x", "rows": ["a", "b"], "seq": None, "old": 1}
    )
    assert parsed.out == Path("runs/x")
    assert parsed.rows == ("a", "b")


@pytest.mark.integration
def test_language_model_trains_on_eight_devices_and_resumes(texts, tmp_path):
    options = [
        "--text",
        texts,
        "--directory",
        tmp_path / "runs",
        "--local-devices",
        8,
        "--mesh",
        "fsdp=2,model=4",
    ]
    first = run("language_modeling.py", *options, *SMALL, "--steps", 4)
    plan = (only_run(tmp_path / "runs") / "plan.txt").read_text()
    assert plan.splitlines()[0] in first
    assert re.search(r"embed .*\(.*model.*\)", plan)
    assert "Sample:\ndef main" in first
    directory = only_run(tmp_path / "runs")
    assert json.loads((directory / "config.json").read_text())["run"]["mesh"] == "fsdp=2,model=4"
    assert (directory / "checkpoints" / "4").is_dir()
    with Image.open(directory / "bits_per_byte.png") as plot:
        plot.verify()
    history = rc.read_metrics(directory / "metrics.jsonl")
    assert [entry["step"] for entry in history] == [1, 2, 3, 4]
    assert all("learning_rate" in entry for entry in history)
    # One nat is 1 / ln 2 bits, and every byte of the text except the first is predicted.
    assert history[-1]["eval/bits_per_byte"] < 8
    valid = history[-1]["eval/weight"]
    assert valid + 1 in [file.stat().st_size for file in texts.rglob("*") if file.is_file()]
    nats = history[-1]["eval/loss"] * valid / (valid + 1)
    np.testing.assert_allclose(history[-1]["eval/bits_per_byte"], nats / np.log(2), rtol=1e-5)
    assert f"Validation bits per byte: {history[-1]['eval/bits_per_byte']:.3f}" in first

    again = run("language_modeling.py", *options, *SMALL, "--steps", 6, "--resume")
    assert "Resumed at step 4" in again
    history = rc.read_metrics(only_run(tmp_path / "runs") / "metrics.jsonl")
    assert [entry["step"] for entry in history] == [1, 2, 3, 4, 5, 6]


@pytest.mark.integration
def test_language_model_learns_byte_pairs_of_a_file(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("The quick brown fox jumps over the lazy dog. Größe: 3 µm.\n" * 100)
    options = ["--text", file, "--tokenizer", "bpe", "--vocab", 280, "--dtype", "bfloat16"]
    output = run("language_modeling.py", *options, *SMALL, "--steps", 3, "--directory", tmp_path)
    bits = number_after("Validation bits per byte: ", output)
    history = rc.read_metrics(next(tmp_path.glob("*/metrics.jsonl")))
    # A token has several bytes, so bits per byte are fewer than bits per token.
    assert 0 < bits < 0.8 * history[-1]["eval/loss"] / np.log(2)


@pytest.mark.seconds(10)  # a whole run
@pytest.mark.thorough
def test_images_are_classified_in_a_short_run(script, short, tmp_path, capsys):
    # The batch divides the 360 images of the evaluation, which saves a compilation.
    small = {"channels": 4, "batch_size": 72, "steps": 2}
    one = script("_options").Run(mesh="1", directory=tmp_path)
    module = script("image_classification")
    module.main(module.Config(**small, run=one))
    directory = only_run(tmp_path)
    history = rc.read_metrics(directory / "metrics.jsonl")
    assert [entry["step"] for entry in history] == [1, 2]
    assert all(math.isfinite(entry["loss"]) for entry in history)
    results = json.loads((directory / "results.json").read_text())
    assert results == {"accuracy": history[-1]["eval/accuracy"]}
    # A row for each class: precision, recall, F1 and the number of images.
    output = capsys.readouterr().out
    rows = re.findall(r"^ +\d(?: +[01]\.\d\d){3} +(\d+)$", output, re.MULTILINE)
    assert len(rows) == 10
    assert sum(map(int, rows)) == 360
    for name in ("loss.png", "predictions.png"):
        with Image.open(directory / name) as picture:
            picture.verify()


def test_resuming_without_a_run_exits_with_a_message(script, tmp_path, refused):
    with refused("There is no run to resume"):
        script("_common").run_directory(tmp_path, resume=True, config=None)


def test_stopped_runs_exit_with_tempfail(script):
    script("_common").exit_if_stopped(10, 10)
    with pytest.raises(SystemExit) as stopped:
        script("_common").exit_if_stopped(9, 10)
    assert stopped.value.code == STOPPED


@pytest.mark.integration
def test_processes_use_the_directory_and_text_of_process_0():
    program = f"""
import sys, time
from pathlib import Path
sys.path.insert(0, {str(FOLDER)!r})
from _common import broadcast_text, run_directory, print_once
from _options import Hosts
import redcoast as rc
rc.initialize()
import jax
own = jax.process_index()
time.sleep(2 * own)  # so that their clocks differ
directory = run_directory(Path(sys.argv[1]), resume=False, config=Hosts())
assert run_directory(Path(sys.argv[1]), resume=True, config=None) == directory
assert broadcast_text(["Größe", "long" * own][own]) == "Größe"
print_once("said by %d" % own)
"""
    with tempfile.TemporaryDirectory() as runs:
        first, second = run_processes(program, runs, processes=2)
        assert first.returncode == second.returncode == 0, first.output + second.output
        assert len(os.listdir(runs)) == 1
    assert "said by 0" in first.output
    assert "said by" not in second.output


def test_windows_predict_every_token_once(script):
    windows = script("language_modeling").windows([b"abcd", [5, 6, 7], []], 4)
    assert windows.tolist() == [[97, 98, 99, 100, 5], [5, 6, 7, -1, -1]]
    assert script("language_modeling").windows([range(9)], 4).tolist()[-1] == [4, 5, 6, 7, 8]


def test_validation_files_do_not_depend_on_other_files(script, texts):
    read_texts = script("language_modeling").read_texts
    train, valid = read_texts(texts)
    assert len(train) == 3
    assert len(valid) == 1
    (texts / "e.txt").write_text("Another.")
    assert set(read_texts(texts)[0]) - set(train) in ({"Another."}, set(valid))


def test_one_file_in_a_folder_is_refused(script, tmp_path, refused):
    (tmp_path / "only.txt").write_text("Some text.")
    with refused("must hold at least two files"):
        script("language_modeling").read_texts(tmp_path)


@pytest.mark.thorough
def test_standard_library_is_read_without_its_tests(script):
    train, valid = script("language_modeling").read_texts(None)
    assert len(train) > 300
    assert 0.01 < sum(map(len, valid)) / sum(map(len, train)) < 0.1


@pytest.mark.integration
def test_images_are_classified(tmp_path):
    options = ["--steps", 270, "--channels", 16, "--directory", tmp_path]
    output = run("image_classification.py", *options)
    assert number_after("Accuracy: ", output) > 0.9
    # A row for each class: precision, recall, F1 and the number of images.
    assert len(re.findall(r"^ +\d(?: +[01]\.\d\d){3} +\d+$", output, re.MULTILINE)) == 10
    directory = only_run(tmp_path)
    assert (directory / "loss.png").is_file()
    assert (directory / "checkpoints").is_dir()


def test_folder_of_images_is_read(script, tmp_path):
    for index, name in enumerate(["cat", "dog"]):
        (tmp_path / name).mkdir()
        for number in range(index + 1):
            Image.new("L", (5, 7), 255 * index).save(tmp_path / name / f"{number}.png")
    images, labels, names = script("_images").read_images(str(tmp_path), 4)
    assert images.shape == (3, 3, 4, 4)
    assert images.mean(axis=(1, 2, 3)).tolist() == [0, 1, 1]
    assert list(labels) == [0, 1, 1]
    assert names == ["cat", "dog"]


def test_pickle_that_would_run_code_is_refused(script, tmp_path):
    file = tmp_path / "evil.pkl"
    file.write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with file.open("rb") as opened, pytest.raises(KeyError, match="system"):
        script("_images").OnlyArrays(opened).load()


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A small language model in Hugging Face's layout, with a tokenizer and a chat template."""
    directory = tmp_path_factory.mktemp("weights") / "model"
    config = LlamaConfig(vocab=300, width=32, layers=2, heads=4, kv_heads=2, hidden=48, eos=(1,))
    rc.save_pretrained(Llama(config, key=jax.random.key(0)), directory)
    tokenizer = Tokenizer(models.BPE({chr(33 + i): i for i in range(256)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    tokenizer.save(str(directory / "tokenizer.json"))
    template = (
        "{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}"
        "{% if add_generation_prompt %}[assistant] {% endif %}"
    )
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return directory


TUNING = ["--steps", 2, "--batch-size", 4, "--seq", 32, "--new-tokens", 4, "--prompt", "Text"]


@pytest.mark.integration
def test_fine_tuning_improves_and_saves_the_model(weights, texts, tmp_path):
    options = ["--weights", weights, "--text", texts, "--directory", tmp_path / "runs", *TUNING]
    output = run("sft.py", *options, "--learning-rate", 1e-2, "--local-devices", 8, "--mesh", "2x4")
    before = number_after("Perplexity before: ", output)
    assert number_after("Perplexity after: ", output) < before
    assert re.search(r"Sample before:\nT e x t.*Sample after:\nT e x t", output, re.DOTALL)
    saved = only_run(tmp_path / "runs") / "model"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (saved / name).read_bytes() == (weights / name).read_bytes()
    card = (saved / "README.md").read_text()
    assert "| steps | 2 |" in card
    after = number_after("final validation loss | ", card)
    assert math.exp(after) == pytest.approx(number_after("Perplexity after: ", output), rel=1e-3)
    sample = (saved.parent / "samples_after.txt").read_text()
    assert f"Sample after:\n{sample}\n" in output
    changed = rc.load_pretrained(saved).embed - rc.load_pretrained(weights).embed
    assert np.abs(changed).max() > 0


@pytest.mark.integration
def test_adapters_are_tuned_on_chats(weights, tmp_path):
    say = lambda role, content: {"role": role, "content": content}
    chat = {"messages": [say("user", "Add 1 to 2."), say("assistant", "3 it is." * 20)]}
    chats = tmp_path / "chats.jsonl"
    chats.write_text("\n".join([json.dumps(chat)] * 6))
    options = ["--weights", weights, "--text", chats, "--directory", tmp_path / "runs", *TUNING]
    output = run("sft.py", *options, "--lora", "--rank", 2, "--learning-rate", 1e-2)
    assert "chats have more than 33 tokens and are truncated" in output
    directory = only_run(tmp_path / "runs")
    assert (directory / "adapters" / "adapter_model.safetensors").exists()
    tuned, model = rc.load_pretrained(directory / "model"), rc.load_pretrained(weights)
    np.testing.assert_array_equal(tuned.embed, model.embed)
    assert np.abs(tuned.layers.wq - model.layers.wq).max() > 0


@pytest.mark.integration
def test_a_prompt_is_answered_word_by_word(weights):
    options = ["--weights", weights, "--prompt", "Hello", "--new-tokens", 6]
    drawn = run("serve_prompt.py", *options)
    assert drawn.strip()
    assert run("serve_prompt.py", *options, "--local-devices", 2, "--mesh", "model=2") == drawn


def run_as_two(script, *options):
    """Like `run`, with two processes of two devices each; returns the output of the first."""
    first, second = run_processes(FOLDER / script, *options, processes=2, devices=2)
    assert first.returncode == second.returncode == 0, first.output + second.output
    # Messages of gloo may be anywhere in the output.
    first, second = (re.sub(r"\[Gloo\][^\n]*\n", "", x.output) for x in (first, second))
    assert not second
    return first


@pytest.mark.hosts
@pytest.mark.parametrize("options", [["--mesh", "fsdp=2,model=2"], ["--lora", "--rank", 2]])
def test_two_processes_fine_tune(weights, texts, tmp_path, options):
    options = ["--weights", weights, "--text", texts, "--learning-rate", 1e-2, *TUNING, *options]
    alone = run("sft.py", *options, "--directory", tmp_path / "one", "--local-devices", 4)
    together = run_as_two("sft.py", *options, "--directory", tmp_path / "two")
    for words in ("Perplexity before: ", "Perplexity after: "):
        assert number_after(words, together) == pytest.approx(number_after(words, alone), rel=1e-3)
    directory = only_run(tmp_path / "two")
    assert (directory / "model" / "tokenizer.json").exists()
    assert (directory / "adapters").exists() == ("--lora" in options)
    one, two = (rc.load_pretrained(only_run(tmp_path / x) / "model") for x in ("one", "two"))
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4)


@pytest.mark.hosts
def test_two_processes_answer_together(weights):
    options = ["--weights", weights, "--prompt", "Hello", "--new-tokens", 6]
    alone = run("serve_prompt.py", *options)
    assert run_as_two("serve_prompt.py", *options, "--mesh", "model=4") == alone


@pytest.mark.hosts
def test_two_processes_classify_images(tmp_path):
    options = ["--steps", 45, "--channels", 8]
    alone = run(
        "image_classification.py", *options, "--directory", tmp_path / "one", "--local-devices", 4
    )
    together = run_as_two("image_classification.py", *options, "--directory", tmp_path / "two")
    words = "Accuracy: "
    assert number_after(words, together) == pytest.approx(number_after(words, alone), abs=0.01)
    histories = [rc.read_metrics(only_run(tmp_path / x) / "metrics.jsonl") for x in ("one", "two")]
    for one, two in zip(*histories, strict=True):
        for name in one.keys() - {"step_seconds", "examples_per_second"}:
            assert one[name] == pytest.approx(two[name], rel=1e-2)
    assert (only_run(tmp_path / "two") / "loss.png").is_file()


def test_the_page_on_hosts_contains_the_job_script():
    job = (FOLDER / "language_modeling.sbatch").read_text("utf-8")
    assert f"```bash\n{job}```" in (FOLDER.parent / "docs" / "hosts.md").read_text("utf-8")


@pytest.mark.thorough
@pytest.mark.seconds(5)  # six plots
def test_a_run_is_plotted_and_published(script, tmp_path, monkeypatch):
    """All that was logged is in one picture, with a log axis for a loss that falls tenfold."""
    plots, publish = script("_plots"), script("_publish")
    run = rc.RunInfo(directory=tmp_path / "run", config={"batch_size": 8, "examples": 80})
    with rc.metrics_reader(False, run) as reader:
        for step in range(1, 61):
            metrics = {"loss": 100.0 / step, "accuracy": -1.0, "learning_rate": 1e-3}
            reader.push(step, {name: np.float32(x) for name, x in metrics.items()})
        reader.write({"eval/loss": 1.5, "eval/accuracy": 0.5}, 60)
    seen = {}
    draw = plots.draw_metric
    monkeypatch.setattr(
        plots, "draw_metric", lambda axes, h, name: seen.update({name: axes}) or draw(axes, h, name)
    )
    plots.plot_run(tmp_path / "run")
    assert next(iter(seen)) == "loss"
    assert {"accuracy", "learning_rate", "examples_per_second"} <= seen.keys()
    assert [seen[name].get_yscale() for name in ("loss", "accuracy")] == ["log", "linear"]
    assert len(seen["loss"].lines) == 3  # each step, their mean, and the validation
    (tmp_path / "run" / "samples.txt").write_text("Some <text>.")
    (tmp_path / "run" / "tensorboard").mkdir()
    actual = []
    monkeypatch.setattr(publish, "to_tensorboard", lambda *args: actual.append(args))
    publish.publish(tmp_path / "run", {"accuracy": 0.5})
    ((_, step, pictures, texts, figures),) = actual
    assert (step, texts, figures) == (60, {"samples": "Some <text>."}, {"accuracy": 0.5})
    assert [path.name for path in pictures] == ["run.png"]


def test_text_with_characters_that_the_font_lacks_is_drawn(script, tmp_path):
    """Untrained models write such characters. matplotlib's warning would be an error here."""
    script("_plots").draw_text(tmp_path / "samples.png", "written: \x0e\x1b 漢 $x$\n" + "a" * 200)
    with Image.open(tmp_path / "samples.png") as picture:
        assert np.asarray(picture.convert("L")).min() < 128
