"""Whether the installed jax has the private APIs in `distributed/_private_jax.py`."""

import importlib
import inspect

import jax
import pytest

TRIED = "0.10.2"


def require(found, name):
    if not found:
        pytest.fail(
            f"jax {jax.__version__} has no {name}, on which redcoast/distributed/_private_jax.py "
            f"depends. It was tried with jax {TRIED}: adapt that file to this version."
        )


def test_global_state():
    from jax._src import distributed

    state = getattr(distributed, "global_state", None)
    names = ("client", "service", "coordinator_address", "num_processes", "process_id")
    for name in names:
        require(hasattr(state, name), f"jax._src.distributed.global_state.{name}")


def test_service_is_looked_up_when_it_is_started():
    from jax._src import distributed

    _jax = importlib.import_module("jax._src.lib")._jax
    name = "get_distributed_runtime_service"
    require(hasattr(_jax, name), f"_jax.{name}")
    text = inspect.getsource(distributed)
    require(f"_jax.{name}(" in text, f"call of `_jax.{name}` in jax._src.distributed")


def test_service_and_client_have_the_methods_that_are_called():
    _jax = importlib.import_module("jax._src.lib")._jax
    service = getattr(_jax, "DistributedRuntimeService", None)
    require(hasattr(service, "shutdown"), "_jax.DistributedRuntimeService.shutdown")
    client = getattr(_jax, "DistributedRuntimeClient", None)
    for name in (
        "blocking_key_value_get",
        "key_value_delete",
        "key_value_dir_get",
        "key_value_set",
        "wait_at_barrier",
    ):
        require(hasattr(client, name), f"_jax.DistributedRuntimeClient.{name}")


def test_launchers():
    from jax._src import clusters

    launchers = getattr(clusters.ClusterEnv, "_cluster_types", [])
    require(launchers, "jax._src.clusters.ClusterEnv._cluster_types")
    for name in (
        "get_coordinator_address",
        "get_local_process_id",
        "get_process_count",
        "get_process_id",
        "is_env_present",
        "opt_in_only_method",
    ):
        require(all(hasattr(x, name) for x in launchers), f"jax._src.clusters.ClusterEnv.{name}")
    names = [launcher.__name__ for launcher in launchers]
    require("K8sCluster" in names, "launcher K8sCluster")


def test_backends_are_initialized():
    from jax._src import xla_bridge

    jax.devices()
    found = getattr(xla_bridge, "backends_are_initialized", lambda: False)
    require(found(), "jax._src.xla_bridge.backends_are_initialized")
