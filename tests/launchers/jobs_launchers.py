"""Jobs of real launchers, on this machine alone: torchrun and Open MPI."""

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
    env = known | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def free_port() -> int:
    with socket.socket() as actual:
        actual.bind(("127.0.0.1", 0))
        return actual.getsockname()[1]


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
