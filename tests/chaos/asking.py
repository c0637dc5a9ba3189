"""One request of a chaos run, asked over gRPC until it ends, whatever its client does meanwhile."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator

import grpc

from proto import client_pb2 as pb
from proto import client_pb2_grpc
from tests.chaos.asked import HANG_S, Record

CHUNKS_A_READING = 3
"""After as many a resumable stream's connection is broken, and after as many again."""
ABORTED_WITHIN_S = 15.0


async def ask(address: str, record: Record) -> None:
    """Fills the record. One that aborts its request must hear of its end soon afterwards."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = client_pb2_grpc.TandemStub(channel)
        reading = asyncio.create_task(_read(stub, record))
        try:
            if record.aborts_after_s is not None:
                await asyncio.wait([reading], timeout=record.aborts_after_s)
                await _abort(stub, record, reading)
            await reading
        finally:
            reading.cancel()
            await asyncio.wait([reading])


async def _abort(stub: client_pb2_grpc.TandemStub, record: Record, reading: asyncio.Task[None]) -> None:
    """By the gateway's id, which is known with the first chunk."""
    if not record.request_id:
        return
    await stub.AbortRequest(pb.AbortRequestRequest(request_id=record.request_id))
    await asyncio.wait([reading], timeout=ABORTED_WITHIN_S)
    if not reading.done():
        record.num_ends += 1
        record.outcome = "went on after its abort"


async def _read(stub: client_pb2_grpc.TandemStub, record: Record) -> None:
    timing: list[pb.Timing] = []
    try:
        async with contextlib.aclosing(_chunks(stub, record.request)) as chunks:
            async for chunk in chunks:
                record.request_id = chunk.request_id
                record.take(chunk.choice)
                if chunk.choice.finish_reason:
                    timing.append(chunk.choice.timing)
                if chunk.HasField("usage"):
                    record.num_ends += 1
                    again = max(own.num_attempts for own in timing) > 1
                    record.outcome = "right, retried" if again else "right"
    except grpc.aio.AioRpcError as error:
        record.num_ends += 1
        record.outcome = dict(error.trailing_metadata() or ()).get("tandem-code") or error.code().name


async def _chunks(
    stub: client_pb2_grpc.TandemStub, request: pb.GenerateRequest
) -> AsyncGenerator[pb.GenerateChunk, None]:
    """A resumable stream's over several connections. Raises AioRpcError."""
    call = stub.GenerateStream(request, timeout=HANG_S)
    token, num_received = "", 0
    while True:
        is_over = False
        async for chunk in call:
            num_received += 1
            is_over = chunk.HasField("usage")
            if chunk.resume_token:
                token = chunk.resume_token
            else:
                yield chunk
            if request.resumable and not is_over and num_received % CHUNKS_A_READING == 0:
                break
        else:
            return
        call.cancel()
        position = pb.ResumeStreamRequest(resume_token=token, offset=num_received)
        call = stub.ResumeStream(position, timeout=HANG_S)
