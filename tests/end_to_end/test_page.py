"""The page at `/` in a real browser, over a real tandem: what it shows while an answer comes, and of its timing."""

import asyncio
import base64
from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio

from tandem.testing import LocalCluster
from tests.end_to_end.browser import POLL_S, Browser, missing, start_browser

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(bool(missing()), reason=missing()),
]
ENTER, ARROW_RIGHT = "\ue007", "\ue014"
WORKERS = ["prefill-0", "decode-0", "decode-1"]
LENGTH = "return document.querySelector('.answer:last-child .text')?.textContent.length ?? 0"
BAR_HEIGHT_PX = 14
# The last answer's bar: its segments, its width, and the total that is written above it.
BAR = """
const bar = [...document.querySelectorAll(".bar")].at(-1);
const segments = [...bar.children].map((segment) => ({
  seconds: Number(segment.dataset.seconds),
  text: segment.dataset.text,
  width: segment.getBoundingClientRect().width,
  colour: getComputedStyle(segment).backgroundColor,
}));
const total = bar.parentElement.querySelector("[data-figure=total] b").textContent;
return { segments, width: bar.getBoundingClientRect().width, total };
"""
# The random model would end its answer anywhere; what is sent is kept for the tests to look at.
NEVER_ENDING = """
const plain = window.fetch;
window.asked = [];
window.fetch = (path, options) => {
  if (!options?.body) return plain(path, options);
  window.asked.push(JSON.parse(options.body));
  return plain(path, { ...options, body: JSON.stringify({ ...window.asked.at(-1), ignore_eos: true }) });
};
"""
# Every result of reading the same events: a stream of bytes cut in two at every place, and one of single bytes.
CUT_ANYWHERE = """
const { readEvents } = await import(new URL("page/stream.js", document.baseURI));
const bytes = new TextEncoder().encode(arguments[0]);
const ways = [...bytes.keys()].map((cut) => [bytes.slice(0, cut), bytes.slice(cut)]);
ways.push([...bytes].map((byte) => Uint8Array.of(byte)));
const results = new Set();
for (const parts of ways) {
  const body = new ReadableStream({ start(to) { parts.forEach((part) => to.enqueue(part)); to.close(); } });
  const events = [];
  for await (const event of readEvents(body)) events.push(event);
  results.add(JSON.stringify(events));
}
return [...results].map((events) => JSON.parse(events));
"""
# Answers the next question with these bytes.
ANSWER_WITH = """
const [text, status] = arguments;
window.fetch = async () => new Response(text, { status });
"""
COLOURS = """
const bytes = Uint8Array.from(atob(arguments[0]), (character) => character.charCodeAt(0));
const image = await createImageBitmap(new Blob([bytes]));
const canvas = new OffscreenCanvas(image.width, image.height).getContext("2d");
canvas.drawImage(image, 0, 0);
const { data } = canvas.getImageData(0, 0, image.width, image.height);
const counts = {};
for (let at = 0; at < data.length; at += 4) {
  const name = `rgb(${data[at]}, ${data[at + 1]}, ${data[at + 2]})`;
  counts[name] = (counts[name] ?? 0) + 1;
}
return counts;
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(start_cluster) -> AsyncIterator[LocalCluster]:
    async with start_cluster(num_decode=2, worker_arguments=("--num-blocks", "700")) as running:
        await running.wait_workers(WORKERS)
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser(tmp_path_factory) -> AsyncIterator[Browser]:
    async with start_browser(tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest_asyncio.fixture(loop_scope="module")
async def page(cluster, browser) -> AsyncIterator[Browser]:
    """The page, freshly opened; the browser has nothing to say against it."""
    await browser.open(cluster.http)
    await browser.wait("return document.getElementById('status').dataset.state === 'ready'")
    await browser.wait("return document.getElementById('model').textContent === 'test'")
    await browser.run(NEVER_ENDING)
    await set_field(browser, "temperature", 0)
    yield browser
    assert [line for line in await browser.console() if "status of 400" not in line] == []


async def set_field(page: Browser, name: str, value: object) -> None:
    await page.run("document.forms.settings.elements[arguments[0]].value = arguments[1]", name, value)


async def ask(page: Browser, text: str, max_tokens: int) -> None:
    await set_field(page, "max_tokens", max_tokens)
    await page.type("#message", text + ENTER)


async def wait_answers(page: Browser, count: int) -> None:
    await page.wait("return document.querySelectorAll('.timing').length === arguments[0]", count)


async def texts(page: Browser, selector: str) -> list[str]:
    found: list[str] = await page.run(
        "return [...document.querySelectorAll(arguments[0])].map((found) => found.textContent)", selector
    )
    return found


async def figure(page: Browser, name: str) -> str:
    """One of the last answer's figures, as it is shown."""
    return (await texts(page, f"[data-figure='{name}'] b"))[-1]


async def live_requests(cluster: LocalCluster) -> list[dict[str, str]]:
    async with httpx.AsyncClient(base_url=cluster.http) as http:
        found: list[dict[str, str]] = (await http.get("/cluster")).json()["requests"]
    return found


async def lengths_while_growing(page: Browser) -> list[int]:
    """The answer's length at each look at it, until its timing is there."""
    lengths = []
    while not await page.run("return document.querySelector('.timing')"):
        lengths.append(await page.run(LENGTH))
        await asyncio.sleep(POLL_S)
    return lengths


async def test_an_answer_grows_and_its_bar_adds_up(page, tmp_path):
    await ask(page, "hello", 1200)
    lengths = await lengths_while_growing(page)
    assert lengths == sorted(lengths)
    assert len(set(lengths)) > 3, lengths
    assert await figure(page, "tokens") == "1200"
    bar = await page.run(BAR)
    seconds = [segment["seconds"] for segment in bar["segments"]]
    assert as_shown(sum(seconds)) == bar["total"]
    assert sum(segment["width"] for segment in bar["segments"]) == pytest.approx(bar["width"], abs=1)
    longest = max(bar["segments"], key=lambda segment: segment["seconds"])
    share = longest["seconds"] / sum(seconds)
    assert longest["width"] / bar["width"] == pytest.approx(share, abs=0.05)
    image = await page.screenshot(tmp_path / "answer.png")
    counts = await page.run(COLOURS, base64.b64encode(image).decode())
    assert counts[longest["colour"]] > BAR_HEIGHT_PX * longest["width"] * 0.9
    assert len(counts) > 50


async def test_the_arrow_keys_go_from_stage_to_stage(page, tmp_path):
    await ask(page, "hello", 20)
    await wait_answers(page, 1)
    shown = [segment["text"] for segment in (await page.run(BAR))["segments"]]
    assert shown[-1].startswith("decode ")
    await page.type(".bar span", ARROW_RIGHT)
    assert await page.run("return document.activeElement.dataset.text") == shown[1]
    assert len(await page.run("return [...document.querySelectorAll('.bar [tabindex=\"0\"]')]")) == 1
    await page.screenshot(tmp_path / "focus.png")


def as_shown(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.{1 if seconds < 0.1 else 0}f} ms"


async def test_a_chat_goes_on_until_a_new_one_is_begun(page):
    await set_field(page, "system", "Be brief.")
    await ask(page, "first", 5)
    await wait_answers(page, 1)
    await ask(page, "second", 5)
    await wait_answers(page, 2)
    first_answer = (await texts(page, ".answer .text"))[0]
    await page.click("#new-chat")
    assert await texts(page, ".answer") == []
    await ask(page, "third", 5)
    await wait_answers(page, 1)
    asked = await page.run("return window.asked.map((request) => request.messages)")
    system = {"role": "system", "content": "Be brief."}
    first, second, third = ({"role": "user", "content": text} for text in ("first", "second", "third"))
    answer = {"role": "assistant", "content": first_answer}
    assert asked == [[system, first], [system, first, answer, second], [system, third]]


async def test_only_fields_that_are_filled_are_sent(page):
    for name, value in {"top_k": 40, "min_p": 0, "seed": 7, "stop": "end\\n\n##"}.items():
        await set_field(page, name, value)
    await ask(page, "hello", 5)
    await wait_answers(page, 1)
    (asked,) = await page.run("return window.asked")
    del asked["messages"], asked["stream"], asked["stream_options"]
    sampling = {"temperature": 0, "max_tokens": 5, "top_k": 40, "min_p": 0, "seed": 7}
    assert asked == {"model": "test", **sampling, "stop": ["end\n", "##"]}


async def test_stop_ends_the_answer_and_the_request(page, cluster, tmp_path):
    await ask(page, "hello", 1900)
    await page.wait(LENGTH)
    await page.screenshot(tmp_path / "streaming.png")
    await page.click("#stop")
    await page.wait("return document.querySelector('.answer .badge')?.textContent === 'stopped'")
    assert await page.run("return !document.getElementById('send').hidden")
    await cluster.wait_idle()
    assert await live_requests(cluster) == []


async def test_what_is_wrong_is_said_and_its_field_marked(page):
    await set_field(page, "stop", "\n".join("abcdefghijklmnopq"))
    await ask(page, "hello", 5)
    (error,) = await page.wait("return [...document.querySelectorAll('.error')].map((e) => e.textContent)")
    assert error.startswith("invalid_request: stop")
    assert await page.run("return document.querySelector('[aria-invalid]').name") == "stop"
    assert await page.run("return document.getElementById('message').value") == "hello"


@pytest.mark.parametrize(
    ("end", "told"),
    [
        ('data: {"error": {"code": "worker_lost", "message": "gone"}}\n\n', "worker_lost: gone"),
        ("", "connection_lost: the stream ended before the answer did"),
    ],
)
async def test_an_answer_that_breaks_off_is_shown_with_the_reason(page, end, told):
    part = '{"choices": [{"index": 0, "delta": {"content": "<b>half</b>"}, "finish_reason": null}]}'
    await page.run(ANSWER_WITH, f"data: {part}\n\n{end}", 200)
    await ask(page, "hello", 5)
    await page.wait("return document.querySelector('.error')")
    assert await texts(page, ".error") == [told]
    assert await texts(page, ".answer .text") == ["<b>half</b>"]


async def test_events_may_be_cut_anywhere(page):
    stream = 'data: {"a":"ü€😀"}\n\n: comment\r\ndata: b\r\ndata: c\r\n\r\ndata:[DONE]\n\n'
    assert await page.run(CUT_ANYWHERE, stream) == [['{"a":"ü€😀"}', "b\nc", "[DONE]"]]


async def test_it_fits_a_phone_in_the_dark(page, tmp_path):
    await ask(page, "hello", 40)
    await wait_answers(page, 1)
    width, height = 360, 740
    try:
        await page.emulate(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=True,
        )
        dark = {"name": "prefers-color-scheme", "value": "dark"}
        await page.emulate("Emulation.setEmulatedMedia", features=[dark])
        assert await page.run("return document.documentElement.scrollWidth") <= width
        image = await page.screenshot(tmp_path / "phone.png")
        counts = await page.run(COLOURS, base64.b64encode(image).decode())
        commonest = max(counts, key=counts.__getitem__)
        assert max(int(part) for part in commonest[4:-1].split(",")) < 64
    finally:
        await page.emulate("Emulation.clearDeviceMetricsOverride")
        await page.emulate("Emulation.setEmulatedMedia", features=[])


async def test_an_answer_whose_worker_is_killed_is_whole_and_says_that_it_was_recovered(
    page, cluster, tmp_path
):
    await ask(page, "hello", 1900)
    await page.wait(LENGTH)
    (live,) = await live_requests(cluster)
    await cluster.processes[live["decode_worker_id"]].kill()
    await wait_answers(page, 1)
    await page.screenshot(tmp_path / "recovered.png")
    assert await texts(page, ".badge.recovered") == ["recovered: worker_lost"]
    assert await figure(page, "tokens") == "1900"
    (path,) = await texts(page, ".path")
    assert "prefill-0" in path
    assert live["decode_worker_id"] not in path
