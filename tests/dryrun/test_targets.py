"""Targets: their names, the devices to compile for, and their bandwidths."""

import dataclasses
import os
import re
from typing import Any, cast

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxlib.xla_client import make_cpu_client

import redcoast as rc
from redcoast import CHIPS
from redcoast.dryrun import _devices as devices_module
from redcoast.dryrun._devices import gpu_config, place_of
from redcoast.dryrun._links import axis_bandwidths, slow_axes
from redcoast.dryrun._target_name import parse_target

GPUS = [chip for chip in CHIPS.values() if chip.kind == "gpu"]
TPUS = [chip for chip in CHIPS.values() if chip.kind == "tpu"]


@pytest.mark.parametrize(
    ("name", "chip", "count", "hosts", "shape"),
    [
        ("v4:4x4x4", "v4", 64, 16, (4, 4, 4)),
        ("v4:2x2x1", "v4", 4, 1, (2, 2, 1)),
        ("v5e:2x4", "v5e", 8, 1, (2, 4)),
        ("v5e:4x4", "v5e", 16, 4, (4, 4)),
        ("v5p:4x4x12", "v5p", 192, 48, (4, 4, 12)),
        ("v6e:1x1", "v6e", 1, 1, (1, 1)),
        ("tpu7x:2x2x2", "tpu7x", 16, 2, (2, 2, 2)),  # a chip is two devices
        ("a100-40gb:4", "a100-40gb", 4, 1, (1, 4)),
        ("h100:8x8", "h100", 64, 8, (8, 8)),
        ("L4", "l4", 1, 1, (1, 1)),
        (" 1080ti:2", "1080ti", 2, 1, (1, 2)),
        ("cpu:8", "cpu", 8, 1, (1, 8)),
    ],
)
def test_names(name, chip, count, hosts, shape):
    target = parse_target(name)
    assert (target.chip.name, target.count, target.hosts, target.shape) == (
        chip,
        count,
        hosts,
        shape,
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a100", "none of v4, v5e.*1080ti, cpu. Did you mean 'a100-40gb' or 'a100-80gb'"),
        ("v4-8", "Did you mean 'v4'"),
        ("rtx4090:2", "Did you mean 'rtx-4090'"),
        ("quantum:2", 'is none of v4.* "v4:2x2x2"'),
        ("v4:3x2x1", "no slice 3x2x1.*nearest that exist are v4:2x2x1, v4:2x2x2"),
        ("v4:8", "no slice 8,.*v4:2x2x2.*multiples of 4.*4096"),
        ("v4:4x4x2", "no slice 4x4x2.*v4:2x4x4.*smallest first"),
        ("v4:16x16x32", "no slice.*v4:16x16x16.*up to 4096 chips"),
        ("v5e:4x2", "no slice 4x2.*all slices are 1x1, 2x2, 2x4, 4x4"),
        ("v5e", "v5e has no slice of unknown size"),
        ("v5e:", "does not give the number of devices.*such as .v5e:4x4"),
        ("h100:0", "does not give the number of devices.*h100:8"),
        ("h100:2x", "does not give the number of devices.*h100:2x8"),
        ("h100:16", "16 devices in a host.*at most 8.*h100:2x8"),
        ("h100:2x2x2", "too many sizes.*hosts x cards"),
        ("cpu:2x4", "too many sizes.*cpu:8"),
        ("h100:100000x8", "more than 1024 hosts.*h100:2x8"),
        ("h100:٤", "does not give the number of devices"),
        ("h100:" + 5000 * "9", "does not give the number of devices"),
        ("cpu:100000", "at most 8192"),
    ],
)
def test_unknown_targets_are_listed_with_valid_ones(name, message):
    with pytest.raises(ValueError, match=message) as actual:
        parse_target(name)
    assert repr(name) in str(actual.value)


def test_a_target_is_a_name():
    with pytest.raises(TypeError, match="8"):
        parse_target(cast(str, 8))


def test_slices_that_messages_name_exist():
    for chip in TPUS:
        for wrong in ("3x3", "5x5x5", "4x4x130", "1x100"):
            with pytest.raises(ValueError) as actual:  # noqa: PT011
                parse_target(f"{chip.name}:{wrong}")
            named = re.findall(rf"\b{chip.name}:[\dx]+(?=[,;])", str(actual.value))
            assert len(named) == 5
            for name in named:
                parse_target(name)


def test_figures_are_plausible():
    for chip in (*TPUS, *GPUS):
        assert 0.87 < chip.usable / chip.memory < 1.01
        assert 10 <= chip.memory / 2**30 <= 192
        assert 1e13 < chip.flops["float32"] <= chip.flops["bfloat16"] < 2e15
        assert 0.1 < chip.memory_bandwidth / 2e12 < 2.5
        assert chip.host_bandwidth < chip.link_bandwidth < chip.memory_bandwidth
        assert chip.source.startswith("https://")


@pytest.mark.parametrize("chip", GPUS, ids=lambda chip: chip.name)
def test_descriptions_of_cards(chip):
    """Peak rate and memory agree with the table of chips, which has another source."""
    text = gpu_config(chip)
    fields = dict(re.findall(r"^  (\w+): ([\d.]+)$", text, re.M))
    capability = re.search(r"major: (\d) minor: (\d)", text)
    assert capability is not None
    lanes = int(fields["core_count"]) * int(fields["fpus_per_core"])
    ordinary = lanes * 2 * float(fields["clock_rate_ghz"]) * 1e9
    # Tensor cores: 8, 7.4 (at a lower clock) and 2 times as fast in TF32; Pascal has none.
    times = {"80": 8, "90": 7.4, "89": 2, "61": 1}["".join(capability.groups())]
    times = 1 if chip.name == "rtx-4090" else times  # sold with half of what its processor does
    assert chip.flops["float32"] == pytest.approx(times * ordinary, rel=0.03)
    assert 0.97 < int(fields["device_memory_size"]) * 0.95 / chip.usable < 1.03
    assert int(fields["shared_memory_per_block_optin"]) <= int(fields["shared_memory_per_core"])


def held(devices, model=4) -> int:
    """The bytes of a program's sharded argument on each device."""
    mesh = rc.make_mesh(model=model, devices=devices)
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=NamedSharding(mesh, P(None, "model")))
    memory: Any = jax.jit(lambda x: jnp.tanh(x @ x)).lower(x).compile().memory_analysis()
    return memory.argument_size_in_bytes


def test_more_cpu_devices_than_the_process_has():
    assert jnp.ones(3).sum() == 3
    before = jax.devices()
    actual = place_of(parse_target("cpu:64"))
    assert (len(actual.devices), actual.compiler) == (64, "cpu")
    assert "no official specifications" in actual.notes[0]
    assert held(actual.devices, model=64) == 64 * 64 * 4 // 64
    assert jax.devices() == before
    assert place_of(parse_target("cpu:64")).devices == actual.devices


@pytest.mark.parametrize(("name", "extra"), [("v4:2x2x2", "tpu"), ("h100:2x4", "cuda12")])
def test_the_cpu_compiler_replaces_a_missing_one(name, extra, monkeypatch):
    monkeypatch.setattr(devices_module, "_installed", lambda compiler: False)
    actual = place_of(parse_target(name))
    assert (len(actual.devices), actual.compiler) == (8, "cpu")
    assert len(actual.notes) == 1
    assert f"pip install 'redcoast[{extra}]'" in actual.notes[0]
    assert "estimates" in actual.notes[0]
    assert held(actual.devices) == 64 * 64 * 4 // 4


def test_devices_of_a_target_compile_a_step_of_ones_own():
    devices = rc.target_devices("cpu:4")
    assert held(devices) == 64 * 64 * 4 // 4
    assert not {*devices} & {*jax.devices()}


@pytest.mark.parametrize(("name", "extra"), [("v4:2x2x2", "tpu"), ("h100:2x4", "cuda12")])
def test_other_devices_do_not_stand_in_for_a_target(name, extra, monkeypatch):
    monkeypatch.setattr(devices_module, "_installed", lambda compiler: False)
    with pytest.raises(ImportError, match=rf"pip install 'redcoast\[{extra}\]'"):
        rc.target_devices(name)


@pytest.mark.parametrize(("name", "inner"), [("v4:2x2x2", "_tpu"), ("h100:2x4", "_cuda")])
def test_a_compiler_that_fails_is_an_error(name, inner, monkeypatch):
    def fail(target):
        raise jax.errors.JaxRuntimeError("ABORTED: libtpu multi-process lockfile")

    monkeypatch.setattr(devices_module, "_installed", lambda compiler: True)
    monkeypatch.setattr(devices_module, inner, fail)
    message = f"compiler for {name} is installed.*lockfile.*ALLOW_MULTIPLE_LIBTPU_LOAD=1"
    with pytest.raises(RuntimeError, match=message):
        place_of(parse_target(name))


def test_the_environment_is_as_before(monkeypatch):
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "mine")
    monkeypatch.delenv("TPU_SKIP_MDS_QUERY", raising=False)
    before = dict(os.environ)
    with devices_module._environment(devices_module._NO_TPU, "/none/*"):
        assert os.environ["TPU_WORKER_HOSTNAMES"] == "mine"
        assert os.environ["TPU_SKIP_MDS_QUERY"] == "1"
    assert dict(os.environ) == before
    with devices_module._environment(devices_module._NO_TPU, "/none/*", "/*"):
        assert dict(os.environ) == before


def together(name, **sizes):
    """Bandwidths with CPU devices in place of the target's, in units of a link."""
    target = parse_target(name)
    mesh = rc.make_mesh(**sizes, devices=place_of(parse_target(f"cpu:{target.count}")).devices)
    actual = axis_bandwidths(target, mesh)
    return {axes: rate / target.chip.link_bandwidth for axes, rate in actual.items()}


def bandwidths(name, **sizes):
    return {axes: rate for axes, rate in together(name, **sizes).items() if "+" not in axes}


def test_cards_of_one_host_and_of_several():
    h100 = CHIPS["h100"]
    network = h100.host_bandwidth / h100.link_bandwidth
    assert network == pytest.approx(50 / 450)
    # Along `model` within a host; along `data` each card has its own network card.
    assert bandwidths("h100:8x8", data=8, model=8) == pytest.approx(
        {"data": network, "fsdp": 1, "model": 1}
    )
    # Of 16 cards in two hosts, half of all must enter a host, over the network cards of 8.
    assert bandwidths("h100:2x4", fsdp=8, data=1) == pytest.approx(
        {"data": 1, "fsdp": network * 4 * (7 / 8) / (1 / 2), "model": 1}
    )
    # With all eight of a host at once, NVLink is the bottleneck.
    assert bandwidths("h100:2x8", fsdp=16, data=1)["fsdp"] == 1
    assert bandwidths("1080ti:2", model=2) == {"data": 1, "fsdp": 1, "model": 1}
    assert bandwidths("cpu:8", model=4) == {"data": 1, "fsdp": 1, "model": 1}


def test_links_of_a_torus():
    # Closed rings of four send in both directions; two dimensions double the bandwidth.
    ring = {"data": 2, "fsdp": 2, "model": 2}
    assert bandwidths("v4:4x4x4", data=4, fsdp=4, model=4) == ring
    assert bandwidths("v4:4x4x4", data=1, fsdp=16, model=4) == {"data": 1, "fsdp": 4, "model": 2}
    # A ring of four as 2 x 2: neighbours have one link; those opposite share two ways with others.
    assert bandwidths("v4:4x4x4", data=1, fsdp=8, model=8) == {"data": 1, "fsdp": 3, "model": 3}
    # What is less than a cube is open: at an end of a row there is one link to send over.
    assert bandwidths("v4:2x2x4", data=4, model=4) == {"data": 1, "fsdp": 1, "model": 2}
    assert bandwidths("v5e:4x4", data=4, model=4) == {"data": 1, "fsdp": 1, "model": 1}
    # In a row of four as 2 x 2, two messages share the link in the middle.
    assert bandwidths("v5e:4x4", data=8, model=2) == {"data": 1.5, "fsdp": 1, "model": 1}
    # A pod of v5e is closed.
    assert bandwidths("v5e:16x16", data=16, model=16) == {"data": 2, "fsdp": 1, "model": 2}


def test_several_axes_together():
    # Over one card of each host there is one network card, over eight there are eight.
    actual = together("h100:2x8", data=2, fsdp=8)
    assert actual["data"] == pytest.approx(50 / 450)
    assert (actual["fsdp"], actual["data+fsdp"], actual["data+model"]) == (1, 1, actual["data"])
    # 16 along two closed dimensions and 4 along the third: all 64 have six links each.
    actual = together("v4:4x4x4", data=1, fsdp=16, model=4)
    assert [actual[axes] for axes in ("data+fsdp", "fsdp+model", "data+fsdp+model")] == [4, 6, 6]
    assert list(actual)[3:] == ["data+fsdp", "data+model", "fsdp+model", "data+fsdp+model"]


def test_chips_that_are_two_devices():
    # The two halves are joined six times as fast, and share the links of their chip.
    actual = bandwidths("tpu7x:4x4x4", data=1, fsdp=64, model=2)
    assert actual == {"data": 1, "fsdp": 6 / 2, "model": 6}
    # All eight devices of four chips: 3/4 of all must enter a chip, over two links.
    assert bandwidths("tpu7x:2x2x1", data=1, model=8)["model"] == pytest.approx(
        2 * (7 / 8) / (3 / 4)
    )


@dataclasses.dataclass(frozen=True)
class Placed:
    id: int
    coords: tuple[int, int, int]
    process_index: int = 0
    platform: str = "none"


def test_devices_with_coordinates():
    """The devices' own coordinates are used, not their order in `make_mesh`."""
    target = parse_target("v5e:2x4")
    places = [(x, y, 0) for x in range(2) for y in range(4)]
    devices = [Placed(index, place) for index, place in enumerate(places)]
    link = target.chip.link_bandwidth
    mesh = rc.make_mesh(fsdp=2, model=4, devices=devices)
    actual = axis_bandwidths(target, mesh)
    assert [actual[axis] / link for axis in ("data", "fsdp", "model")] == [1, 1, 1]
    mesh = rc.make_mesh(fsdp=4, model=2, devices=devices)
    # `model`: neighbours. `fsdp`: both of the first axis, and every other one of the second.
    actual = axis_bandwidths(target, mesh)
    assert [actual[axis] / link for axis in ("data", "fsdp", "model")] == [1, 1.5, 1]


def test_several_slices_are_connected_by_the_network_of_their_hosts():
    """Two slices of sixteen chips: `data` is between them, `fsdp` inside each."""
    target = parse_target("v5e:2x4x4")
    assert (target.count, target.slices, target.shape, target.groups) == (32, 2, (4, 4), 2)
    devices = make_cpu_client(num_devices=32).devices()
    mesh = rc.make_mesh(data=2, fsdp=16, devices=devices)
    chip, speeds = rc.CHIPS["v5e"], axis_bandwidths(target, mesh)
    one = axis_bandwidths(parse_target("v5e:4x4"), rc.make_mesh(fsdp=16, devices=devices[:16]))
    assert speeds["data"] == chip.host_bandwidth
    assert speeds["fsdp"] == one["fsdp"]
    assert slow_axes(target, mesh) == {"data"}
    assert parse_target("v5p:2x2x2x4").slices == 2
    with pytest.raises(ValueError, match="no slice 3x3"):
        parse_target("v5e:2x3x3")
    with pytest.raises(ValueError, match="more than 128 slices"):
        parse_target("v5e:129x4x4")
