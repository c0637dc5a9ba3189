"""The tcp port against those who do not speak the protocol, and a sender that stops in the middle of a frame."""

import asyncio
import pickle
import struct
from collections.abc import AsyncIterator

import numpy as np
import pytest
import pytest_asyncio

from core.errors import TransferFailed
from core.grant import Grant, GrantSigner, RunDigest, Seal
from core.ids import BlockHash, BlockId, Epoch, HandoffId, RequestId, WorkerId
from core.kv_region import KVRegion
from core.kv_spec import KVSpec
from kernels.digest import digest
from kv_transfer.base import Identity, TransferOptions
from kv_transfer.connectors import ReceiverSet, create_receivers
from kv_transfer.messages import (
    PROTOCOL_VERSION,
    Accepted,
    Data,
    Hello,
    Message,
    Open,
    Quiet,
    Refused,
    Stop,
    Trailer,
    Welcome,
    decode,
    encode,
    grant_digest,
    runs_digest,
)
from kv_transfer.tcp import join_address, split_address

TIMEOUT_S = 10.0
HERE, THERE = WorkerId("here"), WorkerId("there")


class RawPeer:
    """Speaks the protocol byte by byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, spec: KVSpec) -> None:
        self.reader, self.writer = reader, writer
        self.identity = Identity(THERE, Epoch(2), spec)

    def send(self, message: Message, payload: bytes = b"") -> None:
        encoded = encode(message)
        self.writer.write(b"TKV1" + struct.pack("<I", len(encoded)) + encoded + payload)

    async def receive(self) -> Message:
        magic, num_bytes = struct.unpack("<4sI", await self.reader.readexactly(8))
        assert magic == b"TKV1"
        return decode(await self.reader.readexactly(num_bytes))

    async def greet(self) -> None:
        self.send(Hello(PROTOCOL_VERSION, self.identity))
        assert isinstance(await self.receive(), Welcome)

    async def open(self, number: int, grant: Grant) -> None:
        self.send(Open(number, grant.handoff_id, grant.epoch, grant_digest(grant), grant.mac))
        assert await self.receive() == Accepted(number)

    async def is_closed_by_peer(self) -> bool:
        try:
            return await asyncio.wait_for(self.reader.read(), TIMEOUT_S) == b""
        except ConnectionResetError:
            return True


class Decode:
    def __init__(self, spec: KVSpec, options: TransferOptions) -> None:
        self.spec = spec
        self.region = KVRegion.create(spec.block_bytes, 8)
        self.signer = GrantSigner()
        self.receivers: ReceiverSet = create_receivers(
            ["tcp"], self.region, Identity(HERE, Epoch(1), spec), self.signer.verify, options
        )
        self.peers: list[RawPeer] = []

    async def connect(self) -> RawPeer:
        host, port = split_address(self.receivers.addresses[0])
        self.peers.append(RawPeer(*await asyncio.open_connection(host, port), self.spec))
        return self.peers[-1]

    def grant(self, name: str, blocks: list[int]) -> Grant:
        block_ids = tuple(BlockId(block) for block in blocks)
        handoff_id, num_tokens = HandoffId(RequestId(name), 0), len(blocks) * self.spec.block_size
        unsigned = Grant(handoff_id, HERE, Epoch(1), num_tokens, 0, block_ids, self.receivers.addresses)
        grant = Grant(
            handoff_id,
            HERE,
            Epoch(1),
            num_tokens,
            0,
            block_ids,
            self.receivers.addresses,
            self.signer.mac(unsigned),
        )
        self.receivers.expect(grant)
        return grant

    def block(self, number: int) -> bytes:
        return bytes(self.region.view(BlockId(number)))


@pytest_asyncio.fixture
async def worker(spec: KVSpec, options: TransferOptions) -> AsyncIterator[Decode]:
    worker = Decode(spec, options)
    await worker.receivers.start()
    yield worker
    for peer in worker.peers:
        peer.writer.close()
    await worker.receivers.close()
    worker.region.close()


def seal_of(grant: Grant, runs: tuple[RunDigest, ...], number: int) -> Trailer:
    seal = Seal(grant.handoff_id, THERE, Epoch(2), grant.epoch, grant.num_prompt_tokens, BlockHash(b""), ())
    return Trailer(number, seal, runs_digest(runs))


def random_bytes(num_bytes: int, seed: int) -> bytes:
    return np.random.default_rng(seed).bytes(num_bytes)


GARBAGE = {
    "random": random_bytes(5000, 1),
    "http": b"GET / HTTP/1.1\r\nHost: decode\r\n\r\n",
    "pickle": pickle.dumps({"a": list(range(100))}),
    "huge length": b"TKV1" + struct.pack("<I", 0xFFFFFFFF) + b"x" * 100,
    "just too long": b"TKV1" + struct.pack("<I", (64 << 10) + 1),
    "not msgpack": b"TKV1" + struct.pack("<I", 4) + b"\xc1\xc1\xc1\xc1",
    "no such message": b"TKV1" + struct.pack("<I", 6) + b"\x92\xa4Nope",
    "empty message": b"TKV1" + struct.pack("<I", 0),
    "not a greeting": b"TKV1" + struct.pack("<I", len(encode(Quiet(1)))) + encode(Quiet(1)),
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE.keys())
async def test_garbage_closes_its_connection_only(worker: Decode, garbage: bytes) -> None:
    grant = worker.grant("fine", [2])
    good, bad = await worker.connect(), await worker.connect()
    await good.greet()
    bad.writer.write(garbage)
    assert await bad.is_closed_by_peer()
    payload = random_bytes(worker.spec.block_bytes, 2)
    await good.open(1, grant)
    runs = (RunDigest(0, 1, digest(payload)),)
    good.send(Data(1, runs[0]), payload)
    good.send(seal_of(grant, runs, 1))
    await worker.receivers.wait_sealed(grant.handoff_id, TIMEOUT_S)
    assert worker.block(2) == payload


@pytest.mark.parametrize(
    "misbehaviour",
    [
        Data(1, RunDigest(2, 2, bytes(16))),
        Data(1, RunDigest(0, 2, bytes(16))),
        Data(1, RunDigest(-1, 1, bytes(16))),
        Data(1, RunDigest(0, 0, bytes(16))),
        Data(9, RunDigest(0, 1, bytes(16))),
        Stop(1),
        Refused(1, "busy", "no"),
    ],
    ids=[
        "beyond the grant",
        "not adjacent",
        "negative",
        "empty",
        "not open",
        "not for a receiver",
        "an answer",
    ],
)
async def test_what_breaks_the_protocol_closes_the_connection(worker: Decode, misbehaviour: Message) -> None:
    grant = worker.grant("r", [1, 5, 6])
    peer = await worker.connect()
    await peer.greet()
    await peer.open(1, grant)
    peer.send(misbehaviour, b"\xff" * 2 * worker.spec.block_bytes)
    assert await peer.is_closed_by_peer()
    with pytest.raises(TransferFailed, match="lost the sender"):
        await worker.receivers.wait_sealed(grant.handoff_id, TIMEOUT_S)
    assert await worker.receivers.cancel(grant.handoff_id)
    assert not any(any(worker.block(number)) for number in range(8))


async def test_cancel_within_a_frame_is_quiet_at_once_and_the_rest_goes_nowhere(worker: Decode) -> None:
    """The sender has stopped half-way through a block, as if paused; the connection then serves another handoff."""
    grant, other = worker.grant("cancelled", [1]), worker.grant("other", [3])
    peer = await worker.connect()
    await peer.greet()
    await peer.open(1, grant)
    await peer.open(2, other)
    payload, half = random_bytes(worker.spec.block_bytes, 3), worker.spec.block_bytes // 2
    run = RunDigest(0, 1, digest(payload))
    peer.send(Data(1, run), payload[:half])
    while worker.block(1)[:half] != payload[:half]:
        await asyncio.sleep(0)
    assert await worker.receivers.cancel(grant.handoff_id)
    peer.writer.write(payload[half:])
    assert await peer.receive() == Stop(1)
    peer.send(Quiet(1))
    peer.send(Data(2, run), payload)
    peer.send(seal_of(other, (run,), 2))
    await worker.receivers.wait_sealed(other.handoff_id, TIMEOUT_S)
    assert worker.block(3) == payload
    assert worker.block(1) == payload[:half] + bytes(half)


async def test_a_seal_must_list_the_runs_that_arrived(worker: Decode) -> None:
    grant = worker.grant("r", [1])
    peer = await worker.connect()
    await peer.greet()
    await peer.open(1, grant)
    payload = random_bytes(worker.spec.block_bytes, 4)
    run = RunDigest(0, 1, digest(payload))
    peer.send(Data(1, run), payload)
    peer.send(seal_of(grant, (run, RunDigest(1, 1, bytes(16))), 1))
    with pytest.raises(TransferFailed, match="lists other runs than arrived"):
        await worker.receivers.wait_sealed(grant.handoff_id, TIMEOUT_S)


async def test_what_comes_after_the_seal_is_written_nowhere(worker: Decode) -> None:
    grant = worker.grant("r", [1])
    peer = await worker.connect()
    await peer.greet()
    await peer.open(1, grant)
    payload = random_bytes(worker.spec.block_bytes, 1)
    run = RunDigest(0, 1, digest(payload))
    peer.send(Data(1, run), payload)
    peer.send(seal_of(grant, (run,), 1))
    peer.send(Data(1, run), b"\xff" * worker.spec.block_bytes)
    assert await peer.is_closed_by_peer()
    seal = await worker.receivers.wait_sealed(grant.handoff_id, TIMEOUT_S)
    assert seal.runs == (run,)
    assert worker.block(1) == payload


async def test_another_protocol_is_refused_naming_both(worker: Decode) -> None:
    peer = await worker.connect()
    peer.send(Hello(PROTOCOL_VERSION + 1, peer.identity))
    answer = await peer.receive()
    assert isinstance(answer, Refused)
    assert f"protocol: {PROTOCOL_VERSION} here, {PROTOCOL_VERSION + 1} there" in answer.reason
    assert await peer.is_closed_by_peer()


@pytest.mark.parametrize(("host", "port"), [("10.0.0.1", 5), ("worker-3.cluster", 65535), ("::1", 80)])
def test_addresses_survive_spelling(host: str, port: int) -> None:
    assert split_address(join_address("tcp", host, port)) == (host, port)


@pytest.mark.parametrize("address", ["tcp://host", "tcp://host:", "host:5", "tcp://host:5x", ""])
def test_malformed_addresses_are_typed_errors(address: str) -> None:
    with pytest.raises(TransferFailed):
        split_address(address)


async def test_the_advertised_host_is_what_senders_see(spec: KVSpec) -> None:
    region = KVRegion.create(spec.block_bytes, 1)
    options = TransferOptions(advertised_host="decode-1.example")
    receivers = create_receivers(["tcp"], region, Identity(HERE, Epoch(1), spec), lambda grant: True, options)
    await receivers.start()
    assert receivers.addresses[0].startswith("tcp://decode-1.example:")
    await receivers.close()
    region.close()


async def test_a_taken_port_is_an_oserror(worker: Decode, spec: KVSpec) -> None:
    taken = split_address(worker.receivers.addresses[0])[1]
    options = TransferOptions(tcp_port=taken)
    second = create_receivers(
        ["tcp"], worker.region, Identity(HERE, Epoch(1), spec), lambda grant: True, options
    )
    with pytest.raises(OSError):
        await second.start()
