"""glibc's allocator keeps freed memory where JAX runs on the CPU, and is left alone elsewhere."""

import ctypes
import os
import subprocess
import sys

import jax
import pytest

import redcoast as rc
from redcoast.distributed import _allocator
from redcoast.distributed._allocator import describe_allocator, is_much, keep_freed_memory

# Each call needs 66 MB for temporaries. Prints the page faults of the calls after the first four.
PROGRAM = """
import resource
import redcoast as rc
rc.make_mesh()
import jax, jax.numpy as jnp
x = jnp.ones((2**17, 64))
program = jax.jit(lambda x: jnp.sum(jnp.flip(jax.lax.sort(x), 0) * x))
for number in range(40):
    if number == 4:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    program(x).block_until_ready()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


class Glibc:
    """Records the parameters that are set."""

    def __init__(self):
        self.set = []
        self.result = 1

    def mallopt(self, name, value):
        self.set.append((name, value))
        return self.result


@pytest.fixture
def glibc(monkeypatch):
    """A process with glibc in which JAX has not started, with no settings and no plugins."""
    for name in [name for name in os.environ if "MALLOC" in name or "MALLOPT" in name]:
        monkeypatch.delenv(name)
    library = Glibc()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    monkeypatch.setattr(_allocator, "_is_set", False)
    monkeypatch.setattr(_allocator, "_is_glibc", lambda: True)
    monkeypatch.setattr(_allocator, "has_chosen_devices", lambda: False)
    monkeypatch.setattr(_allocator, "entry_points", lambda group: ())
    monkeypatch.setattr(_allocator, "find_spec", lambda name: None)
    before = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update("jax_platforms", None)
    yield library
    jax.config.update("jax_platforms", before)


def test_one_arena_that_keeps_what_is_freed(glibc):
    keep_freed_memory()
    keep_freed_memory()  # has no effect
    assert glibc.set == [(-8, 1), (-4, 0), (-1, 2**31 - 1)]
    assert "keeps freed memory" in describe_allocator()
    assert "REDCOAST_MALLOPT=0 switches it off" in describe_allocator()


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("REDCOAST_MALLOPT", "0"),
        ("MALLOC_ARENA_MAX", "4"),
        ("MALLOC_TRIM_THRESHOLD_", "100000"),
        ("GLIBC_TUNABLES", "glibc.malloc.arena_max=4"),
        ("TPU_LIBRARY_PATH", "libtpu.so"),
    ],
)
def test_variables_that_leave_it_alone(glibc, monkeypatch, variable, value):
    monkeypatch.setenv(variable, value)
    keep_freed_memory()
    assert not glibc.set
    assert f"left as it is: {variable}" in describe_allocator().replace(
        "JAX may run on accelerators, because of ", ""
    )


def test_accelerators_leave_it_alone_unless_devices_are_emulated(glibc, monkeypatch):
    monkeypatch.setattr(_allocator, "find_spec", lambda name: name == "jax_plugins" or None)
    keep_freed_memory()
    assert not glibc.set
    assert "because of jax_plugins" in describe_allocator()
    keep_freed_memory(on_cpu=True)
    assert glibc.set


@pytest.mark.parametrize(("platforms", "is_cpu"), [("cpu", True), ("cuda,cpu", False)])
def test_the_platform_that_jax_is_told_to_use(glibc, monkeypatch, platforms, is_cpu):
    monkeypatch.setattr(_allocator, "find_spec", lambda name: name == "libtpu" or None)
    jax.config.update("jax_platforms", platforms)
    keep_freed_memory()
    assert bool(glibc.set) == is_cpu


def test_other_libraries_and_late_calls(glibc, monkeypatch):
    glibc.result = 0
    keep_freed_memory()
    assert "glibc refused" in describe_allocator()
    glibc.set.clear()
    monkeypatch.setattr(_allocator, "has_chosen_devices", lambda: True)
    keep_freed_memory()
    assert "JAX was used before `make_mesh`" in describe_allocator()
    monkeypatch.setattr(_allocator, "_is_glibc", lambda: False)
    keep_freed_memory(on_cpu=True)
    assert "not glibc" in describe_allocator()
    assert not glibc.set


def test_devices_are_emulated_on_the_cpu(glibc):
    jax.devices()  # so that the configuration of this process does not change
    with pytest.raises(ValueError, match="before JAX is first used"):
        rc.emulate_devices(4)
    assert glibc.set


def test_a_switch_that_is_neither_on_nor_off(glibc, monkeypatch):
    monkeypatch.setenv("REDCOAST_MALLOPT", "no")
    with pytest.raises(ValueError, match="REDCOAST_MALLOPT must be 1, or 0 .* is 'no'"):
        keep_freed_memory()


def test_an_import_needs_to_be_told(glibc):
    """A process that only imports redcoast keeps its allocator."""
    keep_freed_memory(on_cpu=False)
    assert not glibc.set
    assert "JAX_PLATFORMS=cpu is not set" in describe_allocator()


def test_free_memory_is_returned_when_it_is_much():
    """Otherwise, a process would grow to several times of what it uses."""
    whole = 32 * 2**30
    much = lambda free, most_used, available: is_much(
        free * 2**30, most_used * 2**30, available * 2**30, whole
    )
    assert not much(4, 4, 16)
    assert much(5, 4, 16)
    assert much(1, 4, 7)  # the machine has little left
    assert not much(0, 4, 7)


@pytest.mark.integration
@pytest.mark.skipif(not _allocator._is_glibc(), reason="the C library is not glibc")
def test_a_step_has_few_page_faults():
    """The thread that computes has an arena of its own by default, whose blocks are returned."""
    faults = {}
    for switch in ("0", "1"):
        env = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}
        env |= {"REDCOAST_MALLOPT": switch, "XLA_FLAGS": ""}
        ran = subprocess.run(
            [sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True
        )
        assert ran.returncode == 0, ran.stderr
        faults[switch] = int(ran.stdout)
    # By default, each page of all temporaries, of 4 KiB or more, is cleared in each of 36 calls.
    # Memory that grows would be cleared, too.
    assert faults["1"] < faults["0"] / 2
