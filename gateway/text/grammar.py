"""What clients may ask of an output's form, as one grammar. Knows no protocol and no tokens.

`OutputForm`s are made on the event loop, which looks at size and depth only; `to_grammar` and what follows run where
they may take their time or fail altogether (gateway.text.grammar_child).
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from core.errors import InvalidRequest
from tokenizer.grammar import lark

MAX_FORM_CHARACTERS = 256 << 10
MAX_FORM_VALUES = 50_000
MAX_FORM_DEPTH = 64
MAX_REPEATS = 10_000
WHITESPACE = r"\n?[ \t]{0,24}"
"""Between the tokens of JSON: a line break and its indentation. Not any number, or a model may write nothing else."""
_REPEATS = re.compile(r"(?<!\\)\{\s*(\d*)\s*,?\s*(\d*)\s*\}")
_NO_OPTIONS = re.compile(r"(?m)^\s*%llguidance\s*\{\s*\}\s*$")


class FormKind(StrEnum):
    """JSON_SCHEMA: a JSON value of that schema. REGEX: the whole output matches. CHOICE: one of the texts.
    GRAMMAR: Lark (llguidance's) from `start`, or EBNF (GBNF) from `root`. RULES: Lark that the gateway wrote."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"
    RULES = "rules"


@dataclass(frozen=True, slots=True)
class OutputForm:
    """`text` is the schema or the choices as JSON, else what the client wrote. `field` is what the client called it,
    for errors; two forms that differ in nothing else are one grammar."""

    field: str
    kind: FormKind
    text: str


def json_schema(field: str, schema: object) -> OutputForm:
    """`schema`: an object, or its JSON text. Raises InvalidRequest."""
    if isinstance(schema, str):
        check_size(field, schema)
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError):
            raise InvalidRequest(field, f"{field} is not JSON") from None
    if not isinstance(schema, dict):
        raise InvalidRequest(field, f"{field} is not a JSON schema: that is an object")
    check_size(field, schema)
    return OutputForm(field, FormKind.JSON_SCHEMA, _json(field, schema))


def json_object(field: str) -> OutputForm:
    return json_schema(field, {"type": "object"})


def regex(field: str, pattern: object) -> OutputForm:
    """Raises InvalidRequest."""
    return OutputForm(field, FormKind.REGEX, _text(field, pattern))


def grammar(field: str, rules: object) -> OutputForm:
    """Raises InvalidRequest."""
    return OutputForm(field, FormKind.GRAMMAR, _text(field, rules))


def own_rules(field: str, rules: str) -> OutputForm:
    """The gateway's own, in which a client wrote nothing but schemas. Raises InvalidRequest."""
    check_size(field, rules)
    return OutputForm(field, FormKind.RULES, rules)


def choice(field: str, texts: object) -> OutputForm:
    """Raises InvalidRequest."""
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise InvalidRequest(field, f"{field} must be a list of at least one text")
    check_size(field, texts)
    return OutputForm(field, FormKind.CHOICE, _json(field, texts))


def only_form(forms: Sequence[OutputForm]) -> OutputForm | None:
    """The one that was asked for, if any. Raises InvalidRequest for several."""
    if len(forms) > 1:
        names = " and ".join(form.field for form in forms)
        raise InvalidRequest(forms[1].field, f"an output can take one form only, not {names}")
    return forms[0] if forms else None


def response_format(value: object) -> OutputForm | None:
    """OpenAI's: {"type": "text" | "json_object" | "json_schema", "json_schema": {"name", "schema", ...}}. Raises
    InvalidRequest."""
    field = "response_format"
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, dict) else None
    match kind:
        case "text":
            return None
        case "json_object":
            return json_object(field)
        case "json_schema":
            named = value["json_schema"] if isinstance(value, dict) and "json_schema" in value else None
            if not isinstance(named, dict) or not isinstance(named.get("schema"), dict):
                raise InvalidRequest(field, "response_format.json_schema.schema must be a JSON schema")
            return json_schema(field, named["schema"])
    raise InvalidRequest(field, "response_format.type must be text, json_object or json_schema")


def structured_outputs(field: str, value: object) -> OutputForm | None:
    """vLLM's: an object with exactly one of json, regex, choice, grammar and json_object. Raises InvalidRequest."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise InvalidRequest(field, f"{field} must be an object")
    given = {name: item for name, item in value.items() if item is not None and item is not False}
    unknown = next((name for name in given if name not in _STRUCTURED and name != "json_object"), None)
    if unknown is not None:
        raise InvalidRequest(field, f"{field}.{str(unknown)[:64]} is not supported")
    if len(given) != 1:
        raise InvalidRequest(field, f"{field} needs exactly one of {', '.join(_STRUCTURED)} and json_object")
    ((name, item),) = given.items()
    if name == "json_object":
        return json_object(field)
    return _STRUCTURED[name](f"{field}.{name}", item)


_STRUCTURED = {"json": json_schema, "regex": regex, "choice": choice, "grammar": grammar}
GUIDED = {f"guided_{name}": make for name, make in _STRUCTURED.items()}
"""vLLM's older fields, each taking what the newer object's member takes."""


def check_size(field: str, value: object) -> None:
    """Looks at each value of a parsed JSON at most once, and at no more than are allowed. Raises InvalidRequest."""
    waiting: list[tuple[Any, int]] = [(value, 1)]
    num_values = num_characters = 0
    while waiting:
        item, depth = waiting.pop()
        num_values += 1
        if isinstance(item, str):
            num_characters += len(item)
        elif isinstance(item, int) and not -(1 << 63) <= item < 1 << 63:
            raise InvalidRequest(field, f"{field} has a number of more than 64 bits")
        elif isinstance(item, dict | list):
            num_values += len(item)
            if num_values <= MAX_FORM_VALUES:
                waiting += [(part, depth + 1) for part in (item.values() if isinstance(item, dict) else item)]
                num_characters += sum(map(len, item)) if isinstance(item, dict) else 0
        if depth > MAX_FORM_DEPTH:
            raise InvalidRequest(field, f"{field} is nested more than {MAX_FORM_DEPTH} levels deep")
        if num_values > MAX_FORM_VALUES or num_characters > MAX_FORM_CHARACTERS:
            message = f"{field} has more than {MAX_FORM_CHARACTERS} characters or {MAX_FORM_VALUES} values"
            raise InvalidRequest(field, message)


def to_grammar(form: OutputForm) -> str:
    """Lark, not compiled yet. Raises InvalidRequest for what cannot become one; may take long, or need more stack
    than there is."""
    match form.kind:
        case FormKind.JSON_SCHEMA:
            bounded = {**json.loads(form.text), "x-guidance": {"whitespace_pattern": WHITESPACE}}
            return lark(f"start: %json {json.dumps(bounded)}")
        case FormKind.REGEX:
            _check_repeats(form)
            return lark(f"start: /{regex_to_lark(form.text)}/")
        case FormKind.CHOICE:
            return lark("start: " + " | ".join(map(json.dumps, json.loads(form.text))))
        case FormKind.GRAMMAR:
            return lark(_rules(form))
        case FormKind.RULES:
            return lark(form.text)


def _rules(form: OutputForm) -> str:
    try:
        rules = _NO_OPTIONS.sub("", any_to_lark(form.text))
    except Exception as error:  # the library raises nothing narrower
        raise InvalidRequest(form.field, f"neither Lark nor EBNF: {error}") from error
    if "%llguidance" in rules:
        raise InvalidRequest(form.field, "%llguidance options are not supported")
    return rules


def _check_repeats(form: OutputForm) -> None:
    for match in _REPEATS.finditer(form.text):
        if any(len(count) > 9 or int(count) > MAX_REPEATS for count in match.groups() if count):
            raise InvalidRequest(form.field, f"{match[0][:64]} repeats more than {MAX_REPEATS} times")


def _json(field: str, value: object) -> str:
    try:
        return json.dumps(value)
    except ValueError:
        raise InvalidRequest(field, f"{field} has a number that is too long") from None


def _text(field: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidRequest(field, f"{field} must be a text that is not empty")
    check_size(field, value)
    return value
