"""How models write calls of functions: the forms that are understood, and which one a model's template asks for.

HERMES   <tool_call>
         {"name": "f", "arguments": {...}}
         </tool_call>
LLAMA    {"name": "f", "parameters": {...}}          the whole output, or behind <|python_tag|>; several with `;`
"""

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """`opening` and `closing` surround a call, if there is a `closing`; with `may_be_bare` an output that begins with
    an object begins with a call. `separators` may stand between calls; `joint` does when they are guided."""

    name: str
    opening: str
    closing: str
    arguments_key: str
    may_be_bare: bool
    separators: str
    joint: str

    @property
    def markers(self) -> tuple[str, ...]:
        return tuple(marker for marker in (self.opening, self.closing) if marker)


HERMES = ToolFormat("hermes", "<tool_call>", "</tool_call>", "arguments", False, "", "\n")
LLAMA = ToolFormat("llama", "<|python_tag|>", "", "parameters", True, ";", "; ")


def told_format(template: str) -> ToolFormat | None:
    """The format that a chat template's source tells the model to write, if it is one of these."""
    if HERMES.opening in template and re.search(r'\\?"arguments\\?"', template):
        return HERMES
    if LLAMA.opening in template or re.search(r'\{\\?"name\\?": [^{}]*\\?"parameters\\?"', template):
        return LLAMA
    return None
