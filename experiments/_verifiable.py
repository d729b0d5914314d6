"""Problems whose answers a program can check, and their rewards in plain Python."""

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from _options import refuse
from _sandbox import passed_tests


@dataclass(frozen=True)
class Problem:
    """A prompt, its answer, and what checks other answers."""

    prompt: str
    answer: str
    tests: tuple[str, ...] = ()


@dataclass(frozen=True)
class Task:
    """Problems to train on and problems that are held out, the reward of an answer, and the answer
    that someone shows who can be imitated, which may be wrong."""

    train: Sequence[Problem]
    test: Sequence[Problem]
    reward: Callable[[Problem, str], float]
    show: Callable[[Problem, np.random.Generator], str]


def make_task(name: str, seed: int, test_problems: int = 512) -> Task:
    """Makes the problems of a task, ordered by the seed, of which some are held out."""
    make, reward, show = TASKS[name]
    problems = make(random.Random(seed))
    if not 0 < test_problems < len(problems):
        refuse(
            f"--test-problems is {test_problems}, but {name} has {len(problems)} problems. At "
            "least one must be held out, and one be left."
        )
    return Task(problems[test_problems:], problems[:test_problems], reward, show)


CARELESS = 0.9  # of the sums that are shown are made without carrying


def sums(rng: random.Random) -> list[Problem]:
    """All sums of two numbers below 100."""
    problems = []
    for a in range(100):
        for b in range(100):
            problems.append(Problem(f"{a}+{b}=", str(a + b)))
    rng.shuffle(problems)
    return problems


def padded_sums(rng: random.Random) -> list[Problem]:
    """The same, with two digits for each number: 07+09=. A model that sees few short prompts
    answers them wrongly, whatever it is rewarded for."""
    problems = []
    for problem in sums(rng):
        a, b = problem.prompt.rstrip("=").split("+")
        problems.append(Problem(f"{a:0>2}+{b:0>2}=", problem.answer))
    return problems


def careless_sum(problem: Problem, rng: np.random.Generator) -> str:
    """The sum by someone who mostly forgets to carry: 47 + 85 is 22."""
    if rng.random() > CARELESS:
        return problem.answer
    a, b = map(int, problem.prompt.rstrip("=").split("+"))
    return str((a // 10 + b // 10) % 10 * 10 + (a + b) % 10)


def right_answer(problem: Problem, rng: np.random.Generator) -> str:
    return problem.answer


STORIES = (
    ("{name} has {a} {thing}. {name} buys {b} bags with {c} {thing} each and gives {d} {thing} "
     "away. How many {thing} does {name} have now?",
     "There are {b} * {c} = {bc} {thing} in the bags. {a} + {bc} - {d} = {e}.",
     lambda a, b, c, d: a + b * c - d),
    ("{name} reads {a} pages on each of {b} days, and then {c} pages more. The book has {d} pages "
     "more than that. How many pages does the book have?",
     "In {b} days, {name} reads {a} * {b} = {ab} pages. {ab} + {c} + {d} = {e}.",
     lambda a, b, c, d: a * b + c + d),
    ("A train has {b} wagons with {a} seats each. {c} seats are broken, and {d} are taken. How "
     "many seats are free?",
     "There are {a} * {b} = {ab} seats. {ab} - {c} - {d} = {e}.",
     lambda a, b, c, d: a * b - c - d),
)  # fmt: skip


def word_problems(rng: random.Random, count: int = 4000) -> list[Problem]:
    """Word problems of several steps in the format of GSM8K: the answer ends with `#### 42`."""
    problems: dict[str, Problem] = {}  # by prompt, since each is there once
    while len(problems) < count:
        story, steps, result = rng.choice(STORIES)
        a, b, c, d = rng.randint(20, 60), rng.randint(2, 9), rng.randint(2, 12), rng.randint(1, 20)
        values: dict[str, int | str] = {"a": a, "b": b, "c": c, "d": d, "ab": a * b, "bc": b * c}
        values["e"] = result(a, b, c, d)
        values["name"] = rng.choice(["Ada", "Ben", "Chen", "Dora", "Emil", "Fatima"])
        values["thing"] = rng.choice(["apples", "marbles", "stamps", "books", "shells"])
        prompt = f"{story.format(**values)} End your answer with #### and the number."
        answer = f"{steps.format(**values)}\n#### {values['e']}"
        problems[prompt] = Problem(prompt, answer)
    return [*problems.values()]


OPERATIONS = {
    "the sum of {a} and x": "x + {a}",
    "x times {a}": "x * {a}",
    "the square of x, minus {a}": "x * x - {a}",
    "the larger one of x and {a}": "max(x, {a})",
    "the remainder of x divided by {a}": "x % {a}",
}


def programs(rng: random.Random) -> list[Problem]:
    """Functions to write, with tests of what they return."""
    problems = []
    for a in range(2, 202):
        for words, expression in OPERATIONS.items():
            body = expression.format(a=a)
            tests = []
            for x in (0, 7, 250):
                expected = eval(body, {"x": x, "max": max})
                tests.append(f"f({x}) == {expected}")
            prompt = f"Write a Python function f(x) that returns {words.format(a=a)}."
            problems.append(Problem(prompt, f"def f(x):\n    return {body}", (*tests,)))
    rng.shuffle(problems)
    return problems


def exact(problem: Problem, answer: str) -> float:
    """1 for the right answer and nothing else."""
    return float(answer.strip() == problem.answer)


def last_number(problem: Problem, answer: str) -> float:
    """1 for the right number after `####`; 0.1 for another number there, since the form is right;
    0 without it."""
    numbers = re.findall(r"####\s*(-?[\d,]*\d)", answer)
    if not numbers:
        return 0.0
    number = int(numbers[-1].replace(",", ""))
    expected = int(problem.answer.rpartition("####")[2].replace(",", ""))
    if number == expected:
        return 1.0
    return 0.1


def unit_tests(problem: Problem, answer: str) -> float:
    """The part of the tests that a program passes; a block of Markdown is taken out of its text."""
    program = answer
    if block := re.search(r"```(?:python)?\n(.*?)```", answer, re.DOTALL):
        program = block[1]
    return passed_tests(program, problem.tests) / len(problem.tests)


TASKS = {
    "sums": (sums, exact, careless_sum),
    "padded_sums": (padded_sums, exact, careless_sum),
    "word_problems": (word_problems, last_number, right_answer),
    "programs": (programs, unit_tests, right_answer),
}
