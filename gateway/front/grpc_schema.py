"""What gRPC clients ask for, checked by the same fields as HTTP's bodies."""

from typing import Annotated, Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from pydantic import Field
from pydantic_core import from_json

from core.errors import InvalidRequest
from gateway.ask import MAX_CHOICES, Ask, Prompt
from gateway.front.message_fields import ChatFields, MessageList, ToolMode, choose_tools
from gateway.front.sampling_fields import NumLogprobs, SamplingFields, validated
from proto import client_pb2 as pb

MAX_REQUEST_ID_LEN = 128
Kind = TypeVar("Kind", bound=Message)
_OF_CHATS = frozenset(
    {
        "tools",
        "tool_choice",
        "named_tool",
        "parallel_tool_calls",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template_kwargs",
    }
)


class GrpcChatFields(ChatFields):
    """A chat of a GenerateRequest, with what is said of it beside."""

    messages: MessageList
    tool_choice: ToolMode | None = None
    named_tool: str | None = None
    parallel_tool_calls: bool | None = None

    def prompt(self) -> Prompt:
        tools = choose_tools(self.functions(), self.tool_choice, self.named_tool, self.parallel_tool_calls)
        return Prompt("chat", chat=self.to_chat(self.messages, tools))


class GenerateFields(SamplingFields):
    """A GenerateRequest without its input."""

    logprobs: NumLogprobs | None = None
    prompt_logprobs: NumLogprobs | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    client_request_id: Annotated[str, Field(max_length=MAX_REQUEST_ID_LEN, pattern="^[!-~]*$")] = ""


def read_message(kind: type[Kind], raw: bytes) -> Kind:
    """Raises InvalidRequest."""
    try:
        return kind.FromString(raw)
    except DecodeError:
        raise InvalidRequest("body", f"this is no {kind.DESCRIPTOR.name}") from None


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
        if (field.containing_oneof is None or field.containing_oneof.name != "input")
        and field.name not in _OF_CHATS
    }


def _plain(field: FieldDescriptor, value: Any) -> Any:
    if field.message_type is not None:
        return dict(value) if field.message_type.GetOptions().map_entry else _set_fields(value)
    return list(value) if field.is_repeated else value


def _prompt(request: pb.GenerateRequest) -> Prompt:
    given = next((field.name for field, _ in request.ListFields() if field.name in _OF_CHATS), None)
    if given is not None and request.WhichOneof("input") != "chat":
        raise InvalidRequest(given, f"{given} is for a chat")
    match request.WhichOneof("input"):
        case "text":
            return Prompt("text", text=request.text)
        case "token_ids":
            return Prompt("token_ids", token_ids=tuple(request.token_ids.ids))
        case "chat":
            return _chat_prompt(request)
    raise InvalidRequest("input", "one of text, chat and token_ids is needed")


def _chat_prompt(request: pb.GenerateRequest) -> Prompt:
    try:
        fields: GrpcChatFields = validated(GrpcChatFields, _chat_data(request))
        return fields.prompt()
    except InvalidRequest as error:
        raise InvalidRequest("chat" if error.field == "messages" else error.field, str(error)) from error


def _chat_data(request: pb.GenerateRequest) -> dict[str, Any]:
    """As OpenAI's clients would write it."""
    return {
        "messages": [_message(message) for message in request.chat.messages],
        "tools": [_tool(tool) for tool in request.tools],
        "tool_choice": request.tool_choice or None,
        "named_tool": request.named_tool or None,
        "parallel_tool_calls": request.parallel_tool_calls
        if request.HasField("parallel_tool_calls")
        else None,
        "add_generation_prompt": (
            request.add_generation_prompt if request.HasField("add_generation_prompt") else None
        ),
        "continue_final_message": request.continue_final_message,
        "chat_template_kwargs": _object("chat_template_kwargs", request.chat_template_kwargs),
    }


def _message(message: pb.ChatMessage) -> dict[str, Any]:
    """No content beside calls stands for none."""
    return {
        "role": message.role,
        "content": None if message.tool_calls and not message.content else message.content,
        "name": message.name or None,
        "tool_calls": [
            {"id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ],
        "tool_call_id": message.tool_call_id or None,
        "reasoning_content": message.reasoning_content or None,
    }


def _tool(tool: pb.FunctionTool) -> dict[str, Any]:
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": _object("tools", tool.parameters),
        "strict": tool.strict,
    }
    return {"type": "function", "function": function}


def _object(field: str, text: str) -> dict[str, Any] | None:
    """Raises InvalidRequest for what is no JSON object."""
    if not text:
        return None
    try:
        value = from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequest(field, f"{field}: no JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidRequest(field, f"{field}: no JSON object")
    return value
