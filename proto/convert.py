"""Between wire messages and the types of `core`. The only place where the two meet; values are checked here only for
shape, their meaning is checked by whoever acts on them."""

from collections.abc import Sequence
from dataclasses import asdict

from core.errors import Busy, EngineFailed, InvalidRequest, ModelNotFound, TandemError, error_from
from core.grant import FirstToken, Grant
from core.ids import BlockId, Epoch, HandoffId, RequestId, WorkerId
from core.kv_spec import DType, KVSpec
from core.load import Counts, DiskCounts, Load, Sent
from core.sampling import SamplingParams, Top
from core.scores import PromptScore
from core.worker import WorkerRecord
from proto import session_pb2 as session
from proto import types_pb2 as pb

FINISH_REASONS = {
    "": pb.FINISH_REASON_UNSPECIFIED,
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "tool_calls": pb.FINISH_REASON_TOOL_CALLS,
}
_DTYPES = frozenset(dtype.value for dtype in DType)
FINISH_NAMES = {number: name for name, number in FINISH_REASONS.items()}


def finish_name(reason: pb.FinishReason) -> str:
    """Enums are open on the wire: raises EngineFailed for a value that this version does not know."""
    if reason not in FINISH_NAMES:
        raise EngineFailed(f"unknown finish reason {reason}")
    return FINISH_NAMES[reason]


def handoff_id_to_proto(handoff_id: HandoffId) -> pb.HandoffId:
    return pb.HandoffId(request_id=handoff_id.request_id, attempt=handoff_id.attempt)


def handoff_id_from_proto(message: pb.HandoffId) -> HandoffId:
    return HandoffId(RequestId(message.request_id), message.attempt)


def identity_to_proto(worker_id: WorkerId, epoch: Epoch) -> pb.WorkerIdentity:
    return pb.WorkerIdentity(worker_id=worker_id, epoch=epoch)


def sampling_to_proto(params: SamplingParams) -> pb.SamplingParams:
    message = pb.SamplingParams(
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        seed=params.seed,
        stop_token_ids=params.stop_token_ids,
        min_tokens=params.min_tokens,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias=dict(params.logit_bias),
        allowed_token_ids=params.allowed_token_ids,
        bad_words=[pb.TokenSequence(ids=word) for word in params.bad_words],
        grammar=params.grammar,
        num_logprobs=params.num_logprobs,
        priority=params.priority,
    )
    if params.num_prompt_logprobs >= 0:
        message.num_prompt_logprobs = params.num_prompt_logprobs
    return message


def sampling_from_proto(message: pb.SamplingParams) -> SamplingParams:
    return SamplingParams(
        max_tokens=message.max_tokens,
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        min_p=message.min_p,
        seed=message.seed,
        stop_token_ids=tuple(message.stop_token_ids),
        min_tokens=message.min_tokens,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=message.repetition_penalty or 1.0,
        logit_bias=tuple(sorted(message.logit_bias.items())),
        allowed_token_ids=tuple(message.allowed_token_ids),
        bad_words=tuple(tuple(word.ids) for word in message.bad_words),
        grammar=message.grammar,
        num_logprobs=message.num_logprobs,
        num_prompt_logprobs=message.num_prompt_logprobs if message.HasField("num_prompt_logprobs") else -1,
        priority=message.priority,
    )


def top_to_proto(top: Top) -> pb.TopTokens | None:
    """None for an empty one: most tokens have none."""
    if not top:
        return None
    return pb.TopTokens(token_ids=[pair[0] for pair in top], logprobs=[pair[1] for pair in top])


def top_from_proto(message: pb.TopTokens) -> Top:
    """Raises EngineFailed when ids and log-probabilities are not as many."""
    if len(message.token_ids) != len(message.logprobs):
        raise EngineFailed(
            f"{len(message.token_ids)} likeliest tokens, {len(message.logprobs)} probabilities"
        )
    return tuple(zip(message.token_ids, message.logprobs, strict=True))


def scores_to_proto(handoff_id: HandoffId, position: int, scores: Sequence[PromptScore]) -> pb.PromptScores:
    tops = [top_to_proto(score.top) for score in scores if score.top]
    return pb.PromptScores(
        handoff_id=handoff_id_to_proto(handoff_id),
        position=position,
        logprobs=[score.logprob for score in scores],
        ranks=[score.rank for score in scores],
        tops=tops,
    )


def scores_from_proto(message: pb.PromptScores) -> list[PromptScore]:
    """Raises EngineFailed when their parts are not as many."""
    num_scores = len(message.logprobs)
    if len(message.ranks) != num_scores or len(message.tops) not in (0, num_scores):
        raise EngineFailed(f"{num_scores} scores, {len(message.ranks)} ranks, {len(message.tops)} likeliest")
    tops = [top_from_proto(top) for top in message.tops] or [()] * num_scores
    return list(map(PromptScore, message.logprobs, message.ranks, tops))


def kv_spec_to_proto(spec: KVSpec) -> pb.KVSpec:
    return pb.KVSpec(
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        block_size=spec.block_size,
        dtype=spec.dtype.value,
        fingerprint=spec.fingerprint,
        layout_version=spec.layout_version,
    )


def kv_spec_from_proto(message: pb.KVSpec) -> KVSpec:
    """Raises EngineFailed for a dtype that this version does not know."""
    if message.dtype not in _DTYPES:
        raise EngineFailed(f"unknown dtype {message.dtype!r}")
    return KVSpec(
        num_layers=message.num_layers,
        num_kv_heads=message.num_kv_heads,
        head_dim=message.head_dim,
        block_size=message.block_size,
        dtype=DType(message.dtype),
        fingerprint=message.fingerprint,
        layout_version=message.layout_version,
    )


def grant_to_proto(grant: Grant) -> pb.Grant:
    return pb.Grant(
        handoff_id=handoff_id_to_proto(grant.handoff_id),
        decode_worker=identity_to_proto(grant.worker_id, grant.epoch),
        num_prompt_tokens=grant.num_prompt_tokens,
        num_cached_tokens=grant.num_cached_tokens,
        block_ids=grant.block_ids,
        addresses=grant.addresses,
        mac=grant.mac,
    )


def grant_from_proto(message: pb.Grant) -> Grant:
    return Grant(
        handoff_id=handoff_id_from_proto(message.handoff_id),
        worker_id=WorkerId(message.decode_worker.worker_id),
        epoch=Epoch(message.decode_worker.epoch),
        num_prompt_tokens=message.num_prompt_tokens,
        num_cached_tokens=message.num_cached_tokens,
        block_ids=tuple(BlockId(block) for block in message.block_ids),
        addresses=tuple(message.addresses),
        mac=message.mac,
    )


def first_token_to_proto(token: FirstToken, finish_reason: str = "") -> pb.FirstToken:
    return pb.FirstToken(
        choice=token.choice,
        position=token.position,
        token_id=token.token_id,
        logprob=token.logprob,
        finish_reason=FINISH_REASONS[finish_reason],
        top=top_to_proto(token.top),
    )


def hello_to_proto(record: WorkerRecord) -> session.WorkerHello:
    return session.WorkerHello(
        worker=identity_to_proto(*record.key),
        kv_spec=kv_spec_to_proto(record.kv_spec),
        context_len=record.context_len,
        num_blocks=record.num_blocks,
        max_batch=record.max_batch,
        max_local_tokens=record.max_local_tokens,
    )


def load_to_proto(load: Load) -> pb.Load:
    return pb.Load(
        num_blocks=load.num_blocks,
        num_free_blocks=load.num_free_blocks,
        num_queued_tokens=load.num_queued_tokens,
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        step_s=load.step_s,
        sequence=load.sequence,
        blocks_by_state=load.blocks_by_state,
        tokens_per_s=load.tokens_per_s,
        is_draining=load.is_draining,
        num_suspended=load.num_suspended,
        counts=_counts_to_proto(load.counts),
    )


def load_from_proto(message: pb.Load) -> Load:
    return Load(
        num_blocks=message.num_blocks,
        num_free_blocks=message.num_free_blocks,
        num_queued_tokens=message.num_queued_tokens,
        num_running=message.num_running,
        num_waiting=message.num_waiting,
        step_s=message.step_s,
        blocks_by_state=dict(message.blocks_by_state),
        tokens_per_s=message.tokens_per_s,
        sequence=message.sequence,
        is_draining=message.is_draining,
        num_suspended=message.num_suspended,
        counts=_counts_from_proto(message.counts),
    )


def _counts_to_proto(counts: Counts) -> pb.Counts:
    return pb.Counts(
        steps_by_time=counts.steps_by_time,
        steps_s=counts.steps_s,
        steps_by_batch=counts.steps_by_batch,
        num_batched=counts.num_batched,
        num_prompt_tokens=counts.num_prompt_tokens,
        num_output_tokens=counts.num_output_tokens,
        num_recomputed_tokens=counts.num_recomputed_tokens,
        num_preemptions=counts.num_preemptions,
        sent=[
            pb.Sent(
                connector=sent.connector,
                num_transfers=sent.num_transfers,
                num_bytes=sent.num_bytes,
                seconds=sent.seconds,
            )
            for sent in counts.sent
        ],
        disk=pb.DiskCache(**asdict(counts.disk)) if counts.disk is not None else None,
    )


def _counts_from_proto(message: pb.Counts) -> Counts:
    return Counts(
        steps_by_time=tuple(message.steps_by_time),
        steps_s=message.steps_s,
        steps_by_batch=tuple(message.steps_by_batch),
        num_batched=message.num_batched,
        num_prompt_tokens=message.num_prompt_tokens,
        num_output_tokens=message.num_output_tokens,
        num_recomputed_tokens=message.num_recomputed_tokens,
        num_preemptions=message.num_preemptions,
        sent=tuple(Sent(s.connector, s.num_transfers, s.num_bytes, s.seconds) for s in message.sent),
        disk=_disk_from_proto(message.disk) if message.HasField("disk") else None,
    )


def _disk_from_proto(message: pb.DiskCache) -> DiskCounts:
    return DiskCounts(
        message.num_blocks,
        message.num_bytes,
        message.num_read,
        message.num_written,
        message.num_evicted,
        message.num_bad,
        message.num_errors,
    )


def error_to_proto(error: TandemError) -> pb.Error:
    message = pb.Error(code=error.code.value, message=str(error))
    if isinstance(error, InvalidRequest | ModelNotFound):
        message.field = error.field
    if isinstance(error, Busy):
        message.retry_after_s = error.retry_after_s
    return message


def failed_to_proto(handoff_id: HandoffId, error: TandemError) -> session.Failed:
    return session.Failed(handoff_id=handoff_id_to_proto(handoff_id), error=error_to_proto(error))


def aborted_to_proto(handoff_id: HandoffId, is_quiet: bool) -> session.Aborted:
    return session.Aborted(handoff_id=handoff_id_to_proto(handoff_id), is_quiet=is_quiet)


def error_from_proto(message: pb.Error) -> TandemError:
    if message.code == Busy.code and message.retry_after_s:
        return Busy(message.message, message.retry_after_s)
    return error_from(message.code, message.message, message.field)
