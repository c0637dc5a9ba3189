"""Grants and seals: the two records that pass between tiers for one handoff. No I/O.

A **grant** is made by a decode worker, carried by the gateway as opaque bytes and used by a prefill worker.
A **seal** is made by the prefill worker, travels last on the connector and is verified by the decode worker.

    prompt tokens  [ cached on decode | to be sent                     ]
    grant          num_cached_tokens    block_ids[0], block_ids[1], ...    (the last block may be partial)
"""

import hmac
import secrets
import struct
from dataclasses import dataclass, replace
from hashlib import sha256

from core.ids import BlockHash, BlockId, Epoch, HandoffId, WorkerId
from core.sampling import Top


@dataclass(frozen=True, slots=True)
class Grant:
    """Decode blocks reserved for one handoff. `block_ids` are the blocks to be written, in prompt order, after the
    `num_cached_tokens` leading tokens (whole blocks) that the decode worker already holds and pins. `addresses`
    are the connectors that worker listens on. Valid for one decode epoch only."""

    handoff_id: HandoffId
    worker_id: WorkerId
    epoch: Epoch
    num_prompt_tokens: int
    num_cached_tokens: int
    block_ids: tuple[BlockId, ...]
    addresses: tuple[str, ...]
    mac: bytes = b""


class GrantSigner:
    """HMAC-SHA256 under a key that is random per decode epoch and never leaves the worker."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)

    def mac(self, grant: Grant) -> bytes:
        """Over every field but `mac` itself, length-prefixed."""
        parts = (
            grant.handoff_id.request_id.encode(),
            grant.worker_id.encode(),
            struct.pack(
                "<qqqq",
                grant.handoff_id.attempt,
                grant.epoch,
                grant.num_prompt_tokens,
                grant.num_cached_tokens,
            ),
            struct.pack(f"<{len(grant.block_ids)}q", *grant.block_ids),
            *(address.encode() for address in grant.addresses),
        )
        message = b"".join(struct.pack("<I", len(part)) + part for part in parts)
        return hmac.digest(self._key, message, sha256)

    def sign(self, grant: Grant) -> Grant:
        """The same grant with its mac."""
        return replace(grant, mac=self.mac(grant))

    def verify(self, grant: Grant) -> bool:
        return hmac.compare_digest(self.mac(grant), grant.mac)


@dataclass(frozen=True, slots=True)
class RunDigest:
    """The 128-bit xxh3 of one transferred run: `num_blocks` blocks of the grant from `position` on, in order."""

    position: int
    num_blocks: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class FirstToken:
    """What prefill sampled for one choice at output position `position` (0 unless a stream is being recovered). `top`
    are the likeliest tokens with their log-probabilities, if it asked for some."""

    choice: int
    position: int
    token_id: int
    logprob: float
    is_finished: bool = False
    top: Top = ()


@dataclass(frozen=True, slots=True)
class Seal:
    """The trailer that makes a transfer valid. `chain_hash` is that of the prompt's last full block (empty for a
    prompt shorter than one) and must equal the decode worker's own. No runs means all was cached: still valid.
    `connector` is the scheme that carried the blocks."""

    handoff_id: HandoffId
    prefill_worker_id: WorkerId
    prefill_epoch: Epoch
    decode_epoch: Epoch
    num_tokens: int
    chain_hash: BlockHash
    first_tokens: tuple[FirstToken, ...]
    runs: tuple[RunDigest, ...] = ()
    connector: str = ""

    def covers(self, num_blocks: int) -> bool:
        """Whether the runs tile [0, num_blocks) of the grant exactly, in order, without gap or overlap."""
        position = 0
        for run in sorted(self.runs, key=lambda run: run.position):
            if run.position != position or run.num_blocks <= 0:
                return False
            position += run.num_blocks
        return position == num_blocks
