"""`redcoast serve`: a pretrained language model over HTTP, with OpenAI's API."""

import math
import os
import socket
import sys

import jax

import redcoast as rc
from redcoast.serve import require_extra
from redcoast.serve._extra import SERVER

from ._options import ServeCommand
from ._usage import mesh_sizes, refuse

KEY = "REDCOAST_API_KEY"


def main(c: ServeCommand) -> None:
    """Loads the model, and serves it until the process is terminated."""
    try:
        require_extra(*SERVER)
    except ImportError as error:
        refuse(str(error))
    # Imported here, because they need the extra.
    from redcoast.serve._application import run_application
    from redcoast.serve._guard import is_this_machine
    from redcoast.serve._load_served import load_served

    check(c)
    key = c.api_key or os.environ.get(KEY)
    rc.initialize(local_devices=c.local_devices)
    if jax.process_count() > 1:
        refuse("The server runs in one process, with all of its devices. Start it once.")
    try:
        served, server = load_served(
            c.weights,
            mesh=make_served_mesh(c.mesh),
            name=c.name,
            dtype=c.dtype,
            rows=c.rows,
            waiting=c.waiting,
            context=c.context,
            new_tokens=c.new_tokens,
            seed=c.seed,
        )
    except (ValueError, TypeError, OSError, ImportError) as error:
        refuse(str(error))
    if key is None and not is_this_machine(c.host):
        print("Other machines can use this server without a key: see --api-key.", file=sys.stderr)
    run_application(
        served, server, host=c.host, port=c.port, key=key, wait=c.wait, timeout=c.timeout
    )


def check(c: ServeCommand) -> None:
    for name in ("rows", "waiting", "context", "new_tokens"):
        if getattr(c, name) < 1:
            refuse(f"--{name.replace('_', '-')} must be at least 1, but is {getattr(c, name)}.")
    if not 0 <= c.port < 2**16:
        refuse(f"--port must be at least 0 and at most 65535, but is {c.port}.")
    check_address(c.host, c.port)
    if not c.timeout > 0:
        refuse(f"--timeout must be positive, but is {c.timeout}.")
    for name, key in (("--api-key", c.api_key), (KEY, os.environ.get(KEY))):
        if key is not None and not (
            key and key.isascii() and key.isprintable() and key == key.strip()
        ):
            refuse(f"{name} must be printable ASCII, without spaces at its ends.")


def check_address(host: str, port: int) -> None:
    """Refuses an address at which this machine cannot listen, before a model is loaded."""
    try:
        family, *_, address = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM)[0]
        socket.create_server(address[:2], family=family).close()
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        refuse(
            f"The server cannot listen at --host {host} and --port {port}: {reason}. The host is "
            "a name or an address of this machine, such as 127.0.0.1, and the port is unused."
        )


def make_served_mesh(text: str) -> jax.sharding.Mesh:
    """The mesh that `--mesh` describes, of the first devices if it needs fewer than all."""
    if text == "auto":
        return rc.make_mesh(data=1, fsdp=-1)
    sizes = {"data": -1} | mesh_sizes(text)
    devices = jax.devices()
    count = math.prod(sizes.values())
    if 0 < count < len(devices):
        devices = devices[:count]
    return rc.make_mesh(**sizes, devices=devices)
