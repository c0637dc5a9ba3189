"""Text to token ids and back. Two readings of one vocabulary: the model's templates may spell control tokens, text
from a client never does: there `<|im_end|>` is nine ordinary characters."""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from core.errors import InvalidRequest
from gateway.text.chat import Chat
from gateway.text.chat_template import ChatTemplate, template_messages, template_tools
from gateway.text.tool_format import HERMES, ToolFormat
from tokenizer.files import TokenizerFiles

# Stand-ins for control tokens spelled in client text while a template is rendered: private-use characters.
_MARK, _END = "\ue000", "\ue001"
_HERE = "\ue002"
"""Where the answer goes on, when it continues a message."""
_MARKS = (_MARK, _END, _HERE)
_MARKUP = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]")
"""Added tokens that are no special ones and yet structure: `<tool_response>`, and not runs of spaces."""
_SAID = ("content", "reasoning_content")


class TextTokenizer:
    """Immutable after construction; methods may run in any thread."""

    def __init__(self, files: TokenizerFiles) -> None:
        self.eos_token_ids = files.eos_token_ids
        self.vocab_size = files.tokenizer.get_vocab_size()
        self.longest_token_len = max(map(len, files.tokenizer.get_vocab()))
        self._files = files
        self._trusted = files.tokenizer
        self._plain = Tokenizer.from_str(files.tokenizer.to_str())
        self._plain.encode_special_tokens = True
        added = files.tokenizer.get_added_tokens_decoder()
        self._control_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.added_tokens = frozenset(token.content for token in added.values())
        special = {token.content for token in added.values() if token.special and token.content}
        markup = {text for text in self.added_tokens if _MARKUP.fullmatch(text)}
        self.markup_tokens = tuple(sorted(markup - special))
        self._controls = [*sorted(special | markup, key=len, reverse=True), *_MARKS]
        self._control = _any_of(self._controls)
        self._special = _any_of([text for text in self._controls if text in special or text in _MARKS])
        decoder = files.tokenizer.decoder
        self._is_byte_level = decoder is not None and b"ByteLevel" in decoder.__getstate__()
        self._template = None
        if files.chat_template:
            self._template = ChatTemplate(files.chat_template, files.bos_token, files.eos_token)
        self._telling = _without_special(self._trusted, self.tool_format.markers)

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode_text(self, text: str) -> list[int]:
        """A completion prompt: control tokens in it are text; the model's own add-BOS rule applies."""
        ids = _encode(self._plain, text)
        bos = self._trusted.token_to_id(self._files.bos_token) if self._files.add_bos else None
        return ids if bos is None else [bos, *ids]

    @property
    def tool_format(self) -> ToolFormat:
        """How this model writes calls of functions."""
        return HERMES if self._template is None else self._template.tool_format

    def encode_chat(self, chat: Chat) -> list[int]:
        """Messages and functions through the model's template. Raises InvalidRequest when the template refuses
        them."""
        if self._template is None:
            raise InvalidRequest("messages", "this model has no chat template; use /v1/completions")
        fixed = next((name for name in chat.template_values if name in self._template.fixed_values), None)
        if fixed is not None:
            raise InvalidRequest("chat_template_kwargs", f"{fixed} is not for the client to set")
        try:
            messages = [self._disarm_message(message) for message in template_messages(chat)]
            tools = _mapped(template_tools(chat), self._disarm)
        except RecursionError:
            raise InvalidRequest("messages", "arguments of a call are nested too deeply") from None
        if chat.continues_last:
            messages[-1]["content"] += _HERE
        values = _mapped(dict(chat.template_values), self._disarm)
        rendered = self._template.render(
            messages, tools, chat.opens_answer and not chat.continues_last, values
        )
        if chat.continues_last:
            rendered, here, _ = rendered.rpartition(_HERE)
            if not here:
                message = "the model's chat template leaves out the last message: it cannot be continued"
                raise InvalidRequest("continue_final_message", message)
        return self._encode_rendered(rendered)

    def spellings(self, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """Each word as tokens, at the start of a text and after a space: nothing else spells it in running text."""
        texts = [text for word in words for text in (word.lstrip(), " " + word.lstrip())]
        ids = (tuple(_encode(self._plain, text)) for text in texts)
        return tuple(dict.fromkeys(own for own in ids if own))

    def token_bytes(self, token_id: int) -> bytes:
        """What one token spells, which need not be whole characters; nothing for an id beyond the vocabulary."""
        token = self._trusted.id_to_token(token_id)
        if token is None:
            return b""
        if token in self.added_tokens or not self._is_byte_level:
            return _sentencepiece_bytes(token)
        return bytes(_BYTES[character] for character in token if character in _BYTES)

    def is_control(self, token_id: int) -> bool:
        """Whether it is left out of text."""
        return token_id in self._control_ids

    def decode_stream(self, skips_special_tokens: bool = True, tells_calls: bool = False) -> "OutputText":
        """For one output. With `tells_calls` its text has the tokens that surround calls, special or not."""
        return OutputText(self._telling if tells_calls else self._trusted, skips_special_tokens)

    def decode(self, token_ids: Sequence[int], skips_special_tokens: bool = True) -> str:
        text: str = self._trusted.decode(list(token_ids), skip_special_tokens=skips_special_tokens)
        return text

    def _disarm_message(self, message: dict[str, Any]) -> dict[str, Any]:
        """What an assistant has said may have the vocabulary's markup, as `<think>`: its template looks for it, and a
        client that writes for the assistant can have it anyway."""
        disarm = self._disarm_special if message["role"] == "assistant" else self._disarm
        own = {name: disarm(value) for name, value in message.items() if name in _SAID and value is not None}
        return {**_mapped(message, self._disarm), **own}

    def _disarm(self, text: str) -> str:
        """Replace spelled control tokens, and what would be taken for marks, by marks that the template passes
        through unchanged."""
        return self._control.sub(self._mark, text)

    def _disarm_special(self, text: str) -> str:
        """Of control tokens alone."""
        return self._special.sub(self._mark, text)

    def _mark(self, match: re.Match[str]) -> str:
        return f"{_MARK}{self._controls.index(match[0])}{_END}"

    def _encode_rendered(self, rendered: str) -> list[int]:
        """The template's text with control tokens, what stood behind a mark without."""
        ids: list[int] = []
        for index, part in enumerate(re.split(f"{_MARK}(\\d+){_END}", rendered)):
            if index % 2:
                ids += self._encode_literally(self._controls[int(part)])
            elif part:
                ids += _encode(self._trusted, part)
        return ids

    def _encode_literally(self, control: str) -> list[int]:
        """The characters of a control token. Markup is a token in any text: cut in two it is none."""
        if self._special.fullmatch(control):
            return _encode(self._plain, control)
        return _encode(self._plain, control[0]) + _encode(self._plain, control[1:])


class OutputText:
    """One output's tokens, as they come, as text."""

    def __init__(self, tokenizer: Tokenizer, skips_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skips = skips_special_tokens
        self._stream = DecodeStream(skip_special_tokens=skips_special_tokens)
        self._undecoded: list[int] = []

    def push(self, token_id: int) -> str:
        """The text that a further token completes; empty while a character is incomplete."""
        text = self._stream.step(self._tokenizer, token_id) or ""
        self._undecoded = [] if text else [*self._undecoded, token_id]
        return text

    def finish(self) -> str:
        """When no token follows: the replacement of a character that stayed incomplete."""
        ids, self._undecoded = self._undecoded, []
        text: str = self._tokenizer.decode(ids, skip_special_tokens=self._skips) if ids else ""
        return text


def _byte_alphabet() -> dict[str, int]:
    """Byte-level vocabularies spell each byte as one character: printable Latin-1 ones as themselves, the others, in
    order, as those from U+0100 on (OpenAI's GPT-2)."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(0x100 + at): byte for at, byte in enumerate(others)}


_BYTES = _byte_alphabet()


def _sentencepiece_bytes(token: str) -> bytes:
    """`<0xE2>` is a byte; U+2581 stands for a space."""
    if match := re.fullmatch("<0x([0-9A-F]{2})>", token):
        return bytes.fromhex(match[1])
    return token.replace("\u2581", " ").encode()


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """As a batch of one: unlike encode(), that lets other threads run meanwhile."""
    ids: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return ids


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Of several that begin at one place, the first listed."""
    return re.compile("|".join(map(re.escape, texts)))


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """JSON with every string in it changed, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): _mapped(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [_mapped(item, change) for item in value]
    return value


def _without_special(tokenizer: Tokenizer, texts: Iterable[str]) -> Tokenizer:
    """The same vocabulary, in which the tokens of these texts are no special ones; the same object if they are none
    anyway."""
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    told = special.intersection(texts)
    if not told:
        return tokenizer
    state = json.loads(tokenizer.to_str())
    for token in state["added_tokens"]:
        token["special"] = token["special"] and token["content"] not in told
    return Tokenizer.from_str(json.dumps(state))
