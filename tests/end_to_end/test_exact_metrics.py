"""Every count that the gateway exports against a shadow count, made of what clients saw and nothing else: answers of
all kinds, refusals, clients that left, retries, choices, prompts prefilled on a decode worker."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import grpc
import httpx
import pytest

from gateway.timing import STAGES
from tandem.testing import LocalCluster
from tests.end_to_end.clients import Client, make_request
from tests.end_to_end.samples import Samples, grown, read_samples, total

AT_ONCE = 12  # no more than there are places: none is refused
MODEL = "test"
LOCAL_CAUSES = ("no_prefill_worker", "short_prompt")


@dataclass
class Shadow:
    """What the clients of a cluster saw."""

    outcomes: Counter[str] = field(default_factory=Counter)
    retries: Counter[str] = field(default_factory=Counter)
    local: Counter[str] = field(default_factory=Counter)
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_gaps: int = 0
    num_cached_tokens: int = 0
    num_kv_bytes: int = 0
    num_choices: int = 0
    num_admitted: int = 0
    seconds: Counter[str] = field(default_factory=Counter)

    def see(self, choices: list, usage: object, outcome: str) -> None:
        """One whole answer; `choices` are each choice's last chunk and its number of tokens."""
        self.outcomes[outcome] += 1
        self.num_admitted += 1
        self.num_prompt_tokens += usage.num_prompt_tokens
        self.num_output_tokens += usage.num_completion_tokens
        self.num_cached_tokens += usage.num_cached_tokens
        for timing, num_tokens in choices:
            self.num_choices += 1
            self.num_gaps += num_tokens - 1
            self.num_kv_bytes += timing.kv_bytes
            for cause in timing.causes:
                (self.local if cause in LOCAL_CAUSES else self.retries)[cause] += 1
            for name in (*STAGES, "total_s", "time_to_first_token_s"):
                self.seconds[name] += getattr(timing, name)

    def check(self, samples: Samples) -> None:
        """Everything that is counted of requests is that, and nothing more."""
        for name, label, counts in (
            ("tandem_requests_total", "outcome", self.outcomes),
            ("tandem_retries_total", "cause", self.retries),
            ("tandem_local_prefills_total", "cause", self.local),
        ):
            for value, count in counts.items():
                assert total(samples, name, **{label: value}) == count, (name, value)
            assert total(samples, name) == counts.total(), name
        refused = {code: self.outcomes[code] for code in ("busy", "unavailable") if self.outcomes[code]}
        assert total(samples, "tandem_admissions_total", outcome="admitted") == self.num_admitted
        assert total(samples, "tandem_admissions_total") == self.num_admitted + sum(refused.values())
        assert total(samples, "tandem_prompt_tokens_total") == self.num_prompt_tokens
        assert total(samples, "tandem_output_tokens_total") == self.num_output_tokens
        assert total(samples, "tandem_kv_sent_bytes_total") == self.num_kv_bytes
        not_computed = [
            total(samples, "tandem_prefix_hit_tokens_total", source=s) for s in ("prefill", "local")
        ]
        assert sum(not_computed) == self.num_cached_tokens
        assert total(samples, "tandem_inter_token_seconds_count") == self.num_gaps
        self._check_times(samples)

    def _check_times(self, samples: Samples) -> None:
        for name, seconds in (("request", "total_s"), ("time_to_first_token", "time_to_first_token_s")):
            assert total(samples, f"tandem_{name}_seconds_count") == self.num_choices
            assert total(samples, f"tandem_{name}_seconds_sum") == pytest.approx(self.seconds[seconds])
        for stage in STAGES:
            label = stage.removesuffix("_s")
            assert total(samples, "tandem_stage_seconds_count", stage=label) == self.num_choices
            assert total(samples, "tandem_stage_seconds_sum", stage=label) == pytest.approx(
                self.seconds[stage], abs=1e-9
            )


class Asking:
    """Requests whose outcomes go into a shadow count."""

    def __init__(self, cluster: LocalCluster, client: Client, http: httpx.AsyncClient) -> None:
        self.cluster, self.client, self.http = cluster, client, http
        self.shadow = Shadow()
        self._places = asyncio.Semaphore(AT_ONCE)

    async def whole(self, prompt: list[int], max_tokens: int, outcome: str = "length", **options: object):
        """One answer of any number of choices over gRPC."""
        options = {"ignore_eos": True, **options}
        async with self._places:
            answer = await self.client.stub.Generate(make_request(prompt, max_tokens, **options))
        parts = [(choice.timing, len(choice.token_ids)) for choice in answer.choices]
        self.shadow.see(parts, answer.usage, outcome)
        return answer

    async def refused(self, outcome: str, prompt: list[int], **options: object) -> None:
        with pytest.raises(grpc.aio.AioRpcError):
            await self.client.generate(prompt, **options)
        self.shadow.outcomes[outcome] += 1

    async def settled(self, is_done: Callable[[Samples], bool] = lambda samples: True) -> Samples:
        """The samples once nothing runs and the workers have told their last counts."""
        await self.cluster.wait_idle()
        async with asyncio.timeout(10):
            while True:
                samples = await read_samples(self.cluster)
                if samples["tandem_live_requests"] == 0 and is_done(samples):
                    return samples
                await asyncio.sleep(0.05)


@pytest.fixture
async def ask(start_cluster, connect) -> AsyncIterator[Callable[..., object]]:
    async with AsyncExitStack() as stack:

        async def begin(**options: object) -> Asking:
            cluster = await stack.enter_async_context(start_cluster(**options))
            client = await stack.enter_async_context(connect(cluster))
            http = await stack.enter_async_context(httpx.AsyncClient(base_url=cluster.http))
            return Asking(cluster, client, http)

        yield begin


def prompts(count: int, seed: int, longest: int = 300) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(256) for _ in range(rng.randrange(1, longest))] for _ in range(count)]


async def test_answers_of_all_kinds_are_counted_exactly(ask):
    asking = await ask()
    http = asking.http
    many = [(prompt, 1 + index % 30) for index, prompt in enumerate(prompts(40, 1))]
    answers = await asyncio.gather(*(asking.whole(prompt, length) for prompt, length in many))
    repeated = prompts(1, 2)[0] * 2
    await asking.whole(repeated, 5)
    await asking.whole(repeated, 5)
    await asking.whole(prompts(1, 3)[0], 6, n=3, temperature=1.0, seed=1)
    await asking.whole([7, 8, 9], 40, "stop", allowed_token_ids=[97], stop=["aaa"])
    body = {"model": MODEL, "prompt": "abc", "max_tokens": "x"}
    assert (await http.post("/v1/completions", json=body)).status_code == 400
    assert (await http.post("/v1/completions", content=b"{")).status_code == 400
    assert (
        await http.post("/v1/completions", json={**body, "max_tokens": 1, "model": "?"})
    ).status_code == 404
    asking.shadow.outcomes.update(invalid_request=2, model_not_found=1)
    await asking.refused("invalid_request", [1], temperature=7.0)
    samples = await asking.settled()
    asking.shadow.check(samples)
    check_workers(samples, asking.shadow, num_decoded=sum(n - 1 for _, n in many))
    assert len(answers) == 40


def check_workers(samples: Samples, shadow: Shadow, num_decoded: int) -> None:
    """What the workers count is what the gateway counts: prompts but for what is cached, bytes, every step once."""
    assert total(samples, "tandem_transfer_bytes_total") == shadow.num_kv_bytes
    assert total(samples, "tandem_computed_tokens_total", kind="recomputed") == 0
    assert total(samples, "tandem_computed_tokens_total", kind="output", role="prefill") == 0
    assert total(samples, "tandem_computed_tokens_total", kind="output", role="decode") >= num_decoded
    for role in ("prefill", "decode"):
        tokens = total(samples, "tandem_step_sequences_sum", role=role)
        steps = total(samples, "tandem_step_seconds_count", role=role)
        assert steps == total(samples, "tandem_step_sequences_count", role=role)
        assert 0 < steps <= tokens
        assert total(samples, "tandem_step_seconds_bucket", role=role, le="+Inf") == steps


async def test_workers_count_every_token_once(ask):
    asking = await ask(num_decode=2)
    before = await asking.settled()
    many = [(prompt, 2 + index % 30) for index, prompt in enumerate(prompts(30, 4))]
    await asyncio.gather(*(asking.whole(prompt, length) for prompt, length in many))
    num_uncached = sum(len(prompt) for prompt, _ in many) - asking.shadow.num_cached_tokens
    num_decoded = sum(length - 1 for _, length in many)

    def has_all(samples: Samples) -> bool:
        return total(grown(before, samples), "tandem_transfers_total") == len(many)

    samples = grown(before, await asking.settled(has_all))
    assert total(samples, "tandem_computed_tokens_total", kind="prompt", role="prefill") == num_uncached
    assert total(samples, "tandem_computed_tokens_total", kind="output", role="decode") == num_decoded
    assert total(samples, "tandem_computed_tokens_total") == num_uncached + num_decoded
    assert total(samples, "tandem_step_sequences_sum", role="decode") == num_decoded
    assert total(samples, "tandem_transfer_bytes_total", connector="shm") == asking.shadow.num_kv_bytes
    asking.shadow.check(samples)


async def test_clients_that_leave_and_requests_that_are_aborted_are_counted_once(ask):
    asking = await ask()
    for index in range(6):
        call = asking.client.stub.GenerateStream(make_request([index] * 40, 1500, ignore_eos=True))
        await anext(aiter(call))
        call.cancel()
    samples = await asking.settled(lambda found: total(found, "tandem_requests_total") == 6)
    assert total(samples, "tandem_requests_total", outcome="cancelled") == 6
    assert total(samples, "tandem_admissions_total", outcome="admitted") == 6
    assert total(samples, "tandem_prompt_tokens_total") == 240
    num_tokens = total(samples, "tandem_output_tokens_total")
    num_begun = total(samples, "tandem_request_seconds_count")
    assert total(samples, "tandem_inter_token_seconds_count") == num_tokens - num_begun


async def test_retries_are_counted_by_cause(ask):
    faults = {"TANDEM_FAULTS": json.dumps({"corrupts": True, "every": 2})}
    asking = await ask(environment=faults)
    for prompt in prompts(4, 5):
        await asking.whole(prompt, 6)
    assert asking.shadow.retries["transfer_failed"] > 0
    samples = await asking.settled()
    asking.shadow.check(samples)
    assert total(samples, "tandem_resends_total") == asking.shadow.retries["transfer_failed"]


async def test_prompts_prefilled_on_decode_are_counted_as_such(ask):
    asking = await ask()
    await asking.cluster.processes["prefill-0"].kill()
    await asking.cluster.wait_workers(["decode-0"])
    prompt = prompts(1, 6)[0] * 3
    for _ in range(3):
        await asking.whole(prompt, 4)
    samples = await asking.settled()
    asking.shadow.check(samples)
    assert total(samples, "tandem_local_prefills_total", cause="no_prefill_worker") == 3
    assert total(samples, "tandem_prefix_hit_tokens_total", source="local") > 0
    assert total(samples, "tandem_workers", role="prefill", state="up") == 0


async def test_refusals_name_the_tier_that_is_behind(ask):
    """Before any request has ended the tier may be filled twice; what comes at once beyond that is refused."""
    asking = await ask()

    async def one(index: int) -> str:
        try:
            await asking.client.generate([index] * 20, 100, ignore_eos=True)
        except grpc.aio.AioRpcError as error:
            return dict(error.trailing_metadata())["tandem-code"]
        return "length"

    outcomes = Counter(await asyncio.gather(*map(one, range(60))))
    assert outcomes["busy"] > 0
    samples = await asking.settled()
    for outcome in ("busy", "length"):
        assert total(samples, "tandem_requests_total", outcome=outcome) == outcomes[outcome]
    assert total(samples, "tandem_admissions_total", outcome="busy", tier="decode") == outcomes["busy"]
    assert total(samples, "tandem_admissions_total", outcome="admitted") == outcomes["length"]


async def test_without_a_decode_worker_requests_are_refused_and_counted(ask):
    asking = await ask()
    await asking.cluster.processes["decode-0"].kill()
    await asking.cluster.wait_workers(["prefill-0"])
    for _ in range(3):
        await asking.refused("unavailable", [1, 2, 3])
    samples = await asking.settled()
    asking.shadow.check(samples)
    assert total(samples, "tandem_admissions_total", outcome="unavailable", tier="gateway") == 3
