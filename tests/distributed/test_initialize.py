"""Real processes connect, or raise errors."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading

import jax
import pytest
from processes import free_port, run_processes, start_processes

import redcoast as rc
from redcoast.distributed._initialize import _LAUNCHERS, _OF_JAX, _Job, _with_torchrun

JOIN = """
import sys, jax, redcoast as rc
number = int(sys.argv[2])
rc.initialize(
    coordinator=sys.argv[1], processes=2, process_id=number, local_devices=2, timeout=900
)
"""
SUM = """
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
mesh = rc.make_mesh()
x = jax.device_put(jnp.arange(4.0), NamedSharding(mesh, P("data")))
total = float(jax.jit(jnp.sum)(x))  # gloo prints its own messages
print("sum", total, "of", jax.device_count(), "in", jax.process_index())
"""
AGAIN = """
rc.initialize()
rc.initialize(processes=2, local_devices=2)
for wrong in ({"processes": 3}, {"coordinator": "elsewhere:1"}, {"local_devices": 1}):
    try:
        rc.initialize(**wrong)
    except ValueError as error:
        print(error)
"""
# Environment variables of supported launchers, and of redcoast.
VARIABLES = ("REDCOAST_", "SLURM_", "OMPI_", "PMIX_", "KUBERNETES_", "JOB_COMPLETION_INDEX")
NAMES = {*_LAUNCHERS, *_OF_JAX.values(), "MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK"}


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in [name for name in os.environ if name.startswith(VARIABLES) or name in NAMES]:
        monkeypatch.delenv(name)


@pytest.mark.integration
def test_processes_connect_by_environment_variables_only_once():
    script = "import jax, redcoast as rc\nrc.initialize()\n" + AGAIN + SUM
    nowhere = {"http_proxy": "http://127.0.0.1:9"}  # the proxy must not be used
    finished = run_processes(script, processes=2, devices=2, env=nowhere)
    for number, (code, output) in enumerate(finished):
        assert code == 0, output
        assert f"sum 6.0 of 4 in {number}" in output
        assert "has already joined its job with processes=2, and cannot join again with " in output
        assert "again with processes=3" in output
        assert "again with coordinator='elsewhere:1'" in output
        assert "again with local_devices=1" in output


def start(script, *arguments, **env):
    outside = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "NPROC")}
    command = [sys.executable, "-c", script, *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env=outside | env, **pipes)


def finish(process, timeout=900):
    try:
        return process.communicate(timeout=timeout)[0]
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    "second",
    [
        pytest.param({"SLURM_NTASKS": "2", "SLURM_LOCALID": "1"}, id="slurm"),
        pytest.param(
            {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"},
            id="open mpi 5",
            marks=pytest.mark.hosts,
        ),
    ],
)
@pytest.mark.integration
def test_processes_connect_by_arguments_and_by_launcher(second):
    address = f"127.0.0.1:{free_port()}"
    if "SLURM_NTASKS" in second:
        job = 2**12 - (65536 - int(address.split(":")[1])) % 2**12
        port = 65535 - 2**12 + 1 + job % 2**12
        address = f"127.0.0.1:{port}"
        nodes = {"SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_PROCID": "1"}
        env = second | nodes | {"SLURM_JOB_ID": str(job)}
    else:
        env = second | {"REDCOAST_COORDINATOR": address}
    first = start(JOIN + SUM, address, 0)
    script = "import jax, redcoast as rc\nrc.initialize()" + SUM
    other = start(script, address, 1, **env, REDCOAST_LOCAL_DEVICES="2")
    for number, process in enumerate((first, other)):
        output = finish(process)
        assert process.returncode == 0, output
        assert f"sum 6.0 of 4 in {number}" in output


def test_a_single_process_does_nothing(monkeypatch):
    devices, handler = jax.devices(), signal.getsignal(signal.SIGTERM)
    rc.initialize()
    rc.initialize(processes=1)
    rc.initialize(processes=1, process_id=0, coordinator="10.0.0.1:1234")
    monkeypatch.setenv("REDCOAST_PROCESSES", "1")
    rc.initialize()
    monkeypatch.delenv("REDCOAST_PROCESSES")
    for name in ("JOB_ID", "STEP_NODELIST", "NTASKS", "LOCALID"):  # a job of one task
        monkeypatch.setenv(f"SLURM_{name}", "1")
    monkeypatch.setenv("SLURM_PROCID", "0")
    rc.initialize()
    assert not jax.distributed.is_initialized()
    assert jax.devices() == devices
    assert signal.getsignal(signal.SIGTERM) is handler


def variables_of(launcher, port, number):
    address = ("127.0.0.1", str(port))
    if launcher == "kubeflow":
        address = (":".join(address),)
        names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
    else:
        names = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK")
    return dict(zip(names, (*address, "2", str(number), str(number)), strict=False))


@pytest.mark.integration
@pytest.mark.parametrize("launcher", ["kubeflow", "torchrun"])
def test_processes_connect_by_the_variables_of_their_launcher(launcher):
    """Kubeflow Trainer's runtime for JAX, and torchrun, whose agent listens on the port of
    MASTER_PORT."""
    script = "import jax, redcoast as rc\nrc.initialize(timeout=60)" + SUM
    port = free_port()
    with contextlib.ExitStack() as stack:
        more = {"REDCOAST_LOCAL_DEVICES": "2", "JAX_PLATFORMS": "cpu"}
        if launcher == "torchrun":
            port = free_port_before_a_free_one()
            stack.enter_context(socket.create_server(("127.0.0.1", port)))
            more["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        jobs = [variables_of(launcher, port, number) | more for number in range(2)]
        for number, process in enumerate([start(script, **job) for job in jobs]):
            output = finish(process)
            assert process.returncode == 0, output
            assert f"sum 6.0 of 4 in {number}" in output


@pytest.mark.integration
def test_processes_that_their_launcher_connected_stay_connected():
    """Ray Train's `JaxTrainer` calls `jax.distributed.initialize` before the user's function."""
    port = free_port()
    joined = (
        f"import jax, redcoast as rc\njax.distributed.initialize('localhost:{port}', 2, NUMBER)"
    )
    scripts = [joined.replace("NUMBER", str(i)) + "\nrc.initialize()" + SUM for i in range(2)]
    more = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    for number, process in enumerate([start(script, **more) for script in scripts]):
        output = finish(process)
        assert process.returncode == 0, output
        assert f"sum 6.0 of 4 in {number}" in output


def free_port_before_a_free_one():
    while True:
        port = free_port()
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port + 1)):
            return port


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, _Job("10.0.0.1:29500", 2, 1, None, 0)),
        ({"MASTER_ADDR": "fe80::1"}, _Job("[fe80::1]:29500", 2, 1, None, 0)),
        ({"TORCHELASTIC_USE_AGENT_STORE": "True"}, _Job("10.0.0.1:29501", 2, 1, None, 0)),
        ({"LOCAL_RANK": ""}, _Job("10.0.0.1:29500", 2, 1, None, None)),
        ({"WORLD_SIZE": "1", "RANK": "0"}, _Job()),  # a single process
        ({"RANK": ""}, _Job()),
        ({"MASTER_ADDR": ""}, _Job()),
        ({"MASTER_PORT": "x"}, _Job()),
    ],
    ids=str,
)
def test_variables_of_torchrun(changes, expected, monkeypatch):
    options = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "WORLD_SIZE": "2", "RANK": "1"}
    for name, value in (options | {"LOCAL_RANK": "0"} | changes).items():
        monkeypatch.setenv(name, value)
    assert _with_torchrun(_Job()) == expected
    asked = _Job("elsewhere:1", None, 0)
    assert _with_torchrun(asked).process_id == 0
    assert _with_torchrun(asked).coordinator == "elsewhere:1"


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        (
            {"SKYPILOT_NUM_NODES": "3", "SKYPILOT_NODE_RANK": "2"},
            ("SKYPILOT_NUM_NODES=3, so SkyPilot", "=3` and `process_id=2` (this is SKYPILOT"),
        ),
        (
            {"PMI_SIZE": "2", "PMI_RANK": "1"},
            ("so MPICH has", "=1` (this is PMI_RANK)"),
        ),
        ({"WORLD_SIZE": "4"}, ("so torchrun has", "`processes=4` and `process_id=...`, or set")),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, ("so Open MPI has",)),
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, ("so SLURM has", "`processes=8`")),
        ({"SLURM_NNODES": "2"}, ("so SLURM has",)),
        ({"JOB_COMPLETION_INDEX": "1"}, ("Indexed Job", "`processes=...` and `process_id=1`")),
    ],
)
def test_unconnected_processes_of_a_launcher_warn(variables, words, monkeypatch, caplog):
    """Otherwise all processes would train the same model in the same directory."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    rc.initialize()
    assert not jax.distributed.is_initialized()
    for word in (
        *words,
        "this process is connected to no other",
        "alone, pass `processes=1`",
    ):
        assert word in caplog.text
    caplog.clear()
    rc.initialize(processes=1)
    monkeypatch.setenv("JAX_NUM_PROCESSES", "1")
    rc.initialize()
    assert not caplog.text


@pytest.mark.parametrize(
    "variables",
    [
        dict.fromkeys(_LAUNCHERS, "1"),
        dict.fromkeys(_LAUNCHERS, "some"),
        {"JOB_COMPLETION_INDEX": "0"},
        # A SLURM step with one task in a job with two nodes.
        {"SLURM_NNODES": "2", "SLURM_STEP_NODELIST": "a"},
    ],
    ids=["ones", "no numbers", "the first pod", "a step of SLURM"],
)
def test_a_single_process_does_not_warn(variables, monkeypatch, caplog):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    rc.initialize()
    assert not caplog.text


def test_a_single_pod_does_nothing(monkeypatch):
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    rc.initialize()
    assert not jax.distributed.is_initialized()


@pytest.mark.integration
def test_a_missing_process_is_named():
    script = "import redcoast as rc\nrc.initialize(timeout=2)\n"
    (finished,) = run_processes(script, processes=1, env={"REDCOAST_PROCESSES": "2"})
    assert finished.returncode == 1
    last = finished.output.strip().splitlines()[-1]
    assert last.startswith("TimeoutError: Process 1 of 2 did not join within 2 s.")


@pytest.mark.integration
def test_all_connected_processes_name_the_missing_one():
    outcomes = meet_in_threads([(4, 0), (4, 1)], free_port(), 3)
    for error in outcomes.values():
        assert isinstance(error, TimeoutError)
        assert "4 did not join within 3 s" in str(error)
    # If process 1 started first, it times out before process 0.
    assert re.match("Processes (1, )?2 and 3 of 4 did not join", str(outcomes[0]))


def run_here(**arguments):
    """Returns the error of `initialize`, which must be raised before JAX is used."""
    with pytest.raises((OSError, ValueError)) as error:
        rc.initialize(**arguments)
    return str(error.value)


JOB = {"processes": 2, "process_id": 1}


def meet_here(*arguments):
    from redcoast.distributed._rendezvous import meet

    with pytest.raises((OSError, ValueError)) as error:
        meet(*arguments)
    return str(error.value)


@pytest.mark.integration
def test_nothing_listens_at_the_address():
    port = free_port()
    said = meet_here(f"127.0.0.1:{port}", 2, 1, 2)
    assert f"Process 1, on {socket.gethostname()}, did not reach process 0 at 127.0.0.1:" in said
    assert f":{port} within 2 s" in said
    assert "nothing listens on that port" in said


@pytest.mark.integration
def test_an_unknown_host_name():
    said = meet_here("nowhere.invalid:1234", 3, 2, 2)
    assert "did not reach process 0 at nowhere.invalid:1234" in said
    assert "no machine of that name is known" in said


@pytest.mark.integration
def test_another_program_at_the_address():
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            with contextlib.suppress(OSError):
                while True:
                    with server.accept()[0] as connection:
                        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n")

        threading.Thread(target=answer, daemon=True).start()
        said = meet_here(f"127.0.0.1:{server.getsockname()[1]}", 2, 1, 2)
    assert "another program" in said


def test_the_port_of_the_coordinator_is_in_use(monkeypatch):
    monkeypatch.setattr("redcoast.distributed._rendezvous._PATIENCE", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        said = meet_here(f"127.0.0.1:{port}", 2, 0, 5)
    assert f"Process 0 could not listen on port {port}" in said


def meet_in_threads(members, port, timeout=300):
    """Runs several members in threads, and returns their results."""
    from redcoast.distributed._rendezvous import meet

    outcomes = {}

    def run(index, processes, number):
        try:
            outcomes[index] = meet(f"127.0.0.1:{port}", processes, number, timeout)
        except (OSError, ValueError) as error:
            outcomes[index] = error

    threads = [threading.Thread(target=run, args=(i, *member)) for i, member in enumerate(members)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def test_processes_know_how_many_share_their_machine():
    outcomes = meet_in_threads([(20, i) for i in range(20)], free_port())
    assert outcomes == dict.fromkeys(range(20), 20)


def test_different_numbers_of_processes_raise():
    outcomes = meet_in_threads([(3, 0), (2, 1)], free_port())
    for error in outcomes.values():
        assert isinstance(error, ValueError)
        assert "was started as one of 2 processes, but process 0 " in str(error)


def test_two_processes_with_one_id_raise():
    outcomes = meet_in_threads([(3, 0), (3, 1), (3, 1)], free_port())
    for error in outcomes.values():
        assert isinstance(error, ValueError)
        assert "Two processes were started as process 1" in str(error)


@pytest.mark.integration
def test_a_process_may_time_out_and_connect_again():
    port = free_port()
    outcomes = []
    first = threading.Thread(target=lambda: outcomes.append(meet_in_threads([(3, 0)], port, 300)))
    first.start()
    assert "did not join within 3 s" in str(meet_in_threads([(3, 1)], port, 3)[0])
    stranger = socket.create_connection(("127.0.0.1", port))
    stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
    assert meet_in_threads([(3, 1), (3, 2)], port, 300) == {0: 3, 1: 3}
    first.join()
    assert outcomes == [{0: 3}]
    stranger.close()


@pytest.mark.integration
def test_a_failing_process_exits_while_others_wait():
    script = """
import jax, time, redcoast as rc
rc.initialize()
print(jax.device_count())
if jax.process_index() == 1:
    raise KeyError("what went wrong")
print("here")
time.sleep(300)
"""
    with start_processes(script, processes=2) as running:
        code, output = running[1].wait()
        assert code == 1
        assert output.strip().endswith("KeyError: 'what went wrong'")


@pytest.mark.integration
def test_sigterm_reaches_python_and_then_has_its_default_action():
    script = """
import jax, signal, time, redcoast as rc
from redcoast.loop._stop import stop_signals
rc.initialize()
jax.devices()
with stop_signals() as stopping:
    print("ready", flush=True)
    while not stopping():
        time.sleep(0.01)
    print("stopping", flush=True)
print("done", flush=True)
time.sleep(300)
"""
    with start_processes(script, processes=2) as running:
        running[1].wait_for("ready")
        running[1].kill(signal.SIGTERM)
        running[1].wait_for("done")
        assert "stopping" in running[1].output
        running[1].kill(signal.SIGTERM)
        assert running[1].wait().returncode == -signal.SIGTERM


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"processes": 0}, "`processes` is 0. It must be at least 1."),
        ({"processes": 2}, "Pass coordinator and process_id too, or set REDCOAST_COORDINATOR and"),
        ({"coordinator": "a:1"}, "only coordinator='a:1' is known"),
        ({"process_id": 0}, "only process_id=0 is known"),
        (
            {"processes": 1, "process_id": 1},
            "no process 1 of 1 processes: `process_id` counts from 0 to 0",
        ),
        ({"processes": 2, "process_id": -1}, "`process_id` is -1. It must be at least 0."),
        ({"process_id": -1}, "`process_id` is -1. It must be at least 0."),
        (JOB | {"coordinator": "machine"}, "It is 'machine'."),
        (JOB | {"coordinator": "machine:http"}, "It is 'machine:http'."),
        (JOB | {"coordinator": "machine:0"}, "It is 'machine:0'."),
        (JOB | {"coordinator": "machine:65536"}, "It is 'machine:65536'."),
        (JOB | {"coordinator": ":1234"}, "It is ':1234'."),
        (JOB | {"coordinator": "fe80::1:1234"}, "It is 'fe80::1:1234'."),
        ({"local_devices": 0}, "`local_devices` is 0. It must be at least 1."),
        ({"timeout": 0}, "`timeout` is 0. It must be more than 0."),
        ({"local_devices": 3}, "only before JAX is first used"),
        (JOB | {"coordinator": "localhost:1234"}, "JAX was used in this process before"),
    ],
)
def test_bad_arguments(arguments, says):
    jax.devices()
    assert says in run_here(**arguments)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("PROCESSES", "two", "REDCOAST_PROCESSES must be an integer, but is 'two'"),
        ("PROCESS_ID", "1", "set REDCOAST_COORDINATOR and REDCOAST_PROCESSES"),
        ("COORDINATOR", "machine", "host:port"),
        ("LOCAL_DEVICES", "0", "`local_devices` is 0. It must be at least 1."),
        ("JAX_NUM_PROCESSES", "two", "JAX_NUM_PROCESSES must be an integer, but is 'two'"),
        ("JAX_NUM_PROCESSES", "2", "Pass coordinator and process_id too"),
        ("JAX_COORDINATOR_ADDRESS", "machine", "host:port"),
    ],
)
def test_bad_variables(name, value, says, monkeypatch):
    monkeypatch.setenv(name if name.startswith("JAX_") else f"REDCOAST_{name}", value)
    assert says in run_here()


def test_ipv6_addresses_have_brackets():
    from redcoast.distributed._rendezvous import split_address

    assert split_address("[fe80::1]:1234") == ("fe80::1", 1234)
    assert split_address("machine.example:1") == ("machine.example", 1)


@pytest.mark.parametrize(
    ("local_id", "here", "visible", "expected"),
    [
        (None, 2, None, None),  # no launcher with one process per accelerator
        (0, 1, None, None),  # a single process on its machine uses all
        (0, 1, "0,1", None),
        (1, 2, None, [1]),
        (1, 2, "0,1", [1]),
        (1, 2, "1", None),  # the launcher already restricts the devices
    ],
)
def test_processes_of_one_machine_use_one_accelerator_each(
    local_id, here, visible, expected, monkeypatch
):
    from redcoast.distributed._initialize import _local_device_ids

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert _local_device_ids(local_id, here) == expected
