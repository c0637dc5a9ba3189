"""Choosing connectors by name and by what both sides have; who may reach a shm socket; what imports what."""

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from core.errors import TransferFailed
from core.grant import Grant
from core.ids import Epoch, HandoffId, RequestId, WorkerId, host_id
from core.kv_region import KVRegion
from core.kv_spec import KVSpec
from kv_transfer.base import Identity, TransferOptions
from kv_transfer.connectors import create_receivers, create_senders, known_connectors, scheme_of
from kv_transfer.loopback import LoopbackNetwork
from kv_transfer.shm import split_address

HERE = f"shm://{host_id()}/tmp/a/kv"
ELSEWHERE = "shm://another-boot/tmp/a/kv"
TCP, UCX = "tcp://127.0.0.1:1", "ucx://127.0.0.1:1"


@pytest.fixture
def region(spec: KVSpec) -> Iterator[KVRegion]:
    region = KVRegion.create(spec.block_bytes, 4)
    yield region
    region.close()


@pytest.fixture
def identity(spec: KVSpec) -> Identity:
    return Identity(WorkerId("here"), Epoch(1), spec)


def test_an_unknown_name_is_refused_naming_the_known(region: KVRegion, identity: Identity) -> None:
    for create in (
        lambda: create_receivers(["shm", "carrier-pigeon"], region, identity, lambda grant: True),
        lambda: create_senders("carrier-pigeon", region, identity),
    ):
        with pytest.raises(ValueError, match=r"'carrier-pigeon'; known are auto, loopback, shm, tcp, ucx"):
            create()


@pytest.mark.parametrize(
    ("connector", "offered", "chosen"),
    [
        ("auto", [TCP, UCX, HERE], HERE),
        ("auto", [TCP, UCX, ELSEWHERE], UCX),
        ("auto", [TCP, ELSEWHERE], TCP),
        ("tcp", [HERE, TCP], TCP),
        ("shm", [TCP, HERE], HERE),
        ("ucx", [HERE, UCX, TCP], UCX),
    ],
)
def test_the_best_common_connector_is_chosen(
    connector: str, offered: list[str], chosen: str, region: KVRegion, identity: Identity
) -> None:
    assert create_senders(connector, region, identity).choose(offered) == chosen


@pytest.mark.parametrize(
    ("connector", "offered", "reason"),
    [
        ("tcp", [HERE, UCX], r"tcp \(tcp\) here, shm, ucx there"),
        ("auto", [ELSEWHERE], r"auto \(shm, tcp, ucx\) here, shm there"),
        ("auto", [], "here, none there"),
    ],
)
async def test_no_common_connector_names_both_lists(
    connector: str, offered: list[str], reason: str, region: KVRegion, identity: Identity
) -> None:
    handoff_id = HandoffId(RequestId("r"), 0)
    grant = Grant(handoff_id, WorkerId("there"), Epoch(2), 4, 0, (), tuple(offered))
    with pytest.raises(TransferFailed, match=reason):
        await create_senders(connector, region, identity).open(grant)


async def test_shm_to_another_host_is_refused(region: KVRegion, identity: Identity) -> None:
    grant = Grant(HandoffId(RequestId("r"), 0), WorkerId("there"), Epoch(2), 4, 0, (), (ELSEWHERE,))
    with pytest.raises(TransferFailed, match="another host"):
        await create_senders("shm", region, identity).open(grant)


async def test_one_worker_listens_on_several(region: KVRegion, identity: Identity) -> None:
    network = LoopbackNetwork()
    receivers = create_receivers(["auto", "tcp"], region, identity, lambda grant: True, network=network)
    await receivers.start()
    assert [scheme_of(address) for address in receivers.addresses] == ["loopback", "shm", "tcp"]
    await receivers.close()


def test_auto_offers_ucx_where_every_interface_is_meant(region: KVRegion, identity: Identity) -> None:
    options = TransferOptions(bind_host="0.0.0.0", advertised_host="decode-1")
    receivers = create_receivers(["auto"], region, identity, lambda grant: True, options)
    assert receivers.connectors == ("shm", "tcp", "ucx")


async def test_the_shm_socket_is_for_its_user_only_and_goes_away(
    region: KVRegion, identity: Identity
) -> None:
    receivers = create_receivers(["shm"], region, identity, lambda grant: True)
    await receivers.start()
    host, path = split_address(receivers.addresses[0])
    assert host == host_id()
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert stat.S_ISSOCK(os.stat(path).st_mode)
    assert stat.S_IMODE(Path(path).parent.stat().st_mode) == 0o700
    await receivers.close()
    assert not Path(path).parent.exists()


def sockets() -> dict[int, str]:
    """Open ones by descriptor: what /proc calls them, which no other socket is ever called."""
    links = {int(name): Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")}
    return {number: str(link.readlink()) for number, link in links.items() if link.is_socket()}


async def test_no_descriptor_is_inherited(region: KVRegion, identity: Identity) -> None:
    before = sockets()
    receivers = create_receivers(["shm", "tcp"], region, identity, lambda grant: True)
    await receivers.start()
    opened = [number for number, name in sockets().items() if before.get(number) != name]
    is_inherited = [os.get_inheritable(number) for number in opened]
    await receivers.close()
    assert is_inherited == [False, False]


def test_nothing_heavy_is_imported() -> None:
    """Services hold this package; ucx loads its library when it is first used."""
    loaded = subprocess.run(
        [sys.executable, "-c", "import kv_transfer.faults, sys; print(*sorted(sys.modules))"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    unwanted = {"torch", "ucxx", "ucp", "grpc", "redis", "proto", "engine", "cluster"}
    assert not unwanted & {name.partition(".")[0] for name in loaded}
    assert set(known_connectors()) == {"loopback", "shm", "tcp", "ucx"}
