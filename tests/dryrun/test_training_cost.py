"""The hours and prices of training runs, for one target and compared for several."""

import json
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import redcoast as rc
from redcoast.dryrun import _compare_targets
from redcoast.dryrun._mesh_table import Candidate
from redcoast.dryrun._step_time import StepTime
from redcoast.models import LlamaConfig
from redcoast.pretrained._registry import write_config
from redcoast_cli import _dry_run_command as command
from redcoast_cli._options import DryRunCommand

TINY = LlamaConfig(vocab=64, width=32, layers=2, heads=4, kv_heads=2, hidden=64)
STEP = StepTime(
    seconds=0.5,
    products=0.3,
    attention=0.0,
    other=0.1,
    exposed={"data": 0.1},
    hidden={},
    waiting=0.0,
    kernels=3,
    utilisation=0.4,
)
BATCH = jax.ShapeDtypeStruct((8, 4), np.float32)
SECONDS = {"cpu:1": 4.0, "cpu:2": 1.0, "cpu:4": 2.0}


def init_fn(key):
    return {"w": jnp.zeros((4, 4))}


def loss_fn(model, x, key):
    return jnp.mean((x @ model["w"]) ** 2)


@pytest.fixture(scope="module")
def real():
    return rc.dry_run(init_fn, loss_fn, BATCH, optax.sgd(0.1), target="cpu:1")


@pytest.fixture
def faked(real, monkeypatch):
    """Dry runs whose time of a step is known; `cpu:4` needs too much memory, and on `cpu:8` the
    step cannot be run."""

    def dry_run(*args, target, **options):
        if target == "cpu:8":
            raise ValueError("It cannot be divided.")
        devices, step = int(target[4:]), replace(STEP, seconds=SECONDS[target])
        fits = target != "cpu:4"
        return replace(real, target=target, devices=devices, step=step, fits=fits, rows=8)

    monkeypatch.setattr(_compare_targets, "dry_run", dry_run)
    monkeypatch.setattr(rc, "dry_run", dry_run)


def compare(*targets, **options):
    arguments = (init_fn, loss_fn, BATCH, optax.sgd(0.1))
    return rc.compare_targets(*arguments, targets=targets, **options)


def test_a_dry_run_has_the_time_of_a_step_and_what_it_consists_of(real):
    step = real.step
    parts = step.products + step.attention + step.other + step.waiting
    assert step.seconds == pytest.approx(parts + sum(step.exposed.values()))
    assert step.kernels > 0
    assert json.loads(json.dumps(real.report))["step"]["seconds"] == step.seconds
    assert "Estimated time of a step" in str(real)


def test_hours_and_prices(real):
    run = replace(real, devices=8, step=STEP)
    cost = run.cost(72_000)
    assert (cost.hours, cost.device_hours, cost.price) == (10.0, 80.0, None)
    assert run.cost(72_000, price=2.5).price == 200.0
    with pytest.raises(ValueError, match="`steps` is 0"):
        run.cost(0)
    with pytest.raises(ValueError, match="`price` is -1"):
        run.cost(10, price=-1)
    with pytest.raises(ValueError, match="the compiler rejected the program"):
        replace(run, step=None).cost(10)


@pytest.mark.usefixtures("faked")
def test_targets_that_fit_come_first_and_the_fastest_of_them_at_the_top():
    actual = compare("cpu:1", "cpu:4", "cpu:8", "cpu:2", steps=3600, price={"cpu": 1, "cpu:2": 3})
    assert list(actual.runs) == ["cpu:2", "cpu:1", "cpu:4"]
    assert actual.errors == {"cpu:8": "It cannot be divided."}
    costs = {name: (cost.hours, cost.price) for name, cost in actual.costs.items()}
    assert costs == {"cpu:2": (1.0, 6.0), "cpu:1": (4.0, 4.0), "cpu:4": (2.0, 8.0)}
    lines = str(actual).splitlines()
    assert lines[0].split()[-3:] == ["device", "hours", "price"]
    assert [line.split()[0] for line in lines[1:4]] == ["cpu:2", "cpu:1", "cpu:4"]
    assert "too much" in lines[3]
    assert lines[4] == "cpu:8 cannot be used: It cannot be divided."
    # Without a number of steps there are no hours.
    assert "hours" not in str(compare("cpu:1", "cpu:2"))


@pytest.mark.usefixtures("faked")
def test_targets_that_cannot_be_compared():
    with pytest.raises(ValueError, match="It must be a list of names"):
        rc.compare_targets(init_fn, loss_fn, BATCH, optax.sgd(0.1), targets="cpu:2")
    with pytest.raises(ValueError, match="has no price for 'cpu:2'"):
        compare("cpu:2", steps=1, price={"h100": 2.0})
    with pytest.raises(ValueError, match="`price` is 0"):
        compare("cpu:2", steps=1, price=0)
    with pytest.raises(ValueError, match="It cannot be divided"):
        compare("cpu:8")


def status(**options):
    with pytest.raises(SystemExit) as stopped:
        command.main(DryRunCommand(**options))
    return stopped.value.code


@pytest.fixture
def config_json(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(write_config(TINY)))
    return str(file)


@pytest.mark.usefixtures("faked")
def test_the_command_says_what_so_many_tokens_take(config_json, capsys):
    """Two rows of 100 tokens are a step of one second."""
    options = {"model": config_json, "target": "cpu:2", "mesh": "data=2", "seq": 100}
    assert status(**options, tokens=7.2e5, price="1.5") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "720,000 tokens are 3,600 steps of 200 tokens: 1 hours, 2 device hours" in said
    assert said.endswith("at a price of 3.00.")
    assert status(**options, tokens=7.2e5, json=True) == 0
    cost = json.loads(capsys.readouterr().out)["cost"]
    assert cost == {"steps": 3600.0, "hours": 1.0, "device_hours": 2.0, "price": None}


@pytest.mark.usefixtures("faked")
def test_the_command_compares_targets(config_json, capsys):
    """The batch is one row for each device of the largest target."""
    options = {"model": config_json, "seq": 100, "targets": "cpu:1,cpu:2", "tokens": 7.2e5}
    assert status(**options, price="cpu=1.5") == 0
    first, _, _, fast, slow, *_ = capsys.readouterr().out.splitlines()
    assert "2 rows of 100 tokens" in first
    assert fast.split()[0] == "cpu:2"
    assert fast.split()[-3:] == ["1", "2", "3.00"]
    assert slow.split()[-3:] == ["4", "4", "6.00"]
    assert status(**options, json=True) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["runs"]["cpu:1"]["cost"]["hours"] == 4.0
    assert report["batch"] == 2


@pytest.mark.usefixtures("faked")
def test_each_of_the_compared_meshes_has_its_hours_and_lines(config_json, capsys, monkeypatch):
    candidates = Candidate({"pipe": 2}, fits=True), Candidate({"data": 2}, fits=True)
    suggestion = rc.MeshSuggestion({"pipe": 2}, True, "cpu:2", None, candidates)
    monkeypatch.setattr(rc, "suggest_mesh", lambda *args, **options: suggestion)
    options = {"model": config_json, "target": "cpu:2", "seq": 100, "compare": True}
    assert status(**options, tokens=7.2e5, by_line=True) == 0
    said = capsys.readouterr().out
    assert said.count("720,000 tokens are 3,600 steps") == 2
    assert said.count("as compiled, by line of code") == 2


def test_a_target_that_is_named_twice_is_compiled_once(real, monkeypatch):
    names = []

    def dry_run(*args, target, **options):
        names.append(target)
        return real

    monkeypatch.setattr(_compare_targets, "dry_run", dry_run)
    compare("cpu:1", "CPU:1")
    assert names == ["cpu:1"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"price": "2"}, "--price needs --tokens"),
        ({"targets": "cpu:1,cpu:2", "price": "2"}, "--price needs --tokens"),
        ({"tokens": 1e6, "price": "cheap"}, "--price is 'cheap'. It must be a number"),
        ({"tokens": 1e6, "price": "h100=2"}, "has no price for 'cpu:2'"),
        ({"tokens": -1.0}, "--tokens must be a positive number, but is -1"),
        ({"targets": "cpu:1,v9:2"}, "no target 'v9:2'"),
        ({"targets": "cpu:1", "smallest": True}, "--targets prints a table"),
        ({"tokens": 1e6, "price": "cpu=2,CPU=3"}, "--price must have one price for each name"),
        ({"tokens": 1e6, "price": "=2"}, "--price is '=2'. It must be a number"),
        (
            {"tokens": 1e6, "price": "cpu=2", "target": "l4", "mesh": "auto", "smallest": True},
            "has no price for 'l4:1'",
        ),
        ({"compare": True, "mesh": "auto", "html": "x.html"}, "--html writes a page of one mesh"),
        ({"html": "no/such/folder/page.html"}, "--html cannot be written: .*No such file"),
        ({"accumulate": 10**12}, "--accumulate must be at most 16,384"),
    ],
)
def test_options_that_do_not_go_together(config_json, options, words, capsys, monkeypatch):
    compiled = []
    monkeypatch.setattr(rc, "dry_run", lambda *args, **options: compiled.append(args))
    monkeypatch.setattr(rc, "compare_targets", lambda *args, **options: compiled.append(args))
    settings = {"model": config_json, "target": "cpu:2", "mesh": "data=2", "seq": 8}
    assert status(**settings | options) == 2
    assert re.search(words, " ".join(capsys.readouterr().err.split()))
    assert not compiled  # which takes minutes
