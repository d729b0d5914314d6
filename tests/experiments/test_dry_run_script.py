"""`experiments/dry_run.py` and its modules."""

import dataclasses
import functools
import importlib
import importlib.util
import json
import math
import re
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import equinox as eqx
import jax
import numpy as np
import pytest
import tyro
from jax.sharding import PartitionSpec as P
from paths import EXPERIMENTS

import redcoast as rc
from redcoast.dryrun._job import make_job
from redcoast.dryrun._mesh_table import Candidate
from redcoast.dryrun._target_name import parse_target
from redcoast.models import GPT2Config, LlamaConfig, ViTConfig
from redcoast.pretrained._registry import write_config

FOLDER = EXPERIMENTS
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
    file.write_text(json.dumps(write_config(TINY)))
    return file


def dry_run(**options):
    """Returns the exit status of the script."""
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


@pytest.mark.thorough
def test_figures_of_a_model_in_a_file(config_json, capsys):
    options = {"target": "cpu:4", "mesh": "data=2,fsdp=1,model=2", "seq": 16}
    assert dry_run(model=str(config_json), json=True, **options) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert report["fits"]
    assert report["mesh"] == {"data": 2, "fsdp": 1, "model": 2}
    # float32 parameters, with AdamW's two moments of each.
    assert 4 * WEIGHTS / 2 <= report["memory"]["parameters"] < 4 * WEIGHTS
    assert report["memory"]["optimizer_state"] < 2 * report["memory"]["parameters"] + 1000
    assert report["memory"]["peak"] > 3 * report["memory"]["parameters"]
    assert report["sent_bytes"] > 0
    asked = {"model": str(config_json), "seq": 16, "batch": 4, "accumulate": 1, "chunk": None}
    asked |= {"dtype": "float32", "remat": "full"}
    assert {name: report[name] for name in asked} == asked
    assert "16 tokens" in captured.err


@pytest.mark.thorough
def test_changes_of_the_model_are_reported(tmp_path, capsys):
    config = GPT2Config(vocab=64, width=32, layers=1, heads=2, hidden=64, positions=16)
    (tmp_path / "config.json").write_text(json.dumps(write_config(config)))
    said = "The pretrained model has 16 learned positions; here it has 32."
    options = {"model": str(tmp_path), "target": "cpu:1", "seq": 32}
    assert dry_run(**options) == 0
    assert said in capsys.readouterr().out
    assert dry_run(json=True, **options) == 0
    assert said in json.loads(capsys.readouterr().out)["notes"]


@pytest.mark.parametrize(("dtype", "wanted"), [("float32", None), ("bfloat16", "bfloat16")])
def test_float32_is_not_passed_so_that_bfloat16_can_be_suggested(
    config_json, monkeypatch, dtype, wanted
):
    module, asked = script("redcoast_cli._dry_run_command"), []

    def stop(*args, compute_dtype, **options):
        asked.append(compute_dtype)
        raise ValueError("Enough.")

    monkeypatch.setattr(module.rc, "dry_run", stop)
    assert dry_run(model=str(config_json), target="cpu:2", seq=8, dtype=dtype) == 2
    assert asked == [wanted]


def test_the_longest_sequence_is_compiled_and_the_next_does_not_fit(config_json, monkeypatch):
    module = script("redcoast_cli._dry_run_command")
    seen = {}

    def attempt(c, target, seq, *, suggest=False):
        run = type("Run", (), {"fits": seq <= 700, "report": {}})()
        return seen.setdefault(seq, run)

    monkeypatch.setattr(module, "attempt", attempt)
    c = module.DryRunCommand(model=str(config_json), target="cpu:2", longest=True)
    assert module.longest(c) is seen[640]
    assert not seen[768].fits


def test_the_smallest_target_is_the_first_that_fits(config_json, monkeypatch):
    module = script("redcoast_cli._dry_run_command")
    tried = []

    def attempt(c, target, seq, *, suggest=False):
        tried.append(target.name)
        return type("Run", (), {"fits": target.count >= 8, "name": target.name})()

    monkeypatch.setattr(module, "attempt", attempt)
    c = module.DryRunCommand(model=str(config_json), target="v4:4x4x4", smallest=True)
    assert module.smallest(c).name == "v4:2x2x2"
    assert tried == ["v4:2x2x1", "v4:2x2x2"]
    # Targets that cannot hold 12 bytes for each of 66 billion parameters are not compiled.
    monkeypatch.setattr(module, "attempt", lambda c, target, *_: type("Run", (), {"fits": True}))
    large = module.DryRunCommand(model="opt-66b", target="l4", smallest=True)
    assert module.state_bytes(module.make_workload("opt-66b")) > 12 * 65e9
    assert module.smallest(large).fits
    # Elsewhere a slice needs its sizes, but here they are searched for.
    tried.clear()
    monkeypatch.setattr(module, "attempt", attempt)
    assert module.smallest(
        module.DryRunCommand(model=str(config_json), target="v5e", smallest=True)
    )
    assert tried == ["v5e:1x1", "v5e:2x2", "v5e:2x4"]


def test_a_model_that_fits_nowhere_exits_with_1(config_json, monkeypatch, capsys):
    module = script("redcoast_cli._dry_run_command")
    monkeypatch.setattr(module, "attempt", lambda *args: type("Run", (), {"fits": False}))
    assert dry_run(model=str(config_json), target="v5e", smallest=True) == 1
    assert "does not fit on any number of v5e" in capsys.readouterr().err


def fitting(config_json, monkeypatch, first, others, usable=None):
    """Returns the meshes that are compiled if the cheapest has the peak `first`, and the others,
    from best to worst, have the peaks `others`: GiB by size of `model`; 16 GiB are usable."""
    module, asked = script("redcoast_cli._reach"), []

    def run(*args, target, suggest, mesh=None):
        asked.append(mesh and mesh["model"])
        return SimpleNamespace(mesh={"model": 2}, fits=first <= 16, memory={"peak": first * 2**30})

    candidates = tuple(
        Candidate({"model": size}, fits=peak <= 16, peak_memory=peak * 2**30)
        for size, peak in others.items()
    )
    best = candidates[0]
    actual = rc.MeshSuggestion(best.mesh, best.fits is True, "cpu:2", None, candidates)
    monkeypatch.setattr(module.rc, "dry_run", run)
    monkeypatch.setattr(module.rc, "suggest_mesh", lambda *args, **options: actual)
    workload = script("redcoast_cli._workload").make_workload(str(config_json), 8)
    module.dry_run_to_fit(workload, 2, "cpu:2", usable=usable)
    return asked


@pytest.mark.thorough
def test_the_best_meshes_with_and_without_stages_are_compared(config_json, capsys):
    options = {"model": str(config_json), "target": "cpu:4", "seq": 16, "batch": 8}
    assert dry_run(compare=True, json=True, **options) == 0
    actual = json.loads(capsys.readouterr().out)
    assert {"pipe" in one["mesh"] for one in actual["meshes"]} == {True, False}
    assert ["pipe" in run["mesh"] for run in actual["runs"]] == [True, False]
    assert dry_run(compare=True, **options) == 0
    out = capsys.readouterr().out
    assert re.search(
        "is the best of .*The best mesh with stages:.*The best mesh without", out, re.S
    )


@pytest.mark.thorough
def test_other_meshes_are_compiled_if_the_cheapest_does_not_fit(config_json, monkeypatch):
    ask = functools.partial(fitting, config_json, monkeypatch)
    assert ask(10, {1: 12, 4: 8}) == [None]
    assert ask(20, {1: 12, 4: 8}) == [None, 1]
    # A device may have less memory than the target.
    assert ask(10, {1: 12, 4: 8}, usable=9 * 2**30) == [None, 4]
    # If none fits, the best is reported, unless it was compiled already.
    assert ask(20, {1: 18, 4: 19}) == [None, 1]
    assert ask(20, {2: 20, 4: 21}) == [None]
    # If not even the training state fits, no other mesh is tried.
    assert ask(20, {1: 12}, usable=1000) == [None]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model": "opt-67b"}, r"no model 'opt-67b'.* opt-66b.*The named models are llama-7b"),
        ({"model": "nowhere/config.json"}, "no config.json at that path"),
        ({"smallest": True, "longest": True}, "Only one of"),
        ({"smallest": True, "mesh": "fsdp=2"}, "leave out --mesh"),
        ({"compare": True, "mesh": "fsdp=2"}, "leave out --mesh"),
        ({"mesh": "fsdp:2"}, "data=1,fsdp=4,model=2, .* but is fsdp:2"),
        ({"mesh": "stage=2"}, "but is stage=2"),
        ({"target": "v9:2x2"}, "no target 'v9:2x2'"),
        ({"model": "vit-base", "seq": 128}, "vit-base reads images of .*leave out --seq"),
        ({"seq": -1}, "--seq must be at least 1, but is -1"),
        (
            {"model": "vit-base", "longest": True},
            "reads images: --longest needs a model that reads text",
        ),
        ({"table1": True, "rows": ("opt-175b",)}, "Unknown: opt-175b.*opt-66b"),
        ({"table1": True, "columns": ("fp8",)}, "Unknown: fp8.*bfloat16"),
        ({"table1": True, "model": "opt-66b", "remat": "none"}, "leave out --model, --remat"),
        ({"rows": ("opt-66b",)}, "need --table1: leave out --rows"),
        ({"model": "vit-base", "chunk": 0}, "--chunk must be at least 1, but is 0"),
        ({"target": "v9", "smallest": True}, "no target 'v9'"),
    ],
)
def test_errors_say_what_would_work(options, words, tmp_path, capsys):
    target = {} if "table1" in options else {"target": "cpu:2"}
    assert dry_run(**target | {"out": tmp_path} | options) == 2
    assert re.search(words, capsys.readouterr().err, re.DOTALL)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mesh": "model=3"}, "model in .1, 2, 4. would fit"),
        ({"mesh": "model=0"}, "`model` must be at least 1, but is 0"),
        ({"accumulate": 0}, "--accumulate must be at least 1, but is 0"),
        pytest.param(
            {"batch": 3, "accumulate": 2},
            "`accumulate=2` does not divide the batch",
            marks=pytest.mark.thorough,
        ),
        ({"batch": 0}, "--batch must be at least 1, but is 0"),
        ({"batch": -3}, "--batch must be at least 1, but is -3"),
        ({"chunk": 0}, "--chunk must be at least 1, but is 0"),
    ],
)
def test_invalid_options_exit_with_2(config_json, options, words, capsys):
    assert dry_run(**{"model": str(config_json), "target": "cpu:4", "seq": 16} | options) == 2
    captured = capsys.readouterr()
    assert re.search(words, captured.err)
    assert not captured.out
    assert "Traceback" not in captured.err


def test_a_compiler_error_exits_with_2(config_json, monkeypatch, capsys):
    module = script("redcoast_cli._dry_run_command")

    def fail(*args, **options):
        raise RuntimeError("The compiler failed.")

    monkeypatch.setattr(module.rc, "dry_run", fail)
    assert dry_run(model=str(config_json), target="cpu:2", seq=8) == 2
    assert capsys.readouterr().err == "The compiler failed.\n"


def test_an_unknown_config_json_exits_with_2(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    assert dry_run(model=str(tmp_path), target="cpu:2") == 2
    assert re.search("'mamba'.*llama", capsys.readouterr().err)


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
    workload = script("redcoast_cli._workload").make_workload(model)
    init_fn, loss_fn, batch, _ = workload.arguments(4)
    made = eqx.filter_eval_shape(init_fn, jax.random.key(0))
    assert made.config.remat == "full"
    assert {str(x.shape) for x in jax.tree.leaves(batch)} == names
    loss = eqx.filter_eval_shape(loss_fn, made, batch, jax.random.key(0))
    assert loss.shape == ()


@pytest.mark.thorough
def test_the_loss_of_a_language_model_is_of_its_vocabulary(config_json):
    workload = script("redcoast_cli._workload").make_workload(str(config_json), 8, chunk=4)
    init_fn, loss_fn, shapes, _ = workload.arguments(2)
    ones = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), shapes)
    loss = jax.jit(lambda key, batch: loss_fn(init_fn(key), batch, key))(jax.random.key(0), ones)
    assert abs(loss - math.log(64)) < 1


def test_images_of_a_file_keep_their_size(tmp_path):
    config = ViTConfig(width=32, layers=1, heads=2, hidden=64, image=(32, 32), patch=(8, 8))
    (tmp_path / "config.json").write_text(json.dumps(write_config(config)))
    workload = script("redcoast_cli._workload").make_workload(str(tmp_path))
    assert workload.make_batch(2)["inputs"].shape == (2, 3, 32, 32)
    assert workload.seq is None


def test_learned_positions_are_added_with_a_note():
    workload = script("redcoast_cli._workload").make_workload("gpt2-small", 2048)
    model = eqx.filter_eval_shape(workload.init_fn, jax.random.key(0))
    assert model.position_embed.shape[0] == 2048
    assert "1024 learned positions; here it has 2048" in workload.notes[0]
    assert script("redcoast_cli._workload").make_workload("gpt2-small", 512).notes == ()


@pytest.mark.parametrize("limit", [0, 100, 128, 5000, 8192, 10**9])
@pytest.mark.parametrize("start", [100, 1024, 1500, 65536, 2**21])
def test_the_longest_sequence_by_trying_all(limit, start):
    module = script("redcoast_cli._reach")
    asked = []
    fits = lambda seq: asked.append(seq) or seq <= limit
    actual = module.longest_sequence(fits, start)
    assert actual == min(limit // 128 * 128, 2**20)
    assert len(asked) == len(set(asked)) < 30


@pytest.mark.parametrize("name", ["v4:2x2x2", "v5e:2x2", "tpu7x:2x2x1", "h100:2x8", "cpu:4"])
def test_sizes_of_a_chip_are_sorted_and_complete(name):
    targets = script("redcoast_cli._reach").sizes_of(parse_target(name).chip)
    counts = [target.count for target in targets]
    assert counts == sorted(set(counts))
    assert {target.chip.name for target in targets} == {parse_target(name).chip.name}
    assert parse_target(name).count in counts


def test_rows_of_the_paper_have_models_and_halves():
    for row in script("_table1").ROWS:
        whole, half = parse_target(row.target), parse_target(row.half)
        assert whole.count == 2 * half.count
        assert whole.chip.name == half.chip.name
        script("redcoast_cli._workload").find_model(row.model)


def cell(model, column, peak, **more):
    memory = {"temporaries": 0, "peak": peak * 2**30}
    sizes = {"seq": 512, "target": "v4:2x2x2", "compiler": "tpu", "mesh": {"fsdp": 8, "model": 1}}
    actual = {"model": model, "column": column, "memory": memory, "usable": 32 * 2**30, **sizes}
    return actual | {"fits": peak <= 32, "sent_bytes": 2e9} | more


def test_cells_are_added_or_replaced(tmp_path):
    module, file = script("_cells"), tmp_path / "cells.json"
    for one in (cell("a", "paper", 1), cell("b", "paper", 2), cell("a", "paper", 3)):
        module.write_cell(file, one)
    actual = {(one["model"], one["column"]): one for one in module.read_cells(file)}
    assert set(actual) == {("a", "paper"), ("b", "paper")}
    assert actual["a", "paper"]["memory"]["peak"] == 3 * 2**30


def test_tables_list_the_variants_that_fit():
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


def test_the_models_that_fit_are_counted():
    text = script("_cells").beyond_text
    cells = [cell(model, "twice", peak) for model, peak in (("a", 16), ("b", 40))]
    cells += [cell(model, "half", 40) for model in "ab"]
    assert "At twice the length, 1 of 2 fits (a)." in text(cells)
    assert "On half of the devices, none of 2 fits." in text(cells)
    assert text([cell(model, "twice", 16) for model in "ab"]).endswith("length, 2 of 2 fit.")
    assert text([cell("a", "paper", 16)]).endswith("|")


def refused(model, column, peak):
    """A rejected program in the current and in the old format."""
    now = cell(model, column, peak, refused=True, sent_bytes=None, fits=False)
    old = cell(model, column, peak, sent_bytes=0, fits=False)
    del now["memory"]["temporaries"], old["memory"]["temporaries"]
    return now, old


def test_a_rejected_program_has_a_lower_bound_and_no_traffic():
    module, megatron = script("_cells"), script("megatron_ahead")
    for one in refused("opt-13b", "paper", 40):
        fields = [x.strip() for x in module.paper_table([one]).splitlines()[-1].split("|")]
        assert fields[-5:-1] == ["no", "at least 40.00", "-", "-"]
        half = one | {"column": "half"}
        assert "at least 40.00 of 32.00" in module.beyond_table([half]).splitlines()[-1]
        by_hand = {"by_hand": {"sent_bytes": None, "peak": 41 * 2**30}}
        sent = ["-", "-", "-", "at least 40.00", "at least 41.00"]
        assert megatron.line(one | by_hand)[-5:] == sent
    by_hand = {"by_hand": {"sent_bytes": 4e9, "peak": 41 * 2**30}}
    assert megatron.line(cell("a", "v4", 8) | by_hand)[-5:] == [
        "2.00",
        "4.00",
        "0.50",
        "8.00",
        "41.00",
    ]


def test_the_cpu_compiler_is_not_compared_with_rejected_programs():
    module = script("cpu_bias")
    targets = [cell("a", "paper", 10), *refused("b", "half", 40)[:1], cell("c", "bfloat16", 10)]
    targets += refused("d", "half", 40)[1:]
    cpus = [cell("a", "paper", 12, sent_bytes=3e9), cell("b", "half", 60), cell("d", "half", 39)]
    cpus += [cell("c", "bfloat16", 10, sent_bytes=4e9)]
    lines = module.report(targets, cpus).splitlines()
    fields = lambda line: [field.strip() for field in line.split("|")][1:-1]
    assert fields(lines[2])[2:] == ["10.00", "12.00", "+20.0%", "2.00", "3.00", "1.50"]
    assert fields(lines[3])[2:] == ["at least 40.00", "60.00", "-", "-", "2.00", "-"]
    assert "by more than 10% for: a (512)." in "\n".join(lines)
    assert "of a rejected program: d (512), half." in "\n".join(lines)
    assert ["float32, with `fsdp`", "1", "+20.0% to +20.0%", "1.50 to 1.50"] in map(fields, lines)
    assert ["bfloat16", "1", "+0.0% to +0.0%", "2.00 to 2.00"] in map(fields, lines)


@pytest.mark.thorough
def test_the_cpu_compiler_replaces_missing_compilers(config_json, monkeypatch):
    monkeypatch.setenv("TPU_LIBRARY_PATH", "/nowhere")
    for name in ("libtpu", "jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13"):
        there = ModuleType(name)
        there.__spec__ = ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, there)
    assert importlib.util.find_spec("libtpu") is not None
    script("cpu_bias").forget_accelerators()
    workload = script("redcoast_cli._workload").make_workload(str(config_json), 8)
    for target in ("v4:2x2x1", "a100-40gb:2"):
        run = rc.dry_run(*workload.arguments(4), target=target, suggest=False)
        assert run.compiler == "cpu"
        assert "is not installed" in run.notes[0]


def test_shardings_by_hand_are_those_of_megatron(tmp_path):
    mesh = rc.make_mesh(data=2, fsdp=2, model=2)
    # All arrays but keys and values have the 4,096 elements from which on they are FSDP-sharded.
    settings = write_config(dataclasses.replace(TINY, width=64, hidden=128))
    (tmp_path / "config.json").write_text(json.dumps(settings))
    workload = script("redcoast_cli._workload").make_workload(str(tmp_path), 16)
    plan = script("megatron_ahead").plan_by_hand(make_job(*workload.arguments(4)), mesh)
    actual = jax.tree_util.tree_leaves_with_path(plan.shardings.model)
    actual = {jax.tree_util.keystr(p, simple=True, separator="/"): s.spec for p, s in actual}
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
    split = {name: spec for name, spec in actual.items() if name not in norms}
    assert {k: tuple(v) for k, v in split.items()} == {k: tuple(v) for k, v in wanted.items()}
    assert plan.constrain(len) is len


def test_gpus_are_recognised_by_their_names():
    target_of = script("real_peak").target_of
    assert target_of("NVIDIA A100-SXM4-40GB") == "a100-40gb:1"
    assert target_of("NVIDIA GeForce GTX 1080 Ti") == "1080ti:1"
    with pytest.raises(SystemExit, match="'Tesla K80' is none of .*a100-40gb.*--target"):
        target_of("Tesla K80")


def test_tables_replace_the_text_between_their_marks(tmp_path):
    module, pages = script("dry_run_docs"), (tmp_path / "page.md", tmp_path / "more.md")
    names = ("dry_run_measured.md", "measured/dry_runs.md")
    marks = (("paper", "real"), ("beyond", "megatron", "meshes", "cpu"))
    for page, name, inside in zip(pages, names, marks, strict=True):
        text = (module.DOCS / name).read_text("utf-8")
        for mark in inside:
            text = module.between_marks(text, mark, f"The table {mark}.")
        page.write_text(text)
    script("_cells").write_cell(tmp_path / "table1.json", cell("opt-13b", "paper", 16))
    module.main(tmp_path, *pages)
    page, more = (page.read_text() for page in pages)
    assert "| opt-13b (512) |" in page
    assert "The table paper." not in page
    assert "The table beyond." not in more
    assert "The table megatron." in more
    with pytest.raises(SystemExit, match="must have one line <!-- paper:begin -->"):
        module.between_marks("", "paper", "")
