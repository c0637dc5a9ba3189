"""One choice as text: the tokens of a generation, cut where a stop string or token ends it. Knows no protocol."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass

from core.scores import PromptScore
from gateway.generation import OutputToken
from gateway.orchestrator import Generation
from gateway.text_stream import TextStream
from gateway.timing import Timing


@dataclass(frozen=True, slots=True)
class TextChunk:
    """Text that follows that of the choice's chunk before, and the tokens since then. `finish_reason` is set on the
    choice's last one, and `stop_reason`: the stop string or token that ended it, if one did that the client named.
    `prompt` is on the first one, when it is to be echoed or scored."""

    text: str
    tokens: tuple[OutputToken, ...]
    finish_reason: str = ""
    stop_reason: str | int | None = None
    choice: int = 0
    prompt: "EchoedPrompt | None" = None

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
    ) -> None:
        """`is_scoring_only`: the prompt alone was asked for; the one token that is made all the same is dropped."""
        self.choice = choice
        self.request_id = generation.request.request_id
        self.num_tokens = 0
        self.sum_logprobs = 0.0
        self._generation = generation
        self._text = text
        self._named_stop_ids = named_stop_ids
        self._echoed_text = echoed_text
        self._is_scoring_only = is_scoring_only

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
                    await tokens.aclose()
                    yield TextChunk("", (), "length", choice=self.choice, prompt=prompt)
                    return
                self.num_tokens += 1
                self.sum_logprobs += token.logprob
                unshown.append(token)
                text = self._text.push(token.token_id, is_stop_token=token.finish_reason == "stop")
                if self._text.is_stopped or token.finish_reason:
                    await tokens.aclose()
                    yield self._last(text + self._text.finish(), unshown, prompt)
                    return
                if text or prompt:
                    yield TextChunk(text, tuple(unshown), choice=self.choice, prompt=prompt)
                    unshown, prompt = [], None
        finally:
            await tokens.aclose()

    def _last(self, text: str, unshown: list[OutputToken], prompt: EchoedPrompt | None) -> TextChunk:
        stop_reason: str | int | None = self._text.matched or None
        reason = "stop" if self._text.is_stopped else unshown[-1].finish_reason
        if stop_reason is None and reason == "stop" and unshown[-1].token_id in self._named_stop_ids:
            stop_reason = unshown[-1].token_id
        return TextChunk(text, tuple(unshown), reason, stop_reason, self.choice, prompt)

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
    def timing(self) -> Timing:
        return self._generation.timing
