import subprocess
import sys

import pytest

HEAVY = ("wandb", "orbax", "grain", "safetensors", "gguf", "tyro", "tqdm", "matplotlib")
OURS = (
    "sharding.heuristic",
    "sharding.report._table",
    "generate._prompt",
    "pretrained._load",
    "models",
)


def run(program):
    return subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=900
    ).stdout


def test_import_loads_nothing_that_is_not_used():
    names = HEAVY + tuple(f"redcoast.{name}" for name in OURS)
    loaded = run(f"import redcoast, sys; print([n for n in {names} if n in sys.modules])")
    assert loaded.strip() == "[]"


def test_import_touches_no_device():
    program = "import redcoast, jax._src.xla_bridge as x; print(x.backends_are_initialized())"
    assert run(program).strip() == "False"


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
    assert [n for n in public if not getattr(redcoast, n).__doc__] == []


def test_nothing_else_is_public():
    import redcoast

    assert redcoast.make_mesh.__module__ == "redcoast.distributed._mesh"
    assert not hasattr(redcoast, "Static")


def test_submodules_need_no_import_of_their_own():
    program = "import redcoast as rc; print(rc.models.GPT2.__name__, rc.losses, rc.lora.merge)"
    assert run(program).startswith("GPT2 <module")
    complete = "import redcoast as rc; print({'models', 'losses', 'lora'} <= set(dir(rc)))"
    assert run(complete).strip() == "True"


def test_a_name_that_there_is_not():
    import redcoast

    with pytest.raises(AttributeError, match="'redcoast' has no attribute 'modells'"):
        redcoast.modells  # noqa: B018
