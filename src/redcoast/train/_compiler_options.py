"""Options of the compiler for training steps, with defaults for each kind of device.

The defaults are what shortened the schedules of compiled steps
(`experiments/benchmarks/accelerators.py`). Versions of XLA know different options, so each is tried
on a trivial program first, and left out if the compiler does not know it.
"""

import functools as ft
from collections.abc import Mapping
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, SingleDeviceSharding

from ..core._frames import warn

Option: TypeAlias = bool | int | float | str
Options: TypeAlias = tuple[tuple[str, Option], ...]

# XLA's own combine thresholds, of about 30 MiB, expose least: with 128 MiB, the first and the last
# collective of a step, behind which nothing runs, have the arrays of more than one layer.
_GPU: dict[str, Option] = {
    # Without it, no collective is asynchronous.
    "xla_gpu_enable_latency_hiding_scheduler": True
}
# None for TPUs: without options, the compiler for v5e makes most all-gathers a part of products.
_DEFAULTS: dict[str, dict[str, Option]] = {"gpu": _GPU, "cuda": _GPU}


def check_compiler_options(options: object) -> None:
    """Raises an error unless the options are None, or a mapping of names to values."""
    if options is None:
        return
    if not isinstance(options, Mapping):
        raise TypeError(
            f"`compiler_options` is {options!r}. It must be a dict of XLA's options, such as "
            '{"xla_gpu_enable_latency_hiding_scheduler": True}, or None for the defaults.'
        )
    for name, value in options.items():
        if not isinstance(name, str):
            raise TypeError(f"`compiler_options` has the name {name!r}. Names must be strings.")
        if isinstance(value, str) and value.lower() in ("true", "false"):
            raise ValueError(
                f"`compiler_options` has {name}={value!r}. Pass the boolean "
                f"{value.lower() == 'true'}: the compiler does not read it from a string."
            )
        if not isinstance(value, bool | int | float | str | np.bool_ | np.integer | np.floating):
            raise TypeError(
                f"`compiler_options` has {name}={value!r}. Values must be booleans, numbers or "
                "strings."
            )


def compiler_options_for(
    mesh: Mesh | AbstractMesh, user_options: Mapping[str, Option] | None = None
) -> Options:
    """The options for programs on the devices of a mesh that their compiler knows.

    `user_options` replace the defaults. Those that the compiler does not know are left out with a
    warning.

    Raises `ValueError` if the compiler knows an option but not its value.
    """
    if not isinstance(mesh, Mesh):
        return ()
    # A process compiles for devices of its own, if it has some in the mesh.
    own = [x for x in mesh.devices.flat if x.process_index == jax.process_index()]
    device = (own or list(mesh.devices.flat))[0]
    options = user_options
    if options is None:
        options = _DEFAULTS.get(device.platform, {})
    plain: dict[str, Option] = {}
    for name, value in options.items():
        # JAX passes only Python's own types on.
        if isinstance(value, np.generic):
            value = value.item()
        plain[name] = value
    known = _known_options(device, tuple(plain.items()))
    unknown = plain.keys() - dict(known).keys()
    # Defaults that an older compiler does not know are left out silently.
    if user_options is not None and unknown:
        warn(
            f"The compiler for {device.platform} does not know the options "
            f"{', '.join(sorted(unknown))} of `compiler_options`. They are left out."
        )
    return known


@ft.cache
def _known_options(device: Any, options: Options) -> Options:
    # Usually all are known, which one compilation of a tiny program shows.
    if not options or _refusal(device, options) is None:
        return options
    known: list[tuple[str, Option]] = []
    for name, value in options:
        # One by one, since the compiler's error names only the first.
        refusal = _refusal(device, ((name, value),))
        if refusal is None:
            known.append((name, value))
        elif "No such compile option" not in refusal:
            raise ValueError(
                f"The compiler for {device.platform} refuses {name}={value!r} of "
                f"`compiler_options`: {refusal}"
            )
    return tuple(known)


# What the compilers say about an unknown option and about a value; the last is the TPU's.
_ABOUT_OPTIONS = ("compile option", "setting option", "into flag")


def _refusal(device: Any, options: Options) -> str | None:
    """The compiler's error about options, if there is one."""
    # Options are checked by the compiler itself, which has no function that lists them.
    x = jax.ShapeDtypeStruct((8,), np.float32, sharding=SingleDeviceSharding(device))
    settings: dict[str, Any] = dict(options)
    try:
        jax.jit(lambda x: x + 1).lower(x).compile(compiler_options=settings)
    except jax.errors.JaxRuntimeError as error:
        refusal = str(error)
        if any(phrase in refusal for phrase in _ABOUT_OPTIONS):
            return refusal
    return None


def show_options(options: Options) -> str:
    """Options in one line, such as `"xla_enable_async_all_gather=True"`."""
    return ", ".join(f"{name}={value}" for name, value in options)
