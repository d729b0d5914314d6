"""The search for the cheapest set of classes, compared with trying all sets."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from counting import count_calls
from grammar import LAYERS, Sizes, program
from jax.sharding import PartitionSpec as P
from sharding_helpers import array, mesh_of

import redcoast as rc
from redcoast.sharding.program._batch_dims import batch_dims
from redcoast.sharding.program._classes import Classes, conflicts
from redcoast.sharding.program._program import follow_program
from redcoast.sharding.program._trace import trace
from redcoast.sharding.solver import _eliminate as search_module
from redcoast.sharding.solver._cost import Problem, price
from redcoast.sharding.solver._eliminate import search_classes
from redcoast.sharding.solver._strategy import _candidates

MODEL, BATCH = 4, 2


def random_problem(seed):
    """The problem of a random program by class, and the classes that the search chooses."""
    rng = np.random.default_rng(seed)
    pick = lambda *options: options[rng.integers(len(options))]
    sizes = Sizes(
        batch=pick(2, 16, 128),
        time=pick(16, 128, 1024),
        width=pick(192, 768, 1536),
        hidden=pick(256, 1024, 8192),
        heads=pick(4, 6, 8, 16),
        experts=pick(4, 6, 64),
        vocabulary=pick(250, 32_000),
    )
    layers = rng.choice(sorted(LAYERS), rng.integers(3, 9)).tolist()
    hardware = rc.Hardware(
        flops=pick(1e12, 1e14), memory_bandwidth=pick(1e11, 1.5e12), scatters=pick(True, False)
    )
    return choose(followed(*program(layers, sizes)), hardware, rng)


def followed(fn, model, batch):
    traced, _ = trace(fn, model, (batch, None))
    return follow_program(traced, [True] * traced.arrays)


def choose(program, hardware, rng):
    sharded = [value for value in program.parameters if rng.random() < 0.7]
    graph, classes = program.graph, Classes(program.graph, MODEL)
    over = batch_dims(program, BATCH)
    against = conflicts(graph, classes, _candidates(program, classes, over))
    problem = price(
        graph, classes, over, against, sharded, hardware, model=MODEL, fsdp=1, gradient_shards=1
    )
    return problem, search_classes(problem)


def is_allowed(problem, chosen):
    return all(problem.against[one].isdisjoint(chosen) for one in chosen)


def costs_of(problem, chosen):
    """The cost of each set of classes, a row of `chosen` with a column for each class."""
    place = {one: i for i, one in enumerate(problem.against)}
    costs = np.zeros(len(chosen))
    for (_, classes), (hit, miss) in problem.costs.items():
        any_of = np.any(chosen[:, [place[one] for one in classes]], axis=1)
        costs = costs + np.where(any_of, hit, miss)
    return costs


def cost(problem, chosen):
    seconds = problem.seconds(frozenset(chosen))
    return seconds.serial + seconds.memory


def cheapest(problem):
    """The cost of the best of all allowed sets of classes, each of them tried."""
    sets = np.zeros((1, 0), bool)
    for i, one in enumerate(problem.against):
        against = np.array(
            [other in problem.against[one] for other in list(problem.against)[:i]], bool
        )
        free = sets[~np.any(sets & against, axis=1)]
        without = np.pad(sets, ((0, 0), (0, 1)))
        sets = np.concatenate([without, np.pad(free, ((0, 0), (0, 1)), constant_values=True)])
    return np.min(costs_of(problem, sets))


@pytest.mark.thorough
def test_as_cheap_as_the_best_of_all_sets_of_classes():
    excess, counts = [], []
    for seed in range(40):
        problem, picked = random_problem(seed)
        assert is_allowed(problem, picked)
        excess.append(cost(problem, picked) / cheapest(problem) - 1)
        counts.append((len(problem.against), len(picked)))
    assert np.mean(np.array(excess) < 1e-6) >= 0.95
    assert max(excess) < 0.05
    # The programs are such that there is something to choose.
    assert np.mean([of > 4 for of, _ in counts]) > 0.5
    assert np.mean([0 < some < of for of, some in counts]) > 0.3


def random_costs(rng, count, widest):
    against = {i: set() for i in range(count)}
    for a, b in rng.integers(count, size=(count, 2)).tolist():
        if a != b:
            against[a].add(b)
            against[b].add(a)
    problem = Problem(against)
    problem.add("memory", frozenset(), 1.0, 1.0)
    for root, seconds in enumerate(rng.exponential(size=count).tolist()):
        problem.add("exposed", frozenset([root]), seconds, 0.0)
    for _ in range(3 * count):
        classes = rng.choice(count, rng.integers(1, widest + 1), replace=False).tolist()
        hit, miss = sorted(rng.exponential(size=2).tolist())
        problem.add("arithmetic", frozenset(classes), hit, miss)
    return problem


@pytest.mark.parametrize("seed", range(20))
def test_finds_the_best_of_any_costs(seed):
    problem = random_costs(np.random.default_rng(seed), 12, widest=4)
    picked = search_classes(problem)
    assert is_allowed(problem, picked)
    assert cost(problem, picked) == pytest.approx(cheapest(problem), rel=1e-9)


@pytest.mark.parametrize("seed", range(10))
def test_too_many_neighbours_cost_some_and_not_much(seed, monkeypatch):
    monkeypatch.setattr(search_module, "MAX_NEIGHBOURS", 3)
    problem = random_costs(np.random.default_rng(seed), 12, widest=2)
    picked = search_classes(problem)
    assert is_allowed(problem, picked)
    assert cost(problem, picked) <= cost(problem, [])
    assert cost(problem, picked) >= cheapest(problem) * (1 - 1e-9)


def test_where_it_makes_no_difference_nothing_is_split():
    problem = Problem({0: set(), 1: set()})
    problem.add("exposed", frozenset([0]), 0.1 + 0.2, 0.3)
    assert search_classes(problem) == frozenset()


def specs(plan):
    return {row.path: str(row.spec) for row in plan.report.arrays}


def chain(layers):
    sizes = Sizes(batch=16, time=512, width=512, hidden=2048, heads=8, vocabulary=8192)
    return program(layers, sizes)


@pytest.mark.thorough
def test_the_same_every_time_and_whatever_the_order_of_leaves():
    fn, model, batch = chain(["attention", "gated", "experts", "layers", "depthwise"])
    plan = lambda fn, model: rc.plan_shardings(model, mesh_of(2, 2, 4), fn=fn, args=(batch, None))
    expected = specs(plan(fn, model))
    assert any("model" in spec for spec in expected.values())
    assert specs(plan(fn, model)) == expected
    # A list keeps the order that it is given; leaves of dicts are sorted by name.
    names = [(a, b) for a, layer in model.items() if a != "embed" for b in layer]
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(len(names))
        leaves = [model["embed"], *(model[names[i][0]][names[i][1]] for i in order)]

        def shuffled(leaves, batch, key, order=order):
            rebuilt = {"embed": leaves[0]}
            for i, leaf in zip(order, leaves[1:], strict=True):
                rebuilt.setdefault(names[i][0], {})[names[i][1]] = leaf
            return fn(rebuilt, batch, key)

        actual = specs(plan(shuffled, leaves))
        for place, i in enumerate(order):
            assert actual[str(place + 1)] == expected["/".join(names[i])]


@pytest.mark.thorough
def test_layers_of_the_same_shape_decide_alike():
    names = ["norm", "attention", "norm", "gated"] * 8
    fn, model, batch = chain(names)
    plan = rc.plan_shardings(model, mesh_of(2, 1, 4), fn=fn, args=(batch, None))
    by_role = {}
    for path, spec in specs(plan).items():
        if "/" in path:
            layer, name = path.split("/")
            by_role.setdefault((layer.split()[1], name), set()).add(spec)
    assert all(len(actual) == 1 for actual in by_role.values())
    assert by_role["gated", "up"] == {str(P(None, "model"))}


def unequal(count):
    """A chain of layers of different widths, so that every class is decided by itself."""
    widths = [64 * (2 + i % 53) + 64 * 53 * (i // 53) for i in range(count + 1)]
    model = [array(*pair) for pair in itertools.pairwise(widths)]

    def fn(model, x, key):
        for w in model:
            x = jax.nn.relu(x @ w)
        return jnp.mean(x**2)

    return fn, model, array(256, widths[0])


def work(fn, model, batch):
    """How many functions planning calls."""
    plans = []
    make = lambda: rc.plan_shardings(model, mesh_of(2, 2, 2), fn=fn, args=(batch, None))
    calls = count_calls(lambda: plans.append(make()))
    assert any("model" in spec for spec in specs(plans[0]).values())
    return calls


@pytest.mark.parametrize(
    ("make", "few", "many"),
    [(unequal, 10, 60), (lambda count: chain(["norm", "gated"] * count), 4, 16)],
)
@pytest.mark.few("unequal-10-60")
@pytest.mark.thorough
def test_the_work_is_linear_in_the_number_of_equations(make, few, many):
    work(*make(2))  # what JAX does only once
    assert work(*make(many)) < 1.25 * many / few * work(*make(few))
