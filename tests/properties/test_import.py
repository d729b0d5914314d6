import json
import os
import subprocess
import sys

import pytest

HEAVY = ("wandb", "orbax", "grain", "safetensors", "gguf", "tyro", "tqdm", "matplotlib")
HEAVY += ("google_crc32c", "starlette", "uvicorn", "tokenizers", "jinja2", "llguidance")
OURS = (
    "sharding.heuristic",
    "sharding.pipeline",
    "sharding.program._program",
    "sharding.solver._strategy",
    "sharding.report._table",
    "generate._prompt",
    "pretrained._load",
    "serve",
    "models",
)


def run(program):
    # Installed libraries are compiled, and so is the package after its first import, unless Python
    # is told to write no bytecode.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", program]
    return subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=900, env=environment
    ).stdout


@pytest.fixture(scope="module")
def imported():
    """What is there after `import redcoast` in a process of its own."""
    names = HEAVY + tuple(f"redcoast.{name}" for name in OURS)
    program = f"""
import json, sys
import redcoast as rc
loaded = [name for name in {names} if name in sys.modules]
import jax._src.xla_bridge as bridge
devices = bridge.backends_are_initialized()
listed = {{"models", "losses", "lora"}} <= set(dir(rc))
used = [rc.models.GPT2.__name__, rc.losses.__name__, rc.lora.merge.__name__]
print(json.dumps({{"loaded": loaded, "devices": devices, "listed": listed, "used": used}}))
"""
    return json.loads(run(program))


def test_import_loads_nothing_that_is_not_used(imported):
    assert imported["loaded"] == []


def test_import_touches_no_device(imported):
    assert imported["devices"] is False


@pytest.mark.thorough
def test_import_costs_little_more_than_its_libraries():
    # In one process, so that both are measured under the same circumstances; and several times, as
    # a busy machine may take either of them away for a while.
    program = """
import time
begin = time.process_time()
import jax, equinox, optax
libraries = time.process_time()
import redcoast
print((time.process_time() - begin) / (libraries - begin))
"""
    assert any(float(run(program)) < 1.2 for _ in range(6))


def test_public_names_have_documentation():
    import redcoast

    names = [n for n in dir(redcoast) if not n.startswith("_")]
    public = [n for n in names if not isinstance(getattr(redcoast, n), type(sys))]
    assert "fit" in public
    # A mapping has no docstring: that of `CHIPS` is below its definition.
    assert {n for n in public if not getattr(redcoast, n).__doc__} <= {"CHIPS"}


def test_nothing_else_is_public():
    import redcoast

    assert redcoast.make_mesh.__module__ == "redcoast.distributed._mesh"
    assert not hasattr(redcoast, "Static")


def test_submodules_need_no_import_of_their_own(imported):
    assert imported["used"] == ["GPT2", "redcoast.losses", "merge"]
    assert imported["listed"]


def test_a_name_that_there_is_not():
    import redcoast

    with pytest.raises(AttributeError, match="'redcoast' has no attribute 'modells'"):
        redcoast.modells  # noqa: B018
