"""The page at `/cluster` in a real browser, over a real tandem under load: it draws what the gateway tells."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from core.worker import Role
from gateway.timing import STAGES
from tandem.testing import LocalCluster
from tests.end_to_end.browser import Browser, missing, start_browser

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(bool(missing()), reason=missing()),
]
ENTER, ARROW_DOWN = "\ue007", "\ue015"
NUM_BLOCKS = 300
MAX_BATCH = 16
STATES = ("owned", "in_flight", "leased", "quarantined", "cached", "free")
# Each worker's box: the counts of its bar, their widths and that of the bar, its batch, its state.
NODES = """
return Object.fromEntries([...document.querySelectorAll("#topology [data-worker]")].map((node) => {
  const segments = [...node.querySelectorAll(".pool [data-blocks]")];
  const width = (part) => Number(part.getAttribute("width"));
  return [node.dataset.worker, {
    counts: segments.map((segment) => Number(segment.dataset.count)),
    widths: segments.map(width),
    bar: width(node.querySelector(".pool .track")),
    running: Number(node.querySelector(".fill .taken").dataset.count),
    state: node.dataset.state,
    tag: node.querySelector(".tag")?.textContent ?? "",
    about: node.getAttribute("aria-label"),
  }];
}));
"""
# The waterfall: each stage's seconds, where its bar begins and how wide it is, of the track.
WATERFALL = """
const shown = document.querySelector(".waterfall");
const stages = [...shown.querySelectorAll("[data-seconds]")].map((stage) => {
  const [track, bar] = [".track", ".part"].map((part) => stage.querySelector(part).getBoundingClientRect());
  const share = (px) => px / track.width;
  return { seconds: Number(stage.dataset.seconds), left: share(bar.left - track.left), width: share(bar.width) };
});
const figures = Object.fromEntries([...shown.querySelectorAll("[data-figure]")].map((figure) =>
  [figure.dataset.figure, figure.querySelector("b").textContent],
));
return { id: shown.dataset.request, total: Number(shown.dataset.total), stages, figures, text: shown.textContent };
"""
# Boxes that lie on each other, or beyond the drawing.
OVERLAPPING = """
const drawing = document.getElementById("topology").getBoundingClientRect();
const boxes = [...document.querySelectorAll("#topology .node .frame")].map((frame) => frame.getBoundingClientRect());
const before = (one, other) => one.right <= other.left || one.bottom <= other.top;
const apart = (one, other) => before(one, other) || before(other, one);
const beyond = ({ left, right, top, bottom }) =>
  left < drawing.left - 1 || right > drawing.right + 1 || top < drawing.top - 1 || bottom > drawing.bottom + 1;
const wrong = boxes.filter((box, at) => beyond(box) || boxes.slice(at + 1).some((other) => !apart(box, other)));
return wrong.map(({ x, y, width, height }) => [x, y, width, height]);
"""
STATUS = "return document.getElementById('status').dataset.state"
# What the page is told from now on; null: what the gateway says.
TELL = """
window.plain ??= window.fetch;
window.asked = 0;
const body = arguments[0];
window.fetch = (...given) => {
  window.asked += 1;
  return body === null ? window.plain(...given) : Promise.resolve(new Response(body));
};
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(start_cluster) -> AsyncIterator[LocalCluster]:
    async with start_cluster(num_decode=2, worker_arguments=("--num-blocks", str(NUM_BLOCKS))) as running:
        await running.wait_workers(["prefill-0", "decode-0", "decode-1"])
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser(tmp_path_factory) -> AsyncIterator[Browser]:
    async with start_browser(tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest_asyncio.fixture(loop_scope="module")
async def page(cluster, browser) -> AsyncIterator[Browser]:
    """The page, freshly opened; the browser has nothing to say against it but that a gateway was gone."""
    await browser.open(f"{cluster.http}/cluster")
    await browser.wait(f"{STATUS} === 'ready'")
    yield browser
    assert [line for line in await browser.console() if "ERR_CONNECTION" not in line] == []


@contextlib.asynccontextmanager
async def load(cluster: LocalCluster, num_streams: int = 6) -> AsyncIterator[None]:
    """Requests of every length, one after another on each of so many streams."""

    async def ask(client: httpx.AsyncClient, number: int) -> None:
        at = number
        while True:
            body = {"model": "test", "prompt": f"{at} " * (10 + at % 90), "max_tokens": 40 + 9 * (at % 20)}
            with contextlib.suppress(httpx.HTTPError):
                await client.post("/v1/completions", json={**body, "ignore_eos": True})
            at += num_streams

    async with httpx.AsyncClient(base_url=cluster.http, timeout=60) as client:
        tasks = [asyncio.create_task(ask(client, number)) for number in range(num_streams)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def view(cluster: LocalCluster) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=cluster.http) as http:
        found: dict[str, Any] = (await http.get("/cluster")).raise_for_status().json()
    return found


async def complete(cluster: LocalCluster, **fields: object) -> None:
    async with httpx.AsyncClient(base_url=cluster.http, timeout=60) as http:
        body = {"model": "test", "prompt": "hello", "max_tokens": 60, "ignore_eos": True, **fields}
        (await http.post("/v1/completions", json=body)).raise_for_status()


async def choose_ended(page: Browser) -> dict[str, Any]:
    """The waterfall of the newest that ended."""
    await page.wait("return document.querySelector('#requests tr[data-live=false]')")
    await page.run("document.querySelector('#requests tr[data-live=false] button').click()")
    found: dict[str, Any] = await page.wait(f"if (document.querySelector('.waterfall')) {{ {WATERFALL} }}")
    return found


async def test_a_browser_gets_the_page_and_everybody_else_the_numbers(cluster):
    async with httpx.AsyncClient(base_url=cluster.http) as http:
        html = await http.get("/cluster", headers={"accept": "text/html,application/xhtml+xml,*/*;q=0.8"})
        assert html.headers["content-type"].startswith("text/html")
        assert "default-src 'none'" in html.headers["content-security-policy"]
        for accept in ("*/*", "application/json"):
            answer = await http.get("/cluster", headers={"accept": accept})
            assert answer.headers["content-type"] == "application/json"
            assert answer.headers["vary"] == html.headers["vary"] == "accept"
        for after in ("-1", "x", "9" * 30):
            assert (await http.get("/cluster", params={"after": after})).status_code == 400


async def test_every_worker_is_drawn_and_its_bar_sums_to_its_pool_under_load(page, cluster, tmp_path):
    async with load(cluster):
        await page.wait("return document.querySelector('.edge[data-kind=kv]:not([data-level=\"0.00\"])')")
        for _ in range(5):
            nodes = await page.run(NODES)
            assert set(nodes) == {"prefill-0", "decode-0", "decode-1"}
            for name, node in nodes.items():
                assert sum(node["counts"]) == NUM_BLOCKS, (name, node)
                assert sum(node["widths"]) == pytest.approx(node["bar"], abs=0.1)
                shares = [count / NUM_BLOCKS for count in node["counts"]]
                assert [width / node["bar"] for width in node["widths"]] == pytest.approx(shares, abs=0.001)
                assert 0 <= node["running"] <= MAX_BATCH
                assert node["state"] == "up"
            await asyncio.sleep(0.3)
        await page.screenshot(tmp_path / "load.png")
    edges = await page.run("return [...document.querySelectorAll('.edge')].map((edge) => edge.dataset.edge)")
    assert {"kv prefill-0 decode-0", "kv prefill-0 decode-1", "prompts  prefill-0"} <= set(edges)


async def test_the_lines_move_with_what_crosses_and_rest_when_nothing_does(page, cluster):
    moving = "return document.querySelectorAll('.edge:not([data-level=\"0.00\"])').length"
    offset = "return document.querySelector('.edge[data-kind=kv]:not([data-level=\"0.00\"]) .moving')?"
    offset += ".getAttribute('stroke-dashoffset')"
    await complete(cluster)
    before = await page.wait(offset)
    assert await page.wait(
        f"const now = (() => {{ {offset} }})(); return now && now !== arguments[0]", before
    )
    await page.wait(f"return (() => {{ {moving} }})() === 0")


async def test_a_waterfall_adds_up_to_its_total_and_is_what_the_gateway_tells(page, cluster, tmp_path):
    await complete(cluster, max_tokens=200)
    newest = (await view(cluster))["recent"][0]
    await page.wait(
        "return document.querySelector(`#requests [data-request='${arguments[0]}']`)", newest["request_id"]
    )
    found = await choose_ended(page)
    assert found["id"] == newest["request_id"]
    seconds = [stage["seconds"] for stage in found["stages"]]
    assert len(seconds) == len(STAGES)
    assert sum(seconds) == pytest.approx(found["total"]) == pytest.approx(newest["timing"]["total_s"])
    begin = 0.0
    for stage in found["stages"]:
        assert stage["left"] == pytest.approx(begin, abs=0.01)
        begin += stage["seconds"] / found["total"]
    assert found["stages"][-1]["left"] + found["stages"][-1]["width"] == pytest.approx(1, abs=0.02)
    assert found["figures"]["output tokens"] == "200"
    assert newest["timing"]["prefill_worker_id"] in found["text"]
    assert newest["timing"]["decode_worker_id"] in found["text"]
    await page.screenshot(tmp_path / "waterfall.png")


async def test_it_can_be_used_with_the_keyboard_alone(page, cluster):
    for _ in range(2):
        await complete(cluster)
    await page.wait("return document.querySelectorAll('#requests tr').length > 1")
    await page.type("#topology [data-worker='prefill-0']", ENTER)
    assert await page.run("return document.querySelector('#worker dd').textContent") == "prefill-0"
    assert await page.run("return !document.getElementById('all-workers').hidden")
    await page.type("#requests button", ENTER)
    assert (await page.wait(f"if (document.querySelector('.waterfall')) {{ {WATERFALL} }}"))["total"] > 0
    await page.type("#requests button", ARROW_DOWN)
    assert await page.run("return document.activeElement.closest('tr').sectionRowIndex") == 1
    await page.type("#all-workers", ENTER)
    assert await page.run("return document.getElementById('all-workers').hidden")


async def test_a_running_request_is_in_its_stage_and_has_a_waterfall_so_far(page, cluster):
    asking = asyncio.create_task(complete(cluster, max_tokens=1900))
    await page.wait("return document.querySelector('#stages [data-stage=decode_s] b').textContent === '1'")
    await page.run("document.querySelector('#requests tr[data-live=true] button').click()")
    found = await page.wait(f"if (document.querySelector('.waterfall')) {{ {WATERFALL} }}")
    assert "so far" in found["figures"]
    assert sum(stage["seconds"] for stage in found["stages"]) == pytest.approx(found["total"])
    await asking
    await page.wait("return document.querySelector('.waterfall')?.textContent.includes('ended: length')")


async def test_it_asks_nothing_while_nobody_looks(page):
    await page.run(TELL, None)
    await page.wait("return window.asked > 1")
    hide = "Object.defineProperty(document, 'hidden', { value: arguments[0], configurable: true });"
    hide += "document.dispatchEvent(new Event('visibilitychange')); window.asked = 0;"
    await page.run(hide, True)
    await asyncio.sleep(2.5)
    assert await page.run("return window.asked") <= 1, "one may have been on its way"
    await page.run(hide, False)
    await page.wait("return window.asked > 1")


@pytest.mark.parametrize(("num_prefill", "num_decode"), [(0, 0), (0, 3), (1, 1), (10, 30), (40, 60)])
async def test_any_number_of_workers_fits_any_window(page, cluster, tmp_path, num_prefill, num_decode):
    told = await view(cluster)
    made = {
        role: next(w for w in told["workers"] if w["record"]["role"] == role)
        for role in ("prefill", "decode")
    }
    told["workers"] = [
        {**made[role], "record": {**made[role]["record"], "worker_id": f"{role}-{number}"}}
        for role, count in (("prefill", num_prefill), ("decode", num_decode))
        for number in range(count)
    ]
    await page.run(TELL, json.dumps({**told, "gone": []}))
    count = num_prefill + num_decode
    await page.wait(
        "return document.querySelectorAll('#topology [data-worker]').length === arguments[0]", count
    )
    try:
        for width in (360, 800, 1280, 1900):
            await page.emulate(
                "Emulation.setDeviceMetricsOverride",
                width=width,
                height=900,
                deviceScaleFactor=1,
                mobile=False,
            )
            await page.wait(
                "return document.getElementById('topology').viewBox.baseVal.width < arguments[0]", width
            )
            assert await page.run("return document.documentElement.scrollWidth") <= width
            assert await page.run(OVERLAPPING) == [], width
            await page.screenshot(tmp_path / f"{count}-workers-{width}.png")
    finally:
        await page.emulate("Emulation.clearDeviceMetricsOverride")


async def test_what_a_worker_or_a_client_calls_itself_is_text(page, cluster):
    await complete(cluster)
    told, name = await view(cluster), "<img src=x onerror=alert(1)>"
    told["workers"][0]["record"]["worker_id"] = told["recent"][0]["client_request_id"] = name
    await page.run(TELL, json.dumps(told))
    await page.wait(
        "return [...document.querySelectorAll('[data-worker]')].some((node) => node.dataset.worker === arguments[0])",
        name,
    )
    await choose_ended(page)
    assert name in await page.run("return document.getElementById('detail-id').textContent")
    assert await page.run("return document.querySelectorAll('img').length") == 1


async def test_a_worker_that_is_killed_is_shown_as_gone_and_its_request_as_recovered(page, cluster, tmp_path):
    asking = asyncio.create_task(complete(cluster, max_tokens=1900))
    await page.wait("return document.querySelector('#stages [data-stage=decode_s] b').textContent === '1'")
    (live,) = (await view(cluster))["requests"]
    victim = live["decode_worker_id"]
    await cluster.processes[victim].kill()
    await page.wait(
        f"const nodes = (() => {{ {NODES} }})(); return nodes[arguments[0]].state !== 'up'", victim
    )
    await page.wait(
        f"const nodes = (() => {{ {NODES} }})(); return nodes[arguments[0]].state === 'gone'", victim
    )
    node = (await page.run(NODES))[victim]
    assert node["tag"].startswith("gone for")
    assert sum(node["counts"]) == 0
    await page.screenshot(tmp_path / "gone.png")
    await asking
    await page.wait(
        "return document.querySelector(`#requests [data-request='${arguments[0]}'][data-live=false]`)",
        live["request_id"],
    )
    found = await choose_ended(page)
    assert "recovered: worker_lost" in found["text"]
    assert sum(stage["seconds"] for stage in found["stages"]) == pytest.approx(found["total"])
    await cluster.add_worker(Role.DECODE, victim)
    await page.wait(
        f"const nodes = (() => {{ {NODES} }})(); return nodes[arguments[0]].state === 'up'", victim
    )


async def test_it_says_that_the_gateway_is_gone_and_goes_on_when_it_is_back(page, cluster, tmp_path):
    await complete(cluster)
    await page.wait("return document.querySelector('#requests tr')")
    address = cluster.http.removeprefix("http://")
    await cluster.processes["gateway"].kill()
    await page.wait(f"{STATUS} === 'lost'")
    said = await page.run("return document.getElementById('status').textContent")
    assert said.startswith("gateway gone since")
    await page.screenshot(tmp_path / "lost.png")
    await cluster.start_gateway(http=address)
    await page.wait(f"{STATUS} === 'ready'")
    await page.wait("return document.querySelectorAll('#requests tr').length === 0")
    await complete(cluster)
    await page.wait("return document.querySelectorAll('#requests tr').length === 1")
