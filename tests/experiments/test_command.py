"""The console command `redcoast`."""

import json
import os
import re
import subprocess
import sys
from importlib import metadata

import jax
import pytest
from paths import EXPERIMENTS

import redcoast as rc
import redcoast_cli
from redcoast.core._versions import TESTED
from redcoast.distributed._allocator import describe_allocator
from redcoast.models import LlamaConfig
from redcoast.pretrained._registry import write_config
from redcoast_cli import _doctor_command


def run(*args):
    redcoast_cli.main([*args])


def test_help_and_version_import_neither_jax_nor_the_library():
    """They take seconds."""
    program = """
import contextlib, sys
from redcoast_cli import main
main(["--version"])
for command in ([], ["plan"], ["dry-run"], ["serve"], ["doctor"]):
    with contextlib.suppress(SystemExit):
        main([*command, "--help"])
print([name for name in ("jax", "numpy", "redcoast") if name in sys.modules])
"""
    columns = os.environ | {"COLUMNS": "80"}
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=columns
    )
    assert ran.stdout.splitlines()[-1] == "[]", ran.stderr
    assert ran.stdout.splitlines()[0] == f"redcoast {metadata.version('redcoast')}"
    assert max(map(len, ran.stdout.splitlines())) <= 80
    assert "redcoast dry-run --model opt-66b" in ran.stdout
    assert "--target" in ran.stdout


@pytest.mark.parametrize(
    "command",
    [["-m", "redcoast_cli"], [str(EXPERIMENTS / "grpo.py")]],
    ids=["redcoast", "an experiment"],
)
def test_help_that_nobody_reads_to_its_end_ends_quietly(command):
    """As in `--help | head`."""
    command = [sys.executable, *command, "--help"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1


def test_the_list_of_commands_has_one_sentence_of_each(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        run("--help")
    listed = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "• dry-run Compiles a training step for accelerators that you do not have," in listed
    assert "• plan Plans how a model's training step is sharded over a mesh, and prints" in listed
    assert "Nothing is compiled" not in listed
    with pytest.raises(SystemExit):
        run("plan", "--help")
    assert "Nothing is compiled" in capsys.readouterr().out


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The folder of a model's config.json."""
    folder = tmp_path_factory.mktemp("model")
    sizes = LlamaConfig(vocab=64, width=64, layers=2, heads=4, kv_heads=4, hidden=128)
    (folder / "config.json").write_text(json.dumps(write_config(sizes)))
    return str(folder)


def test_plan_prints_the_summary_and_the_table(model, capsys):
    run("plan", "--model", model, "--mesh", "2x4", "--seq", "16", "--table")
    out = capsys.readouterr().out
    assert out.startswith("8 devices = ")
    assert "Plan over the mesh data=2, fsdp=1, model=4" in out
    assert re.search(r"^path +shape +spec +MB/device$", out, re.MULTILINE)
    assert re.search(r"embed.* \(64, 64\) ", out)


def test_the_summary_of_a_plan_names_the_option_for_details(model, capsys):
    run("plan", "--model", model, "--mesh", "2x4", "--seq", "16")
    assert capsys.readouterr().out.endswith("Details: --table\n")


def test_plan_as_json(model, capsys):
    run("plan", "--model", model, "--mesh", "fsdp=8", "--json")
    report = json.loads(capsys.readouterr().out)
    assert report["mesh"] == {"data": 1, "fsdp": 8, "model": 1}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--model", "gpt5"], "There is no model 'gpt5'"),
        (["--mesh", "data=-1"], "--mesh needs the number of devices of each axis"),
        (["--mesh", "stage=2"], "--mesh must have the form"),
        (["--mesh", ""], "or 2x4, but is empty."),
        (["--batch", "0"], "--batch must be at least 1"),
        (["--batch", "99999999999999999999"], "--batch must be at most 2,147,483,647"),
        (["--seq", "99999999"], "--seq must be at most 1,048,576"),
        (["gpt2"], "`gpt2` follows no option. Write `redcoast plan --model gpt2`."),
        (["--mesh", "data=2,data=4"], "--mesh must name each axis once"),
        (["--mesh", "data=128,fsdp=80"], "--mesh has 10,240 devices. Plans are made for at most"),
    ],
)
def test_invalid_options_of_plan_exit_with_2(options, words, capsys):
    with pytest.raises(SystemExit) as stopped:
        run("plan", *options)
    assert stopped.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--rows", "0"], "--rows must be at least 1"),
        (["--timeout", "0"], "--timeout must be positive"),
        (["--port", "65536"], "--port must be at least 0 and at most 65535"),
        (["--host", "300.1.1.1"], "The server cannot listen at --host 300.1.1.1"),
        (["--api-key", " a"], "--api-key must be printable ASCII"),
        ([], "There is nothing at "),
    ],
)
def test_invalid_options_of_serve_exit_with_2(options, words, capsys):
    with pytest.raises(SystemExit) as stopped:
        run("serve", "--weights", "nowhere", *options)
    assert stopped.value.code == 2
    assert words in capsys.readouterr().err


def test_serve_says_which_packages_are_missing(capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        run("serve", "--weights", "nowhere")
    said = capsys.readouterr().err
    assert "needs jinja2 and starlette and tokenizers and uvicorn" in said
    assert 'pip install "redcoast[serve]"' in said


def test_doctor_names_devices_versions_and_what_is_missing(capsys, monkeypatch):
    monkeypatch.setattr(_doctor_command.importlib.util, "find_spec", lambda name: None)
    run("doctor")
    out = capsys.readouterr().out
    assert f"jax               {jax.__version__}" in out
    assert f"redcoast          {rc.__version__}" in out
    assert "8 x cpu (cpu)" in out
    assert f"Allocator         {describe_allocator()}" in out
    assert 'missing: pip install "redcoast[tpu]"' in out
    assert 'missing: pip install "wandb"' in out


def test_doctor_says_which_versions_were_not_tested_together(capsys, monkeypatch):
    tested = dict(TESTED[-1])
    monkeypatch.setattr(_doctor_command, "installed_versions", lambda: tested)
    run("doctor")
    assert "Tested together   yes" in capsys.readouterr().out
    tested["jax"] = "99.0"
    run("doctor")
    wanted = f"Tested together   no: jax 99.0 (tested: {TESTED[-1]['jax']})"
    assert wanted in capsys.readouterr().out


def test_doctor_does_not_miss_the_package_that_runs(monkeypatch):
    """It may be on the path without an installation."""

    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert _doctor_command.version("redcoast") == "(not installed)"
    assert _doctor_command.version("jax") == 'missing: pip install "jax"'


def test_doctor_says_how_wandb_runs(monkeypatch):
    assert _doctor_command.wandb_mode() == "offline, by WANDB_MODE"
    monkeypatch.setattr(_doctor_command.importlib.util, "find_spec", lambda name: None)
    assert "missing: pip install" in _doctor_command.wandb_mode()
