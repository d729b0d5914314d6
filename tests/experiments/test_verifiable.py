"""Rewards that a program computes, and the process in which programs of a model run."""

import numpy as np
import pytest

PASSING = "def f(x):\n    return x + 1"
TESTS = ["f(1) == 2", "f(2) == 3", "f(3) == 5"]


@pytest.mark.parametrize("name", ["sums", "padded_sums", "word_problems", "programs"])
def test_right_answers_have_the_full_reward_and_others_have_not(script, name):
    task = script("_verifiable").make_task(name, 3)
    assert not {x.prompt for x in task.train} & {x.prompt for x in task.test}
    assert len(task.test) == 512
    for problem, other in zip(task.train[:4], task.train[4:8], strict=True):
        assert task.reward(problem, problem.answer) == 1
        assert task.reward(problem, "") == 0
        if problem.answer != other.answer:
            assert task.reward(problem, other.answer) < 1
    again = script("_verifiable").make_task(name, 3)
    assert again.train == task.train
    assert script("_verifiable").make_task(name, 4).train != task.train


def test_problems_are_held_out_and_left(script, capsys):
    make_task = script("_verifiable").make_task
    task = make_task("programs", 0, 3)
    assert (len(task.test), len(task.train)) == (3, 997)
    for count in (0, 1000):
        with pytest.raises(SystemExit):
            make_task("programs", 0, count)
        assert f"--test-problems is {count}, but programs has 1000" in capsys.readouterr().err


def test_the_form_of_an_answer_has_a_small_reward(script):
    verifiable = script("_verifiable")
    assert "####" in verifiable.make_task("word_problems", 0).train[0].prompt
    problem = verifiable.Problem("How many?", "3 + 4 = 7\n#### 1,007")
    rewards = {"#### 1007": 1, "1007": 0, "so #### 7": 0.1, "#### 3 no, #### 1,007": 1, "": 0}
    assert {x: verifiable.last_number(problem, x) for x in rewards} == rewards


def test_shown_sums_are_mostly_without_carrying(script):
    verifiable = script("_verifiable")
    problem, rng = verifiable.Problem("47+85=", "132"), np.random.default_rng(0)
    shown = [verifiable.careless_sum(problem, rng) for _ in range(400)]
    assert set(shown) == {"22", "132"}
    assert 0.86 < shown.count("22") / 400 < 0.94
    assert verifiable.careless_sum(verifiable.Problem("41+37=", "78"), rng) == "78"


def test_programs_are_tested(script):
    passed = script("_sandbox").passed_tests
    assert passed(PASSING, TESTS) == 2
    assert passed("print('9 9')\n" + PASSING, TESTS) == 2
    assert passed("def f(x)", TESTS) == 0
    fenced = f"Here it is:\n```python\n{PASSING}\n```"
    problem = script("_verifiable").Problem("", "", tuple(TESTS))
    assert script("_verifiable").unit_tests(problem, fenced) == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    "program",
    [
        pytest.param("while True: pass", marks=pytest.mark.thorough),
        "import os; os.system('touch {mark}')",
        "open('{mark}', 'w').write('x')",
        "import socket; socket.socket()",
        "import os; os._exit(0)",
        "import sys; sys.exit(0)",
        "x = 'a' * 10**10",
        "import subprocess; subprocess.run(['touch', '{mark}'])",
        "import os; os.open('{mark}', os.O_CREAT | os.O_WRONLY)",
        "import os; os.symlink('/', '{mark}')",
        "import os; os.truncate('/dev/null', 0)",
        "import __main__ as m, os; m.report(f'{m.word} 99'); m.sys.__stdout__.flush(); os._exit(0)",
    ],
)
def test_programs_that_reach_for_more_pass_no_test(script, program, tmp_path):
    mark = tmp_path / "mark"
    text = program.replace("{mark}", str(mark)) + "\n" + PASSING
    assert script("_sandbox").passed_tests(text, TESTS, seconds=1) == 0
    assert not mark.exists()


def test_programs_see_nothing_of_the_environment(script, monkeypatch):
    monkeypatch.setenv("SECRET", "word")
    text = "import os\nf = lambda: os.environ.get('SECRET')"
    assert script("_sandbox").passed_tests(text, ["f() is None"]) == 1
