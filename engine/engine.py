"""An engine: a scheduler and a runner, stepped. No torch: a simulator steps it with a runner of its own. Knows
nothing of services, processes or handoffs."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Protocol

from core.ids import BlockId, HandoffId
from core.sampling import SamplingParams
from engine.guided import Guide, GuideFactory
from engine.scheduler import Progress, Sampled, Scheduler, Work
from engine.step_counts import StepCounts


class Runner(Protocol):
    """The computing side of a step."""

    def run(self, work: Seq[Work]) -> dict[HandoffId, Sampled]:
        """Write the KV of the work's tokens and sample a token for each sequence that needs one."""
        ...


RATE_DECAY = 0.95


class Engine:
    """step() is the whole story: schedule, forward and sample, commit. `on_scheduled` is called between the first
    two; `work` is the latest schedule, also while and after it is computed by a step that raised. `take_in` readies
    blocks that a connector has written: the runner may read them afterwards. `publish` readies cached ones for a
    connector to read. `guides` are for requests with a grammar; an engine without takes none."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        take_in: Callable[[Seq[BlockId]], None] = lambda block_ids: None,
        publish: Callable[[Seq[BlockId]], None] = lambda block_ids: None,
        guides: GuideFactory | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.take_in = take_in
        self.publish = publish
        self.guides = guides
        self.counts = StepCounts()
        self.step_s = 0.0
        self._recent_tokens = 0.0
        self._recent_s = 0.0
        self.work: list[Work] = []
        self.on_scheduled: Callable[[list[Work]], None] = lambda work: None

    def step(self) -> list[Progress]:
        """Compute one batch; empty when nothing could run. Finished sequences still own their blocks."""
        started_s = self.scheduler.clock()
        self.work = self.scheduler.schedule()
        if not self.work:
            return []
        self.on_scheduled(self.work)
        sampled = self.runner.run(self.work)
        progress = self.scheduler.commit(self.work, sampled)
        step_s = self.scheduler.clock() - started_s
        self.counts.note(self.work, step_s)
        self.note_step(step_s, sum(item.num_tokens for item in self.work))
        return progress

    def guide(self, params: SamplingParams) -> Guide | None:
        """What a sequence of these parameters has to follow, from now on being compiled."""
        assert self.guides is not None or not params.grammar, "an engine without guides got a grammar"
        return self.guides.guide(params.grammar) if self.guides is not None else None

    @property
    def tokens_per_s(self) -> float:
        """Over the latest steps, each counted by what it computed; 0 before the first."""
        return self._recent_tokens / self._recent_s if self._recent_s else 0.0

    def note_step(self, step_s: float, num_tokens: int) -> None:
        """A step took so long and computed so much."""
        self.step_s = step_s
        self._recent_s = RATE_DECAY * self._recent_s + step_s
        self._recent_tokens = RATE_DECAY * self._recent_tokens + num_tokens
