"""The commands of an attempt, as messages. Pure."""

from collections.abc import Sequence

from core.ids import HandoffId
from core.worker import Role, WorkerRecord
from gateway.generation import GenerationRequest
from proto import convert
from proto import session_pb2 as pb
from proto import types_pb2 as types


def start_prefill(
    handoff_id: HandoffId,
    worker: WorkerRecord,
    request: GenerationRequest,
    committed: Sequence[int],
    deadline_s: float,
    takes_over: int,
) -> pb.PrefillCommand:
    """`takes_over`: an earlier attempt whose blocks that worker still holds; 0 for none."""
    start = pb.PrefillStart(
        handoff_id=convert.handoff_id_to_proto(handoff_id),
        worker=convert.identity_to_proto(*worker.key),
        prompt_ids=request.prompt_ids,
        output_ids=committed,
        sampling=convert.sampling_to_proto(request.params),
        deadline_s=max(deadline_s, 0.0),
        takes_over=takes_over,
        trace_parent=request.trace_parent,
        cache_salt=request.cache_salt,
    )
    return pb.PrefillCommand(start=start)


def pass_grant(grant: types.Grant) -> pb.PrefillCommand:
    return pb.PrefillCommand(grant=pb.PrefillGrant(grant=grant))


def release_prefill(handoff_id: HandoffId) -> pb.PrefillCommand:
    return pb.PrefillCommand(release=pb.PrefillRelease(handoff_id=convert.handoff_id_to_proto(handoff_id)))


def abort_prefill(handoff_id: HandoffId, reason: str) -> pb.PrefillCommand:
    return pb.PrefillCommand(abort=_abort(handoff_id, reason))


def reserve_decode(
    handoff_id: HandoffId,
    worker: WorkerRecord,
    request: GenerationRequest,
    covered: Sequence[int],
    deadline_s: float,
    wait_s: float,
    credit: int,
    is_local: bool,
) -> pb.DecodeCommand:
    """`covered` are the output tokens whose KV will be handed over. `is_local`: the prompt is computed there."""
    reserve = pb.DecodeReserve(
        handoff_id=convert.handoff_id_to_proto(handoff_id),
        worker=convert.identity_to_proto(*worker.key),
        prompt_ids=request.prompt_ids,
        output_ids=covered,
        sampling=convert.sampling_to_proto(request.params),
        deadline_s=max(deadline_s, 0.0),
        wait_s=wait_s,
        credit=credit,
        is_local=is_local,
        trace_parent=request.trace_parent,
        cache_salt=request.cache_salt,
    )
    return pb.DecodeCommand(reserve=reserve)


def add_credit(handoff_id: HandoffId, num_tokens: int) -> pb.DecodeCommand:
    credit = pb.DecodeCredit(handoff_id=convert.handoff_id_to_proto(handoff_id), num_tokens=num_tokens)
    return pb.DecodeCommand(credit=credit)


def abort_decode(handoff_id: HandoffId, reason: str) -> pb.DecodeCommand:
    return pb.DecodeCommand(abort=_abort(handoff_id, reason))


def clear_cache(role: Role) -> pb.PrefillCommand | pb.DecodeCommand:
    kind = pb.PrefillCommand if role is Role.PREFILL else pb.DecodeCommand
    return kind(clear_cache=pb.ClearCache())


def _abort(handoff_id: HandoffId, reason: str) -> pb.Abort:
    return pb.Abort(handoff_id=convert.handoff_id_to_proto(handoff_id), reason=reason)
