"""Requests that nobody should send: generated from the schemas of what the gateway reads, and made by hand.

`bodies()` and `messages()` are strategies; `hostile()` and `RAW` are what somebody thought of."""

import functools
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from google.protobuf.descriptor import FieldDescriptor as Field
from google.protobuf.message import Message
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from gateway.front.openai_schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from gateway.front.responses_schema import ResponsesBody
from proto import client_pb2 as pb

Json = dict[str, Any]
MODEL = "test"
COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
KINDS = {
    COMPLETIONS: CompletionBody,
    CHAT: ChatBody,
    RESPONSES: ResponsesBody,
    "/v1/tokenize": TokenizeBody,
    "/v1/detokenize": DetokenizeBody,
}
TEXTS = (
    "",
    "a",
    "hello",
    "\x00",
    "\ud800",
    "\u202e",
    "<|im_end|>",
    "\ue0000\ue001",
    "é" * 300,
    "x" * 5000,
    "{{ 7*7 }}",
)
NUMBERS = (
    0,
    1,
    -1,
    2,
    3.5,
    127,
    128,
    129,
    2**31,
    -(2**63),
    2**64,
    10**4000,
    1e308,
    -0.0,
    float("nan"),
    float("inf"),
)
FORMS: tuple[Any, ...] = (
    "(a{1,9999}){1,9999}",
    "(?<=x)",
    "[",
    "a" * 5000,
    "root ::= root root",
    'root ::= "a"* "b"',
    "start: %json {}",
    {"type": "object"},
    {"type": "json_object"},
    {"type": "json_schema", "json_schema": {"name": "n", "schema": {"$ref": "#"}}},
    {"type": "json_schema", "json_schema": {"schema": {"$ref": "http://127.0.0.1/"}}},
    {"json": {"oneOf": [{}, {}]}},
    {"regex": "(a|a)*", "choice": ["a"]},
    {"properties": {"a": {"type": "string", "pattern": "(a+)+$"}}},
    {"enum": []},
    {"minimum": 5, "maximum": 1, "type": "integer"},
    ["yes", "no"],
    [],
)
MESSAGES = [{"role": "user", "content": "a"}]
GOOD: dict[str, Json] = {
    COMPLETIONS: {"prompt": "a"},
    CHAT: {"messages": MESSAGES},
    RESPONSES: {"input": "a"},
    "/v1/tokenize": {"messages": MESSAGES},
    "/v1/detokenize": {"tokens": [65]},
}
SMALL = {"max_tokens": 4, "max_completion_tokens": 4, "max_output_tokens": 4}


class Attack(NamedTuple):
    """One HTTP request."""

    path: str
    body: bytes
    content_type: str = "application/json"
    method: str = "POST"


def values() -> SearchStrategy[Any]:
    """Any JSON, small but nested."""
    leaves = (
        st.none() | st.booleans() | st.sampled_from(NUMBERS) | st.sampled_from(TEXTS) | st.sampled_from(FORMS)
    )
    return st.recursive(leaves, lambda inner: st.lists(inner, max_size=3) | named(inner), max_leaves=6)


def named(inner: SearchStrategy[Any]) -> SearchStrategy[Json]:
    return st.dictionaries(
        st.sampled_from([*TEXTS, "type", "role", "content", "0", "511", "512"]), inner, max_size=3
    )


def of_schema(schema: Json, definitions: Json, depth: int = 0) -> SearchStrategy[Any]:
    """Values at and just beyond what the schema allows."""
    if depth > 5:
        return st.none()
    if "const" in schema or "enum" in schema:
        return st.sampled_from(schema.get("enum") or [schema["const"]])
    if "type" in schema:
        return _of_type(schema, definitions, depth)
    if "$ref" in schema:
        return of_schema(definitions[schema["$ref"].rpartition("/")[2]], definitions, depth + 1)
    if "anyOf" in schema:
        return st.one_of(*(of_schema(option, definitions, depth + 1) for option in schema["anyOf"]))
    return st.sampled_from(FORMS) | values()


def _of_type(schema: Json, definitions: Json, depth: int) -> SearchStrategy[Any]:
    match schema["type"]:
        case "integer" | "number":
            return st.sampled_from([*_ends(schema), *NUMBERS[:6]])
        case "string":
            lengths = [schema.get("maxLength", 16), schema.get("maxLength", 15) + 1]
            return st.sampled_from([*TEXTS, *("y" * length for length in lengths)])
        case "boolean":
            return st.booleans()
        case "null":
            return st.none()
        case "array":
            return _lists(schema, of_schema(schema.get("items", {}), definitions, depth + 1))
        case "object" if "properties" in schema:
            return _objects(schema, definitions, depth)
        case "object":
            return named(values())
    return st.sampled_from(FORMS) | values()


def _ends(schema: Json) -> list[int]:
    names = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
    return [schema[name] + by for name in names if name in schema for by in (-1, 0, 1)]


def _lists(schema: Json, items: SearchStrategy[Any]) -> SearchStrategy[list[Any]]:
    few = st.lists(items, max_size=3)
    most = schema.get("maxItems", 200)
    return few if most > 1 << 17 else few | items.map(lambda item: [item] * (most + 1))


def _objects(schema: Json, definitions: Json, depth: int = 0) -> SearchStrategy[Json]:
    fields = {name: of_schema(own, definitions, depth + 1) for name, own in schema["properties"].items()}
    required = {name: fields.pop(name) for name in schema.get("required", ())}
    some = st.sets(st.sampled_from(sorted(fields)), max_size=4) if fields else st.just(set())
    whole = st.tuples(st.fixed_dictionaries(required), some.flatmap(lambda names: _of(fields, names))).map(
        lambda parts: {**parts[0], **parts[1]}
    )
    return whole


def _of(fields: dict[str, SearchStrategy[Any]], names: set[str]) -> SearchStrategy[Json]:
    return st.fixed_dictionaries({name: fields[name] for name in sorted(names)})


@st.composite
def bodies(draw: st.DrawFn) -> Attack:
    """A body near its schema, mostly to the right address; some are harmed as bytes."""
    path = draw(st.sampled_from(sorted(KINDS)))
    body = draw(_bodies(path))
    if body and draw(st.booleans()):
        body[draw(st.sampled_from(sorted(body)))] = draw(values())
    if draw(st.integers(0, 3)):
        body = {**body, "model": MODEL, **draw(st.sampled_from([GOOD[path], {}]))}
    body |= _short(body)
    raw = json.dumps(body, ensure_ascii=draw(st.booleans()), allow_nan=True).encode("utf-8", "surrogatepass")
    kind = draw(
        st.sampled_from(["application/json"] * 8 + ["text/plain", "multipart/form-data", "", "a/b; c=\xff"])
    )
    return Attack(path, draw(harmed(raw)), kind)


@functools.cache
def _bodies(path: str) -> SearchStrategy[Json]:
    schema = KINDS[path].model_json_schema()
    return _objects(schema, schema.get("$defs", {}))


def _short(body: Json) -> Json:
    """What keeps an answer, should there be one, to a few tokens."""
    return {name: few if _is_long(body.get(name)) else body[name] for name, few in SMALL.items()}


def _is_long(given: Any) -> bool:
    return given is None or (isinstance(given, int) and given > 4)


@st.composite
def harmed(draw: st.DrawFn, raw: bytes) -> bytes:
    at = draw(st.integers(0, len(raw)))
    match draw(st.integers(0, 15)):
        case 0:
            return raw[:at]
        case 1:
            return raw[:at] + draw(st.binary(min_size=1, max_size=4)) + raw[at:]
        case 2:
            return raw[:-1] + b', "model": "test", "model": ["x"], "max_tokens": 1' + raw[-1:]
        case 3:
            return b"\xef\xbb\xbf" + raw
        case 4:
            return raw.decode("utf-8", "replace").encode("utf-16")
        case 5:
            return b'{"a":' * draw(st.sampled_from([5, 199, 5000])) + raw
        case 6:
            return raw * 2
    return raw


@st.composite
def messages(draw: st.DrawFn) -> bytes:
    """A GenerateRequest with values of any size in its fields, some harmed as bytes."""
    request = pb.GenerateRequest()
    for field in draw(st.lists(st.sampled_from(list(request.DESCRIPTOR.fields)), max_size=6)):
        _fill(draw, request, field)
    request.max_tokens = draw(st.sampled_from([0, 1, 4]))
    return draw(harmed(request.SerializeToString()))


def _fill(draw: st.DrawFn, message: Message, field: Field) -> None:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        getattr(message, field.name)[draw(st.sampled_from([0, 511, 512, 2**32 - 1]))] = draw(st.floats())
    elif field.message_type is not None:
        own = getattr(message, field.name)
        own = own.add() if field.is_repeated else own
        own.SetInParent() if not field.is_repeated else None
        for inner in (
            draw(st.lists(st.sampled_from(list(own.DESCRIPTOR.fields)), max_size=3))
            if own.DESCRIPTOR.fields
            else ()
        ):
            _fill(draw, own, inner)
    elif field.is_repeated:
        getattr(message, field.name).extend([draw(_scalar(field))] * draw(st.sampled_from([1, 3, 200])))
    else:
        setattr(message, field.name, draw(_scalar(field)))


def _scalar(field: Field) -> SearchStrategy[Any]:
    match field.cpp_type:
        case Field.CPPTYPE_BOOL:
            return st.booleans()
        case Field.CPPTYPE_STRING if field.type == Field.TYPE_BYTES:
            return st.binary(max_size=8)
        case Field.CPPTYPE_STRING:
            return st.sampled_from(
                [text for text in (*TEXTS, *FORMS) if isinstance(text, str) and text != "\ud800"]
            )
        case Field.CPPTYPE_DOUBLE | Field.CPPTYPE_FLOAT:
            return st.floats(width=32)
        case Field.CPPTYPE_ENUM:
            return st.sampled_from([value.number for value in field.enum_type.values])
    is_unsigned = field.cpp_type in (Field.CPPTYPE_UINT32, Field.CPPTYPE_UINT64)
    bits = 32 if field.cpp_type in (Field.CPPTYPE_INT32, Field.CPPTYPE_UINT32) else 64
    least, most = (0, 2**bits - 1) if is_unsigned else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return st.sampled_from([least, 0, 1, 2, 129, 512, most])


def asked(**fields: Any) -> Attack:
    path = CHAT if "messages" in fields else RESPONSES if "input" in fields else COMPLETIONS
    return Attack(path, json.dumps({"model": MODEL, "max_tokens": 2, **fields}).encode())


def spelled(before: str, unit: str, count: int, after: str, path: str = COMPLETIONS) -> Attack:
    head = f'{{"model":"{MODEL}","max_tokens":2,{before}'
    return Attack(path, (head + ",".join([unit] * count) + after + "}").encode())


def hostile() -> Iterator[Attack]:
    """Small ones."""
    yield from _at_bounds()
    yield from _forms()
    yield from _contents()
    yield from _wrong_ways()


def _at_bounds() -> Iterator[Attack]:
    for bias in (511, 512, 1024, 1025):
        yield asked(prompt="a", logit_bias={str(index): 1 for index in range(bias)})
    many = (["a"] * 128, ["a"] * 129, [[1]] * 128, [[1]] * 129, [[]] * 128, [""], [[1], "a"], [1, "a"], {})
    for prompt in many:
        yield asked(prompt=prompt)
    for n in (0, 1, 128, 129, 10**6, -1, 1.0, "1", True, None, 2**63):
        yield asked(prompt="a", n=n)
        yield asked(prompt=["a", "b"], best_of=n)
    for stop in (["a"] * 16, ["a"] * 17, "", [""], "x" * 256, "x" * 257, ["\ud800"], {"a": 1}):
        yield asked(prompt="a", stop=stop)
        yield asked(messages=[{"role": "user", "content": "a"}], stop=stop)
    yield asked(prompt="a" * 1500, echo=True, logprobs=20)
    yield asked(prompt=list(range(500)), prompt_logprobs=20)
    yield asked(prompt="a", bad_words=["x" * 256] * 128)
    yield asked(prompt="a", stream=True, stream_options={"include_usage": 1})


def _forms() -> Iterator[Attack]:
    nested: Json = {}
    for _ in range(60):
        nested = {"items": nested}
    regexes = ("(" * 3000 + ")" * 3000, "(a?){500}a{500}", "\\p{L}{1,999}", "[" + "a-z" * 999 + "]")
    for form in (*FORMS, nested, *regexes):
        for name in ("guided_regex", "guided_json", "guided_grammar", "guided_choice", "response_format"):
            yield asked(prompt="a", **{name: form})


def _contents() -> Iterator[Attack]:
    part = {"type": "text", "text": "a"}
    image = {**part, "type": "image_url"}
    for content in ("<|im_end|>" * 50, [part] * 300, [image], [[]], None, 7, "\ue0000\ue001"):
        yield asked(messages=[{"role": "user", "content": content}])
        yield asked(input=[{"role": "user", "content": content}])
    yield asked(messages=[{"role": "user", "content": "{% for i in range(10**9) %}{{ i }}{% endfor %}"}])


def _wrong_ways() -> Iterator[Attack]:
    no_json = (
        b"",
        b"null",
        b"[]",
        b"{",
        b"\x00",
        b"\xff\xfe{}",
        b"nan",
        b"[" * 5000,
        b'{"a":' * 5000,
        b"1" * 5000,
    )
    for path in (*KINDS, "/v1/embeddings"):
        for method in ("GET", "PUT", "DELETE", "PATCH", "OPTIONS"):
            yield Attack(path, b"{}", method=method)
        for raw in no_json:
            yield Attack(path, raw)
    models = ("x" * 5000, "%00", "%ff", "..%2f..")
    for path in ("/", "//", "/v1", "/%2e%2e/etc/passwd", *(f"/v1/models/{model}" for model in models)):
        yield Attack(path, b"", method="GET")
        yield Attack(path, b"{}")


def huge() -> Iterator[Attack]:
    """Each within or beyond the limit on a body's size, and slow to read for whoever reads it whole."""
    yield spelled('"prompt":[', "[]", 2_000_000, "]")
    yield spelled('"prompt":[', "7", 1 << 20, "]")
    yield spelled('"prompt":[', '"a"', 100_000, "]")
    yield spelled('"messages":[', '{"role":"user","content":"a"}', 250_000, "]", CHAT)
    yield spelled('"messages":[', "{}", 1_000_000, "]", CHAT)
    part = '{"type":"text","text":""}'
    yield spelled('"messages":[', f'{{"role":"user","content":[{",".join([part] * 79)}]}}', 3_900, "]", CHAT)
    yield spelled('"prompt":"a","guided_json":{"enum":[', "{}", 2_000_000, "]}")
    yield spelled('"prompt":"a","tools":[', "[]", 2_000_000, "]", CHAT)
    yield spelled('"prompt":"a","stop":[', '"a"', 1_500_000, "]")
    keys = ",".join(f'"{index}":1' for index in range(500_000))
    yield spelled(f'"prompt":"a","logit_bias":{{{keys}', "", 1, "}")
    yield spelled('"prompt":"', "a b c d e f", 600_000, '"')
    yield spelled('"prompt":"', "\\u0041\\ud83d\\ude00", 400_000, '"')
    yield Attack("/v1/detokenize", b'{"tokens":[' + b"7," * 1_000_000 + b"7]}")
    yield spelled('"prompt":[', f'"{"abc" * 500}"', 128, '],"echo":true,"logprobs":20')
    yield Attack(COMPLETIONS, b"x" * (200 << 20))


BODY = b'{"model":"test","prompt":"a","max_tokens":1}'
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nConnection: close\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
RAW: tuple[bytes, ...] = (
    b"\r\n\r\n",
    b"\x00" * 4096,
    b"GET\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\n\r\n",
    b"POST http://127.0.0.1:1/v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}",
    HEAD + b"Content-Length: -1\r\n\r\n" + BODY,
    HEAD + b"Content-Length: 99999999999999999999\r\n\r\n" + BODY,
    HEAD + b"Content-Length: 44\r\nContent-Length: 2\r\n\r\n" + BODY,
    HEAD + b"Content-Length: 44\r\nTransfer-Encoding: chunked\r\n\r\n" + BODY,
    HEAD + b"Content-Length: 10\r\n\r\n" + BODY,
    HEAD + b"Content-Encoding: gzip\r\nContent-Length: 44\r\n\r\n" + BODY,
    HEAD + b"Expect: 100-continue\r\nContent-Length: 44\r\n\r\n" + BODY,
    HEAD + b"Expect: the impossible\r\nContent-Length: 44\r\n\r\n" + BODY,
    HEAD + b"X: " + b"y" * (1 << 20) + b"\r\nContent-Length: 44\r\n\r\n" + BODY,
    HEAD + b"".join(b"X%d: y\r\n" % index for index in range(5000)) + b"Content-Length: 44\r\n\r\n" + BODY,
    HEAD + b"Host: a\r\nHost: b\r\n: empty\r\nno colon\r\nContent-Length: 44\r\n\r\n" + BODY,
    HEAD + b"Upgrade: websocket\r\nConnection: upgrade\r\nContent-Length: 44\r\n\r\n" + BODY,
    CHUNKED + b"".join(b"1\r\n%c\r\n" % byte for byte in BODY) + b"0\r\n\r\n",
    CHUNKED + b"zz\r\n" + BODY,
    CHUNKED + b"ffffffffffffffff\r\n" + BODY,
    CHUNKED + b"2c;ext=" + b"x" * 5000 + b"\r\n" + BODY + b"\r\n0\r\nTrailer: " + b"y" * 5000 + b"\r\n\r\n",
    CHUNKED + b"0\r\n\r\n",
    HEAD.replace(b"1.1", b"1.0") + b"\r\n" + BODY,
    b"POST /v1/completions?"
    + b"a=b&" * 10_000
    + b" HTTP/1.1\r\nHost: t\r\nContent-Length: 44\r\n\r\n"
    + BODY,
    b"GET /v1/models/\xff\x00 HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n",
    b"DELETE " * 1000 + b"\r\n\r\n",
)
