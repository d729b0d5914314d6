"""What the texts show is what happens: in the README, the docs and the examples of docstrings."""

import functools as ft
import inspect
import os
import re
import subprocess
import sys
import textwrap
import types
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from paths import ROOT
from problem import batch_of, collate_fn, loss_fn, make_examples, make_model, predict_fn

import redcoast as rc
from redcoast.models.llama import Llama, LlamaConfig

DOCS = ROOT / "docs"
FILES = {path.relative_to(DOCS).as_posix(): path for path in sorted(DOCS.rglob("*.md"))}
PAGES = {name: path.read_text("utf-8") for name, path in FILES.items()}
README = (ROOT / "README.md").read_text("utf-8")
# These show something of one line or of an attribute, and have no example of their own.
WITHOUT_EXAMPLE = {"Plan", "TrainState", "Batch", "Batches", "Restored", "Step"}
WITHOUT_EXAMPLE |= {"Estimate", "Generated", "MetricsReader", "Prepared", "RunInfo", "CHIPS"}
# Its example writes to trackio's own directory; `test_trackio.py` runs it elsewhere.
WITHOUT_EXAMPLE |= {"trackio_logger"}
WITHOUT_EXAMPLE |= {"lm_eval_model"}  # whose example needs lm-eval
# Pages that show a package that redcoast does without.
NEEDS = {"howto/export.md": "flatbuffers"}


def blocks(text, language="python"):
    """The fenced blocks of a language, those that are indented in a note as well."""
    actual = re.findall(rf"^( *)```{language}\n(.*?)^\1```$", text, re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(body) for _, body in actual]


def run(sources, namespace):
    for i, source in enumerate(sources):
        # Readers have JAX's own settings, not the strict ones of these tests.
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            exec(compile(source, f"<block {i}>", "exec"), namespace)


def run_apart(source, cwd):
    """Runs a program in a process that has what a user's has: no emulated devices as yet."""
    environment = {k: v for k, v in os.environ.items() if k != "NPROC"}
    environment["XLA_FLAGS"] = os.environ["XLA_FLAGS"].partition(" ")[2]  # but quick to compile
    command = [sys.executable, "-c", source]
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=900
    )


def outputs(text):
    """What a page says that its blocks print."""
    begins = ("8 devices = ", "Plan over", "The override")
    return [b for b in blocks(text, "text") if b.startswith(begins)]


def emulates(text):
    return "rc.emulate_devices(" in "".join(blocks(text))


def words(text):
    return " ".join(text.split())


@pytest.mark.parametrize("name", [n for n, t in PAGES.items() if blocks(t) and not emulates(t)])
@pytest.mark.integration
def test_blocks_of_a_page_run_in_order(name, tmp_path, monkeypatch, capsys):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    monkeypatch.chdir(tmp_path)
    module = types.ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)
    run(blocks(PAGES[name]), module.__dict__)
    printed = words(capsys.readouterr().out)
    for output in outputs(PAGES[name]):
        assert words(output) in printed


@pytest.mark.parametrize("name", [n for n, t in PAGES.items() if emulates(t)])
@pytest.mark.integration
def test_blocks_of_a_page_that_emulates_devices_run_in_order(name, tmp_path):
    result = run_apart("\n".join(blocks(PAGES[name])), tmp_path)
    assert result.returncode == 0, result.stderr
    for output in outputs(PAGES[name]):
        assert words(output) in words(result.stdout)


@pytest.mark.parametrize(
    "name", [n for n, t in PAGES.items() if blocks(t) and "emulate_devices" not in t]
)
@pytest.mark.thorough
def test_pages_that_name_no_way_to_have_more_devices_run_on_one(name, tmp_path):
    """On one device, arrays are not copied where they are on several, and meshes do not fit."""
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    result = run_apart("\n".join(blocks(PAGES[name])), tmp_path)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("mesh", ['"auto"', "rc.make_mesh(model=4)"])
@pytest.mark.integration
def test_blocks_of_the_readme_train_and_print_the_plan(mesh, tmp_path):
    screen, loop = blocks(README)
    assert len([line for line in screen.splitlines() if line.strip()]) <= 12
    assert 'mesh="auto"' in screen
    emulated = "import redcoast as rc\nrc.emulate_devices(8)\n" + screen + loop
    result = run_apart(emulated.replace('mesh="auto"', f"mesh={mesh}"), tmp_path)
    assert result.returncode == 0, result.stderr
    (plan,) = outputs(README)
    assert plan in result.stdout or mesh == '"auto"'
    losses = re.findall(r"loss (\S+)", result.stderr)
    assert float(losses[-1]) < 0.1
    assert float(result.stdout.split()[-1]) < 1.1  # the loss of the loop, after 10 steps


HAND_WRITTEN = [name for name in PAGES if not re.search(r"^(measured|notebooks)/", name)]


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", *HAND_WRITTEN])
def test_prose_is_wrapped_at_100_columns(name):
    text = PAGES[name] if name in PAGES else (ROOT / name).read_text("utf-8")
    prose = re.sub(r"^( *)```.*?^\1```$", "", text, flags=re.MULTILINE | re.DOTALL)
    apart = re.compile(r"^ *(#|\||!\[|members:)")  # headings, tables, pictures, lists of names
    assert [x for x in prose.splitlines() if len(x) > 100 and not apart.search(x)] == []


def test_links_of_the_readme_lead_somewhere():
    links = re.findall(r"\]\(([^)#]+)(?:#([^)]+))?\)", README)
    local = [(path, anchor) for path, anchor in links if not path.startswith("https://")]
    assert local
    for path, anchor in local:
        assert (ROOT / path).is_file(), path
        text = (ROOT / path).read_text("utf-8") if anchor else ""
        headings = re.findall(r"^#+ (.+?)(?: \{ *#([\w-]+) *\})?$", text, re.MULTILINE)
        anchors = {re.sub(r"[^\w-]", "", h.lower().replace(" ", "-")) for h, _ in headings}
        assert not anchor or anchor in anchors | {own for _, own in headings}, (path, anchor)


@pytest.mark.integration
def test_five_lines_read_a_checkpoint_without_redcoast(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    state = rc.init_state(lambda key: make_model(), optax.adam(1e-2), key=jax.random.key(0))
    shardings = rc.infer_shardings(state, rc.make_mesh(fsdp=2, model=2))
    state = jax.tree.map(lambda x, s: x if s is None else jax.device_put(x, s), state, shardings)
    (source,) = [b for b in blocks(PAGES["checkpoints.md"]) if "PyTreeRestore" in b]
    assert len(source.splitlines()) == 5
    (place,) = re.findall(r'Path\("(.+)/state"\)', source)
    rc.save_checkpoint(place, state)

    before = "import sys; sys.modules['redcoast'] = None\n"
    after = """
flat, _ = jax.tree_util.tree_flatten_with_path(arrays)
assert all(type(x) is np.ndarray for _, x in flat)
names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in flat]
np.savez("read.npz", **dict(zip(names, [x for _, x in flat])))
"""
    result = run_apart(before + source + after, tmp_path)
    assert result.returncode == 0, result.stderr
    read = np.load("read.npz")
    state = eqx.tree_at(lambda s: s.key, state, jax.random.key_data(state.key))
    expected, _ = jax.tree_util.tree_flatten_with_path(eqx.filter(state, eqx.is_array))
    assert len(read.files) == len(expected)
    for path, x in expected:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        np.testing.assert_array_equal(read[name], x)


def public():
    """The public objects, by name."""
    actual = {name: getattr(rc, name) for name in dir(rc) if not name.startswith("_")}
    return {name: x for name, x in actual.items() if not inspect.ismodule(x)} | {"Llama": Llama}


def examples_of(name):
    return blocks(inspect.getdoc(public()[name]) or "")


def namespace(name):
    """What the examples take for granted."""
    optimizer, key = optax.adam(1e-2), jax.random.key(0)
    mesh = rc.make_mesh(fsdp=2, model=2)
    model, examples = make_model(), make_examples(64)
    if name == "generate":
        config = LlamaConfig(vocab=16, width=16, layers=1, heads=2, kv_heads=1, hidden=16)
        return {"model": Llama(config, key=key), "jax": jax, "np": np, "rc": rc}
    state = rc.init_state(lambda key: make_model(), optimizer, key=key)
    if name == "load_checkpoint":
        rc.save_checkpoint("runs/lm/checkpoints/500", state)
    if name == "read_metrics":
        Path("runs/lm").mkdir(parents=True)
        Path("runs/lm/metrics.jsonl").write_text('{"step": 1, "loss": 2.5}\n')
    modules = {"eqx": eqx, "ft": ft, "jax": jax, "jnp": jnp, "np": np, "optax": optax, "rc": rc}
    functions = {"collate_fn": collate_fn, "loss_fn": loss_fn, "predict_fn": predict_fn}
    made = {"model": model, "optimizer": optimizer, "state": state, "key": key, "mesh": mesh}
    data = {"examples": examples, "test_examples": examples, "images": examples}
    batches = {"batch": batch_of(16), "batches": [batch_of(16), batch_of(16, seed=1)]}
    options = {"batch_size": 4, "key": key, "mesh": mesh, "steps": 3}
    loop = {"data": rc.batches(examples, collate_fn, **options), "step": lambda s, b: (s, {})}
    more = loop | {"init_fn": lambda key: make_model(), "Llama": Llama, "LlamaConfig": LlamaConfig}
    more |= {"plan": rc.plan_step(state, loss_fn, batch_of(16), mesh), "target": model}
    return modules | functions | made | data | batches | more


def test_reference_has_one_entry_for_every_public_name_on_the_page_of_its_folder():
    reference = {name: text for name, text in PAGES.items() if name.startswith("reference/")}
    for name, x in public().items():
        if isinstance(x, type | types.FunctionType) and name != "Llama":
            (page,) = [p for p, text in reference.items() if f"::: redcoast.{name}\n" in text]
            _, *folders = x.__module__.split(".")
            # Exceptions are shown as those of `redcoast` itself; `core` has no page.
            assert not folders or folders[0] in ("core", Path(page).stem)
            assert f"[redcoast.{name}]" in PAGES["api.md"]


def test_public_functions_have_an_example():
    missing = {name for name in public() if not examples_of(name)}
    assert missing <= WITHOUT_EXAMPLE | {"LlamaConfig"}


# Whole programs, or long to compile.
LONG = {"Llama", "generate", "load_pretrained", "save_pretrained", "suggest_mesh", "prepare"}
LONG |= {"MeshSuggestion", "Evaluation", "CheckpointNotSaved", "moving_average", "train_steps"}


@pytest.mark.integration
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[pytest.mark.integration] if n in LONG else [])
        for n in public()
        if n != "emulate_devices" and examples_of(n)
    ],
)
def test_example_of_a_docstring_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(examples_of(name), namespace(name))


@pytest.mark.integration
def test_example_of_emulate_devices_runs(tmp_path):
    source = "import redcoast as rc\n" + "\n".join(examples_of("emulate_devices"))
    result = run_apart(source + "\nprint(dict(mesh.shape))", tmp_path)
    assert words(result.stdout) == "{'data': 2, 'fsdp': 1, 'model': 4}", result.stderr
