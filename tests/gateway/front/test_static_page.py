"""The page's files as they are served, and the policy that they come under."""

import re
from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio
from starlette.applications import Starlette
from starlette.routing import Route

from gateway.front.static_page import FOLDER, page, page_routes

KINDS = {
    "/": "text/html; charset=utf-8",
    "/cluster": "text/html; charset=utf-8",
    "/page/page.css": "text/css; charset=utf-8",
    "/page/app.js": "text/javascript; charset=utf-8",
    "/page/icon.svg": "image/svg+xml",
}


@pytest_asyncio.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    cluster = page("cluster.html")
    routes = [Route("/cluster", lambda _: cluster()), *page_routes()]
    transport = httpx.ASGITransport(Starlette(routes=routes))
    async with httpx.AsyncClient(transport=transport, base_url="http://page") as made:
        yield made


@pytest.mark.parametrize(("path", "kind"), KINDS.items())
async def test_every_file_comes_with_its_kind_and_a_policy_that_allows_no_other_origin(client, path, kind):
    answer = await client.get(path)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == kind
    assert answer.headers["x-content-type-options"] == "nosniff"
    directives = dict(
        part.strip().partition(" ")[::2] for part in answer.headers["content-security-policy"].split(";")
    )
    assert directives["default-src"] == "'none'"
    sources = {name: value for name, value in directives.items() if name.endswith("-src")}
    assert set(sources.values()) <= {"'none'", "'self'"}


async def test_whatever_the_page_needs_is_served_and_is_its_own(client):
    named: set[str] = set()
    for path in FOLDER.iterdir():
        text = path.read_text(encoding="utf-8")
        assert "innerHTML" not in text
        assert not re.findall(r"(?:https?:)?//(?!www\.w3\.org/2000/svg)[\w-]+\.", text), path
        named |= set(re.findall(r"""(?:src|href)="([^"]+)\"""", text))
        named |= {f"page/{name}" for name in re.findall(r'from "\./([^"]+)"', text)}
    assert len(named) >= len(list(FOLDER.iterdir())) - 1
    for name in named:
        assert (await client.get(f"/{name}")).status_code == 200, name


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
async def test_it_can_only_be_read(client, method):
    assert (await client.request(method, "/")).status_code == 405


@pytest.mark.parametrize(
    "path", ["/page/", "/page/no.js", "/page/cluster.html", "/page/../http_server.py", "/page/%2e%2e/main.py"]
)
async def test_nothing_else_is_served(client, path):
    assert (await client.get(path)).status_code == 404
