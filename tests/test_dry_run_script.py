"""`experiments/dry_run.py`, and what it is made of."""

import dataclasses
import importlib
import json
import math
import re
import sys
from pathlib import Path

import equinox as eqx
import jax
import numpy as np
import pytest
import tyro
from jax.sharding import PartitionSpec as P

import redcoast as rc
from redcoast._dryrun.step import make_job
from redcoast._dryrun.target import parse_target
from redcoast.models import LlamaConfig, ViTConfig

FOLDER = Path(__file__).parents[1] / "experiments"
TINY = LlamaConfig(vocab=64, width=32, layers=2, heads=4, kv_heads=2, hidden=64)
WEIGHTS = 2 * 64 * 32 + 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64 + 2 * 32) + 32


@pytest.fixture(scope="module", autouse=True)
def _experiments():
    sys.path[:0] = [str(FOLDER), str(FOLDER / "benchmarks")]
    yield
    del sys.path[:2]


def script(name):
    return importlib.import_module(name)


@pytest.fixture(scope="module")
def config_json(tmp_path_factory):
    file = tmp_path_factory.mktemp("tiny") / "config.json"
    file.write_text(json.dumps(TINY.to_hugging_face()))
    return file


def dry_run(**options):
    """The exit status of the script."""
    module = script("dry_run")
    with pytest.raises(SystemExit) as stopped:
        module.main(module.Config(**options))
    return stopped.value.code


def test_help_explains_every_option(capsys):
    config = script("dry_run").Config
    with pytest.raises(SystemExit) as stopped:
        tyro.cli(config, args=["--help"])
    assert stopped.value.code == 0
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for field in config.__dataclass_fields__:
        option = "--" + field.replace("_", "-")
        assert re.search(rf"{option}\b[^(]* [a-z]{{2,}} [^(]*\(", text), option


def test_figures_of_a_model_in_a_file(config_json, capsys):
    options = {"target": "cpu:4", "mesh": "data=2,fsdp=1,model=2", "seq": 16}
    assert dry_run(model=str(config_json), json=True, **options) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert report["fits"]
    assert report["mesh"] == {"data": 2, "fsdp": 1, "model": 2}
    # Parameters in float32, of which AdamW keeps two means each.
    assert 4 * WEIGHTS / 2 <= report["memory"]["parameters"] < 4 * WEIGHTS
    assert report["memory"]["optimizer_state"] < 2 * report["memory"]["parameters"] + 1000
    assert report["memory"]["peak"] > 3 * report["memory"]["parameters"]
    assert report["sent_bytes"] > 0
    assert "16 tokens" in captured.err


def test_the_longest_sequence_is_compiled_and_the_next_does_not_fit(config_json, monkeypatch):
    module = script("dry_run")
    seen = {}

    def attempt(c, target, seq, *, suggest=False):
        run = type("Run", (), {"fits": seq <= 700, "report": {}})()
        return seen.setdefault(seq, run)

    monkeypatch.setattr(module, "attempt", attempt)
    c = module.Config(model=str(config_json), target="cpu:2", longest=True)
    assert module.longest(c) is seen[640]
    assert not seen[768].fits


def test_the_smallest_target_is_the_first_that_fits(config_json, monkeypatch):
    module = script("dry_run")
    tried = []

    def attempt(c, target, seq, *, suggest=False):
        tried.append(target.name)
        return type("Run", (), {"fits": target.count >= 8, "name": target.name})()

    monkeypatch.setattr(module, "attempt", attempt)
    c = module.Config(model=str(config_json), target="v4:4x4x4", smallest=True)
    assert module.smallest(c).name == "v4:2x2x2"
    assert tried == ["v4:2x2x1", "v4:2x2x2"]
    # 16 bytes for each of 66 billion parameters, of which 12 stay, are no matter of compiling.
    monkeypatch.setattr(module, "attempt", lambda c, target, *_: type("Run", (), {"fits": True}))
    large = module.Config(model="opt-66b", target="l4", smallest=True)
    assert module.state_bytes(module.make_workload("opt-66b")) > 12 * 65e9
    assert module.smallest(large).fits


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model": "opt-67b"}, r"no model 'opt-67b'.* opt-66b.*The named models are llama-7b"),
        ({"model": "nowhere/config.json"}, "no config.json at that path"),
        ({"smallest": True, "longest": True}, "Only one of"),
        ({"smallest": True, "mesh": "fsdp=2"}, "leave --mesh out"),
        ({"mesh": "fsdp:2"}, "data=1,fsdp=4,model=2, and not as fsdp:2"),
        ({"mesh": "pipe=2"}, "and not as pipe=2"),
        ({"target": "v9:2x2"}, "no target 'v9:2x2'"),
        ({"model": "vit-base", "seq": 128}, "vit-base reads images of .*leave --seq out"),
        ({"seq": -1}, "at least one token"),
        ({"model": "vit-base", "longest": True}, "reads images, and no texts"),
        ({"table1": True, "rows": ("opt-175b",)}, "There is no opt-175b.*opt-66b"),
        ({"table1": True, "columns": ("fp8",)}, "There is no fp8.*bfloat16"),
    ],
)
def test_errors_say_what_would_work(options, words, tmp_path):
    said = dry_run(**{"target": "cpu:2", "out": tmp_path} | options)
    assert re.search(words, str(said), re.DOTALL)


def test_a_config_json_of_another_kind_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    assert re.search("'mamba'.*llama", str(dry_run(model=str(tmp_path), target="cpu:2")))


@pytest.mark.parametrize(
    ("model", "names"),
    [
        ("llama-7b", {"(4, 1024)"}),
        ("t5-small", {"(4, 1024)"}),
        ("bert-base", {"(4, 512)"}),
        ("vit-base", {"(4, 3, 224, 224)", "(4,)"}),
    ],
)
def test_every_kind_of_model_has_a_loss(model, names):
    workload = script("_workload").make_workload(model)
    init_fn, loss_fn, batch, _ = workload.arguments(4)
    made = eqx.filter_eval_shape(init_fn, jax.random.key(0))
    assert made.config.remat == "full"
    assert {str(x.shape) for x in jax.tree.leaves(batch)} == names
    loss = eqx.filter_eval_shape(loss_fn, made, batch, jax.random.key(0))
    assert loss.shape == ()


def test_the_loss_of_a_language_model_is_of_its_vocabulary(config_json):
    workload = script("_workload").make_workload(str(config_json), 8, chunk=4)
    init_fn, loss_fn, shapes, _ = workload.arguments(2)
    ones = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), shapes)
    loss = jax.jit(lambda key, batch: loss_fn(init_fn(key), batch, key))(jax.random.key(0), ones)
    assert abs(loss - math.log(64)) < 1


def test_images_of_a_file_keep_their_size(tmp_path):
    config = ViTConfig(width=32, layers=1, heads=2, hidden=64, image=(32, 32), patch=(8, 8))
    (tmp_path / "config.json").write_text(json.dumps(config.to_hugging_face()))
    workload = script("_workload").make_workload(str(tmp_path))
    assert workload.make_batch(2)["inputs"].shape == (2, 3, 32, 32)
    assert workload.seq is None


def test_positions_that_are_learned_are_as_many_as_it_takes_and_that_is_said():
    workload = script("_workload").make_workload("gpt2-small", 2048)
    model = eqx.filter_eval_shape(workload.init_fn, jax.random.key(0))
    assert model.position_embed.shape[0] == 2048
    assert "1024 learned positions; here 2048" in workload.notes[0]
    assert script("_workload").make_workload("gpt2-small", 512).notes == ()


@pytest.mark.parametrize("limit", [0, 100, 128, 5000, 8192, 10**9])
@pytest.mark.parametrize("start", [100, 1024, 65536])
def test_the_longest_sequence_by_trying_all(limit, start):
    module = script("_reach")
    asked = []
    fits = lambda seq: asked.append(seq) or seq <= limit
    found = module.longest_sequence(fits, start)
    assert found == min(limit // 128 * 128, 2**20)
    assert len(asked) == len(set(asked)) < 30


@pytest.mark.parametrize("name", ["v4:2x2x2", "v5e:2x2", "tpu7x:2x2x1", "h100:2x8", "cpu:4"])
def test_sizes_of_a_chip_grow_and_hold_what_was_asked_for(name):
    targets = script("_reach").sizes_of(parse_target(name))
    counts = [target.count for target in targets]
    assert counts == sorted(set(counts))
    assert {target.chip.name for target in targets} == {parse_target(name).chip.name}
    assert parse_target(name).count in counts


def test_rows_of_the_paper_have_models_and_halves():
    for row in script("_table1").ROWS:
        whole, half = parse_target(row.target), parse_target(row.half)
        assert whole.count == 2 * half.count
        assert whole.chip.name == half.chip.name
        script("_workload").find_model(row.model)


def cell(model, column, peak, **more):
    memory = {"peak": peak * 2**30}
    sizes = {"seq": 512, "target": "v4:2x2x2", "compiler": "tpu", "mesh": {"fsdp": 8, "model": 1}}
    found = {"model": model, "column": column, "memory": memory, "usable": 32 * 2**30, **sizes}
    return found | {"fits": peak <= 32, "sent_bytes": 2e9} | more


def test_cells_are_kept_one_by_one_and_replaced(tmp_path):
    module, file = script("_cells"), tmp_path / "cells.json"
    for one in (cell("a", "paper", 1), cell("b", "paper", 2), cell("a", "paper", 3)):
        module.write_cell(file, one)
    found = {(one["model"], one["column"]): one for one in module.read_cells(file)}
    assert set(found) == {("a", "paper"), ("b", "paper")}
    assert found["a", "paper"]["memory"]["peak"] == 3 * 2**30


def test_tables_say_which_of_the_two_holds():
    module = script("_cells")
    cells = [
        cell("opt-13b", "paper", 16),
        cell("opt-13b", "twice", 24),
        cell("opt-13b", "half", 40),
    ]
    paper = module.paper_table(cells).splitlines()[-1]
    assert all(word in paper for word in ("opt-13b (512)", "fsdp 8", "yes", "16.00", "50%", "2.00"))
    beyond = module.beyond_table(cells).splitlines()[-1]
    assert "the length" in beyond
    assert "40.00 of 32.00" in beyond
    cells[2] = cell("opt-13b", "half", 31)
    assert "both" in module.beyond_table(cells).splitlines()[-1]


def test_shardings_by_hand_are_those_of_megatron(tmp_path):
    mesh = rc.make_mesh(data=2, fsdp=2, model=2)
    # So wide that all but keys and values have the 4,096 elements that are stored split.
    settings = dataclasses.replace(TINY, width=64, hidden=128).to_hugging_face()
    (tmp_path / "config.json").write_text(json.dumps(settings))
    workload = script("_workload").make_workload(str(tmp_path), 16)
    plan = script("megatron_ahead").plan_by_hand(make_job(*workload.arguments(4)), mesh)
    found = jax.tree_util.tree_leaves_with_path(plan.shardings.model)
    found = {jax.tree_util.keystr(p, simple=True, separator="/"): s.spec for p, s in found}
    norms = ("layers/attention_norm", "layers/mlp_norm", "norm")
    wanted = {
        "embed": P("model", "fsdp"),
        "head": P("fsdp", "model"),
        "layers/wq": P(None, "fsdp", "model", None),
        "layers/wk": P(None, None, "model", None),
        "layers/wv": P(None, None, "model", None),
        "layers/wo": P(None, "model", None, "fsdp"),
        "layers/gate": P(None, "fsdp", "model"),
        "layers/up": P(None, "fsdp", "model"),
        "layers/down": P(None, "model", "fsdp"),
    }
    split = {name: spec for name, spec in found.items() if name not in norms}
    assert {k: tuple(v) for k, v in split.items()} == {k: tuple(v) for k, v in wanted.items()}
    assert plan.constrain(len) is len


def test_gpus_are_known_by_what_they_call_themselves():
    target_of = script("real_peak").target_of
    assert target_of("NVIDIA A100-SXM4-40GB") == "a100-40gb:1"
    assert target_of("NVIDIA GeForce GTX 1080 Ti") == "1080ti:1"
    with pytest.raises(SystemExit, match="'Tesla K80' is none of .*a100-40gb.*--target"):
        target_of("Tesla K80")


def test_tables_take_their_places_in_the_page(tmp_path):
    module, page = script("dry_run_docs"), tmp_path / "page.md"
    text = module.PAGE.read_text("utf-8")
    for name in ("paper", "beyond", "megatron", "cpu", "real"):
        text = module.between_marks(text, name, f"The table {name}.")
    page.write_text(text)
    script("_cells").write_cell(tmp_path / "table1.json", cell("opt-13b", "paper", 16))
    module.main(tmp_path, page)
    text = page.read_text()
    assert "| opt-13b (512) |" in text
    assert "The table paper." not in text
    assert "The table megatron." in text
    with pytest.raises(SystemExit, match="must have one line <!-- paper:begin -->"):
        module.between_marks("", "paper", "")
