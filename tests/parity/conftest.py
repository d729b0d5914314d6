"""As in the other tests, but quicker to compile, and with libraries that may warn."""

import os

import agreement
import pytest

# Of what a session takes, most is the compiler's time, and half of that goes to making fast code.
os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0"


def pytest_configure(config):
    for library in ("torch", "transformers", "huggingface_hub"):
        config.addinivalue_line("filterwarnings", rf"ignore:::{library}\..*")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Sends what a test has recorded with its report, which may go to another process."""
    report = yield
    if call.when == "call":
        found = [*agreement.measured]
        agreement.measured.clear()
        if report.failed:
            params = getattr(item, "callspec", None)
            case = params.params.get("case") if params else None
            kind = case.model.config_class.model_type if case else item.path.stem
            found.append((kind, "failed", 1))
        report.user_properties.append(("agreement", found))
    return report


def pytest_terminal_summary(terminalreporter):
    reports = [x for kind in ("passed", "failed") for x in terminalreporter.stats.get(kind, ())]
    properties = [pair for report in reports for pair in report.user_properties]
    entries = [tuple(entry) for name, found in properties if name == "agreement" for entry in found]
    if entries:
        terminalreporter.section("agreement with transformers")
        terminalreporter.write_line(agreement.table(entries))
