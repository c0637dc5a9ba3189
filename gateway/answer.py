"""A request's choices as one stream of chunks, with what is counted of them. Knows no protocol.

leader   ──► chunks ──┐
follower ──► chunks ──┼──► as the client takes them
follower ──► chunks ──┘
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from cluster.tracing import NO_SPAN, Span
from core.errors import ErrorCode, TandemError
from core.logs import about
from gateway.metrics import GatewayMetrics
from gateway.text_generation import TextChunk, TextGeneration
from gateway.timing import Timing

logger = logging.getLogger(__name__)
MAX_AT_ONCE = 16
Source = AsyncGenerator[TextChunk, None]


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request. Each prompt counts once, whatever the number of its choices; a final stop token counts,
    what was made beyond a stop string does not."""

    num_prompt_tokens: int
    num_completion_tokens: int
    num_cached_tokens: int


class Answer:
    """Iterate chunks() once, or take whole(); usage and timings are complete afterwards. Choices are numbered prompt
    by prompt; those of one prompt are adjacent."""

    def __init__(
        self,
        choices: Sequence[TextGeneration],
        prompt_lens: Sequence[int],
        num_kept: int,
        metrics: GatewayMetrics,
        span: Span = NO_SPAN,
        client_request_id: str = "",
    ) -> None:
        """`choices` are as many for each prompt, of which whole() keeps the best `num_kept`. `span` is that of the
        request, which ends here."""
        self.request_id = choices[0].request_id
        self.prompt_lens = tuple(prompt_lens)
        self._choices = tuple(choices)
        self._num_kept = num_kept
        self._metrics = metrics
        self._span = span
        self._client_request_id = client_request_id

    async def chunks(self) -> AsyncGenerator[TextChunk, None]:
        """Of every choice at least one; exactly its last has a finish reason. Raises the first typed error of any
        choice, which ends all. Closing it early aborts the request."""
        outcome = ErrorCode.CANCELLED.value
        self._metrics.live.inc()
        source = self._choices[0].chunks() if len(self._choices) == 1 else self._merged()
        num_open = len(self._choices)
        try:
            async with contextlib.aclosing(source) as chunks:
                async for chunk in chunks:
                    num_open -= bool(chunk.finish_reason)
                    if not num_open:
                        outcome = chunk.finish_reason
                    yield chunk
        except TandemError as error:
            outcome = error.code.value
            raise
        finally:
            self._count(outcome)

    async def whole(self) -> list[list[TextChunk]]:
        """Each choice's chunks. Of each prompt's, those with the best mean log-probability of their tokens, numbered
        anew."""
        by_choice: list[list[TextChunk]] = [[] for _ in self._choices]
        async for chunk in self.chunks():
            by_choice[chunk.choice].append(chunk)
        num_each = len(self._choices) // len(self.prompt_lens)
        kept = [
            choice
            for first in range(0, len(self._choices), num_each)
            for choice in self._best(range(first, first + num_each))
        ]
        return [[replace(chunk, choice=at) for chunk in by_choice[choice]] for at, choice in enumerate(kept)]

    def _best(self, choices: range) -> list[int]:
        if len(choices) <= self._num_kept:
            return list(choices)

        def mean(choice: int) -> float:
            own = self._choices[choice]
            return own.sum_logprobs / max(own.num_tokens, 1)

        return sorted(choices, key=mean, reverse=True)[: self._num_kept]

    async def _merged(self) -> AsyncGenerator[TextChunk, None]:
        """Chunks as they come, at most one of each choice ahead of who takes them, and of MAX_AT_ONCE choices: one
        request must not take all places of a tier."""
        sources = [choice.chunks() for choice in self._choices]
        to_start = iter(sources)
        waiting: dict[asyncio.Future[TextChunk], Source] = {}

        def wait_for(source: Source | None) -> None:
            if source is not None:
                waiting[asyncio.ensure_future(anext(source))] = source

        try:
            for source in islice(to_start, MAX_AT_ONCE):
                wait_for(source)
            while waiting:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    source, chunk = waiting.pop(task), task.result()
                    wait_for(next(to_start, None) if chunk.finish_reason else source)
                    yield chunk
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            for source in sources:
                await source.aclose()

    @property
    def usage(self) -> Usage:
        return Usage(
            sum(self.prompt_lens),
            sum(choice.num_tokens for choice in self._choices),
            sum(leader.num_cached_tokens for leader in self._leaders),
        )

    @property
    def _leaders(self) -> Sequence[TextGeneration]:
        """Each prompt's first choice."""
        return self._choices[:: len(self._choices) // len(self.prompt_lens)]

    def timing(self, choice: int = 0) -> Timing:
        return self._choices[choice].timing

    def _count(self, outcome: str) -> None:
        """At the end: metrics, the span and its stages, a line in the log."""
        metrics, usage = self._metrics, self.usage
        metrics.live.dec()
        metrics.requests.labels(outcome=outcome).inc()
        metrics.prompt_tokens.inc(usage.num_prompt_tokens)
        metrics.output_tokens.inc(usage.num_completion_tokens)
        for leader in self._leaders:
            for source, num_tokens in leader.report.hits.items():
                metrics.cached_tokens.labels(source=source).inc(num_tokens)
        for choice in self._choices:
            timing = choice.timing
            metrics.preemptions.inc(timing.num_preemptions)
            metrics.refusals.inc(choice.report.num_refusals)
            if timing.kv_bytes:
                metrics.kv_bytes.labels(connector=timing.connector).inc(timing.kv_bytes)
            if choice.num_tokens:
                metrics.observe(timing)
        told = self._told(outcome, usage)
        if self._span.trace_parent:
            self._trace(told)
        logger.info("request ended", extra=about(self.request_id, **told))

    def _told(self, outcome: str, usage: Usage) -> dict[str, str | int | float]:
        """What the log and the span say of it."""
        timing = self.timing()
        told: dict[str, str | int | float] = {
            "client_request_id": self._client_request_id,
            "outcome": outcome,
            "num_choices": len(self._choices),
            "num_prompt_tokens": usage.num_prompt_tokens,
            "num_output_tokens": usage.num_completion_tokens,
            "num_cached_tokens": usage.num_cached_tokens,
            "time_to_first_token_s": round(timing.time_to_first_token_s, 6),
            "total_s": round(timing.total_s, 6),
            "prefill": timing.prefill_worker_id,
            "decode": timing.decode_worker_id,
            "num_attempts": timing.num_attempts,
            "causes": ",".join(timing.causes),
        }
        return {name: value for name, value in told.items() if value != ""}

    def _trace(self, told: Mapping[str, str | int | float]) -> None:
        """The stages of every choice are parts of the request's span, which ends with the last of them."""
        spans = [(choice.choice, span) for choice in self._choices for span in choice.stage_spans]
        for choice, (stage, begin_s, end_s) in spans:
            self._span.add(stage.removesuffix("_s"), begin_s, end_s, {"tandem.choice": choice})
        outcome = str(told["outcome"])
        error = outcome if any(outcome == code for code in ErrorCode) else ""
        attributes = {f"tandem.{name}": value for name, value in told.items()}
        ended_s = max(span.end_s for _, span in spans)
        self._span.end(ended_s, {"tandem.request_id": self.request_id, **attributes}, error)
