"""The devices of a target to compile for; none of them need be present."""

import importlib
import importlib.util
import itertools as it
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from glob import glob
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh
from jaxlib import xla_client

from ..core._target import Target as Device
from ..core._target import target_of
from ..distributed._kv_store import exchange
from ..distributed._mesh import BATCH_AXES, make_mesh
from ..sharding import Hardware
from ..sharding.solver._hardware import hardware_for, hardware_of, not_scattered
from ..train._compiler_options import Option, check_compiler_options, compiler_options_for
from ._chips import SHARE, Chip
from ._links import axis_bandwidths
from ._roofline import peak
from ._target_name import TargetDevices, parse_target


class _Processor(NamedTuple):
    """The processor of a card, by XLA's names; sizes are in bytes and, except `l2_cache_size`, of
    one multiprocessor."""

    capability: tuple[int, int]
    core_count: int  # multiprocessors
    fpus_per_core: int
    threads_per_core_limit: int
    clock_rate_ghz: float
    l2_cache_size: int
    shared_memory_per_core: int
    shared_memory_per_block_optin: int


_KB, _MB = 2**10, 2**20
_PROCESSORS = {
    "a100-40gb": _Processor((8, 0), 108, 64, 2048, 1.41, 40 * _MB, 164 * _KB, 163 * _KB),
    "a100-80gb": _Processor((8, 0), 108, 64, 2048, 1.41, 40 * _MB, 164 * _KB, 163 * _KB),
    "h100": _Processor((9, 0), 132, 128, 2048, 1.98, 50 * _MB, 228 * _KB, 227 * _KB),
    "h200": _Processor((9, 0), 132, 128, 2048, 1.98, 50 * _MB, 228 * _KB, 227 * _KB),
    "l4": _Processor((8, 9), 58, 128, 1536, 2.04, 48 * _MB, 100 * _KB, 99 * _KB),
    "rtx-4090": _Processor((8, 9), 128, 128, 1536, 2.52, 72 * _MB, 100 * _KB, 99 * _KB),
    "1080ti": _Processor((6, 1), 28, 128, 2048, 1.58, 2816 * _KB, 96 * _KB, 48 * _KB),
}  # fmt: skip


def gpu_config(chip: Chip) -> str:
    """The `GpuTargetConfig` of a chip of kind `"gpu"`, in protocol buffers' text format."""
    figures = _PROCESSORS[chip.name]._asdict()
    major, minor = figures.pop("capability")
    figures |= {
        # What CUDA reports, of which a program can use a share.
        "device_memory_size": round(chip.usable / SHARE),
        "memory_bandwidth": int(chip.memory_bandwidth),
        **_COMMON,
    }
    lines = "\n".join(f"  {name}: {value}" for name, value in figures.items())
    return (
        f"gpu_device_info {{\n{lines}\n"
        f"  cuda_compute_capability {{ major: {major} minor: {minor} }}\n}}\n"
        'platform_name: "CUDA"\ndnn_version_info { major: 9 minor: 8 }\n'
        f'device_description_str: "{chip.device_kind}"\n'
    )


# The limits that all CUDA devices of these generations have in common.
_COMMON = {
    "threads_per_warp": 32,
    "threads_per_block_limit": 1024,
    "shared_memory_per_block": 48 * _KB,
    "registers_per_core_limit": 65536,
    "registers_per_block_limit": 65536,
    "block_dim_limit_x": 2**31 - 1,
    "block_dim_limit_y": 65535,
    "block_dim_limit_z": 65535,
    "thread_dim_limit_x": 1024,
    "thread_dim_limit_y": 1024,
    "thread_dim_limit_z": 64,
}


# Without a TPU, keeps its compiler from querying the network for neighbours, and from failing
# because another process is compiling too.
_NO_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
# Without a GPU, keeps JAX's CUDA plugin from failing because there is no driver.
_NO_CUDA = {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
_PLUGINS = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")
# Measured by `experiments/benchmarks/cpu_bias.py`.
_BIAS = (
    "Where the documentation has figures for the same model and target, they are from the target's "
    "own compiler, and differ for this reason. In measurements in float32, memory was 0 to 18 % "
    "too high (14 to 27 % with `fsdp`, where it keeps a second copy of FSDP-sharded arrays), and "
    "communication was 1.2 to 2 times as much. It computes bfloat16 in float32: memory was 8 to "
    "44 % too high, and communication was 2.5 to 4 times as much. The CPU compiler fuses less, so "
    "the estimated time of a step is too long. For two programs that were far too large, its "
    "memory was at least 2 and 8 % too low."
)
_OLD = (
    "The compiler still supports the 1080ti (compute capability 6.1), but not "
    "`jax.nn.dot_product_attention` in 16 bits. The card has no units for bfloat16, which "
    "therefore saves memory but no time."
)
_NOMINAL = (
    "Emulated CPU devices have no official specifications; memory and speeds are rough guesses, "
    "for about one core of a server."
)
_LOCK = (
    " Another process has locked libtpu. Set ALLOW_MULTIPLE_LIBTPU_LOAD=1 before this process "
    "starts: it only compiles, and needs no TPU."
)


@dataclass(frozen=True)
class Place:
    """Devices to compile for.

    `target` is `None` for attached devices. `usable` are the bytes of memory that a program can use
    on each, if known, and `notes` caveats about their figures, as sentences.
    """

    name: str
    devices: Sequence[Any]
    target: TargetDevices | None
    usable: int | None
    notes: tuple[str, ...] = ()
    compiler: str = ""

    @property
    def stands_in(self) -> bool:
        """Whether these are CPU devices in place of an accelerator's."""
        if self.target is None or self.target.chip.kind == "cpu":
            return False
        return self.devices[0].platform == "cpu"

    @property
    def device(self) -> Device:
        """The device that models choose operations for. A CPU in place of a GPU has none of its
        kernels."""
        device = target_of(self.devices[0])
        if self.target is None:
            return device
        return replace(device, platform=self.target.chip.kind)

    def mesh(self, sizes: Mapping[str, int]) -> Mesh:
        return make_mesh(**sizes, devices=self.devices)

    def known_options(self, options: Mapping[str, Option] | None) -> dict[str, Option]:
        """The options that the compiler knows, or the defaults, for None.

        A warning names those that it does not know, once for all meshes that are compiled.
        """
        check_compiler_options(options)
        return dict(compiler_options_for(self.mesh({}), options))


def place_of(target: TargetDevices) -> Place:
    """The devices of a target, or as many CPU devices if the target's compiler is not installed.

    It may be called in a process that has already used JAX, whose devices do not change.

    Raises `RuntimeError` if the compiler is installed but does not work.
    """
    place = partial(Place, target=target, name=target.name, usable=target.chip.usable)
    if target.chip.kind == "cpu":
        return place(devices=_cpu(target.count), notes=(_NOMINAL,), compiler="cpu")
    if missing := missing_compiler(target.chip):
        return place(devices=_cpu(target.count), notes=(f"{missing} {_BIAS}",), compiler="cpu")
    compiler, describe = "cuda", _cuda
    if target.chip.kind == "tpu":
        compiler, describe = "tpu", _tpu
    try:
        devices = describe(target)
    except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
        hint = ""
        if "lockfile" in str(error):
            hint = _LOCK
        raise RuntimeError(
            f"The compiler for {target.name} is installed, but does not work: "
            f"{str(error).rstrip('.')}.{hint}"
        ) from error
    notes: tuple[str, ...] = ()
    if target.chip.name == "1080ti":
        notes = (_OLD,)
    return place(devices=devices, notes=notes, compiler=compiler)


def missing_compiler(chip: Chip) -> str:
    """A sentence that a chip's own compiler is not installed, and how to install it; `""` if it
    is."""
    extra = _missing_extra(chip)
    if extra is None:
        return ""
    return (
        f"The figures are estimates by the CPU compiler: the compiler for {chip.name} is not "
        f"installed (`pip install 'redcoast[{extra}]'`)."
    )


def _missing_extra(chip: Chip) -> str | None:
    """The extra that installs a chip's own compiler, unless it is installed."""
    extra = {"tpu": "tpu", "gpu": "cuda12", "cpu": None}[chip.kind]
    if extra is None or _installed(extra):
        return None
    return extra


def _installed(extra: str) -> bool:
    if extra == "tpu":
        return "TPU_LIBRARY_PATH" in os.environ or _exists("libtpu")
    return any(map(_exists, _PLUGINS))


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package of the module does not exist either
        return False


@lru_cache
def _cpu(count: int) -> tuple[Any, ...]:
    """The devices of a separate client: the number of JAX's own devices cannot change any more."""
    return tuple(xla_client.make_cpu_client(num_devices=count).devices())


def _tpu(target: TargetDevices) -> list[Any]:
    from jax.experimental import topologies

    options: dict[str, Any] = {}
    if target.chip.name == "v4":
        options["chip_config_name"] = "megacore"  # both cores of a chip as one device
    if target.hosts == target.slices:
        # Each slice is in one host.
        options["chips_per_host_bounds"] = [*target.shape, 1][:3]
    if target.slices > 1:
        options["num_slices"] = target.slices
    shape = "x".join(map(str, target.shape))
    with _environment(_NO_TPU, "/dev/accel*", "/dev/vfio/[0-9]*"):
        return topologies.get_topology_desc(f"{target.chip.name}:{shape}", "tpu", **options).devices


@contextmanager
def _environment(variables: dict[str, str], *present: str) -> Iterator[None]:
    """Sets variables that compilers read when they are loaded.

    Variables that the user has set do not change. If a file matches `present`, the hardware is
    present and nothing is set.
    """
    missing: list[str] = []
    if not any(map(glob, present)):
        missing = [name for name in variables if name not in os.environ]
    for name in missing:
        os.environ[name] = variables[name]
    try:
        yield
    finally:
        for name in missing:
            del os.environ[name]


def _cuda(target: TargetDevices) -> list[Any]:
    from jax.experimental import topologies

    # Slices x hosts x cards, as XLA writes the topology of GPUs.
    hosts, cards = target.shape
    options = {"topology": f"1x{hosts}x{cards}", "target_config": gpu_config(target.chip)}
    describe = partial(topologies.get_topology_desc, target.chip.name, "cuda", **options)
    with _environment(_NO_CUDA, "/dev/nvidia[0-9]*"):
        try:
            return describe().devices
        except NotImplementedError:
            # JAX has been used before, found no card, and did not load the plugin.
            importlib.import_module(next(filter(_exists, _PLUGINS))).initialize()
            return describe().devices


def target_place(name: str) -> Place:
    """The devices of a target, which need not be present."""
    return place_of(parse_target(name))


def target_devices(target: str) -> tuple[Any, ...]:
    """The devices of a target, which need not be present: programs can be compiled for them.

    A mesh of them is for plans, and for [`redcoast.compile_step`][], whose `lower` takes shapes.
    Programs cannot be run on them.

    **Arguments:**

    - `target`: a slice of TPUs such as `"v4:4x4x4"`, GPUs such as `"a100-80gb:8"` or (hosts x
        cards) `"h100:8x8"`, or emulated devices such as `"cpu:8"`.

    **Returns:**

    The devices, as JAX counts them, for `redcoast.make_mesh(devices=...)`.

    **Raises:**

    `ValueError` or `TypeError` if the target does not exist; `ImportError` if its compiler is not
    installed (`redcoast[tpu]`, `redcoast[cuda12]`; neither needs an accelerator). `RuntimeError` if
    it is installed but does not work.

    !!! example

        ```python
        import equinox as eqx
        import jax
        import jax.numpy as jnp
        import optax
        import redcoast as rc

        mesh = rc.make_mesh(model=4, devices=rc.target_devices("cpu:4"))
        loss_fn = lambda p, x, key: jnp.mean((jax.nn.relu(x @ p["up"]) @ p["down"]) ** 2)
        optimizer = optax.adamw(1e-3)
        init_fn = lambda key: {"up": jnp.zeros((64, 256)), "down": jnp.zeros((256, 64))}
        make = lambda key: rc.init_state(init_fn, optimizer, key=key)
        state = eqx.filter_eval_shape(make, jax.random.key(0))
        batch = jax.ShapeDtypeStruct((32, 64), jnp.float32)

        plan = rc.plan_step(state, loss_fn, batch, mesh)
        constrained = plan.constrain(loss_fn)
        step = lambda state, batch: rc.train_step(
            state, batch, loss_fn=constrained, optimizer=optimizer
        )
        compiled = rc.compile_step(step, plan.shardings).lower(state, batch).compile()
        print(compiled.memory_analysis())
        ```
    """
    place = target_place(target)
    # These are devices of the CPU, for which another compiler makes other programs.
    if place.stands_in:
        assert place.target is not None
        chip = place.target.chip
        raise ImportError(
            f"The compiler for {chip.name} is not installed. `pip install "
            f"'redcoast[{_missing_extra(chip)}]'` installs it, and needs no such device."
        )
    return tuple(place.devices)


def attached_place() -> Place:
    """The attached devices of all processes; all processes must call this together."""
    devices = jax.devices()
    limits = []
    for device in jax.local_devices():
        stats = device.memory_stats() or {}
        limits.append(stats.get("bytes_limit"))
    everyone = list(it.chain.from_iterable(exchange("the memory of devices", limits)))
    usable = None
    # The device with the least memory limits all. CPU devices report none.
    if None not in everyone:
        usable = min(everyone)
    return Place(f"{len(devices)} x {devices[0].device_kind}", devices, None, usable)


def planner_hardware(place: Place, mesh: Mesh) -> Hardware:
    """The hardware constants that `fit` would use if it ran on these devices.

    `fit` reads only their memory. The other constants depend on the compiler and the mesh.
    """
    if place.target is None:
        return hardware_of(mesh)
    chip = place.target.chip
    # Emulated devices do not report their memory.
    usable = None if chip.kind == "cpu" else chip.usable
    hardware = hardware_for(chip.kind, usable)
    if chip.kind != "tpu":
        return hardware
    return replace(hardware, not_scattered=not_scattered(chip.device_kind, place.target.shape))


def target_hardware(place: Place, mesh: Mesh, dtype: str = "float32") -> Hardware:
    """The hardware constants of a target, with its bandwidths along a mesh's axes.

    For attached devices, these are the planner's constants. `dtype` is the operands' dtype.
    """
    hardware, target = planner_hardware(place, mesh), place.target
    if target is None:
        return hardware
    speeds = axis_bandwidths(target, mesh)
    # A batch is sent along all of its axes, at the speed of the slowest.
    batch = [speeds[axis] for axis in BATCH_AXES if mesh.shape[axis] > 1]
    return replace(
        hardware,
        flops=peak(target.chip, dtype),
        model_bandwidth=speeds["model"],
        batch_bandwidth=min(batch or [speeds["model"]]),
        memory_bandwidth=target.chip.memory_bandwidth,
    )
