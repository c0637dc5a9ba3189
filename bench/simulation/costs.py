"""What an engine's step, a message, a transfer take, in seconds. Pure numbers; `bench.profile` measures them."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

FEW_TOKENS = 32
Points = Sequence[tuple[int, float]]


def interpolate(points: Points, x: float) -> float:
    """Linear between neighbours in increasing x, and beyond the last two as between them; from 0 at 0."""
    if len(points) == 1 or x <= points[0][0]:
        return points[0][1] * (x / points[0][0] if x < points[0][0] else 1.0)
    index = min(bisect_left(points, x, key=lambda point: point[0]), len(points) - 1)
    (x0, y0), (x1, y1) = points[index - 1], points[index]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


@dataclass(frozen=True, slots=True)
class StepCosts:
    """A step of n tokens, s of which are sampled: body(n) + head(s) + the keys that they attend to. `body` and `head`
    are (tokens, seconds); a key is a token of context that one token looks at, of a prompt or while decoding."""

    body: tuple[tuple[int, float], ...]
    head: tuple[tuple[int, float], ...]
    prefill_key_s: float
    decode_key_s: float

    def step_s(self, num_tokens: int, num_sampled: int, prefill_keys: float, decode_keys: float) -> float:
        sampled_s = interpolate(self.head, num_sampled) if num_sampled else 0.0
        keys_s = self.prefill_key_s * prefill_keys + self.decode_key_s * decode_keys
        return interpolate(self.body, num_tokens) + sampled_s + keys_s

    def scaled(self, few: float, many: float) -> "StepCosts":
        """Times `few` what a step of few tokens takes, as when decoding, times `many` what a larger one does."""
        return StepCosts(
            tuple((x, y * (few if x <= FEW_TOKENS else many)) for x, y in self.body),
            tuple((x, y * few) for x, y in self.head),
            self.prefill_key_s * many,
            self.decode_key_s * few,
        )


@dataclass(frozen=True, slots=True)
class HostCosts:
    """An engine's step by what the other workers of its host do. `helped`: they are idle and lend their cores;
    `contended`: they compute, and share caches and memory with it; `alone`: neither."""

    alone: StepCosts
    helped: StepCosts
    contended: StepCosts

    @classmethod
    def same(cls, costs: StepCosts) -> "HostCosts":
        """Where workers are nobody's neighbours."""
        return cls(costs, costs, costs)


@dataclass(frozen=True, slots=True)
class LinkCosts:
    """`front_s`: from a client's request to its first command; `hop_s`: a message between gateway and worker;
    `token_s`: from an engine's step to the client's chunk. Between an engine's steps pass `step_overhead_s`, and
    `token_overhead_s` for each token sampled. A transfer takes `transfer_s` and its bytes at `bytes_per_s`."""

    front_s: float = 0.003
    hop_s: float = 0.0005
    token_s: float = 0.001
    step_overhead_s: float = 0.0005
    token_overhead_s: float = 0.0
    transfer_s: float = 0.001
    bytes_per_s: float = 2e9


@dataclass(frozen=True, slots=True)
class Profile:
    """A machine and a model: what `tandem bench profile` writes and the simulator reads. `engines` by the threads
    that one has of its own."""

    model: str
    kv_bytes_per_token: int
    context_len: int
    engines: dict[int, HostCosts]
    link: LinkCosts = field(default_factory=LinkCosts)
    machine: str = ""
