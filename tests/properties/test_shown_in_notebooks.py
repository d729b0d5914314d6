"""What notebooks and the REPL show: a live bar, plans with pictures, states in a few lines."""

import re
import sys
import types
from html.parser import HTMLParser
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problem import collate_fn, loss_fn, make_examples, make_model

import redcoast as rc


class Shown:
    """An object that a notebook shows, and what it has shown of it."""

    def __init__(self, obj):
        self.states = [obj._repr_mimebundle_()]

    def update(self, obj):
        self.states.append(obj._repr_mimebundle_(include=None, exclude=None))


@pytest.fixture
def shown(monkeypatch):
    """The displays of a notebook, without IPython: only what it promises is there."""
    displays = []

    def display(obj, *, display_id):
        assert display_id is True
        displays.append(Shown(obj))
        return displays[-1]

    ipython: Any = types.ModuleType("IPython")
    ipython.get_ipython = lambda: types.SimpleNamespace(kernel=object())
    module: Any = types.ModuleType("IPython.display")
    module.display = display
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    return displays


def train(**options):
    evaluation = rc.Evaluation(make_examples(16), every=2)
    return rc.fit(
        *(make_model(), optax.adam(1e-2), make_examples(64)),
        collate_fn=collate_fn,
        loss_fn=loss_fn,
        batch_size=16,
        steps=4,
        evaluation=evaluation,
        **options,
    )


@pytest.mark.thorough
def test_a_notebook_has_one_live_bar(shown, capsys):
    train()
    (bar,) = shown
    texts = [state["text/plain"] for state in bar.states]
    assert texts[1] == "step 0/4  compiling"
    assert texts[-1].startswith("step 4/4  ")
    assert "loss" in texts[-1]
    assert any("evaluating 1/1" in text for text in texts)
    assert '<progress value="4" max="4"' in bar.states[-1]["text/html"]
    assert "step 4" not in capsys.readouterr().err


@pytest.mark.thorough
def test_no_bar_where_none_is_asked_for(shown):
    train(log=False)
    train(log=rc.progress_logger(False))
    assert shown == []


@pytest.mark.thorough
def test_ipython_in_a_terminal_is_a_terminal(shown, capsys):
    ipython: Any = sys.modules["IPython"]
    ipython.get_ipython = lambda: types.SimpleNamespace()
    train()
    assert shown == []
    assert "step 4/4" in capsys.readouterr().err


class Balanced(HTMLParser):
    """Checks that each tag is closed, and keeps the texts and the tags."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.texts = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def read_html(plan):
    parser = Balanced()
    parser.feed(plan._repr_html_())
    parser.close()
    assert parser.open == []
    return parser


def test_a_plan_is_shown_with_a_picture_of_each_array():
    model = {"w": jnp.zeros((64, 256)), "b": jnp.zeros(3), "<script>&": jnp.zeros((256, 64))}
    plan = rc.plan_shardings(model, rc.make_mesh(data=2, model=4))
    page = read_html(plan)
    assert str(plan) in page.texts
    assert "<script>&" in page.texts
    assert "script" not in page.tags
    assert page.tags.count("svg") == page.tags.count("tr") - 1 == 3
    pictures = re.findall(r"<svg.*?</svg>", plan._repr_html_())
    colours = [len(set(re.findall(r'fill="([^"]*)"', picture))) for picture in pictures]
    parts = [array.parts for array in plan.report.arrays]
    assert sorted(colours) == sorted(parts) == [1, 4, 4]
    assert repr(plan) == str(plan)


def test_pictures_of_scalars_and_of_many_dimensions():
    model = {
        "stack": jnp.zeros((3, 8, 2, 512)),
        "scalar": jnp.zeros(()),
        "empty": jnp.zeros((0, 4)),
    }
    overrides = [("stack", jax.P(None, ("data", "model"), None, "fsdp"))]
    plan = rc.plan_shardings(model, rc.make_mesh(fsdp=2, model=4), overrides=overrides)
    page = read_html(plan)
    assert page.tags.count("rect") == 8 + 1 + 1


@pytest.mark.thorough
def test_a_long_plan_is_cut():
    model = {f"{i:03}" + "x" * i: jnp.zeros(i + 1) for i in range(60)}
    page = read_html(rc.plan_shardings(model, rc.make_mesh()))
    assert "20 more lines: plan.table()" in page.texts


@pytest.mark.thorough
def test_a_state_is_shown_in_a_few_lines():
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    init_fn = lambda key: eqx.nn.MLP(8, 8, 64, 2, key=key)
    key = jax.random.key(0)
    abstract = eqx.filter_eval_shape(rc.init_state, init_fn, optimizer, key=key)
    count = 8 * 64 + 64 + 64 * 64 + 64 + 64 * 8 + 8
    assert f"{count:,} parameters, " in repr(abstract)
    assert "abstract" in repr(abstract)
    overrides = [("layers/1/weight", jax.P("model"))]
    shardings = rc.infer_shardings(abstract, rc.make_mesh(model=8), overrides=overrides)
    state = rc.init_state(init_fn, optimizer, key=key, shardings=shardings)
    lines = repr(state).splitlines()
    assert lines[0] == "TrainState of MLP, step 0"
    assert "float32" in lines[1]
    assert "ScaleByAdam" in lines[2]
    assert "model=8" in lines[3]
    assert len(lines) == 4
    # Trees of other things are shown as they are.
    assert "NamedSharding" in repr(shardings)
    vmapped = eqx.filter_vmap(lambda key: rc.init_state(init_fn, optimizer, key=key))
    assert "steps int32[2]" in repr(vmapped(jax.random.split(key, 2)))
    shown = []
    eqx.filter_jit(lambda state: shown.append(repr(state)))(state)
    assert "abstract" in shown[0]
    eqx.filter_jit(lambda state: state, donate="all")(state)
    assert "donated" in repr(state) or not state.step.is_deleted()
    assert repr(rc.TrainState({"w": np.ones(3)}, (), jnp.int32(7), key)).startswith(
        "TrainState of dict, step 7\n"
    )
