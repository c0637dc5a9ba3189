"""Offline inference in one process: the same engine as the services', without any of them."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from core.errors import InvalidRequest
from core.ids import HandoffId, RequestId
from core.kv_region import KVRegion
from core.sampling import SamplingParams, Top
from core.scores import PromptScore
from engine.build import build_engine
from engine.config import EngineConfig
from engine.engine_geometry import EngineGeometry
from engine.scheduler import Progress, Sampled
from engine.sequence import FinishReason, Sequence


@dataclass(frozen=True, slots=True)
class Completion:
    """One prompt's output. `num_cached_tokens` of the prompt came from the prefix cache; `tops` are the likeliest
    tokens in each place, and `prompt_scores` those of every prompt token but the first, as the parameters ask."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    num_cached_tokens: int
    tops: list[Top]
    prompt_scores: list[PromptScore]


class LLM:
    """`LLM("smollm2").generate([[1, 2, 3]], SamplingParams(max_tokens=8))`. Owns its pool; close() gives it back."""

    def __init__(self, config: EngineConfig | str = "smollm2") -> None:
        self.config = EngineConfig(model=config) if isinstance(config, str) else config
        self.geometry = EngineGeometry(self.config)
        self._region = KVRegion.create(self.geometry.kv_spec.block_bytes, self.geometry.num_blocks)
        self.engine = build_engine(self.config, self.geometry, self._region)
        self._num_requests = 0

    def generate(
        self, prompts: Seq[Seq[int]], params: SamplingParams | Seq[SamplingParams]
    ) -> list[Completion]:
        """Complete every prompt (token ids), batched, in the order given. The model's end-of-sequence ids are not
        added: put them into stop_token_ids. Raises InvalidRequest for a prompt that can never run or a
        grammar that is none, EngineFailed for logits that are not finite; the engine can be used again afterwards."""
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        sequences = [self._sequence(prompt, own) for prompt, own in zip(prompts, each, strict=True)]
        drawn: dict[HandoffId, list[Sampled]] = {sequence.id: [] for sequence in sequences}
        reasons: dict[HandoffId, FinishReason] = {}
        try:
            for sequence in sequences:
                self.engine.scheduler.submit(sequence)
            while len(reasons) < len(sequences):
                for progress in self.engine.step():
                    self._take(progress, drawn, reasons)
        finally:
            for sequence in sequences:
                self.engine.scheduler.finish(sequence)
        return [
            Completion(
                s.tokens[s.num_prompt_tokens :],
                [token.logprob for token in drawn[s.id]],
                reasons[s.id],
                s.num_cached,
                [token.top for token in drawn[s.id]],
                s.scores,
            )
            for s in sequences
        ]

    def close(self) -> None:
        """The engine is unusable afterwards."""
        if self.engine.guides is not None:
            self.engine.guides.close()
        del self.engine
        self._region.close()

    def _sequence(self, prompt: Seq[int], params: SamplingParams) -> Sequence:
        scheduler = self.engine.scheduler
        room = min(
            scheduler.limits.context_len, scheduler.pool.num_blocks * scheduler.limits.block_size
        ) - len(prompt)
        if not prompt or room < 1:
            raise InvalidRequest("prompt", f"a prompt of {len(prompt)} tokens leaves no room for output")
        self._num_requests += 1
        handoff_id = HandoffId(RequestId(str(self._num_requests)), 1)
        bounded = replace(params, max_tokens=min(params.max_tokens, room))
        guide = self.engine.guide(params)
        if guide is not None:
            guide.wait()
            if guide.error is not None:
                raise guide.error
        return Sequence(
            handoff_id, list(prompt), len(prompt), bounded, self.geometry.model.fingerprint, guide=guide
        )

    def _take(
        self,
        progress: Progress,
        drawn: dict[HandoffId, list[Sampled]],
        reasons: dict[HandoffId, FinishReason],
    ) -> None:
        sequence, token, reason = progress
        if token is None:
            return
        if not token.is_valid:
            raise token.error
        drawn[sequence.id].append(token)
        if reason is not None:
            reasons[sequence.id] = reason
            self.engine.scheduler.finish(sequence)
