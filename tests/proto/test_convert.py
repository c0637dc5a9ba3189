"""What goes over the wire comes back equal, through real serialisation."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import Busy, EngineFailed, ErrorCode, TandemError, error_from
from core.grant import FirstToken, Grant
from core.ids import HandoffId
from core.kv_spec import DType, KVSpec
from core.load import Counts, Load, Sent
from core.sampling import SamplingParams
from core.worker import Role, WorkerRecord
from proto import convert
from proto import session_pb2 as session
from proto import types_pb2 as pb

UINT32 = st.integers(0, 2**32 - 1)
UINT64 = st.integers(0, 2**64 - 1)
EPOCH = st.integers(-(2**63), 2**63 - 1)
FINITE = st.floats(allow_nan=False)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
HANDOFF_IDS = st.builds(HandoffId, TEXT, UINT32)
SPECS = st.builds(KVSpec, UINT32, UINT32, UINT32, UINT32, st.sampled_from(DType), TEXT, UINT32)
GRANTS = st.builds(
    Grant,
    HANDOFF_IDS,
    TEXT,
    EPOCH,
    UINT32,
    UINT32,
    st.lists(UINT32).map(tuple),
    st.lists(TEXT).map(tuple),
    st.binary(),
)
IDS = st.lists(UINT32).map(tuple)
TOPS = st.lists(st.tuples(UINT32, st.floats(width=32, allow_nan=False))).map(tuple)
PARAMS = st.builds(
    SamplingParams,
    max_tokens=UINT32,
    temperature=FINITE,
    top_p=FINITE,
    top_k=UINT32,
    min_p=FINITE,
    seed=UINT64,
    stop_token_ids=IDS,
    min_tokens=UINT32,
    presence_penalty=FINITE,
    frequency_penalty=FINITE,
    repetition_penalty=FINITE.filter(bool),
    logit_bias=st.dictionaries(UINT32, FINITE).map(lambda bias: tuple(sorted(bias.items()))),
    allowed_token_ids=IDS,
    bad_words=st.lists(IDS).map(tuple),
    grammar=TEXT,
    num_logprobs=UINT32,
    num_prompt_logprobs=st.integers(-1, 2**32 - 1),
    priority=st.integers(-(2**31), 2**31 - 1),
)
BUCKETS = st.lists(UINT64).map(tuple)
SENT = st.lists(st.builds(Sent, TEXT, UINT64, UINT64, FINITE)).map(tuple)
COUNTS = st.builds(Counts, BUCKETS, FINITE, BUCKETS, UINT64, UINT64, UINT64, UINT64, UINT64, SENT)
LOADS = st.builds(
    Load,
    UINT32,
    UINT32,
    UINT64,
    UINT32,
    UINT32,
    FINITE,
    FINITE,
    st.dictionaries(TEXT, UINT32),
    UINT64,
    st.booleans(),
    UINT32,
    COUNTS,
)


def crossed(message: Any) -> Any:
    return type(message).FromString(message.SerializeToString())


@given(HANDOFF_IDS)
def test_handoff_ids(handoff_id):
    assert convert.handoff_id_from_proto(crossed(convert.handoff_id_to_proto(handoff_id))) == handoff_id


@given(SPECS)
def test_kv_specs(spec):
    assert convert.kv_spec_from_proto(crossed(convert.kv_spec_to_proto(spec))) == spec


@given(GRANTS)
def test_grants(grant):
    assert convert.grant_from_proto(crossed(convert.grant_to_proto(grant))) == grant


@given(PARAMS)
def test_sampling_parameters(params):
    assert convert.sampling_from_proto(crossed(convert.sampling_to_proto(params))) == params


@given(LOADS)
def test_loads(load):
    assert convert.load_from_proto(crossed(convert.load_to_proto(load))) == load


@given(st.builds(FirstToken, UINT32, UINT32, UINT32, FINITE), st.sampled_from(["", "stop", "length"]))
def test_first_tokens(token, reason):
    message = crossed(convert.first_token_to_proto(token, reason))
    fields = (message.choice, message.position, message.token_id, message.logprob)
    assert FirstToken(*fields) == token
    assert convert.finish_name(message.finish_reason) == reason


@given(SPECS, UINT32, UINT32, UINT32, TEXT, EPOCH)
def test_a_hello_says_what_the_record_says(spec, context_len, num_blocks, max_batch, worker_id, epoch):
    record = WorkerRecord(
        worker_id, epoch, Role.DECODE, "host:1", "m", spec, context_len, 9, num_blocks, max_batch
    )
    hello = crossed(convert.hello_to_proto(record))
    assert (hello.worker.worker_id, hello.worker.epoch) == record.key
    assert convert.kv_spec_from_proto(hello.kv_spec) == spec
    assert (hello.context_len, hello.num_blocks, hello.max_batch) == (context_len, num_blocks, max_batch)


ERRORS = st.one_of(
    st.builds(error_from, st.sampled_from(ErrorCode), TEXT, TEXT),
    st.builds(Busy, TEXT, st.floats(0.01, 1e6)),
)


@given(ERRORS)
def test_errors(error):
    arrived = convert.error_from_proto(crossed(convert.error_to_proto(error)))
    assert type(arrived) is type(error)
    assert str(arrived) == str(error)
    for name in ("field", "retry_after_s"):
        assert getattr(arrived, name, None) == getattr(error, name, None)


def test_an_error_of_an_unknown_code_is_a_failure_of_the_engine():
    assert type(convert.error_from_proto(pb.Error(code="teapot", message="short"))) is EngineFailed


@pytest.mark.parametrize("dtype", ["", "int4", "FLOAT32"])
def test_an_unknown_dtype_is_a_typed_error(dtype):
    with pytest.raises(TandemError, match="dtype"):
        convert.kv_spec_from_proto(pb.KVSpec(dtype=dtype))


def test_an_unknown_finish_reason_is_a_typed_error():
    with pytest.raises(TandemError, match="finish reason"):
        convert.finish_name(session.DecodeToken.FromString(b"\x30\x63").finish_reason)
