"""Whether the installed JAX has the undocumented APIs that redcoast uses."""

import importlib
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import JaxprEqn

import redcoast
from redcoast.core._versions import versions_tested

SRC = Path(redcoast.__file__).parent

JAX_EXTEND = "jax.extend.core"
# Module, name, and the file that depends on it.
NAMES = [
    ("jax._src.interpreters.ad", "JVPTracer", "train/_loss.py"),
    ("jax._src.interpreters.ad", "LinearizeTracer", "train/_loss.py"),
    ("jax._src.mesh", "thread_resources", "core/_tracing.py"),
    ("jax.interpreters.partial_eval", "dce_jaxpr", "dryrun/_flops.py"),
    ("jaxlib.xla_client", "make_cpu_client", "dryrun/_devices.py"),
    ("jax._src.ad_checkpoint", "name_p", "core/_control_flow.py"),
    (JAX_EXTEND, "Jaxpr", "core/_control_flow.py"),
    (JAX_EXTEND, "JaxprEqn", "core/_jaxpr.py"),
    (JAX_EXTEND, "Literal", "core/_jaxpr.py"),
    (JAX_EXTEND, "Primitive.get_bind_params", "core/_jaxpr.py"),
    (JAX_EXTEND, "jaxprs_in_params", "core/_control_flow.py"),
    (JAX_EXTEND, "Jaxpr.replace", "sharding/constrain/_verify.py"),
    (JAX_EXTEND, "JaxprEqn.replace", "core/_control_flow.py"),
    (JAX_EXTEND, "jaxpr_as_fun", "sharding/constrain/_verify.py"),
    (JAX_EXTEND, "jaxpr_as_fun", "train/_programs.py"),
]


def require(found: bool, name: str, file: str) -> None:
    if not found:
        pytest.fail(
            f"JAX {jax.__version__} has no {name}, on which redcoast/{file} depends. The file was "
            f"tried with JAX {versions_tested('jax')}: adapt it to this version."
        )


@pytest.mark.parametrize(("module", "name", "file"), NAMES)
def test_names(module, name, file):
    assert name.rpartition(".")[2] in (SRC / file).read_text()
    try:
        found = importlib.import_module(module)
    except ImportError:
        found = None
    for part in name.split("."):
        found = getattr(found, part, None)
    require(found is not None, f"{module}.{name}", file)


def equation_of(fn, *args) -> JaxprEqn:
    return jax.make_jaxpr(fn)(*args).jaxpr.eqns[-1]


def test_attributes_of_equations():
    equation = equation_of(jnp.sin, 1.0)
    manager = getattr(getattr(equation, "ctx", None), "manager", None)
    require(manager is not None, "JaxprEqn.ctx.manager", "core/_jaxpr.py")
    frames = getattr(equation.source_info.traceback, "frames", ())
    require(bool(frames), "traceback.frames of equations", "sharding/report/_coupling.py")


def test_attributes_of_arrays():
    require(
        hasattr(jax.random.key(0), "_base_array"),
        "attribute `_base_array` of key arrays",
        "core/_donation.py",
    )
    shard = jnp.zeros(2).addressable_shards[0].data
    name = "jax.Array.unsafe_buffer_pointer"
    require(hasattr(shard, "unsafe_buffer_pointer"), name, "core/_donation.py")


def test_differentiated_arrays_have_a_trace():
    kinds = []

    def loss(x):
        kinds.append((type(x).__name__, hasattr(x, "_trace")))
        return x**2

    jax.grad(loss)(1.0)
    name, has_trace = kinds[0]
    require(name in ("JVPTracer", "LinearizeTracer"), "tracer in `jax.grad`", "train/_loss.py")
    require(has_trace, "attribute `_trace` of tracers", "train/_loss.py")
