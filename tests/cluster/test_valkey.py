"""The embedded server: on loopback only, and never longer than whoever started it."""

import asyncio
import os
import signal
import sys
from pathlib import Path

from redis.asyncio import Redis as Client

from cluster.valkey import EmbeddedValkey

OWNER = """
import asyncio
from cluster.valkey import EmbeddedValkey

async def main():
    server = await EmbeddedValkey.start()
    print(server.pid, server._directory.name, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def is_running(pid: int) -> bool:
    """Neither gone nor a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def is_directory(path: str) -> bool:
    return Path(path).is_dir()


async def test_it_dies_with_a_parent_that_is_killed(eventually):
    owner = await asyncio.create_subprocess_exec(sys.executable, "-c", OWNER, stdout=asyncio.subprocess.PIPE)
    pid = int((await owner.stdout.readline()).split()[0])
    assert is_running(pid)
    owner.kill()
    await owner.communicate()

    async def is_gone() -> bool:
        return not is_running(pid)

    await eventually(is_gone)


def listening(pid: int) -> list[str]:
    """The addresses on which a process listens for TCP, as the kernel writes them."""
    links = [os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir()]
    inodes = {link.removeprefix("socket:[").removesuffix("]") for link in links}
    lines = [line.split() for name in ("tcp", "tcp6") for line in _table(pid, name)]
    return [fields[1] for fields in lines if fields[3] == "0A" and fields[9] in inodes]


def _table(pid: int, name: str) -> list[str]:
    return Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]


async def test_it_listens_on_loopback_only(redis):
    assert listening(redis.server.pid) == [f"0100007F:{redis.server.port:04X}"]


async def test_stop_is_idempotent_ends_the_server_and_its_directory():
    server = await EmbeddedValkey.start()
    directory = server._directory.name
    assert is_directory(directory)
    await server.stop()
    await server.stop()
    assert not is_running(server.pid)
    assert not is_directory(directory)
    assert await server.wait() is not None


async def test_a_stopped_server_can_be_ended_too():
    server = await EmbeddedValkey.start()
    os.kill(server.pid, signal.SIGSTOP)
    await server.stop()
    assert not is_running(server.pid)


async def test_a_server_that_is_killed_is_noticed():
    server = await EmbeddedValkey.start()
    os.kill(server.pid, signal.SIGKILL)
    assert await server.wait() == -signal.SIGKILL
    await server.stop()


async def test_two_run_side_by_side_and_know_nothing_of_each_other(redis):
    other = await EmbeddedValkey.start()
    async with Client.from_url(other.url) as theirs:
        await theirs.set("key", "theirs")
        assert await redis.store().redis.get("key") is None
    await other.stop()
