"""The table of docs/examples.md, written with the results that there are."""

import sys

import pytest
from paths import EXPERIMENTS

sys.path.append(str(EXPERIMENTS / "benchmarks"))
import examples

PPO = examples.example_of("ppo")


def cells(page, name):
    (row,) = (line for line in page.splitlines() if f"[`{name}.py`]" in line)
    return [cell.strip() for cell in row.split("|")[1:-1]]


@pytest.fixture
def page():
    """A page with figures of all experiments."""
    runs = {
        x.name: {str(seed): {x.figure: 12.5, "processor_minutes": 3} for seed in x.seeds}
        for x in examples.EXAMPLES
    }
    return examples.table({name: {"seeds": seeds, "step": 1.5} for name, seeds in runs.items()}, "")


def test_a_table_has_the_figures_of_all_seeds(page):
    assert cells(page, "ppo")[4:] == ["12.5, 12.5, 12.5", "3.0", "1.50"]
    assert len(page.splitlines()) == 2 + len(examples.EXAMPLES)


def test_rows_without_new_results_stay_as_they_are(page):
    assert examples.table({}, page) == page
    seeds = {str(seed): {"mean_return": 7.0, "processor_minutes": 1} for seed in PPO.seeds}
    actual = examples.table({"ppo": {"seeds": seeds}}, page)
    assert cells(actual, "ppo")[4:] == ["7, 7, 7", "1.0", "1.50"]
    changed = zip(page.splitlines(), actual.splitlines(), strict=True)
    assert [new for old, new in changed if old != new] == [
        line for line in actual.splitlines() if "[`ppo.py`]" in line
    ]


def test_a_part_of_the_seeds_leaves_the_row_as_it_is(page):
    seeds = {str(PPO.seeds[0]): {"mean_return": 7.0, "processor_minutes": 1}}
    assert examples.table({"ppo": {"seeds": seeds}}, page) == page
    assert cells(examples.table({"ppo": {"seeds": seeds}}, ""), "ppo")[4:] == ["", "", ""]
