"""The file of tenants and their keys, and who is who by a header."""

import pytest

from core.errors import ErrorCode, Unauthenticated
from gateway.tenants import Tenants, read_tenants

FILE = """
# two of research, one of web
research  sk-1
research\tsk-2#

   # indented
web sk-3   \r
"""


@pytest.fixture
def path(tmp_path):
    return tmp_path / "keys"


@pytest.fixture
def tenants(path) -> Tenants:
    path.write_text(FILE)
    return read_tenants(str(path))


@pytest.mark.parametrize(
    ("key", "tenant"), [("sk-1", "research"), ("sk-2#", "research"), ("sk-3", "web"), (" sk-3 ", "web")]
)
@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_each_key_is_its_tenants(tenants, scheme, key, tenant):
    assert tenants.of(f"{scheme} {key}") == tenant


@pytest.mark.parametrize(
    "authorization",
    [
        "",
        "Bearer",
        "Bearer ",
        "sk-1",
        "Basic sk-1",
        "Bearer sk-4",
        "Bearer sk-1 sk-1",
        "Bearer sk-é",
        "Bearer #",
    ],
)
def test_whoever_has_none_of_them_is_refused_without_being_told_a_key(tenants, authorization):
    with pytest.raises(Unauthenticated) as caught:
        tenants.of(authorization)
    assert caught.value.code is ErrorCode.UNAUTHENTICATED
    assert "sk-" not in str(caught.value)


@pytest.mark.parametrize("authorization", ["", "Bearer sk-1", "nonsense"])
def test_without_keys_everybody_is_the_one_nameless_tenant(authorization):
    assert Tenants().of(authorization) == ""


def test_no_key_is_kept(tenants):
    assert "sk-" not in repr(vars(tenants))


@pytest.mark.parametrize(
    ("content", "line", "reason"),
    [
        (b"a sk-1\nb\n", 2, "not `tenant key`"),
        (b"\n\na sk-1 more", 3, "not `tenant key`"),
        (b"a sk-1\nb sk-\xc3\xa9\n", 2, "not `tenant key`"),
        (b"\xef\xbb\xbfa sk-1\n", 1, "not `tenant key`"),
        (b"a\x00 sk-1\n", 1, "not `tenant key`"),
        (b"a" * 65 + b" sk-1\n", 1, "not `tenant key`"),
        (b"a " + b"k" * 257, 1, "not `tenant key`"),
        (b"a sk-1\n#\nb sk-1\n", 3, "that of line 1"),
        (b"a sk-1\na sk-1\n", 2, "that of line 1"),
    ],
)
def test_a_mistake_is_told_with_file_and_line_and_no_key(path, content, line, reason):
    path.write_bytes(content)
    with pytest.raises(ValueError, match=reason) as caught:
        read_tenants(str(path))
    assert str(caught.value).startswith(f"{path}, line {line}: ")
    assert "sk-" not in str(caught.value)


@pytest.mark.parametrize("content", ["", "\n# a sk-1\n"])
def test_a_file_without_keys_lets_nobody_in_by_mistake(path, content):
    path.write_text(content)
    with pytest.raises(ValueError, match="no key"):
        read_tenants(str(path))


def test_a_file_that_cannot_be_read_is_named(path):
    with pytest.raises(OSError, match=str(path)):
        read_tenants(str(path))
