"""A SLURM cluster of one node, which is this machine, with all of its files in one folder."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from processes import OURS, free_port

DAEMONS = ("munged", "slurmctld", "slurmd")
CONFIG = """
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={node}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
KillWait=60
SlurmdParameters=config_overrides
NodeName={host} NodeAddr=127.0.0.1 CPUs=4
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


@contextlib.contextmanager
def one_node(folder: Path) -> Iterator[dict[str, str]]:
    """Starts the cluster, gives the environment in which SLURM's commands speak to it, and stops
    it."""
    for name in ("state", "spool"):
        (folder / name).mkdir()
    values = {"host": socket.gethostname(), "controller": free_port(), "node": free_port()}
    (folder / "slurm.conf").write_text(CONFIG.format(folder=folder, **values))
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    outside = {key: value for key, value in os.environ.items() if key not in OURS}
    env = outside | {"SLURM_CONF": str(folder / "slurm.conf")}
    try:
        _start_daemons(folder, env)
        state = lambda: run("sinfo", "--noheader", "--format=%T", env=env).strip()
        wait_until(lambda: state() == "idle", 60, lambda: logs(folder))
        yield env
    finally:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            run("scancel", "--user=root", "--full", env=env)
        for name in reversed(DAEMONS):
            _stop(folder / f"{name}.pid")


def run(*command: object, env: dict[str, str], cwd: Path | None = None) -> str:
    """The output of a command that must succeed."""
    words = [str(word) for word in command]
    result = subprocess.run(words, env=env, cwd=cwd, capture_output=True, text=True, timeout=180)
    assert result.returncode == 0, f"{' '.join(words)}\n{result.stdout}\n{result.stderr}"
    return result.stdout


def wait_until(
    condition: Callable[[], object], seconds: float, explain: Callable[[], str] = str
) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, explain()
        time.sleep(0.2)


def _start_daemons(folder: Path, env: dict[str, str]) -> None:
    files = {"key": "key", "log": "log", "pid": "pid", "seed": "seed"}
    options = [f"--{option}-file={folder}/munge.{name}" for option, name in files.items()]
    options[2] = f"--pid-file={folder}/munged.pid"
    # It does not like a key and a socket in a folder that others may write to, such as /tmp.
    run(_program("munged"), "--force", f"--socket={folder}/munge.socket", *options, env=env)
    for name in DAEMONS[1:]:
        run(_program(name), "-f", folder / "slurm.conf", env=env)


def _program(name: str) -> str:
    actual = shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    assert actual, f"There is no {name} here: install the packages slurm-wlm and munge."
    return actual


def _stop(pid_file: Path) -> None:
    if not pid_file.exists():
        return
    number = int(pid_file.read_text())
    for sent in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, sent)
        end = time.monotonic() + 10
        while Path(f"/proc/{number}").exists() and time.monotonic() < end:
            time.sleep(0.1)


def logs(folder: Path) -> str:
    files = sorted(folder.glob("*.log"))
    return "\n".join(f"-- {file.name}\n{file.read_text()[-3000:]}" for file in files)
