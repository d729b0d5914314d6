"""A test of the default suite fails if it takes much more than its processor time."""

import budget
import pytest


def run(item, used, slow=1.0):
    """The hook around a test that takes `used` seconds on a machine `slow` times slower."""
    times = iter([10.0, 10.0 + used])
    with pytest.MonkeyPatch.context() as patch:  # undone before this test's own hook goes on
        patch.setattr(budget, "processor_time", lambda: next(times))
        patch.setattr(budget, "slowness", lambda: slow)
        hook = budget.pytest_runtest_call(item)
        next(hook)
        with pytest.raises(StopIteration) as result:
            hook.send("done")
    return result.value.value


def test_too_much_is_refused(request):
    words = r"took 7\.6 s of processor time, where 3 s are the most .* mark it `thorough` or"
    with pytest.raises(pytest.fail.Exception, match=words):
        run(request.node, 7.6)


@pytest.mark.parametrize(("used", "slow"), [(0.1, 1.0), (7.4, 1.0), (29.0, 4.0)])
def test_less_and_a_slower_machine_pass(request, used, slow):
    assert run(request.node, used, slow) == "done"


def test_a_test_may_name_its_own_budget(request):
    request.node.add_marker(pytest.mark.seconds(10))
    assert run(request.node, 24.9) == "done"
    with pytest.raises(pytest.fail.Exception, match=r"took 25\.1 s .* where 10 s are the most"):
        run(request.node, 25.1)


@pytest.mark.parametrize("name", budget.ELSEWHERE)
def test_other_sessions_take_as_long_as_they_do(request, name):
    request.node.add_marker(name)
    assert run(request.node, 100.0) == "done"


def test_the_machine_is_measured_in_processor_time():
    begin = budget.processor_time()
    assert budget.slowness() >= 1.0
    assert budget.processor_time() > begin
