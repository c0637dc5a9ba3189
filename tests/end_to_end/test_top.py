"""`tandem top` in a terminal of its own, over a real cluster whose gateway goes away and comes back."""

import asyncio
import os
import pty
import re
import sys
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from core.child import dying_with_parent
from tandem.testing import LocalCluster

pytestmark = pytest.mark.asyncio(loop_scope="module")
LIMIT_S = 60.0
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(start_cluster) -> AsyncIterator[LocalCluster]:
    async with start_cluster() as running:
        await running.wait_workers(["prefill-0", "decode-0"])
        yield running


class Terminal:
    """What a program writes to its terminal since it was last looked at."""

    def __init__(self, end: int) -> None:
        self._end = end
        self._text = ""
        os.set_blocking(end, False)
        asyncio.get_running_loop().add_reader(end, self._read)
        self._is_new = asyncio.Event()

    def _read(self) -> None:
        try:
            self._text += os.read(self._end, 1 << 16).decode(errors="replace")
        except OSError:  # the program has ended
            asyncio.get_running_loop().remove_reader(self._end)
        self._is_new.set()

    async def wait(self, words: str) -> None:
        """Until they are written. Raises TimeoutError."""
        async with asyncio.timeout(LIMIT_S):
            while words not in ESCAPES.sub("", self._text):
                self._is_new.clear()
                await self._is_new.wait()
        self._text = ""

    def type(self, text: str) -> None:
        os.write(self._end, text.encode())


def command(url: str, *options: str) -> list[str]:
    return dying_with_parent([sys.executable, "-m", "tandem.cli", "top", "--url", url, *options])


async def test_once_prints_every_worker_and_exits(cluster):
    process = await asyncio.create_subprocess_exec(
        *command(cluster.http, "--once"), stdout=asyncio.subprocess.PIPE
    )
    told, _ = await process.communicate()
    assert process.returncode == 0
    rows = [
        line.split()[:2] for line in told.decode().splitlines() if line.startswith(("prefill-", "decode-"))
    ]
    assert rows == [["prefill-0", "up"], ["decode-0", "up"]]
    assert "256" in told.decode()


async def test_it_says_when_the_gateway_is_gone_goes_on_when_it_is_back_and_q_quits(cluster):
    near, far = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "130", "LINES": "40"}
    process = await asyncio.create_subprocess_exec(
        *command(cluster.http), stdin=far, stdout=far, stderr=far, env=environment, start_new_session=True
    )
    os.close(far)
    terminal = Terminal(near)
    await terminal.wait("decode-0")
    address = cluster.http.removeprefix("http://")
    await cluster.processes["gateway"].kill()
    await terminal.wait("gateway gone since")
    await cluster.start_gateway(http=address)
    await terminal.wait("live")
    terminal.type("q")
    async with asyncio.timeout(LIMIT_S):
        assert await process.wait() == 0
    os.close(near)


async def test_without_a_gateway_it_says_so_and_fails(cluster):
    process = await asyncio.create_subprocess_exec(
        *command("http://127.0.0.1:1"), stderr=asyncio.subprocess.PIPE
    )
    _, said = await process.communicate()
    assert process.returncode == 1
    assert said.decode().startswith("tandem: http://127.0.0.1:1")
    assert len(said.decode().splitlines()) == 1
