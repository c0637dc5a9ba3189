"""What gRPC clients ask for, checked by the same fields as HTTP's bodies."""

from typing import Annotated, Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from pydantic import Field

from core.errors import InvalidRequest
from gateway.ask import MAX_CHOICES, Ask, Prompt
from gateway.sampling_fields import NumLogprobs, SamplingFields, validated
from proto import client_pb2 as pb

MAX_REQUEST_ID_LEN = 128
ROLES = ("system", "user", "assistant")


class GenerateFields(SamplingFields):
    """A GenerateRequest without its input."""

    logprobs: NumLogprobs | None = None
    prompt_logprobs: NumLogprobs | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    client_request_id: Annotated[str, Field(max_length=MAX_REQUEST_ID_LEN, pattern="^[!-~]*$")] = ""


def to_ask(request: pb.GenerateRequest, model_id: str, is_stream: bool) -> Ask:
    """`model_id` is what an empty model means. Raises InvalidRequest naming the field."""
    fields: GenerateFields = validated(GenerateFields, _set_fields(request))
    return fields.to_ask(
        request.model or model_id,
        (_prompt(request),),
        best_of=fields.best_of,
        num_logprobs=fields.logprobs,
        num_prompt_logprobs=fields.prompt_logprobs,
        echoes=bool(fields.echo),
        is_stream=is_stream,
        client_request_id=fields.client_request_id,
    )


def _set_fields(message: Message) -> dict[str, Any]:
    """What the client has set, but for the input; plain lists and dictionaries."""
    return {
        field.name: _plain(field, value)
        for field, value in message.ListFields()
        if field.containing_oneof is None or field.containing_oneof.name != "input"
    }


def _plain(field: FieldDescriptor, value: Any) -> Any:
    if field.message_type is not None:
        return dict(value) if field.message_type.GetOptions().map_entry else _set_fields(value)
    return list(value) if field.is_repeated else value


def _prompt(request: pb.GenerateRequest) -> Prompt:
    match request.WhichOneof("input"):
        case "text":
            return Prompt("text", text=request.text)
        case "token_ids":
            return Prompt("token_ids", token_ids=tuple(request.token_ids.ids))
        case "chat":
            messages = tuple({"role": m.role, "content": m.content} for m in request.chat.messages)
            wrong = next((message["role"] for message in messages if message["role"] not in ROLES), None)
            if not messages:
                raise InvalidRequest("chat", "at least one message is needed")
            if wrong is not None:
                raise InvalidRequest("chat", f"role {wrong!r} is not one of {', '.join(ROLES)}")
            return Prompt("chat", messages=messages)
    raise InvalidRequest("input", "one of text, chat and token_ids is needed")
