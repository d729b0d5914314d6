"""Whether the installed wandb has the private names that `tracking/_wandb.py` uses."""

import inspect

import pytest
import wandb
from wandb.sdk import wandb_setup

TRIED = "0.31.0"


def require(found, what):
    if not found:
        pytest.fail(
            f"wandb {wandb.__version__} has changed: {what}. `_skip_exit_hook` in "
            f"redcoast/tracking/_wandb.py was tried with {TRIED}: adapt it to this version."
        )


def test_connection_of_the_singleton():
    require(hasattr(wandb_setup, "_singleton"), "`wandb.sdk.wandb_setup._singleton` is missing")
    setup = getattr(wandb_setup, "_WandbSetup", None)
    text = "" if setup is None else inspect.getsource(setup)
    require("self._connection" in text, "the singleton has no `_connection`")


def test_exit_hook_calls_teardown_of_the_connection():
    from wandb.sdk.lib.service import service_connection

    text = inspect.getsource(service_connection)
    require("conn.teardown(" in text, "the exit hook does not call `teardown` of the connection")
    teardown = getattr(service_connection.ServiceConnection, "teardown", None)
    found = teardown is not None and list(inspect.signature(teardown).parameters)
    require(found == ["self", "exit_code"], "`ServiceConnection.teardown` has other arguments")
