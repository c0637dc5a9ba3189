"""A chat as it is asked for, and the functions that its answer may call. Knows no protocol, template or tokens."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MAX_FUNCTIONS = 128
FUNCTION_NAME = "^[A-Za-z0-9_-]{1,64}$"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """What an assistant's message has called. `arguments` is text: JSON, if the model wrote it right."""

    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """`role` is system, user, assistant or tool. Without content, it is a call alone; `call_id` names the call whose
    result a tool's message is; `reasoning` is what the assistant thought before its content."""

    role: str
    content: str | None
    name: str = ""
    calls: tuple[ToolCall, ...] = ()
    call_id: str = ""
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class Function:
    """`parameters` is the JSON schema of its arguments; None stands for a function without any."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] | None = None
    is_strict: bool = False


@dataclass(frozen=True, slots=True)
class Tools:
    """What an answer may call, and must with `is_required`. The prompt shows all `functions`; `callable_names` are
    those that may be called. Without `allows_several` the first call ends the answer."""

    functions: tuple[Function, ...]
    callable_names: frozenset[str]
    is_required: bool = False
    allows_several: bool = True


@dataclass(frozen=True, slots=True)
class Chat:
    """With `continues_last` the answer goes on with the last message's content, else it is a new message, whose
    opening the prompt has if it `opens_answer`. `template_values` are the client's own variables for the template."""

    messages: tuple[Message, ...]
    tools: Tools | None = None
    opens_answer: bool = True
    continues_last: bool = False
    template_values: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_characters(self) -> int:
        """Of what the messages say."""
        return sum(
            len(message.content or "")
            + len(message.reasoning)
            + sum(len(call.arguments) for call in message.calls)
            for message in self.messages
        )
