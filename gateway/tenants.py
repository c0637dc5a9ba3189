"""Whose a call is: tenants by their API keys, of which only digests are kept. Knows no protocol.

# A file of them: one `tenant key` a line, several keys for a tenant as it likes.
research  sk-research-4f0c9d
research  sk-research-next
web       sk-web-81d2aa
"""

import re
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

from core.errors import Unauthenticated

_NAME = re.compile(rb"[!-~]{1,64}")
_KEY = re.compile(rb"[!-~]{1,256}")
_SCHEME = "bearer"


class Tenants:
    """Those of one gateway, by the sha256 of each key. Without any nobody needs a key, and everybody is tenant ""."""

    def __init__(self, by_digest: Mapping[bytes, str] | None = None) -> None:
        self._by_digest = dict(by_digest or {})

    def of(self, authorization: str) -> str:
        """The tenant of a call with that Authorization header. A key is looked up by its digest, so how long it takes
        says nothing of the keys that there are. Raises Unauthenticated."""
        if not self._by_digest:
            return ""
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() != _SCHEME or not key.strip():
            raise Unauthenticated("an API key is needed, as `Authorization: Bearer KEY`")
        tenant = self._by_digest.get(_digest(key.strip().encode()))
        if tenant is None:
            raise Unauthenticated("the API key is not one that this server knows")
        return tenant


def read_tenants(path: str) -> Tenants:
    """Those of a file. Blank lines and lines that begin with # count for nothing. Raises OSError; and ValueError
    naming file and line, but no key, for a line that is no name of at most 64 and key of at most 256 visible ASCII
    characters, for a key that is there twice, and for a file without any, which would let everybody in."""
    by_digest: dict[bytes, str] = {}
    line_of: dict[bytes, int] = {}
    for number, line in enumerate(Path(path).read_bytes().splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith(b"#"):
            continue
        if len(words) != 2 or not (_NAME.fullmatch(words[0]) and _KEY.fullmatch(words[1])):
            raise ValueError(f"{path}, line {number}: not `tenant key`, both visible ASCII without blanks")
        digest = _digest(words[1])
        if digest in line_of:
            raise ValueError(f"{path}, line {number}: the key is that of line {line_of[digest]}")
        by_digest[digest] = words[0].decode()
        line_of[digest] = number
    if not by_digest:
        raise ValueError(f"{path}: there is no key in it")
    return Tenants(by_digest)


def _digest(key: bytes) -> bytes:
    return sha256(key).digest()
