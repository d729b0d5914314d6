"""Connects the processes of a run, from explicit addresses or the variables of a launcher."""

import atexit
import logging
import os
from dataclasses import dataclass, replace

import jax

from ..core._errors import check_integer, check_kind, check_number
from ..core._frames import hide_frames
from ._coordinator import CoordinatorWatch, Service, skip_barrier_on_error, wait_for_all
from ._mesh import emulate_devices
from ._private_jax import has_chosen_devices, launchers, runtime, service_from
from ._rendezvous import is_loopback, meet, split_address

logger = logging.getLogger("redcoast")

# Seconds without a heartbeat until JAX aborts a process; `CoordinatorWatch` ends it before that.
_HEARTBEAT = 100
_NO_PROXY = "no_grpc_proxy"  # gRPC reads the lower-case variable
# JAX's own variables, which Kubeflow Trainer sets.
_OF_JAX = {
    "coordinator": "JAX_COORDINATOR_ADDRESS",
    "processes": "JAX_NUM_PROCESSES",
    "process_id": "JAX_PROCESS_ID",
}
# Variables with the number of processes or machines of a launcher, the launcher's name, and the
# variable with the index of this process.
_LAUNCHERS = {
    "WORLD_SIZE": ("torchrun", "RANK"),
    "JAX_PROCESS_COUNT": ("a launcher of JAX", "JAX_PROCESS_INDEX"),
    "NUM_PROCESSES": ("Kubeflow", "PROCESS_ID"),
    "SKYPILOT_NUM_NODES": ("SkyPilot", "SKYPILOT_NODE_RANK"),
    "SLURM_NTASKS": ("SLURM", "SLURM_PROCID"),
    "SLURM_NNODES": ("SLURM", "SLURM_NODEID"),
    "OMPI_COMM_WORLD_SIZE": ("Open MPI", "OMPI_COMM_WORLD_RANK"),
    "PMI_SIZE": ("MPICH", "PMI_RANK"),
    "MV2_COMM_WORLD_SIZE": ("MVAPICH", "MV2_COMM_WORLD_RANK"),
    "FLUX_JOB_SIZE": ("Flux", "FLUX_TASK_RANK"),
    "JSM_NAMESPACE_SIZE": ("jsrun", "JSM_NAMESPACE_RANK"),
    "PET_NNODES": ("Kubeflow", "PET_NODE_RANK"),
    "AZUREML_NODE_COUNT": ("Azure ML", "NODE_RANK"),
}


@dataclass(frozen=True)
class _Job:
    """The coordinator of a job, its number of processes, and the index of this one."""

    coordinator: str | None = None
    processes: int | None = None
    process_id: int | None = None
    local_devices: int | None = None
    # The index on its machine, if the launcher starts one process for each accelerator.
    local_id: int | None = None


@hide_frames
def initialize(
    *,
    coordinator: str | None = None,
    processes: int | None = None,
    process_id: int | None = None,
    local_devices: int | None = None,
    timeout: int | float = 300,
) -> None:
    """Connects this process to the other processes of its job, so that a mesh contains all devices.

    Each process runs the same script, and calls this before anything that uses JAX's devices.
    Arguments that are not given are read from the environment variables `REDCOAST_COORDINATOR`,
    `REDCOAST_PROCESSES`, `REDCOAST_PROCESS_ID` and `REDCOAST_LOCAL_DEVICES`; then from
    `JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID`, which Kubeflow Trainer
    sets; then from torchrun's `MASTER_ADDR`, `MASTER_PORT`, `WORLD_SIZE`, `RANK` and `LOCAL_RANK`;
    and otherwise from SLURM, Open MPI, Cloud TPU or Kubernetes, as far as `jax.distributed`
    supports them.

    If the job has only one process, nothing is connected, so the same script also runs on one
    machine. If the variables of a launcher indicate several processes that are not connected, a
    warning is logged, unless `processes=1` is passed. A second call has no effect.

    **Arguments:**

    - `coordinator`: `host:port`, an address of process 0's machine that the others can reach, and a
        free port on it.
    - `processes`: the number of processes, at least 1.
    - `process_id`: the index of this process, from 0.
    - `local_devices`: emulates this many CPU devices in each process, as
        [`emulate_devices`][redcoast.emulate_devices] does. By default, a process has the devices
        that JAX finds. If SLURM, Open MPI or torchrun starts several processes on a machine, each
        has one of its accelerators.
    - `timeout`: how long to wait for the other processes, in seconds.

    **Raises:**

    - `ValueError` if arguments are wrong or incomplete, if the processes disagree about their
        number, or if JAX has already been used.
    - `TimeoutError` in all connected processes if others are missing; it names the missing ones.
    - `ConnectionError` if process 0 cannot be reached; it gives the address and the reason.
    - `OSError` if process 0 cannot listen on its port.

    !!! Example

        ```python
        rc.initialize()  # on a laptop, or in each task that `srun` starts
        mesh = rc.make_mesh(fsdp=-1, data=1)
        ```
    """
    check_number("timeout", timeout, above=0)
    arguments = _Job(coordinator, processes, process_id, local_devices)
    _check(arguments)
    if jax.distributed.is_initialized():
        return _check_same(arguments)
    explicit = _with_variables(arguments)
    job = _complete(explicit, timeout)
    if (job.processes or 1) == 1:
        if explicit.processes is None and (warning := _unjoined()):
            logger.warning("%s", warning)
        return _emulate(job.local_devices)
    _join(job, timeout)


def _check(job: _Job) -> None:
    if job.coordinator is not None:
        check_kind("coordinator", job.coordinator, str, "`host:port`")
        split_address(job.coordinator)
    for name in ("processes", "local_devices"):
        if getattr(job, name) is not None:
            check_integer(name, getattr(job, name))
    if job.process_id is not None:
        check_integer("process_id", job.process_id, least=0)
    if job.process_id is not None and not 0 <= job.process_id < (job.processes or 1 << 31):
        of, last = "", ""
        if job.processes is not None:
            of, last = f" of {job.processes} processes", f" to {job.processes - 1}"
        raise ValueError(
            f"There is no process {job.process_id}{of}: `process_id` counts from 0{last}."
        )


def _check_same(arguments: _Job) -> None:
    """Raises `ValueError` if a second call differs from the first."""
    state = runtime()
    joined = {
        "coordinator": state.coordinator_address,
        "processes": state.num_processes,
        "process_id": state.process_id,
        "local_devices": jax.config.jax_num_cpu_devices,  # pyright: ignore
    }
    for name, value in joined.items():
        if getattr(arguments, name) not in (None, value):
            raise ValueError(
                f"This process has already joined its job with {name}={value!r}, and cannot join "
                f"again with {name}={getattr(arguments, name)!r}. Call `initialize` once."
            )


def _fill(job: _Job, **values: str | int | None) -> _Job:
    """Sets the values that are not known yet."""
    unknown = {name: value for name, value in values.items() if getattr(job, name) is None}
    return replace(job, **unknown)


def _with_variables(job: _Job) -> _Job:
    """Fills in missing arguments from the variables of REDCOAST_, and then from JAX's."""
    names = ("coordinator", "processes", "process_id", "local_devices")
    ours = {name: f"REDCOAST_{name.upper()}" for name in names}
    for variables in (ours, _OF_JAX):
        values: dict[str, str | int] = {}
        for name, variable in variables.items():
            text = os.environ.get(variable, "").strip()
            if not text or getattr(job, name) is not None:
                continue
            if name == "coordinator":
                values[name] = text
                continue
            try:
                values[name] = int(text)
            except ValueError:
                raise ValueError(f"{variable} must be an integer, but is {text!r}.") from None
        job = replace(job, **values)
        _check(job)
    return job


def _complete(job: _Job, timeout: int | float) -> _Job:
    """Fills in missing arguments from the launcher that started this process."""
    if job.processes == 1 or None not in (job.coordinator, job.processes, job.process_id):
        return job
    # Inside a SLURM job, for example, torchrun may have started several processes for each task.
    job = _with_launcher(_with_torchrun(job), timeout)
    missing, known = [], []
    for name in ("coordinator", "processes", "process_id"):
        value = getattr(job, name)
        if value is None:
            missing.append(name)
        else:
            known.append(f"{name}={value!r}")
    if job.processes != 1 and missing and known:
        variables = " and ".join(f"REDCOAST_{name.upper()}" for name in missing)
        raise ValueError(
            "Joining a job needs `coordinator`, `processes` and `process_id`, but only "
            f"{', '.join(known)} is known. Pass {' and '.join(missing)} too, or set {variables}."
        )
    _check(job)
    return job


def _with_torchrun(job: _Job) -> _Job:
    names = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")
    host, port, processes, number = (os.environ.get(name, "").strip() for name in names)
    numbers = port.isdecimal() and processes.isdecimal() and number.isdecimal()
    if not host or not numbers or int(processes) < 2:
        return job
    # On the port itself, torchrun's agent may listen.
    uses_agent_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if ":" in host and not host.startswith("["):  # an IPv6 address
        host = f"[{host}]"
    local_id, rank = None, os.environ.get("LOCAL_RANK", "").strip()
    if rank.isdecimal():
        local_id = int(rank)
    return _fill(
        job,
        coordinator=f"{host}:{int(port) + uses_agent_store}",
        processes=int(processes),
        process_id=int(number),
        local_id=local_id,
    )


def _with_launcher(job: _Job, timeout: int | float) -> _Job:
    if job.processes == 1 or None not in (job.coordinator, job.processes, job.process_id):
        return job
    # A pod outside an Indexed Job, such as a notebook's, has no other processes.
    is_alone = "JOB_COMPLETION_INDEX" not in os.environ
    for launcher in launchers():
        if launcher.opt_in_only_method or (is_alone and launcher.__name__ == "K8sCluster"):
            continue
        if launcher.is_env_present():
            return _of_launcher(launcher, job, timeout)
    return _with_open_mpi(job)


def _of_launcher(launcher: type, job: _Job, timeout: int | float) -> _Job:
    processes, number = job.processes, job.process_id
    if processes is None:
        processes = launcher.get_process_count()
    if processes == 1:
        return replace(job, processes=1, process_id=0)
    if number is None:
        number = launcher.get_process_id()
    port = os.environ.get("JAX_COORDINATOR_PORT")
    where = job.coordinator or launcher.get_coordinator_address(int(timeout) or 1, port)
    local_id = launcher.get_local_process_id()
    return replace(
        job, coordinator=where, processes=processes, process_id=number, local_id=local_id
    )


def _with_open_mpi(job: _Job) -> _Job:
    """Open MPI 5 and later sets the number and rank, but not the address of process 0."""
    size, rank = (os.environ.get(f"OMPI_COMM_WORLD_{name}") for name in ("SIZE", "RANK"))
    if size is None or rank is None:
        return job
    local_id = int(os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK", 0))
    return replace(_fill(job, processes=int(size), process_id=int(rank)), local_id=local_id)


def _unjoined() -> str:
    """The warning about a launcher that has started several processes that are not connected."""
    in_step = "SLURM_STEP_NODELIST" in os.environ  # then SLURM has been asked
    several = []
    for name in _LAUNCHERS:
        text = os.environ.get(name, "").strip()
        if text.isdecimal() and int(text) > 1 and not (in_step and name.startswith("SLURM_")):
            several.append((name, text))
    if several:
        count, number = several[0]
        saw, (launcher, rank) = f"{count}={number}", _LAUNCHERS[count]
    elif os.environ.get("JOB_COMPLETION_INDEX", "0").strip() not in ("0", ""):
        launcher, rank, number = "an Indexed Job of Kubernetes", "JOB_COMPLETION_INDEX", "..."
        saw = f"{rank}={os.environ[rank]}"
    else:
        return ""
    process_id = "`process_id=...`"
    if own := os.environ.get(rank):
        process_id = f"`process_id={own}` (this is {rank})"
    return (
        f"{saw}, so {launcher} has started several processes, but this process is connected to "
        "no other, and does all of the work. Pass `coordinator`, host:port of the machine of "
        f"process 0, `processes={number}` and {process_id}, or set REDCOAST_COORDINATOR, "
        "REDCOAST_PROCESSES and REDCOAST_PROCESS_ID. To run it alone, pass `processes=1`."
    )


def _emulate(local_devices: int | None) -> None:
    if local_devices not in (None, jax.config.jax_num_cpu_devices):  # pyright: ignore
        emulate_devices(local_devices)


def _join(job: _Job, timeout: int | float) -> None:
    coordinator, processes, number = job.coordinator, job.processes, job.process_id
    assert coordinator is not None
    assert processes is not None
    assert number is not None
    if has_chosen_devices():
        raise ValueError(
            "JAX was used in this process before `initialize`, and has already chosen its devices. "
            "Call `initialize` at the top of the script, before anything that makes an array or "
            "calls `jax.devices()`."
        )
    host, _ = split_address(coordinator)
    here = meet(coordinator, processes, number, timeout)
    _emulate(job.local_devices)
    # A collective between processes blocks a thread of XLA's pool, and several may run at a time:
    # on a machine with few cores they would deadlock.
    os.environ.setdefault("NPROC", str(max(4, os.cpu_count() or 1)))
    if not jax.config.jax_cpu_collectives_implementation:  # pyright: ignore
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # JAX's preemption service would replace our SIGTERM handler, and the default one.
    jax.config.update("jax_enable_preemption_service", False)
    # gRPC would connect through a proxy of the environment; `meet` has connected directly.
    direct = os.environ.get(_NO_PROXY) or os.environ.get("no_proxy")
    os.environ[_NO_PROXY] = ",".join(filter(None, (direct, host)))
    jax.config.update("jax_check_proxy_envs", False)
    address = None
    if is_loopback(host):  # other computers must not reach it
        address = coordinator
    with service_from(Service):
        jax.distributed.initialize(
            coordinator,
            processes,
            number,
            local_device_ids=_local_device_ids(job.local_id, here),
            cluster_detection_method="deactivate",
            initialization_timeout=60,  # seconds; `meet` has waited for all processes
            coordinator_bind_address=address,
            heartbeat_timeout_seconds=_HEARTBEAT,
        )
    watch = CoordinatorWatch(coordinator)
    watch.start()
    atexit.register(wait_for_all, watch)
    skip_barrier_on_error()


def _local_device_ids(local_id: int | None, here: int) -> list[int] | None:
    """The accelerator of this process, if it shares its machine with others of the job."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    # The launcher may have assigned one to each process already.
    alone = here == 1 or (visible != [""] and len(visible) < here)
    if local_id is None or alone:
        return None
    return [local_id]
