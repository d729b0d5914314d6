"""The page that shows code with the cost of each line."""

import html
import re

import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh
from sharding_helpers import array

import redcoast as rc
from redcoast.sharding.report._data import LineCost
from redcoast.sharding.report._source_page import draw_source_page

MESH = AbstractMesh((2, 1, 4), ("data", "fsdp", "model"))
MODEL = {"up": array(64, 256), "down": array(256, 64)}


def loss(model, x, key):
    hidden = jnp.tanh(x @ model["up"])
    wide = jnp.exp(hidden[..., None] * jnp.arange(64.0)[None, None])  # <planted> & kept
    return jnp.mean(wide) + jnp.mean(hidden @ model["down"])


def test_code_is_shown_with_the_bytes_of_each_line():
    plan = rc.plan_shardings(MODEL, MESH, fn=loss, args=(array(32, 64), None))
    page = plan.to_html()
    assert "<planted> & kept" not in page  # escaped
    row = re.search(r"<tr id=[^>]*>(?:(?!</tr>).)*&lt;planted&gt; &amp; kept</td>", page)
    assert row is not None
    costliest = plan.report.program.lines[0]
    assert f'<td class="size">{costliest.memory_bytes / 1e6:.4g}' in row[0]
    first = page[page.index("<ol>") :].split("</li>")[0]
    assert f"test_source_page.py:{costliest.number}" in first
    assert html.escape('hidden = jnp.tanh(x @ model["up"])') in page
    assert page.count("<tr") == page.count("</tr>")
    assert "http" not in page  # it needs no other files


def test_lines_that_cannot_be_read_are_shown_by_number():
    lines = [LineCost("/no/such/file.py", 7, 1000, 0, ()), LineCost("", 0, 0, 10, ("<why>",))]
    page = draw_source_page(lines, "Title", "Summary")
    assert "file.py:7" in page
    assert "no line of your code" in page
    assert "&lt;why&gt;" in page
    assert draw_source_page([], "Title", "Summary").count("<h2>") == 0


def test_a_plan_without_a_function_has_no_page():
    with pytest.raises(ValueError, match="made without a function"):
        rc.plan_shardings(MODEL, MESH).to_html()
