"""Jobs of real launchers, on this machine alone: torchrun, Open MPI and Ray Train."""

import os
import re
import socket
import subprocess
import sys

# Each process has two devices. The sum is over all four of them.
SUM = """
import jax, jax.numpy as jnp, redcoast as rc
from jax.sharding import NamedSharding, PartitionSpec as P
rc.initialize(local_devices=2, timeout=60)
x = jax.device_put(jnp.arange(4.0), NamedSharding(rc.make_mesh(), P("data")))
total = float(jnp.sum(x))
print(f"{jax.process_index()} of {jax.process_count()}: {total} of {jax.device_count()}")
"""
PROGRAM = [sys.executable, "-c", SUM]


def launched(*command: str) -> str:
    """Runs a command of a launcher, and returns what its processes print."""
    known = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "NPROC")}
    env = known | {"JAX_PLATFORMS": "cpu", "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def test_processes_of_torchrun_join():
    # Its agent keeps the port of MASTER_ADDR, so process 0 must listen on another one.
    address = ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    output = launched("torchrun", "--nproc-per-node", "2", *address, "--no-python", *PROGRAM)
    assert "0 of 2: 6.0 of 4" in output
    assert "1 of 2: 6.0 of 4" in output


def test_processes_of_open_mpi_join():
    version = re.search(r"Open MPI\) (\d+)", launched("mpirun", "--version"))
    assert version is not None
    options = ["-n", "2", "--oversubscribe"]
    if os.geteuid() == 0:
        options += ["--allow-run-as-root"]
    if int(version[1]) >= 5:  # does not tell the address of process 0
        options += ["-x", f"REDCOAST_COORDINATOR=127.0.0.1:{free_port()}"]
    output = launched("mpirun", *options, *PROGRAM)
    assert "0 of 2: 6.0 of 4" in output
    assert "1 of 2: 6.0 of 4" in output


# `JaxTrainer` connects its workers before it calls the function; without accelerators, only if it
# is told to. The workers have two devices each.
RAY = """
import pathlib
import sys

import ray
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


variables = {
    "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "NPROC": "8"
}
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


def test_workers_of_ray_train_are_connected_already(tmp_path):
    program = tmp_path / "train.py"
    program.write_text(RAY)
    launched(sys.executable, str(program), str(tmp_path))
    found = {"connected": True, "step": 6, "devices": 4, "processes": 2}
    for process in range(2):
        assert (tmp_path / f"{process}.txt").read_text() == str(found)
