"""The scores of EleutherAI's `lm-eval`, of a model in memory, of the server and of transformers, on
the same weights.

`nox -s lm_eval` runs it, on tasks made of data of this file.
"""

# pyright: reportMissingImports=false

import json
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import lm_eval
import numpy as np
import pytest
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager
from paths import EXPERIMENTS
from processes import start_processes
from serve_helpers import TEMPLATE, byte_level
from tokenizers import AddedToken

import redcoast as rc
from redcoast.models import Llama, LlamaConfig

COMMAND = "from redcoast_cli import main; main()"
ANIMALS = {"ant": 6, "bee": 6, "cat": 4, "hen": 2, "eel": 0, "fly": 6, "dog": 4, "owl": 2}
CHOICES = """
task: legs_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "The {{{{animal}}}} has"
doc_to_choice: [" no legs", " two legs", " four legs", " six legs and wings"]
doc_to_target: answer
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
ANSWERS = """
task: legs_answer
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "How many legs has a {{{{animal}}}}?"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["\\n", "ab"], max_gen_toks: 12, do_sample: false}}
metric_list: [{{metric: exact_match}}]
"""
TEXTS = """
task: legs_text
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "The {{{{animal}}}} has legs. The {{{{animal}}}} is no plant, nor is the owl."
metric_list: [{{metric: word_perplexity}}, {{metric: bits_per_byte}}]
"""


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A language model of bytes and of one token that ends a text."""
    directory = tmp_path_factory.mktemp("weights") / "tiny"
    sizes: dict[str, Any] = {"vocab": 257, "width": 64, "layers": 2, "heads": 4, "kv_heads": 2}
    model = Llama(LlamaConfig(**sizes, hidden=96, eos=(256,)), key=jax.random.key(3))
    # Weights that are larger than at the start of a training, so that choices are clear.
    larger = jax.tree.map(lambda x: x * 3 if x.ndim > 1 else x, model)
    rc.save_pretrained(larger, directory)
    tokenizer = byte_level()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True, normalized=False)])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
    settings |= {"pad_token": "<eos>", "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


@pytest.fixture(scope="module")
def tasks(weights):
    directory = weights.parent / "tasks"
    directory.mkdir()
    data = directory / "legs.jsonl"
    lines = [{"animal": name, "answer": min(n // 2, 3)} for name, n in ANIMALS.items()]
    data.write_text("\n".join(map(json.dumps, lines)))
    for name, text in (("choice", CHOICES), ("answer", ANSWERS), ("text", TEXTS)):
        (directory / f"{name}.yaml").write_text(text.format(data=data))
    return TaskManager(include_path=str(directory), include_defaults=False)


@pytest.fixture(scope="module")
def address(weights):
    options = ["serve", "--weights", weights, "--port", "0", "--context", "256", "--rows", "4"]
    with start_processes(COMMAND, *options, processes=1) as (process,):
        process.wait_for("Uvicorn running on http://")
        yield process.output.split("Uvicorn running on ")[1].split()[0]


def score(model, arguments, task, tasks, **options):
    actual = lm_eval.simple_evaluate(
        model, model_args=arguments, tasks=[task], task_manager=tasks, bootstrap_iters=0, **options
    )
    figures = {k: v for k, v in actual["results"][task].items() if isinstance(v, float)}
    samples = sorted(actual["samples"][task], key=lambda sample: sample["doc_id"])
    return figures, [sample["resps"] for sample in samples]


def of_transformers(weights, task, tasks, max_length=None, **options):
    arguments = {"pretrained": str(weights), "dtype": "float32", "device": "cpu"}
    arguments |= {} if max_length is None else {"max_length": max_length}
    return score("hf", arguments, task, tasks, batch_size=1, **options)


def in_memory(weights, task, tasks, *, mesh=None, context=None, **options):
    model = rc.load_pretrained(weights, mesh=mesh, dtype=jnp.float32)
    tokenizer, render = rc.load_tokenizer(weights), rc.load_chat_template(weights)
    shape = {"chat_template": render, "batch_size": 4, "context": context}
    wrapped = rc.lm_eval_model(model, tokenizer, **shape)
    return score(wrapped, None, task, tasks, **options)


def of_server(kind, route, address, weights, task, tasks, **options):
    arguments = {"model": "tiny", "base_url": f"{address}/v1/{route}", "tokenizer": str(weights)}
    arguments |= {"num_concurrent": 2, "max_length": 256, "max_retries": 1}
    return score(kind, arguments, task, tasks, **options)


MESHES = {"one": None, "data": {"data": 4}, "data and model": {"data": 4, "model": 2}}


@pytest.mark.parametrize("mesh", MESHES)
def test_choices_in_memory(weights, tasks, mesh):
    theirs, logprobs = of_transformers(weights, "legs_choice", tasks)
    ours, actual = in_memory(weights, "legs_choice", tasks, mesh=made(mesh))
    assert ours == theirs
    values = lambda samples: [[float(choice[0][0]) for choice in sample] for sample in samples]
    np.testing.assert_allclose(values(actual), values(logprobs), atol=1e-4)
    greedy = lambda samples: [[choice[0][1] for choice in sample] for sample in samples]
    assert greedy(actual) == greedy(logprobs)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("chat", [False, True])
def test_answers_in_memory(weights, tasks, mesh, chat):
    options = {"apply_chat_template": chat}
    theirs, expected = of_transformers(weights, "legs_answer", tasks, **options)
    ours, actual = in_memory(weights, "legs_answer", tasks, mesh=made(mesh), **options)
    assert actual == expected
    assert ours == theirs


def test_an_empty_text_is_continued_after_the_first_token(weights):
    """Of a tokenizer that adds no token of its own."""
    model, tokenizer = rc.load_pretrained(weights, dtype=jnp.float32), rc.load_tokenizer(weights)
    options = {"until": [], "max_gen_toks": 4, "do_sample": False}
    wrapped = rc.lm_eval_model(model, tokenizer)
    answers = wrapped.generate_until([Instance("generate_until", {}, ("", options), 0)])
    new = rc.generate(model, [[256]], max_new_tokens=4)
    assert answers == [tokenizer.decode(np.asarray(new)[0].tolist())]


@pytest.mark.parametrize("context", [None, 24])
def test_whole_texts_in_memory(weights, tasks, context):
    """Also texts that are longer than the context, of which each token is scored once."""
    length = {} if context is None else {"max_length": context}
    theirs, _ = of_transformers(weights, "legs_text", tasks, **length)
    ours, _ = in_memory(weights, "legs_text", tasks, context=context)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name] == pytest.approx(value, rel=1e-5), name


def test_the_script_has_the_scores_of_transformers(weights, tasks, tmp_path):
    """From the command line, in a process of its own, on a mesh."""
    names, out = ["legs_choice", "legs_answer"], tmp_path / "scores.json"
    options = ["--weights", weights, "--folder", weights.parent / "tasks", "--out", out]
    command = [EXPERIMENTS / "score.py", *options, "--local-devices", "8", "--mesh", "2x4"]
    subprocess.run([sys.executable, *map(str, command), "--tasks", *names], check=True)
    actual = json.loads(out.read_text())
    for name in names:
        theirs, _ = of_transformers(weights, name, tasks)
        assert {metric: actual[name][metric] for metric in theirs} == theirs


def made(mesh):
    sizes = MESHES[mesh]
    count = 8 if sizes and "model" in sizes else 4
    return None if sizes is None else rc.make_mesh(**sizes, devices=jax.devices()[:count])


def test_choices_by_log_probabilities(weights, address, tasks):
    theirs, logprobs = of_transformers(weights, "legs_choice", tasks)
    ours, actual = of_server(
        "local-completions", "completions", address, weights, "legs_choice", tasks
    )
    assert ours == theirs
    assert {"acc,none", "acc_norm,none"} <= ours.keys()
    values = lambda samples: [[float(choice[0][0]) for choice in sample] for sample in samples]
    np.testing.assert_allclose(values(actual), values(logprobs), atol=2e-3)
    print(ours)


@pytest.mark.parametrize(
    ("kind", "route", "chat"),
    [
        ("local-completions", "completions", False),
        ("local-chat-completions", "chat/completions", True),
    ],
)
def test_answers(weights, address, tasks, kind, route, chat):
    options = {"apply_chat_template": chat}
    theirs, expected = of_transformers(weights, "legs_answer", tasks, **options)
    ours, actual = of_server(kind, route, address, weights, "legs_answer", tasks, **options)
    assert actual == expected
    assert ours == theirs
    print(ours)
