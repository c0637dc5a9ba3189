"""An error that crosses a wire arrives as what it was."""

import pytest

from core.errors import (
    Busy,
    EngineFailed,
    ErrorCode,
    InvalidRequest,
    ModelLoadError,
    ModelNotFound,
    TandemError,
    error_from,
)

KINDS = [
    kind
    for kind in TandemError.__subclasses__()
    if kind not in (InvalidRequest, ModelNotFound, ModelLoadError)
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_kind_comes_back_as_itself(kind):
    error = error_from(kind.code, "what happened")
    assert type(error) is kind
    assert str(error) == "what happened"
    assert error.retryable == kind.retryable


def test_every_code_stands_for_one_kind():
    kinds = {code: type(error_from(code, "", "field")) for code in ErrorCode}
    assert {code: kind.code for code, kind in kinds.items()} == {code: code for code in ErrorCode}
    assert len(set(kinds.values())) == len(ErrorCode)


def test_the_field_at_fault_comes_along():
    error = error_from(ErrorCode.INVALID, "too hot", "temperature")
    assert isinstance(error, InvalidRequest)
    assert error.field == "temperature"
    missing = error_from(ErrorCode.MODEL_NOT_FOUND, str(ModelNotFound("gpt-9")))
    assert str(missing) == "the model `gpt-9` does not exist"
    assert missing.field == "model"


@pytest.mark.parametrize("code", ["", "teapot", "BUSY"])
def test_an_unknown_code_is_a_failure_of_the_engine(code):
    assert type(error_from(code, "what")) is EngineFailed


def test_busy_says_when_to_come_back():
    assert Busy("full", 2.5).retry_after_s == 2.5
