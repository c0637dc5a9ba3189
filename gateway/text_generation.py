"""One choice as text: the tokens of a generation, cut where a stop string or token ends it. Knows no protocol."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace

from core.scores import PromptScore
from gateway.generation import OutputToken
from gateway.routing.live import HandoffReport
from gateway.routing.orchestrator import Generation
from gateway.text.text_stream import TextStream
from gateway.text.tool_calls import CallDelta, Parsed, ToolCallParser
from gateway.timing import StageSpan, Timing


@dataclass(frozen=True, slots=True)
class TextChunk:
    """Text that follows that of the choice's chunk before, what is new of its calls, and the tokens since
    then. `finish_reason` is set on the choice's last one, and `stop_reason`: the stop string or token that ended it,
    if one did that the client named. `prompt` is on the first one, when it is to be echoed or scored."""

    text: str
    tokens: tuple[OutputToken, ...]
    finish_reason: str = ""
    stop_reason: str | int | None = None
    choice: int = 0
    prompt: "EchoedPrompt | None" = None
    calls: tuple[CallDelta, ...] = ()

    @property
    def token_ids(self) -> list[int]:
        return [token.token_id for token in self.tokens]


@dataclass(frozen=True, slots=True)
class EchoedPrompt:
    """`text` is empty unless it is to be echoed; `scores` are of every token but the first, if they were wanted."""

    text: str
    token_ids: tuple[int, ...]
    scores: tuple[PromptScore, ...]


class TextGeneration:
    """Iterate chunks() once; usage and timing are complete afterwards."""

    def __init__(
        self,
        choice: int,
        generation: Generation,
        text: TextStream,
        named_stop_ids: frozenset[int],
        echoed_text: str | None = None,
        is_scoring_only: bool = False,
        calls: ToolCallParser | None = None,
    ) -> None:
        """`is_scoring_only`: the prompt alone was asked for; the one token that is made all the same is dropped.
        `calls` reads calls of functions out of the text."""
        self.choice = choice
        self.request_id = generation.request.request_id
        self.num_tokens = 0
        self.sum_logprobs = 0.0
        self._generation = generation
        self._text = text
        self._named_stop_ids = named_stop_ids
        self._echoed_text = echoed_text
        self._is_scoring_only = is_scoring_only
        self._calls = calls

    async def chunks(self) -> AsyncGenerator[TextChunk, None]:
        """At least one; exactly the last has a finish reason. Raises the typed error that ended the choice. Closing
        it early aborts the choice on both tiers."""
        tokens = self._generation.tokens()
        unshown: list[OutputToken] = []
        prompt: EchoedPrompt | None = None
        try:
            async for token in tokens:
                if not self.num_tokens:
                    prompt = self._prompt()
                if self._is_scoring_only:
                    await self._close(tokens, "length")
                    yield TextChunk("", (), "length", choice=self.choice, prompt=prompt)
                    return
                self.num_tokens += 1
                self.sum_logprobs += token.logprob
                unshown.append(token)
                parsed = self._parse(self._text.push(token.token_id, token.finish_reason == "stop"))
                if self._is_over or token.finish_reason:
                    last = self._last(parsed, unshown, prompt)
                    await self._close(tokens, last.finish_reason)
                    yield last
                    return
                if parsed.content or parsed.calls or prompt:
                    yield self._chunk(parsed, unshown, prompt)
                    unshown, prompt = [], None
        finally:
            await tokens.aclose()

    async def _close(self, tokens: AsyncGenerator[OutputToken, None], finish_reason: str) -> None:
        """The choice ends here, although tokens may be left."""
        self._generation.report.outcome = finish_reason
        await tokens.aclose()

    @property
    def _is_over(self) -> bool:
        """Whether the text ends here, whatever follows."""
        return self._text.is_stopped or (self._calls is not None and self._calls.is_done)

    def _parse(self, text: str) -> Parsed:
        return Parsed(text) if self._calls is None else self._calls.push(text)

    def _chunk(self, parsed: Parsed, unshown: list[OutputToken], prompt: EchoedPrompt | None) -> TextChunk:
        calls = tuple(parsed.calls)
        return TextChunk(parsed.content, tuple(unshown), choice=self.choice, prompt=prompt, calls=calls)

    def _last(self, parsed: Parsed, unshown: list[OutputToken], prompt: EchoedPrompt | None) -> TextChunk:
        for rest in self._finish():
            parsed = Parsed(parsed.content + rest.content, parsed.calls + rest.calls)
        reason = "stop" if self._is_over else unshown[-1].finish_reason
        stop_reason: str | int | None = self._text.matched or None
        if stop_reason is None and reason == "stop" and unshown[-1].token_id in self._named_stop_ids:
            stop_reason = unshown[-1].token_id
        if reason == "stop" and self._calls is not None and self._calls.num_calls:
            reason = "tool_calls"
        return replace(self._chunk(parsed, unshown, prompt), finish_reason=reason, stop_reason=stop_reason)

    def _finish(self) -> list[Parsed]:
        """What was held back."""
        rest = [self._parse(self._text.finish())]
        return rest if self._calls is None else [*rest, self._calls.finish()]

    def _prompt(self) -> EchoedPrompt | None:
        scores = tuple(self._generation.prompt_scores)
        if self._echoed_text is None and not scores:
            return None
        return EchoedPrompt(self._echoed_text or "", self._generation.request.prompt_ids, scores)

    @property
    def num_cached_tokens(self) -> int:
        """Of the prompt, in the prefill worker's cache."""
        return self._generation.report.num_cached_tokens

    @property
    def report(self) -> HandoffReport:
        return self._generation.report

    @property
    def stage_spans(self) -> Sequence[StageSpan]:
        return self._generation.stage_spans

    @property
    def timing(self) -> Timing:
        return self._generation.timing
