"""Writes the figures of a benchmark into the documentation."""

import importlib
import json
import re

import pytest
from paths import EXPERIMENTS, ROOT

FOLDER = EXPERIMENTS / "benchmarks"
PAGE = "# Title\n\n<!-- collectives:begin -->\nstale\n<!-- collectives:end -->\n\nThe end.\n"


@pytest.fixture
def docs(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("collectives_docs")


def row(column, mesh, sent):
    figures = {"collectives": 7, "temporary_bytes": 3e6, "param_bytes": 2e6, "model_share": 1.0}
    times = {"plan_seconds": 0.25, "compile_seconds": 1.5}
    place = {"case": "GPT-2", "family": "transformer", "mesh": mesh, "column": column}
    return place | figures | times | {"sent_bytes": sent}


def write_results(out):
    rows = [
        row(column, mesh, 1e6 * sent)
        for mesh in ([8, 1, 1], [1, 2, 4])
        for column, sent in (("redcoast", 12.5), ("megatron", 50))
    ]
    (out / "collectives.json").write_text(json.dumps({"rows": rows}))


def run(docs, tmp_path, text):
    page, images = tmp_path / "page.md", tmp_path / "images"
    page.write_text(text)
    images.mkdir(exist_ok=True)
    docs.main(tmp_path, page, images)
    return page.read_text()


@pytest.mark.thorough
def test_tables_and_plots_are_between_the_marks(docs, tmp_path):
    write_results(tmp_path)
    text = run(docs, tmp_path, PAGE)
    before, rest = text.split("<!-- collectives:begin -->")
    inside, after = rest.split("<!-- collectives:end -->")
    assert (before, after) == ("# Title\n\n", "\n\nThe end.\n")
    assert "stale" not in inside
    # The mixed mesh is shown, the other one is collapsed.
    assert inside.index("### data 1, fsdp 2, model 4") < inside.index("data 8, fsdp 1, model 1")
    assert inside.count("| GPT-2           |    12.50 |    50.00 |") == 2
    for name in ("transformers_1_2_4.png", "transformers_8_1_1.png"):
        assert f"(../images/{name})" in inside
        assert (tmp_path / "images" / name).stat().st_size > 1000


@pytest.mark.thorough
def test_a_second_run_changes_nothing(docs, tmp_path):
    write_results(tmp_path)
    once = run(docs, tmp_path, PAGE)
    assert run(docs, tmp_path, once) == once


def test_missing_results_or_marks_raise_and_write_nothing(docs, tmp_path):
    with pytest.raises(SystemExit, match="Run collectives.py"):
        run(docs, tmp_path, PAGE)
    write_results(tmp_path)
    with pytest.raises(SystemExit, match="must have one line <!-- collectives:begin -->"):
        run(docs, tmp_path, "# Title\n")
    assert (tmp_path / "page.md").read_text() == "# Title\n"
    assert not list((tmp_path / "images").iterdir())


@pytest.mark.parametrize("page", sorted(ROOT.glob("docs/measured/*.md")), ids=lambda x: x.stem)
def test_a_page_of_measurements_has_marks_and_names_its_script(page, docs):
    """A script that is renamed, or a table without marks, could no longer be written."""
    text = page.read_text("utf-8")
    marks = re.findall("<!-- (\\w+):begin -->", text)
    assert marks
    for mark in marks:
        assert docs.between_marks(text, mark, "new") != text
    script = re.search(r"`(\w+\.py)[ `]", text)
    assert script
    folders = FOLDER, ROOT / "tests" / "parity"
    assert any((folder / script[1]).exists() for folder in folders)
    assert "exclude: true" in text  # a search finds the page that explains the figures


def test_lines_of_a_table_are_printed_and_written(docs, tmp_path, capsys):
    table, page = importlib.import_module("_pages").Printed(), tmp_path / "page.md"
    page.write_text(PAGE)
    table.add("| a |", "|---|")
    table.add("| 1 |")
    table.write(None, "collectives")
    assert page.read_text() == PAGE
    table.write(page, "collectives")
    assert "-->\n\n| a |\n|---|\n| 1 |\n\n<!--" in page.read_text()
    assert capsys.readouterr().out == "| a |\n|---|\n| 1 |\n"


def test_pictures_of_the_concepts_are_those_that_the_script_draws(tmp_path, docs):
    importlib.import_module("concept_pictures").main(tmp_path)
    for picture in tmp_path.iterdir():
        assert picture.read_text() == (ROOT / "docs" / "images" / picture.name).read_text()
