"""A job of Ray Train on this machine alone: its workers are connected before `initialize`."""

import os
import subprocess
import sys

TRAIN = """
import pathlib
import sys
import time

import ray
from ray._private import services
from ray.train import RunConfig, ScalingConfig
from ray.train.v2.jax import JaxTrainer
from ray.train.v2.jax.config import JaxConfig


def train(config):
    import equinox as eqx
    import jax
    import numpy as np
    import optax
    import redcoast as rc

    found = {"connected": jax.distributed.is_initialized()}
    rc.initialize()
    state = rc.fit(
        lambda key: eqx.nn.MLP(4, 4, 64, depth=1, key=key),
        optax.adam(1e-2),
        list(np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32)),
        collate_fn=np.stack,
        loss_fn=lambda model, batch, key: ((jax.vmap(model)(batch) - batch) ** 2).mean(),
        batch_size=8,
        steps=6,
        mesh=rc.make_mesh(data=1, fsdp=4),
        log=False,
    )
    found |= {"step": int(state.step), "devices": jax.device_count()}
    found |= {"processes": jax.process_count()}
    pathlib.Path(config["folder"], f"{jax.process_index()}.txt").write_text(str(found))


get_node = services.get_node


def get_started_node(address, node_id):
    while True:
        try:
            return get_node(address, node_id)
        except RuntimeError:  # as long as the node has not started
            time.sleep(1)


# Ray itself gives up after 30 seconds.
services.get_node = get_started_node
devices = "--xla_force_host_platform_device_count=2"
variables = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": devices, "NPROC": "8"}
ray.init(num_cpus=2, include_dashboard=False)
JaxTrainer(
    train,
    train_loop_config={"folder": sys.argv[1]},
    jax_config=JaxConfig(use_gpu=True),
    scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
    run_config=RunConfig(
        storage_path=sys.argv[1], worker_runtime_env={"env_vars": variables}
    ),
).fit()
"""
# On a busy machine Ray needs minutes to start its processes: it waits longer, and starts fewer.
OPTIONS = {
    "JAX_PLATFORMS": "cpu",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "600",
    "RAY_gcs_server_port_wait_time_s": "600",
    "RAY_gcs_server_request_timeout_seconds": "600",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_enable_metrics_collection": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
}


def test_workers_of_ray_train_are_connected_already(tmp_path):
    program = tmp_path / "train.py"
    program.write_text(TRAIN)
    known = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "NPROC")}
    command = [sys.executable, str(program), str(tmp_path)]
    done = subprocess.run(
        command, env=known | OPTIONS, capture_output=True, text=True, timeout=540, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    actual = {"connected": True, "step": 6, "devices": 4, "processes": 2}
    for process in range(2):
        assert (tmp_path / f"{process}.txt").read_text() == str(actual)
