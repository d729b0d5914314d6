"""As in the other tests, but quicker to compile, and with libraries that may warn."""

import os
from pathlib import Path

import agreement
import pytest

# Of what a session takes, most is the compiler's time, and half of that goes to making fast code.
os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0"


def pytest_addoption(parser):
    text = "A file to which what each test has found is added; the table is then of the whole file."
    parser.addoption("--agreement", type=Path, help=text)


def pytest_configure(config):
    for library in ("torch", "transformers", "huggingface_hub"):
        config.addinivalue_line("filterwarnings", rf"ignore:::{library}\..*")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Sends what a test has recorded with its report, which may go to another process, and writes
    it at once, so that a run that is interrupted can go on."""
    report = yield
    if call.when == "call":
        actual = [*agreement.measured]
        agreement.measured.clear()
        if report.failed:
            params = getattr(item, "callspec", None)
            case = params.params.get("case") if params else None
            kind = case.model.config_class.model_type if case else item.path.stem
            actual.append((kind, "failed", 1))
        report.user_properties.append(("agreement", actual))
        if path := item.config.getoption("agreement", None):
            agreement.write(path, item.nodeid, actual)
    return report


def found_by(report):
    properties = [pair for pair in report.user_properties if pair[0] == "agreement"]
    return [tuple(entry) for _, actual in properties for entry in actual]


def pytest_terminal_summary(terminalreporter, config):
    if path := config.getoption("agreement", None):
        entries = agreement.read(path)
    else:
        kinds = ("passed", "failed")
        reports = [x for kind in kinds for x in terminalreporter.stats.get(kind, ())]
        entries = [entry for report in reports for entry in found_by(report)]
    if entries:
        terminalreporter.section("agreement with transformers")
        terminalreporter.write_line(agreement.table(entries))
