"""A prefill and a decode engine, each with a pool of its own that its region mirrors, against one engine. The test
plays the services: it copies a block from region to region as soon as it is reported, and never again. Pools and
regions start as NaNs: what was not moved ruins every token after it."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from core.ids import HandoffId, RequestId
from core.kv_region import KVRegion
from core.kv_spec import DType
from core.sampling import SamplingParams
from decode_service import worker as decode_worker
from engine.build import build_scheduler, mirrored_engine
from engine.config import EngineConfig
from engine.engine import Engine
from engine.engine_geometry import EngineGeometry
from engine.host_mirror import HostMirror
from engine.kv_pool import KVPool
from engine.messages import (
    Activate,
    AnyEvent,
    Computed,
    First,
    Granted,
    Release,
    Reserve,
    Reserved,
    Started,
    StartPrompt,
    Token,
    WorkFailed,
)
from engine.model import LlamaModel
from engine.runner import ModelRunner
from engine.worker_loop import Tier
from prefill_service import worker as prefill_worker

BLOCK = 16
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Worker:
    """A tier over a mirrored engine."""

    def __init__(
        self,
        path: Path,
        device: str,
        make_tier: Callable[[Engine, EngineGeometry], Tier],
        is_sender: bool,
        num_blocks: int,
    ) -> None:
        config = EngineConfig(
            str(path), DType.FLOAT32, device, num_blocks=num_blocks, token_budget=40, max_batch=4
        )
        geometry = EngineGeometry(config)
        model = LlamaModel.load(geometry.path, geometry.model, config.dtype, device)
        self.pool = KVPool.allocate(geometry.kv_spec, num_blocks, device)
        self.pool.data.fill_(torch.nan)
        block_bytes = geometry.kv_spec.block_bytes
        self.region = KVRegion.create(block_bytes, num_blocks)
        self.region.view(0, num_blocks)[:] = b"\xff" * (num_blocks * block_bytes)
        mirror = HostMirror(self.pool, self.region, staging_bytes=2 * block_bytes)
        runner = ModelRunner(model, self.pool, BLOCK, device)
        engine = mirrored_engine(build_scheduler(config, geometry), runner, mirror, is_sender)
        self.tier = make_tier(engine, geometry)
        engine.on_scheduled = self.tier.announce

    def step(self) -> list[AnyEvent]:
        self.tier.step()
        self.tier.engine.scheduler.pool.check()
        events, self.tier.events = self.tier.events, []
        return events

    def in_region(self, block: int) -> bytes:
        return bytes(self.region.view(block))

    def in_pool(self, block: int) -> bytes:
        return self.pool.data[block].view(torch.uint8).cpu().numpy().tobytes()

    def close(self) -> None:
        del self.tier.engine.on_scheduled  # refers to the tier, which would keep the region open
        del self.tier
        self.region.close()


@dataclass
class Request:
    """What the services know of one. `num_ready` blocks of it were reported, `num_sent` of them have crossed."""

    id: HandoffId
    prompt: list[int]
    params: SamplingParams
    started: Started | None = None
    reserved: Reserved | None = None
    first: First | None = None
    num_ready: int = 0
    num_sent: int = 0
    num_cached_on_decode: int = 0
    tokens: list[int] = field(default_factory=list)
    num_preemptions: int = 0
    is_done: bool = False

    @property
    def num_blocks(self) -> int:
        return -(-len(self.prompt) // BLOCK)


class Tandem:
    def __init__(self, path: Path, device: str, num_decode_blocks: int = 48) -> None:
        self.prefill = Worker(path, device, prefill_worker.make_tier, True, 48)
        self.decode = Worker(path, device, decode_worker.make_tier, False, num_decode_blocks)
        self.requests: dict[HandoffId, Request] = {}

    def run(self, prompts: list[list[int]], params: SamplingParams) -> list[Request]:
        requests = [self._start(prompt, params) for prompt in prompts]
        for _ in range(1000):
            for event in (*self.prefill.step(), *self.decode.step()):
                self._see(self.requests[event.id], event)
            if all(request.is_done for request in requests):
                return requests
        raise AssertionError("not done")

    def run_locally(self, prompt: list[int], params: SamplingParams) -> Request:
        request = self._new(prompt, params)
        self.decode.tier.handle(Reserve(request.id, prompt, [], params, 1e9, 1 << 20, is_local=True))
        while not request.is_done:
            for event in self.decode.step():
                self._see(request, event)
        return request

    def _new(self, prompt: list[int], params: SamplingParams) -> Request:
        request = Request(HandoffId(RequestId(str(len(self.requests))), 1), prompt, params)
        self.requests[request.id] = request
        return request

    def _start(self, prompt: list[int], params: SamplingParams) -> Request:
        request = self._new(prompt, params)
        self.prefill.tier.handle(StartPrompt(request.id, prompt, [], params))
        return request

    def _see(self, request: Request, event: AnyEvent) -> None:
        match event:
            case Started():
                request.started = event
                self._report_ready(request, event.num_cached_tokens)
                self.prefill.tier.handle(Granted(event.id))
                params = request.params
                self.decode.tier.handle(Reserve(event.id, request.prompt, [], params, 1e9, 1 << 20))
            case Computed():
                self._report_ready(request, event.num_tokens)
            case First():
                request.first = event
                request.tokens.append(event.first_tokens[0].token_id)
            case Reserved():
                request.reserved = event
                request.num_sent = request.num_cached_on_decode = event.num_cached_tokens // BLOCK
            case Token():
                request.tokens.append(event.token_id)
                request.num_preemptions = event.num_preemptions
                request.is_done = bool(event.finish_reason)
            case WorkFailed():
                raise AssertionError(event)
        self._send(request)

    def _report_ready(self, request: Request, num_tokens: int) -> None:
        """Every block that is reported, a cached one too, is in the region as it is in the pool."""
        is_whole = num_tokens == len(request.prompt)
        request.num_ready = request.num_blocks if is_whole else num_tokens // BLOCK
        for block in request.started.block_ids[: request.num_ready]:
            assert self.prefill.in_region(block) == self.prefill.in_pool(block), block

    def _send(self, request: Request) -> None:
        """What is ready crosses; after the last block and the first token the seal counts as verified."""
        if request.reserved is None:
            return
        for index in range(request.num_sent, request.num_ready):
            target = request.reserved.block_ids[index - request.num_cached_on_decode]
            self.decode.region.view(target)[:] = self.prefill.in_region(request.started.block_ids[index])
        request.num_sent = max(request.num_sent, request.num_ready)
        if request.first is not None and request.num_sent == request.num_blocks:
            self.decode.tier.handle(Activate(request.id, request.first.first_tokens))
            self.prefill.tier.handle(Release(request.id))
            for block in request.reserved.block_ids:
                assert self.decode.in_pool(block) == self.decode.in_region(block), block
            request.reserved = None

    def close(self) -> None:
        self.prefill.close()
        self.decode.close()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
def make_tandem(request, tiny_model) -> Iterator[Callable[..., Tandem]]:
    made: list[Tandem] = []

    def make(**options: int) -> Tandem:
        made.append(Tandem(tiny_model, request.param, **options))
        return made[-1]

    yield make
    for tandem in made:
        tandem.close()


def prompts_of(*lengths: int) -> list[list[int]]:
    rng = random.Random(8)
    return [[rng.randrange(256) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.8, "seed": 11}])
def test_a_tandem_of_mirrored_engines_gives_the_tokens_of_one(make_tandem, oracle, sampling):
    """In one batch, of chunks that end within blocks and on their bounds."""
    prompts = prompts_of(1, 15, 16, 17, 40, 100, 3, 130, 80)
    requests = make_tandem().run(prompts, SamplingParams(20, **sampling))
    assert [request.tokens for request in requests] == [oracle(p, max_tokens=20, **sampling) for p in prompts]


def test_prefixes_that_are_cached_on_either_side_need_no_movement(make_tandem, oracle):
    """A block that was published, or taken in, is there for those that share it."""
    tandem, params = make_tandem(), SamplingParams(12, temperature=0.0)
    whole, rest = prompts_of(90, 30)
    longer, other = [*whole[:70], *rest], [*whole[:40], *rest]
    assert tandem.run([whole], params)[0].started.num_cached_tokens == 0
    requests = tandem.run([whole, longer, other], params)
    assert [request.started.num_cached_tokens for request in requests] == [80, 64, 32]
    assert [r.tokens for r in requests] == [oracle(r.prompt, max_tokens=12) for r in requests]


def test_what_a_decode_engine_computed_itself_is_shared_without_having_been_in_its_region(
    make_tandem, oracle
):
    tandem, params = make_tandem(), SamplingParams(12, temperature=0.0)
    (prompt,) = prompts_of(70)
    local = tandem.run_locally(prompt, params)
    assert not bytes(tandem.decode.region.view(0, 48)).strip(b"\xff")
    longer = [*prompt, *local.tokens, 7, 8, 9]
    (request,) = tandem.run([longer], params)
    assert request.num_cached_on_decode == 5
    assert local.tokens == oracle(prompt, max_tokens=12)
    assert request.tokens == oracle(longer, max_tokens=12)


def test_a_preempted_sequence_computes_again_what_was_taken_in(make_tandem, oracle):
    prompts = prompts_of(40, 41, 42, 43)
    requests = make_tandem(num_decode_blocks=16).run(prompts, SamplingParams(60, temperature=0.0))
    assert any(request.num_preemptions for request in requests)
    assert [request.tokens for request in requests] == [oracle(p, max_tokens=60) for p in prompts]
