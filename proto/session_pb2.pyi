from proto import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GatewayHello(_message.Message):
    __slots__ = ("gateway_id", "fingerprint")
    GATEWAY_ID_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    gateway_id: str
    fingerprint: str
    def __init__(self, gateway_id: _Optional[str] = ..., fingerprint: _Optional[str] = ...) -> None: ...

class WorkerHello(_message.Message):
    __slots__ = ("worker", "kv_spec", "context_len", "num_blocks", "max_batch", "max_local_tokens")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    KV_SPEC_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LEN_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_FIELD_NUMBER: _ClassVar[int]
    MAX_LOCAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    worker: _types_pb2.WorkerIdentity
    kv_spec: _types_pb2.KVSpec
    context_len: int
    num_blocks: int
    max_batch: int
    max_local_tokens: int
    def __init__(self, worker: _Optional[_Union[_types_pb2.WorkerIdentity, _Mapping]] = ..., kv_spec: _Optional[_Union[_types_pb2.KVSpec, _Mapping]] = ..., context_len: _Optional[int] = ..., num_blocks: _Optional[int] = ..., max_batch: _Optional[int] = ..., max_local_tokens: _Optional[int] = ...) -> None: ...

class PrefillCommands(_message.Message):
    __slots__ = ("commands",)
    COMMANDS_FIELD_NUMBER: _ClassVar[int]
    commands: _containers.RepeatedCompositeFieldContainer[PrefillCommand]
    def __init__(self, commands: _Optional[_Iterable[_Union[PrefillCommand, _Mapping]]] = ...) -> None: ...

class PrefillCommand(_message.Message):
    __slots__ = ("hello", "start", "grant", "release", "abort", "clear_cache")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    CLEAR_CACHE_FIELD_NUMBER: _ClassVar[int]
    hello: GatewayHello
    start: PrefillStart
    grant: PrefillGrant
    release: PrefillRelease
    abort: Abort
    clear_cache: ClearCache
    def __init__(self, hello: _Optional[_Union[GatewayHello, _Mapping]] = ..., start: _Optional[_Union[PrefillStart, _Mapping]] = ..., grant: _Optional[_Union[PrefillGrant, _Mapping]] = ..., release: _Optional[_Union[PrefillRelease, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ..., clear_cache: _Optional[_Union[ClearCache, _Mapping]] = ...) -> None: ...

class PrefillStart(_message.Message):
    __slots__ = ("handoff_id", "worker", "prompt_ids", "output_ids", "sampling", "deadline_s", "takes_over", "trace_parent", "cache_salt")
    HANDOFF_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    TAKES_OVER_FIELD_NUMBER: _ClassVar[int]
    TRACE_PARENT_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    handoff_id: _types_pb2.HandoffId
    worker: _types_pb2.WorkerIdentity
    prompt_ids: _containers.RepeatedScalarFieldContainer[int]
    output_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _types_pb2.SamplingParams
    deadline_s: float
    takes_over: int
    trace_parent: str
    cache_salt: bytes
    def __init__(self, handoff_id: _Optional[_Union[_types_pb2.HandoffId, _Mapping]] = ..., worker: _Optional[_Union[_types_pb2.WorkerIdentity, _Mapping]] = ..., prompt_ids: _Optional[_Iterable[int]] = ..., output_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_types_pb2.SamplingParams, _Mapping]] = ..., deadline_s: _Optional[float] = ..., takes_over: _Optional[int] = ..., trace_parent: _Optional[str] = ..., cache_salt: _Optional[bytes] = ...) -> None: ...

class PrefillGrant(_message.Message):
    __slots__ = ("grant",)
    GRANT_FIELD_NUMBER: _ClassVar[int]
    grant: _types_pb2.Grant
    def __init__(self, grant: _Optional[_Union[_types_pb2.Grant, _Mapping]] = ...) -> None: ...

class PrefillRelease(_message.Message):
    __slots__ = ("handoff_id",)
    HANDOFF_ID_FIELD_NUMBER: _ClassVar[int]
    handoff_id: _types_pb2.HandoffId
    def __init__(self, handoff_id: _Optional[_Union[_types_pb2.HandoffId, _Mapping]] = ...) -> None: ...

class Abort(_message.Message):
    __slots__ = ("handoff_id", "reason")
    HANDOFF_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    handoff_id: _types_pb2.HandoffId
    reason: str
    def __init__(self, handoff_id: _Optional[_Union[_types_pb2.HandoffId, _Mapping]] = ..., reason: _Optional[str] = ...) -> None: ...

class ClearCache(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PrefillEvents(_message.Message):
    __slots__ = ("events", "load")
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[PrefillEvent]
    load: _types_pb2.Load
    def __init__(self, events: _Optional[_Iterable[_Union[PrefillEvent, _Mapping]]] = ..., load: _Optional[_Union[_types_pb2.Load, _Mapping]] = ...) -> None: ...

class PrefillEvent(_message.Message):
    __slots__ = ("hello", "queued", "started", "first_token", "sealed", "failed", "aborted", "prompt_scores")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    SEALED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    ABORTED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_SCORES_FIELD_NUMBER: _ClassVar[int]
    hello: WorkerHello
    queued: PrefillQueued
    started: PrefillStarted
    first_token: PrefillFirstToken
    sealed: PrefillSealed
    failed: Failed
    aborted: Aborted
    prompt_scores: _types_pb2.PromptScores
    def __init__(self, hello: _Optional[_Union[WorkerHello, _Mapping]] = ..., queued: _Optional[_Union[PrefillQueued, _Mapping]] = ..., started: _Optional[_Union[PrefillStarted, _Mapping]] = ..., first_token: _Optional[_Union[PrefillFirstToken, _Mapping]] = ..., sealed: _Optional[_Union[PrefillSealed, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ..., aborted: _Optional[_Union[Aborted, _Mapping]] = ..., prompt_scores: _Optional[_Union[_types_pb2.PromptScores, _Mapping]] = ...) -> None: ...

class PrefillQueued(_message.Message):
    __slots__ = ("handoff_id",)
    HANDOFF_ID_FIELD_NUMBER: _ClassVar[int]
    handoff_id: _types_pb2.HandoffId
    def __init__(self, handoff_id: _Optional[_Union[_types_pb2.HandoffId, _Mapping]] = ...) -> None: ...

class PrefillStarted(_message.Message):
    __slots__ = ("handoff_id", "num_cached_tokens", "num_output_ids")
    HANDOFF_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_IDS_FIELD_NUMBER: _ClassVar[int]
    handoff_id: _types_pb2.HandoffId
    num_cached_tokens: int
    num_output_ids: int
    def __init__(self, handoff_id: _Optional[_Union[_types_pb2.HandoffId, _Mapping]] = ..., num_cached_tokens: _Optional[int] = ..., num_output_ids: _Optional[int] = ...) -> None: ...

class PrefillFirstToken(_message.Message):
    __slots__ = ("handoff_id", "first_tokens")
    HANDOFF_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    handoff_id: _types_pb2.HandoffId
    first_tokens: _containers.RepeatedCompositeFieldContainer[_types_pb2.FirstToken]
    def __init__(self, handoff_id: _Optional[_Union[_types_pb2.HandoffId, _Mapping]] = ..., first_tokens: _Optional[_Iterable[_Union[_types_pb2.FirstToken, _Mapping]]] = ...) -> None: ...

class PrefillSealed(_message.Message):
    __slots__ = ("handoff_id", "num_bytes", "connector")
    HANDOFF_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    CONNECTOR_FIELD_NUMBER: _ClassVar[int]
    handoff_id: _types_pb2.HandoffId
    num_bytes: int
    connector: str
    def __init__(self, handoff_id: _Optional[_Union[_types_pb2.HandoffId, _Mapping]] = ..., num_bytes: _Optional[int] = ..., connector: _Optional[str] = ...) -> None: ...

class Failed(_message.Message):
    __slots__ = ("handoff_id", "error")
    HANDOFF_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    handoff_id: _types_pb2.HandoffId
    error: _types_pb2.Error
    def __init__(self, handoff_id: _Optional[_Union[_types_pb2.HandoffId, _Mapping]] = ..., error: _Optional[_Union[_types_pb2.Error, _Mapping]] = ...) -> None: ...

class Aborted(_message.Message):
    __slots__ = ("handoff_id", "is_quiet")
    HANDOFF_ID_FIELD_NUMBER: _ClassVar[int]
    IS_QUIET_FIELD_NUMBER: _ClassVar[int]
    handoff_id: _types_pb2.HandoffId
    is_quiet: bool
    def __init__(self, handoff_id: _Optional[_Union[_types_pb2.HandoffId, _Mapping]] = ..., is_quiet: _Optional[bool] = ...) -> None: ...

class DecodeCommands(_message.Message):
    __slots__ = ("commands",)
    COMMANDS_FIELD_NUMBER: _ClassVar[int]
    commands: _containers.RepeatedCompositeFieldContainer[DecodeCommand]
    def __init__(self, commands: _Optional[_Iterable[_Union[DecodeCommand, _Mapping]]] = ...) -> None: ...

class DecodeCommand(_message.Message):
    __slots__ = ("hello", "reserve", "credit", "abort", "clear_cache")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    RESERVE_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    CLEAR_CACHE_FIELD_NUMBER: _ClassVar[int]
    hello: GatewayHello
    reserve: DecodeReserve
    credit: DecodeCredit
    abort: Abort
    clear_cache: ClearCache
    def __init__(self, hello: _Optional[_Union[GatewayHello, _Mapping]] = ..., reserve: _Optional[_Union[DecodeReserve, _Mapping]] = ..., credit: _Optional[_Union[DecodeCredit, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ..., clear_cache: _Optional[_Union[ClearCache, _Mapping]] = ...) -> None: ...

class DecodeReserve(_message.Message):
    __slots__ = ("handoff_id", "worker", "prompt_ids", "output_ids", "sampling", "deadline_s", "wait_s", "credit", "is_local", "trace_parent", "cache_salt")
    HANDOFF_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    IS_LOCAL_FIELD_NUMBER: _ClassVar[int]
    TRACE_PARENT_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    handoff_id: _types_pb2.HandoffId
    worker: _types_pb2.WorkerIdentity
    prompt_ids: _containers.RepeatedScalarFieldContainer[int]
    output_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _types_pb2.SamplingParams
    deadline_s: float
    wait_s: float
    credit: int
    is_local: bool
    trace_parent: str
    cache_salt: bytes
    def __init__(self, handoff_id: _Optional[_Union[_types_pb2.HandoffId, _Mapping]] = ..., worker: _Optional[_Union[_types_pb2.WorkerIdentity, _Mapping]] = ..., prompt_ids: _Optional[_Iterable[int]] = ..., output_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_types_pb2.SamplingParams, _Mapping]] = ..., deadline_s: _Optional[float] = ..., wait_s: _Optional[float] = ..., credit: _Optional[int] = ..., is_local: _Optional[bool] = ..., trace_parent: _Optional[str] = ..., cache_salt: _Optional[bytes] = ...) -> None: ...

class DecodeCredit(_message.Message):
    __slots__ = ("handoff_id", "num_tokens")
    HANDOFF_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    handoff_id: _types_pb2.HandoffId
    num_tokens: int
    def __init__(self, handoff_id: _Optional[_Union[_types_pb2.HandoffId, _Mapping]] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class DecodeEvents(_message.Message):
    __slots__ = ("events", "load")
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[DecodeEvent]
    load: _types_pb2.Load
    def __init__(self, events: _Optional[_Iterable[_Union[DecodeEvent, _Mapping]]] = ..., load: _Optional[_Union[_types_pb2.Load, _Mapping]] = ...) -> None: ...

class DecodeEvent(_message.Message):
    __slots__ = ("hello", "granted", "seal_verified", "token", "failed", "aborted", "prompt_scores")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    SEAL_VERIFIED_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    ABORTED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_SCORES_FIELD_NUMBER: _ClassVar[int]
    hello: WorkerHello
    granted: DecodeGranted
    seal_verified: DecodeSealVerified
    token: DecodeToken
    failed: Failed
    aborted: Aborted
    prompt_scores: _types_pb2.PromptScores
    def __init__(self, hello: _Optional[_Union[WorkerHello, _Mapping]] = ..., granted: _Optional[_Union[DecodeGranted, _Mapping]] = ..., seal_verified: _Optional[_Union[DecodeSealVerified, _Mapping]] = ..., token: _Optional[_Union[DecodeToken, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ..., aborted: _Optional[_Union[Aborted, _Mapping]] = ..., prompt_scores: _Optional[_Union[_types_pb2.PromptScores, _Mapping]] = ...) -> None: ...

class DecodeGranted(_message.Message):
    __slots__ = ("grant",)
    GRANT_FIELD_NUMBER: _ClassVar[int]
    grant: _types_pb2.Grant
    def __init__(self, grant: _Optional[_Union[_types_pb2.Grant, _Mapping]] = ...) -> None: ...

class DecodeSealVerified(_message.Message):
    __slots__ = ("handoff_id", "first_tokens", "num_bytes", "connector")
    HANDOFF_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    CONNECTOR_FIELD_NUMBER: _ClassVar[int]
    handoff_id: _types_pb2.HandoffId
    first_tokens: _containers.RepeatedCompositeFieldContainer[_types_pb2.FirstToken]
    num_bytes: int
    connector: str
    def __init__(self, handoff_id: _Optional[_Union[_types_pb2.HandoffId, _Mapping]] = ..., first_tokens: _Optional[_Iterable[_Union[_types_pb2.FirstToken, _Mapping]]] = ..., num_bytes: _Optional[int] = ..., connector: _Optional[str] = ...) -> None: ...

class DecodeToken(_message.Message):
    __slots__ = ("handoff_id", "choice", "position", "token_id", "logprob", "finish_reason", "queue_s", "num_preemptions", "top", "num_cached_tokens")
    HANDOFF_ID_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    handoff_id: _types_pb2.HandoffId
    choice: int
    position: int
    token_id: int
    logprob: float
    finish_reason: _types_pb2.FinishReason
    queue_s: float
    num_preemptions: int
    top: _types_pb2.TopTokens
    num_cached_tokens: int
    def __init__(self, handoff_id: _Optional[_Union[_types_pb2.HandoffId, _Mapping]] = ..., choice: _Optional[int] = ..., position: _Optional[int] = ..., token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., finish_reason: _Optional[_Union[_types_pb2.FinishReason, str]] = ..., queue_s: _Optional[float] = ..., num_preemptions: _Optional[int] = ..., top: _Optional[_Union[_types_pb2.TopTokens, _Mapping]] = ..., num_cached_tokens: _Optional[int] = ...) -> None: ...
