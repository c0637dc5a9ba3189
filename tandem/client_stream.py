"""One stream over as many connections as it takes: what was received, what to ask for next, when to give up. Waits
for nothing, so that the blocking and the asynchronous client share it."""

import time
from typing import Any

import grpc

from core.clock import Clock
from core.errors import DeadlineExceeded, EngineFailed
from proto import client_pb2 as pb
from tandem.client_messages import Chunk, is_broken_connection, to_chunk, to_error
from tandem.client_trace import ClientSpan

FIRST_PAUSE_S = 0.1
MAX_PAUSE_S = 2.0


class ResumedStream:
    """`call()`, `take()` each message, `broke()` and again `call()` after an error, until `is_over`. Its `span` is
    ended by whoever reads it."""

    def __init__(
        self,
        request: pb.GenerateRequest,
        deadline_s: float | None,
        max_resumes: int,
        clock: Clock = time.monotonic,
    ) -> None:
        self.request_id = request.client_request_id  # the gateway's own once it is known
        self.is_over = False
        self.span = ClientSpan(request.client_request_id)
        self._request = request
        self._clock = clock
        self._until_s = None if deadline_s is None else clock() + deadline_s
        self._max_resumes = max_resumes
        self._num_resumes = 0  # without a chunk since
        self._token = ""
        self._num_received = 0

    def call(self, stub: Any, metadata: tuple[tuple[str, str], ...] = ()) -> Any:
        """The call that yields what comes next. The first one sends the request. `metadata` goes with each."""
        if not self._token:
            metadata += self.span.metadata
            return stub.GenerateStream(self._request, timeout=self._left_s(), metadata=metadata)
        position = pb.ResumeStreamRequest(resume_token=self._token, offset=self._num_received)
        return stub.ResumeStream(position, timeout=self._left_s(), metadata=metadata)

    def take(self, message: pb.GenerateChunk) -> Chunk | None:
        """What a message says to the caller; None when it only opens the stream."""
        self._num_received += 1
        self._num_resumes = 0
        self.request_id = message.request_id
        if message.resume_token:
            self._token = message.resume_token
            return None
        self.is_over = message.HasField("usage")
        return to_chunk(message)

    def ended(self) -> None:
        """The call ended without an error. Raises EngineFailed if the stream did not."""
        if not self.is_over:
            self.is_over = True
            raise EngineFailed("the stream ended without a finish reason")

    def broke(self, error: grpc.RpcError) -> float:
        """Seconds to wait before the next call. Raises the typed error when there is to be none: the gateway says why
        it ended, nothing had arrived yet, or it was tried too often."""
        if self.is_over:
            return 0.0  # everything had arrived
        can_resume = is_broken_connection(error) and self._token and self._num_resumes < self._max_resumes
        if not can_resume:
            self.is_over = True
            told = to_error(error)
            self.span.end(told)
            raise told from error
        pause_s = min(FIRST_PAUSE_S * 2.0**self._num_resumes, MAX_PAUSE_S)
        self._num_resumes += 1
        left_s = self._left_s()
        return pause_s if left_s is None else min(pause_s, left_s)

    def _left_s(self) -> float | None:
        if self._until_s is None:
            return None
        left_s = self._until_s - self._clock()
        if left_s <= 0:
            self.is_over = True
            raise DeadlineExceeded("the deadline passed before the stream ended")
        return left_s
