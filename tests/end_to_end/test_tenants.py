"""Tenants on one cluster: whoever sends whatever, nothing of another's is found, aborted or resumed."""

import asyncio
import random
from collections.abc import AsyncIterator

import grpc
import httpx
import openai
import pytest
import pytest_asyncio
from click.testing import CliRunner

from core.errors import Unauthenticated
from tandem.cli import main
from tandem.client import Answer, AsyncClient, Sampling
from tandem.testing import LocalCluster
from tests.end_to_end.browser import missing, start_browser
from tests.end_to_end.clients import Client, read_counter

pytestmark = pytest.mark.asyncio(loop_scope="module")
rng = random.Random(11)
BLOCK = 16
NUM_BLOCKS = 12
WORKERS = ["prefill-0", "decode-0"]
LIMIT_S = 60.0
ENTER = "\ue007"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(start_cluster, tmp_path_factory) -> AsyncIterator[LocalCluster]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("a key-a\na key-a-too\nb key-b\n")
    async with start_cluster(gateway_arguments=("--api-keys", str(keys))) as running:
        await running.wait_workers(WORKERS)
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def open_cluster(start_cluster) -> AsyncIterator[LocalCluster]:
    async with start_cluster() as running:
        await running.wait_workers(WORKERS)
        yield running


def new_prompt() -> list[int]:
    return [rng.randrange(256) for _ in range(NUM_BLOCKS * BLOCK + 1)]


async def ask(cluster: LocalCluster, key: str, prompt: list[int], salt: str | None = None) -> Answer:
    """Eight tokens, when the cluster has settled: what went before is cached, or never will be."""
    await cluster.wait_idle()
    sampling = Sampling(max_tokens=8, temperature=0, ignore_eos=True, cache_salt=salt)
    async with AsyncClient(cluster.grpc, api_key=key) as client:
        return await client.generate(prompt, sampling, deadline_s=LIMIT_S)


async def test_a_tenant_finds_its_own_prefix_and_nobody_elses(cluster, oracle):
    """On neither tier: of what is not found there, all is computed and all is sent."""
    prompt = new_prompt()
    expected = oracle(prompt, max_tokens=8)
    cases = [
        ("key-a", None, False),
        ("key-a", None, True),
        ("key-a-too", None, True),
        ("key-b", None, False),
        ("key-b", None, True),
        ("key-a", "s", False),
        ("key-b", "s", False),
        ("key-a", "s", True),
        ("key-b", "s", True),
        ("key-a", "a", False),
        ("key-b", "a", False),
        ("key-a", None, True),
    ]
    whole_bytes = 0
    for key, salt, is_found in cases:
        answer = await ask(cluster, key, prompt, salt)
        num_found = NUM_BLOCKS * BLOCK if is_found else 0
        assert list(answer.token_ids) == expected, (key, salt)
        assert answer.usage.num_cached_tokens == num_found, (key, salt)
        whole_bytes = whole_bytes or answer.timing.kv_bytes
        num_bytes = answer.timing.kv_bytes
        assert num_bytes < whole_bytes / 2 if is_found else num_bytes == whole_bytes > 0, (key, salt)


async def test_without_keys_a_salt_separates_as_well(open_cluster, oracle):
    prompt = new_prompt()
    expected = oracle(prompt, max_tokens=8)
    salts = [None, None, "s", "s", "t", None]
    for salt, is_found in zip(salts, [False, True, False, True, False, True], strict=True):
        answer = await ask(open_cluster, "", prompt, salt)
        assert list(answer.token_ids) == expected
        assert answer.usage.num_cached_tokens == (NUM_BLOCKS * BLOCK if is_found else 0), salt


async def test_the_choices_of_a_salted_request_share_its_prompt(cluster, oracle):
    prompt = new_prompt()
    sampling = Sampling(max_tokens=4, temperature=0, n=3, cache_salt="s", ignore_eos=True)
    computed = await read_counter(cluster, "tandem_computed_tokens_total", kind="prompt")
    async with AsyncClient(cluster.grpc, api_key="key-a") as client:
        answer = await client.generate(prompt, sampling, deadline_s=LIMIT_S)
    assert [list(choice.token_ids) for choice in answer.choices] == [oracle(prompt, max_tokens=4)] * 3
    await cluster.wait_idle()
    more = await read_counter(cluster, "tandem_computed_tokens_total", kind="prompt") - computed
    assert more < 2 * len(prompt)


async def test_openais_client_sends_the_key_and_is_told_of_a_wrong_one(cluster):
    address = {"base_url": f"{cluster.http}/v1", "max_retries": 0}
    prompt, salt = new_prompt(), {"cache_salt": "s"}
    found = []
    for key in ("key-a", "key-a", "key-b"):
        await cluster.wait_idle()
        async with openai.AsyncOpenAI(api_key=key, **address) as client:
            answer = await client.completions.create(
                model="test", prompt=prompt, max_tokens=1, temperature=0, extra_body=salt
            )
        found.append(answer.usage.prompt_tokens_details.cached_tokens)
    assert found == [0, NUM_BLOCKS * BLOCK, 0]
    async with openai.AsyncOpenAI(api_key="key-c", **address) as client:
        with pytest.raises(openai.AuthenticationError) as caught:
            await client.models.list()
    assert caught.value.code == "invalid_api_key"


async def test_another_tenant_cannot_end_a_request(cluster, oracle):
    prompt = new_prompt()
    sampling = Sampling(max_tokens=200, temperature=0, ignore_eos=True)
    async with (
        AsyncClient(cluster.grpc, api_key="key-b") as other,
        AsyncClient(cluster.grpc, api_key="key-a") as client,
    ):
        stream = client.stream(prompt, sampling, deadline_s=LIMIT_S, request_id="mine")
        first = await anext(stream)
        assert not await other.abort("mine")
        assert not await other.abort(first.request_id)
        rest = [chunk async for chunk in stream]
        token_ids = [token_id for chunk in (first, *rest) for token_id in chunk.token_ids]
        assert token_ids == oracle(prompt, max_tokens=200)
    await cluster.wait_idle()


async def test_a_log_line_of_a_request_names_its_tenant(cluster):
    answer = await ask(cluster, "key-b", new_prompt())
    async with asyncio.timeout(LIMIT_S):
        while True:
            log = cluster.processes["gateway"].log.read_text()
            lines = [line for line in log.splitlines() if f"request_id={answer.request_id} " in line]
            if lines:
                break
            await asyncio.sleep(0.05)
    assert all(" tenant=b" in line for line in lines)
    assert not [name for name in ("key-a", "key-b") if name in log]


async def test_commands_take_the_key_from_the_environment(cluster, monkeypatch):
    monkeypatch.delenv("TANDEM_API_KEY", raising=False)
    before = await read_counter(cluster, "tandem_unauthenticated_total")
    refused = await asyncio.to_thread(CliRunner().invoke, main, ["flush", "--url", cluster.http])
    assert refused.exit_code == 1
    assert "TANDEM_API_KEY" in refused.output
    assert await read_counter(cluster, "tandem_unauthenticated_total") == before + 1
    async with AsyncClient(cluster.grpc) as client:
        with pytest.raises(Unauthenticated):
            await client.model()
    monkeypatch.setenv("TANDEM_API_KEY", "key-a")
    flushed = await asyncio.to_thread(CliRunner().invoke, main, ["flush", "--url", cluster.http])
    assert (flushed.exit_code, flushed.output) == (0, "told decode-0, prefill-0\n")


async def test_what_is_open_tells_nothing_that_requests_contain(cluster):
    """A prompt, an answer, a salt or a tenant, while it runs and when it has ended."""
    secret, salt = "xylophones in the attic", "saltiest-of-all"
    body = {"model": "test", "prompt": secret, "max_tokens": 150, "ignore_eos": True, "cache_salt": salt}
    headers = {"authorization": "Bearer key-a"}
    async with httpx.AsyncClient(base_url=cluster.http, timeout=LIMIT_S) as http:
        running = asyncio.create_task(http.post("/v1/completions", json=body, headers=headers))
        pages = [await text_of(http, path) for path in ("/cluster", "/metrics", "/ready", "/health", "/")]
        answer = (await running).json()["choices"][0]["text"]
        pages += [await text_of(http, path) for path in ("/cluster", "/metrics")]
    for page in pages:
        assert not [told for told in ("xylophone", salt, "key-a", answer[:20]) if told in page]


@pytest.mark.skipif(bool(missing()), reason=missing())
async def test_the_page_asks_for_a_key_and_chats_with_it(cluster, tmp_path):
    async with start_browser(tmp_path) as page:
        await page.open(cluster.http)
        await page.wait("return document.getElementById('status').textContent.includes('API key')")
        await page.run("document.forms.settings.elements.api_key.value = 'key-a'")
        await page.run("document.forms.settings.elements.max_tokens.value = 3")
        await page.wait("return document.getElementById('status').dataset.state === 'ready'")
        await page.wait("return document.getElementById('model').textContent === 'test'")
        await page.type("#message", "hello" + ENTER)
        await page.wait("return document.querySelectorAll('.timing').length === 1")
        others = [line for line in await page.console() if "status of 401" not in line]
    assert others == []


async def text_of(http: httpx.AsyncClient, path: str) -> str:
    return (await http.get(path)).raise_for_status().text


async def test_the_health_service_is_open(cluster):
    result = await asyncio.to_thread(CliRunner().invoke, main, ["health", cluster.grpc])
    assert result.exit_code == 0
    async with grpc.aio.insecure_channel(cluster.grpc) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await Client(channel).generate([1, 2, 3], 1)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
