"""`redcoast doctor`: shows what is installed, which devices there are, and what is missing."""

import importlib.metadata
import importlib.util
import os
import platform
import sys
from collections import Counter

import jax

from redcoast.core._versions import installed_versions, own_version, untested
from redcoast.distributed._allocator import describe_allocator, keep_freed_memory
from redcoast.tracking._wandb import has_account

from ._options import DoctorCommand

PACKAGES = ("redcoast", "jax", "jaxlib", "equinox", "optax", "orbax-checkpoint", "numpy")
# The purpose of an optional package, modules of which one is needed, and the extra that installs
# it.
OPTIONAL = (
    ("Dry runs for TPUs by their compiler", ("libtpu",), "tpu"),
    ("NVIDIA GPUs, and dry runs for them", ("jax_cuda12_plugin", "jax_cuda13_plugin"), "cuda13"),
    (".gguf files", ("gguf",), "gguf"),
    ("TensorBoard", ("tensorboardX",), "tensorboard"),
    ("`redcoast serve`", ("uvicorn",), "serve"),
    ("trackio", ("trackio",), "trackio"),
    ("The experiments", ("sklearn",), "experiments"),
)


def main(c: DoctorCommand) -> None:
    """Prints what is available, and the commands that install what is missing."""
    keep_freed_memory()  # as `make_mesh` does, before the devices are asked for
    show("Python", f"{platform.python_version()} ({sys.executable})")
    for name in PACKAGES:
        show(name, version(name))
    show("Tested together", tested_together())
    for text in devices():
        show("Devices", text)
    show("Memory", host_memory())
    show("Allocator", describe_allocator())
    show("W&B", wandb_mode())
    print()
    for use, modules, extra in OPTIONAL:
        print(f"{use:<36}{optional(modules, extra)}")


def show(name: str, text: str | None) -> None:
    """Prints a line, unless there is nothing to say."""
    if text is not None:
        print(f"{name:<18}{text}")


def version(package: str) -> str:
    if package == "redcoast":
        return own_version()  # it runs, whether it is installed or not
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return f'missing: pip install "{package}"'


def tested_together() -> str:
    """Whether redcoast was tested with the installed versions, or which versions were not
    tested."""
    names = untested(installed_versions())
    if names:
        return f"no: {', '.join(names)}"
    return "yes"


def devices() -> list[str]:
    """The devices that JAX finds, with their memory, or why it finds none."""
    try:
        local = jax.local_devices()
    except RuntimeError as error:
        return [f"none: {error}"]
    counts = Counter(device.device_kind for device in local)
    by_kind = {device.device_kind: device for device in local}
    lines = []
    for kind, count in counts.items():
        device = by_kind[kind]
        text = f"{count} x {kind} ({device.platform})"
        limit = (device.memory_stats() or {}).get("bytes_limit")
        if limit is not None:
            text += f", {limit / 2**30:.1f} GiB each"
        lines.append(text)
    return lines


def host_memory() -> str | None:
    """The memory of this machine, if the operating system reports it."""
    try:
        size = os.sysconf("SC_PAGE_SIZE") / 2**30
        installed, free = os.sysconf("SC_PHYS_PAGES") * size, os.sysconf("SC_AVPHYS_PAGES") * size
    except (ValueError, OSError, AttributeError):
        return None
    return f"{installed:.1f} GiB, {free:.1f} GiB free; {os.cpu_count()} processors"


def wandb_mode() -> str:
    if importlib.util.find_spec("wandb") is None:
        return 'missing: pip install "wandb"'
    mode = os.environ.get("WANDB_MODE")
    if mode:
        return f"{mode}, by WANDB_MODE"
    import wandb

    if has_account(wandb.Settings()):
        return "online: an account was found"
    return "offline: no account was found; `wandb login` stores one"


def optional(modules: tuple[str, ...], extra: str) -> str:
    """Whether an optional package is there, or the command that installs it."""
    if any(map(importlib.util.find_spec, modules)):
        return "installed"
    return f'missing: pip install "redcoast[{extra}]"'
