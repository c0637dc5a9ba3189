"""What an attempt adds to its workers before they tell of it: prompt tokens to compute, blocks to be held, a place in
a decode batch. Others are routed by that, and what is claimed is given back however the attempt ends."""

from dataclasses import dataclass

from core.worker import WorkerRecord
from gateway.generation import GenerationRequest
from gateway.routing.fleet import Fleet
from gateway.routing.link import WorkerLink
from gateway.routing.prefix_index import PrefixIndex
from gateway.routing.prefix_mirror import Expectation
from gateway.routing.router import Overlap, cached_tokens


@dataclass(frozen=True, slots=True)
class Computing:
    """A prompt that `link`'s worker is to compute: `num_cached` of its tokens it is believed to hold, `num_lacking`
    others count as queued there."""

    link: WorkerLink
    num_cached: int
    num_lacking: int
    expectation: Expectation


class Claims:
    """Of a prompt of `num_tokens`."""

    def __init__(
        self,
        fleet: Fleet,
        prefixes: PrefixIndex,
        request: GenerationRequest,
        num_tokens: int,
        overlap: Overlap,
    ) -> None:
        self._fleet = fleet
        self._prefixes = prefixes
        self._request = request
        self._num_tokens = num_tokens
        self._overlap = overlap
        self._computing: Computing | None = None
        self._decode: WorkerLink | None = None

    @property
    def computed_by(self) -> WorkerRecord | None:
        """Who is to compute the prompt."""
        return self._computing.link.record if self._computing is not None else None

    def compute(self, link: WorkerLink, num_pulled: int = 0) -> None:
        """The prompt is to be computed there: what it lacks counts until it is, and what it will hold as held. The
        first `num_pulled` tokens are being moved there."""
        self.computed()
        num_cached = max(cached_tokens(link.record, self._num_tokens, self._overlap), num_pulled)
        expectation = self._prefixes.expect(link.record, self._request.chain)
        self._computing = Computing(link, num_cached, self._num_tokens - num_cached, expectation)
        link.row.pend_tokens(self._computing.num_lacking, num_cached)

    def observe(self, num_cached: int) -> None:
        """So many of the prompt's tokens its worker has found in its cache: whether the index was right."""
        if self._computing is not None and not self._request.is_scored:
            record, num_predicted = self._computing.link.record, self._computing.num_cached
            self._prefixes.observe(record, self._request.chain, num_predicted, num_cached, self._num_tokens)

    def computed(self, link: WorkerLink | None = None) -> None:
        """Or never to be: there, or (None) wherever it was to be."""
        computing = self._computing
        if computing is not None and link in (None, computing.link):
            computing.link.row.pend_tokens(-computing.num_lacking, -computing.num_cached)
            self._prefixes.settle(computing.expectation)
            self._computing = None

    def place(self, decode: WorkerRecord | None) -> None:
        """That worker will be asked for a place once prefill has begun: others of a burst, who are routed meanwhile,
        would all choose the same. None: no more."""
        if self._decode is not None:
            self._decode.row.pend_sequences(-1)
        self._decode = self._fleet.find(decode) if decode is not None else None
        if self._decode is not None:
            self._decode.row.pend_sequences(1)
