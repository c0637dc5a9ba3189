from proto import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FetchRequest(_message.Message):
    __slots__ = ("handoff_id", "worker", "hashes")
    HANDOFF_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    handoff_id: _types_pb2.HandoffId
    worker: _types_pb2.WorkerIdentity
    hashes: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, handoff_id: _Optional[_Union[_types_pb2.HandoffId, _Mapping]] = ..., worker: _Optional[_Union[_types_pb2.WorkerIdentity, _Mapping]] = ..., hashes: _Optional[_Iterable[bytes]] = ...) -> None: ...

class FetchEvent(_message.Message):
    __slots__ = ("grant", "fetched")
    GRANT_FIELD_NUMBER: _ClassVar[int]
    FETCHED_FIELD_NUMBER: _ClassVar[int]
    grant: _types_pb2.Grant
    fetched: Fetched
    def __init__(self, grant: _Optional[_Union[_types_pb2.Grant, _Mapping]] = ..., fetched: _Optional[_Union[Fetched, _Mapping]] = ...) -> None: ...

class Fetched(_message.Message):
    __slots__ = ("num_tokens", "num_bytes", "connector")
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    CONNECTOR_FIELD_NUMBER: _ClassVar[int]
    num_tokens: int
    num_bytes: int
    connector: str
    def __init__(self, num_tokens: _Optional[int] = ..., num_bytes: _Optional[int] = ..., connector: _Optional[str] = ...) -> None: ...

class SendRequest(_message.Message):
    __slots__ = ("grant", "worker", "hashes")
    GRANT_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    grant: _types_pb2.Grant
    worker: _types_pb2.WorkerIdentity
    hashes: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, grant: _Optional[_Union[_types_pb2.Grant, _Mapping]] = ..., worker: _Optional[_Union[_types_pb2.WorkerIdentity, _Mapping]] = ..., hashes: _Optional[_Iterable[bytes]] = ...) -> None: ...

class SendReply(_message.Message):
    __slots__ = ("num_bytes",)
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    num_bytes: int
    def __init__(self, num_bytes: _Optional[int] = ...) -> None: ...
