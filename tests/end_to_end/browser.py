"""A headless Chromium as a test uses one, over chromedriver's HTTP (W3C WebDriver)."""

import asyncio
import base64
import contextlib
import os
import re
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx

from core.child import dying_with_parent

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # how the protocol names an element in JSON
ANSWER_S = 30.0
POLL_S = 0.02


class Browser:
    """One session. Elements are found by CSS selectors."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    async def command(self, method: str, path: str, **body: object) -> Any:
        """What the driver answers. Raises AssertionError with its message when it refuses."""
        answer = await self._client.request(method, path, json=body if method == "POST" else None)
        value = answer.json()["value"]
        assert answer.status_code == 200, value["message"]
        return value

    async def open(self, url: str) -> None:
        await self.command("POST", "url", url=url)

    async def run(self, script: str, *arguments: object) -> Any:
        """The value of a JavaScript function's body; a promise is awaited."""
        return await self.command("POST", "execute/sync", script=script, args=arguments)

    async def click(self, selector: str) -> None:
        await self.command("POST", f"element/{await self._find(selector)}/click")

    async def type(self, selector: str, text: str) -> None:
        """Keys as a user presses them; "\\ue007" is Enter."""
        await self.command("POST", f"element/{await self._find(selector)}/value", text=text)

    async def wait(self, script: str, *arguments: object) -> Any:
        """The first true value of the script. Raises TimeoutError."""
        async with asyncio.timeout(ANSWER_S):
            while not (value := await self.run(script, *arguments)):
                await asyncio.sleep(POLL_S)
        return value

    async def screenshot(self, path: Path) -> bytes:
        """The window as PNG, also saved as a file."""
        image = base64.b64decode(await self.command("GET", "screenshot"))
        await asyncio.to_thread(path.write_bytes, image)
        return image

    async def emulate(self, command: str, **parameters: object) -> None:
        """A command of Chromium's own debugging protocol."""
        await self.command("POST", "goog/cdp/execute", cmd=command, params=parameters)

    async def console(self) -> list[str]:
        """What the page complained of since the last call, and what was refused to it."""
        return [entry["message"] for entry in await self.command("POST", "se/log", type="browser")]

    async def _find(self, selector: str) -> str:
        found = await self.command("POST", "element", using="css selector", value=selector)
        return str(found[ELEMENT])


def missing() -> str:
    """What this machine lacks of a browser; empty when it has one."""
    absent = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"no {' and no '.join(absent)} here (Debian: chromium, chromium-driver)" if absent else ""


@contextlib.asynccontextmanager
async def start_browser(profile: Path) -> AsyncIterator[Browser]:
    """A browser with `profile`, an empty folder, of its own."""
    driver = await asyncio.create_subprocess_exec(
        *dying_with_parent(["chromedriver", "--port=0"]),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        port = await _port_of(driver)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=ANSWER_S) as client:
            session = await _open_session(client, profile)
            client.base_url = client.base_url.join(f"/session/{session}/")
            yield Browser(client)
            await client.delete(str(client.base_url))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(driver.pid, signal.SIGKILL)
        await driver.wait()


async def _port_of(driver: asyncio.subprocess.Process) -> int:
    assert driver.stdout is not None
    async with asyncio.timeout(ANSWER_S):
        async for line in driver.stdout:
            if found := re.search(rb"started successfully on port (\d+)", line):
                return int(found[1])
    raise AssertionError("chromedriver did not start")


async def _open_session(client: httpx.AsyncClient, profile: Path) -> str:
    options = {"args": [*FLAGS, f"--user-data-dir={profile}", "--window-size=1280,900"]}
    wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
    answer = await client.post("/session", json={"capabilities": {"alwaysMatch": wanted}})
    value = answer.json()["value"]
    assert answer.status_code == 200, value["message"]
    return str(value["sessionId"])
