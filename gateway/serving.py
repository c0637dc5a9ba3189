"""The front's one door to the core, the same for HTTP and gRPC: check, tokenise, generate, count. Knows no protocol.

Ask ──prepare()──► TextGeneration ──chunks()──► TextChunk ... TextChunk(finish_reason) ; then usage, timing
"""

import asyncio
import contextlib
import math
import secrets
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from core.block_hash import hash_chain
from core.errors import ErrorCode, InvalidRequest, ModelNotFound, TandemError, Unavailable
from core.sampling import SamplingParams
from core.worker import Role
from gateway.fleet import Fleet
from gateway.generation import GenerationRequest
from gateway.metrics import GatewayMetrics
from gateway.orchestrator import Generation, Orchestrator
from gateway.text_stream import TextStream
from gateway.timing import Timing
from gateway.tokenizer import TextTokenizer

DEFAULT_MAX_TOKENS = 16
MAX_STOP_STRINGS = 16
MAX_STOP_LEN = 256


@dataclass(frozen=True, slots=True)
class Prompt:
    """Exactly one of text, messages and ids. `field` is what the client called it, for errors."""

    field: str
    text: str | None = None
    messages: tuple[dict[str, str], ...] | None = None
    token_ids: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Ask:
    """A request whose fields have the right types and ranges already; what depends on the model is checked here.
    `max_tokens` is a ceiling: it is cut to what fits the context and the pools."""

    model: str
    prompt: Prompt
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    client_request_id: str = ""


@dataclass(frozen=True, slots=True)
class TextChunk:
    """Text that follows that of the chunk before, and the tokens since then. `finish_reason` is set on the last."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str = ""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request; a final stop token counts, what was made beyond a stop string does not."""

    num_prompt_tokens: int
    num_completion_tokens: int
    num_cached_tokens: int


class Serving:
    """Everything a front needs. One per gateway."""

    def __init__(
        self,
        model_id: str,
        tokenizer: TextTokenizer,
        fleet: Fleet,
        orchestrator: Orchestrator,
        metrics: GatewayMetrics,
        timeout_s: float,
    ) -> None:
        self.model_id = model_id
        self.tokenizer = tokenizer
        self.fleet = fleet
        self.orchestrator = orchestrator
        self.metrics = metrics
        self.grpc_address = ""
        self._timeout_s = timeout_s

    def check_model(self, model: str) -> None:
        """Raises ModelNotFound."""
        if model != self.model_id:
            raise ModelNotFound(model)

    @property
    def context_len(self) -> int:
        """Tokens that prompt and output may have together on the workers known now. Raises Unavailable."""
        limits = []
        for role in Role:
            records = [candidate.record for candidate in self.fleet.candidates(role)]
            if not records and role is Role.DECODE:
                raise Unavailable("no decode worker is connected")
            if records:
                pools = max(record.num_blocks * record.kv_spec.block_size for record in records)
                limits.append(min(pools, *(record.context_len for record in records)))
        return min(limits)

    @property
    def vocab_size(self) -> int:
        """Token ids that both the tokenizer and the workers known now have."""
        records = [candidate.record for role in Role for candidate in self.fleet.candidates(role)]
        return min([self.tokenizer.vocab_size, *(record.vocab_size for record in records)])

    async def tokenize(self, prompt: Prompt) -> list[int]:
        """Off the event loop. Raises InvalidRequest naming the prompt's field."""
        if prompt.token_ids is not None:
            return self._check_ids(prompt)
        self._check_len(prompt)
        if prompt.messages is not None:
            ids = await asyncio.to_thread(self.tokenizer.encode_chat, prompt.messages)
        else:
            ids = await asyncio.to_thread(self.tokenizer.encode_text, prompt.text or "")
        if not ids:
            raise InvalidRequest(prompt.field, "the prompt is empty")
        return ids

    async def prepare(self, ask: Ask, deadline_s: float | None = None) -> "TextGeneration":
        """Everything a client can get wrong is refused here, before any work. `deadline_s` is what the client allows,
        if it says so; the gateway's own limit holds in any case."""
        try:
            self.check_model(ask.model)
            self.orchestrator.check_room()
            context_len = self.context_len
            ids = await self.tokenize(ask.prompt)
            room = context_len - len(ids)
            if room < 1:
                message = (
                    f"the prompt has {len(ids)} tokens; with at least 1 of output the limit is {context_len}"
                )
                raise InvalidRequest(ask.prompt.field, message)
            chain = await asyncio.to_thread(hash_chain, ids, self.fleet.fingerprint)
            params = self._sampling(ask, room)
            allowed_s = min(self._timeout_s, math.inf if deadline_s is None else deadline_s)
            request = GenerationRequest(
                tuple(ids), params, tuple(chain), allowed_s, client_request_id=ask.client_request_id
            )
            generation = self.orchestrator.begin(request)
        except TandemError as error:
            self.metrics.requests.labels(outcome=error.code.value).inc()
            raise
        return TextGeneration(generation, TextStream(self.tokenizer, ask.stop), self.metrics)

    def _check_len(self, prompt: Prompt) -> None:
        """Text that cannot fit however it is cut into tokens is not worth cutting."""
        texts = [prompt.text or ""] if prompt.messages is None else [m["content"] for m in prompt.messages]
        num_characters = sum(map(len, texts))
        limit = self.context_len * self.tokenizer.longest_token_len
        if num_characters > limit:
            message = (
                f"the prompt has {num_characters} characters, more than {self.context_len} tokens can hold"
            )
            raise InvalidRequest(prompt.field, message)

    def _check_ids(self, prompt: Prompt) -> list[int]:
        ids = list(prompt.token_ids or ())
        if not ids:
            raise InvalidRequest(prompt.field, "the prompt is empty")
        limit = self.vocab_size
        wrong = next((token_id for token_id in ids if not 0 <= token_id < limit), None)
        if wrong is not None:
            raise InvalidRequest(prompt.field, f"token id {wrong} is outside the vocabulary [0, {limit})")
        return ids

    def _sampling(self, ask: Ask, room: int) -> SamplingParams:
        limit = self.vocab_size
        wrong = next((token_id for token_id in ask.stop_token_ids if not 0 <= token_id < limit), None)
        if wrong is not None:
            raise InvalidRequest("stop_token_ids", f"token id {wrong} is outside the vocabulary [0, {limit})")
        default = room if ask.prompt.messages is not None else DEFAULT_MAX_TOKENS
        ends = () if ask.ignore_eos else self.tokenizer.eos_token_ids
        return SamplingParams(
            max_tokens=min(ask.max_tokens or default, room),
            temperature=ask.temperature,
            top_p=ask.top_p,
            top_k=ask.top_k,
            seed=secrets.randbits(64) if ask.seed is None else ask.seed & 0xFFFFFFFFFFFFFFFF,
            stop_token_ids=tuple(dict.fromkeys((*ask.stop_token_ids, *ends))),
        )


class TextGeneration:
    """One admitted request: iterate chunks() once; usage and timing are complete afterwards."""

    def __init__(self, generation: Generation, text: TextStream, metrics: GatewayMetrics) -> None:
        self.request_id = generation.request.request_id
        self._generation = generation
        self._text = text
        self._metrics = metrics
        self._num_tokens = 0

    async def chunks(self) -> AsyncGenerator[TextChunk, None]:
        """At least one; exactly the last has a finish reason. Raises the typed error that ended the request. Closing
        it early aborts the request."""
        outcome = ErrorCode.CANCELLED.value
        self._metrics.live.inc()
        try:
            async with contextlib.aclosing(self._chunks()) as chunks:
                async for chunk in chunks:
                    if chunk.finish_reason:
                        outcome = chunk.finish_reason
                    yield chunk
        except TandemError as error:
            outcome = error.code.value
            raise
        finally:
            self._count(outcome)

    async def _chunks(self) -> AsyncGenerator[TextChunk, None]:
        tokens = self._generation.tokens()
        unshown: list[int] = []
        try:
            async for token in tokens:
                self._num_tokens += 1
                unshown.append(token.token_id)
                is_stop_token = token.finish_reason == "stop"
                text = "" if is_stop_token else self._text.push(token.token_id)
                reason = "stop" if self._text.is_stopped else token.finish_reason
                if reason:
                    await tokens.aclose()
                    text += self._text.finish()
                    reason = "stop" if self._text.is_stopped else reason
                    yield TextChunk(text, tuple(unshown), reason)
                    return
                if text:
                    yield TextChunk(text, tuple(unshown))
                    unshown = []
        finally:
            await tokens.aclose()

    @property
    def usage(self) -> Usage:
        report = self._generation.report
        return Usage(len(self._generation.request.prompt_ids), self._num_tokens, report.num_cached_tokens)

    @property
    def timing(self) -> Timing:
        return self._generation.timing

    def _count(self, outcome: str) -> None:
        metrics, timing, usage = self._metrics, self.timing, self.usage
        metrics.live.dec()
        metrics.requests.labels(outcome=outcome).inc()
        metrics.prompt_tokens.inc(usage.num_prompt_tokens)
        metrics.output_tokens.inc(usage.num_completion_tokens)
        metrics.cached_tokens.inc(usage.num_cached_tokens)
        if timing.kv_bytes:
            metrics.kv_bytes.labels(connector=timing.connector).inc(timing.kv_bytes)
        if usage.num_completion_tokens:
            metrics.observe(timing)
