"""Which connectors there are, and all of a worker's under one roof. Knows nothing of what any of them does.

A decode worker makes one ReceiverSet for its pool, a prefill worker one SenderSet. A worker that fences itself renews
the one, which must go on watching who may still write, or makes another of the other.
"""

import asyncio
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

from core.errors import TransferFailed
from core.grant import Grant, Seal
from core.ids import BlockHash, HandoffId, host_id
from core.kv_region import KVRegion
from kv_transfer import loopback, shm, tcp, ucx
from kv_transfer.base import Identity, KVReceiver, KVSender, KVTransfer, Tap, TransferOptions
from kv_transfer.loopback import LoopbackNetwork
from kv_transfer.receiving import GrantTable, VerifyGrant

AUTO = "auto"
_DEFAULTS = TransferOptions()
_AUTO_ORDER = ("loopback", "shm", "ucx", "tcp")


class ReceiverSet:
    """Everything one worker receives on: one table of grants, several listeners. Lives on one event loop."""

    def __init__(self, table: GrantTable, receivers: dict[str, KVReceiver]) -> None:
        self._table = table
        self._receivers = receivers

    @property
    def connectors(self) -> tuple[str, ...]:
        return tuple(self._receivers)

    @property
    def addresses(self) -> tuple[str, ...]:
        """What a grant carries; valid after start()."""
        return tuple(receiver.address for receiver in self._receivers.values())

    async def start(self) -> None:
        """Raises OSError when an address cannot be bound; nothing listens then."""
        try:
            for receiver in self._receivers.values():
                await receiver.start()
        except OSError:
            await self.close()
            raise

    def renew(self, identity: Identity, verify: VerifyGrant) -> None:
        """The worker has taken a new epoch and a new key: earlier grants are stale, senders greet it again. What was
        being received must have been cancelled; its blocks may not be quiet yet."""
        self._table.renew(identity, verify)

    def expect(self, grant: Grant, chain_hash: BlockHash | None = None) -> None:
        """Accept a transfer for this (signed) grant from now on; its blocks belong to the transfer until it is
        sealed or quiet. `chain_hash` is the decode worker's own of the prompt's last full block, which the seal
        must equal; None leaves that to the caller. Raises StaleEpoch when this handoff is already over."""
        self._table.expect(grant, chain_hash)

    async def wait_sealed(self, handoff_id: HandoffId, timeout_s: float) -> Seal:
        """The seal, after every run it lists has arrived, tiles the grant and matches its digest; the blocks are
        the caller's again. Raises TransferFailed (bad digest, peer lost, malformed), Cancelled or DeadlineExceeded;
        the caller then cancels."""
        return await self._table.wait_sealed(handoff_id, timeout_s)

    async def cancel(self, handoff_id: HandoffId) -> bool:
        """Forget the grant; what still arrives for it is discarded and the writer is asked to stop. True once no
        write into its blocks can happen any more; False when that could not be shown within the grace: the caller
        quarantines the blocks and awaits `wait_quiet`, or asks again. Idempotent; may come before `expect`."""
        return await self._table.cancel(handoff_id)

    async def wait_quiet(self, handoff_id: HandoffId) -> None:
        """After cancel() answered False: returns when the blocks are quiet, however long that takes."""
        await self._table.wait_quiet(handoff_id)

    async def close(self) -> None:
        """Drop every connection and cancel what is expected. This process touches the region no more; a shm writer
        may until it notices, so the region must not be given to another owner."""
        for receiver in self._receivers.values():
            await receiver.close()
        await self._table.close()


class SenderSet(KVSender):
    """Opens each transfer on the configured connector, or on the best one that both sides have."""

    def __init__(self, connector: str, senders: dict[str, KVSender]) -> None:
        self._connector = connector
        self._senders = senders

    async def open(self, grant: Grant, address: str | None = None) -> KVTransfer:
        """`address` overrules the choice. Raises as KVSender.open; TransferFailed naming both sides' connectors when
        they have none in common."""
        chosen = address if address is not None else self.choose(grant.addresses)
        sender = self._senders.get(scheme_of(chosen))
        if sender is None:
            raise TransferFailed(f"no connector for {chosen} here, only {', '.join(self._senders)}")
        return await sender.open(grant, chosen)

    def choose(self, addresses: Sequence[str]) -> str:
        """The first address of the best scheme. Raises TransferFailed when there is none."""
        offered: dict[str, str] = {}
        for address in addresses:
            offered.setdefault(scheme_of(address), address)
        for scheme in _AUTO_ORDER if self._connector == AUTO else (self._connector,):
            if scheme in self._senders and scheme in offered and self._is_near(scheme, offered[scheme]):
                return offered[scheme]
        here = f"{self._connector} ({', '.join(self._senders)})"
        raise TransferFailed(f"no common connector: {here} here, {', '.join(offered) or 'none'} there")

    async def close(self) -> None:
        await asyncio.gather(*(sender.close() for sender in self._senders.values()))

    def _is_near(self, scheme: str, address: str) -> bool:
        return self._connector != AUTO or scheme != shm.SCHEME or shm.split_address(address)[0] == host_id()


_MakeReceiver = Callable[[GrantTable, TransferOptions, LoopbackNetwork], KVReceiver]
_MakeSender = Callable[[KVRegion, Identity, TransferOptions, Tap, LoopbackNetwork], KVSender]

_RECEIVERS: dict[str, _MakeReceiver] = {
    "loopback": lambda table, _, network: loopback.LoopbackReceiver(table, network),
    "shm": lambda table, _, __: shm.ShmReceiver(table),
    "tcp": lambda table, options, _: tcp.TcpReceiver(table, options),
    "ucx": lambda table, options, _: ucx.UcxReceiver(table, options),
}
_SENDERS: dict[str, _MakeSender] = {
    "loopback": loopback.LoopbackSender,
    "shm": lambda region, identity, options, tap, _: shm.ShmSender(region, identity, options, tap),
    "tcp": lambda region, identity, options, tap, _: tcp.TcpSender(region, identity, options, tap),
    "ucx": lambda region, identity, options, tap, _: ucx.UcxSender(region, identity, options, tap),
}


def scheme_of(address: str) -> str:
    return urlsplit(address).scheme


def known_connectors() -> tuple[str, ...]:
    return tuple(_SENDERS)


def check_connector(name: str) -> None:
    """Raises ValueError naming the known connectors when `name` is neither one of them nor `auto`."""
    _resolve(name, None)


def create_receivers(
    names: Sequence[str],
    region: KVRegion,
    identity: Identity,
    verify: VerifyGrant,
    options: TransferOptions = _DEFAULTS,
    network: LoopbackNetwork | None = None,
) -> ReceiverSet:
    """Receivers into `region` on each named connector; `auto` stands for all that work here (ucx only where
    `bind_host` is no loopback address, because the library listens on every interface). `network` is needed for
    loopback only. Raises ValueError naming the known connectors when a name is not one."""
    table = GrantTable(region, identity, verify, options.grace_s)
    wires = network or LoopbackNetwork()
    schemes = dict.fromkeys(scheme for name in names for scheme in _resolve(name, network))
    chosen = [s for s in schemes if s in names or s != ucx.SCHEME or not _is_loopback(options.bind_host)]
    return ReceiverSet(table, {scheme: _RECEIVERS[scheme](table, options, wires) for scheme in chosen})


def create_senders(
    connector: str,
    region: KVRegion,
    identity: Identity,
    options: TransferOptions = _DEFAULTS,
    network: LoopbackNetwork | None = None,
    tap: Tap = lambda source: source,
) -> SenderSet:
    """Senders from `region` on the named connector, or on whichever suits both sides when it is `auto`. Raises
    ValueError naming the known connectors when it is not one."""
    wires = network or LoopbackNetwork()
    schemes = _resolve(connector, network)
    return SenderSet(connector, {s: _SENDERS[s](region, identity, options, tap, wires) for s in schemes})


def _resolve(name: str, network: LoopbackNetwork | None) -> tuple[str, ...]:
    has_ucx = ucx.find_library() is not None
    if name == AUTO:
        absent = {loopback.SCHEME if network is None else "", "" if has_ucx else ucx.SCHEME}
        return tuple(scheme for scheme in known_connectors() if scheme not in absent)
    if name not in _SENDERS:
        raise ValueError(f"unknown connector {name!r}; known are {', '.join((AUTO, *known_connectors()))}")
    if name == ucx.SCHEME and not has_ucx:
        raise ValueError("connector 'ucx' needs the package ucxx")
    return (name,)


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")
