"""The identity of a full block of tokens: a strong hash chained over everything that its KV depends on.

    h[0] = H(salt; "", ids[0:16], fingerprint, adapter)
    h[i] = H(salt; h[i-1], ids[16i:16i+16], fingerprint, adapter)

Fields are length-prefixed, so no two different inputs spell the same bytes. The hash block is 16 tokens in the
whole cluster, whatever a pool's block size. Blocks under different salts never have the same hash, so those who are
not to share KV have different ones: `cache_salt` makes it.
"""

import struct
from collections.abc import Sequence
from hashlib import blake2b

from core.ids import BlockHash

HASH_BLOCK_TOKENS = 16
HASH_BYTES = 16
MAX_SALT_BYTES = 64
"""Of any salt: the longest key that blake2b takes."""
_SALT_BYTES = 32


def cache_salt(tenant: str, salt: str) -> bytes:
    """What blocks of that tenant, under the salt that its request names, are hashed with: 32 bytes, another for every
    pair; b"" when both are empty."""
    if not tenant and not salt:
        return b""
    digest = blake2b(digest_size=_SALT_BYTES, person=b"tandem-salt")
    for part in (tenant.encode(), salt.encode()):
        digest.update(struct.pack("<I", len(part)))
        digest.update(part)
    return digest.digest()


def hash_block(
    parent: bytes, token_ids: Sequence[int], fingerprint: str, adapter: str = "", salt: bytes = b""
) -> BlockHash:
    """blake2b-128 keyed by the salt (at most MAX_SALT_BYTES). Token ids must fit 32 unsigned bits."""
    digest = blake2b(digest_size=HASH_BYTES, key=salt)
    for part in (
        parent,
        struct.pack(f"<{len(token_ids)}I", *token_ids),
        fingerprint.encode(),
        adapter.encode(),
    ):
        digest.update(struct.pack("<I", len(part)))
        digest.update(part)
    return BlockHash(digest.digest())


def hash_chain(
    token_ids: Sequence[int], fingerprint: str, adapter: str = "", salt: bytes = b""
) -> list[BlockHash]:
    """One hash for each full block of the sequence; a partial last block has none."""
    chain: list[BlockHash] = []
    parent = b""
    for start in range(0, len(token_ids) - HASH_BLOCK_TOKENS + 1, HASH_BLOCK_TOKENS):
        block = hash_block(parent, token_ids[start : start + HASH_BLOCK_TOKENS], fingerprint, adapter, salt)
        chain.append(block)
        parent = block
    return chain


def pool_chain(chain: Sequence[BlockHash], block_size: int) -> Sequence[BlockHash]:
    """The hashes of the full blocks of a pool, each that of its last hash block. `block_size`, in tokens, is a
    multiple of HASH_BLOCK_TOKENS."""
    per_block = block_size // HASH_BLOCK_TOKENS
    return chain[per_block - 1 :: per_block]
