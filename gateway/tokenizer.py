"""Text to token ids and back. Two readings of one vocabulary: the model's templates may spell control tokens, text
from a client never does: there `<|im_end|>` is nine ordinary characters."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from core.errors import InvalidRequest, ModelLoadError
from tokenizer.files import TokenizerFiles

# Stand-ins for control tokens spelled in client text while a template is rendered: private-use characters.
_MARK, _END = "\ue000", "\ue001"


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
        controls = [token.content for token in added.values() if token.content]
        self._controls = [*sorted(controls, key=len, reverse=True), _MARK, _END]
        self._control = re.compile("|".join(map(re.escape, self._controls)))
        decoder = files.tokenizer.decoder
        self._is_byte_level = decoder is not None and b"ByteLevel" in decoder.__getstate__()
        self._template = _compile(files.chat_template) if files.chat_template else None

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode_text(self, text: str) -> list[int]:
        """A completion prompt: control tokens in it are text; the model's own add-BOS rule applies."""
        ids = _encode(self._plain, text)
        bos = self._trusted.token_to_id(self._files.bos_token) if self._files.add_bos else None
        return ids if bos is None else [bos, *ids]

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Messages through the model's template, with the opening of the assistant's turn. Raises InvalidRequest when
        the template refuses them."""
        if self._template is None:
            raise InvalidRequest("messages", "this model has no chat template; use /v1/completions")
        safe = [{key: self._disarm(value) for key, value in message.items()} for message in messages]
        try:
            rendered = self._template.render(
                messages=safe,
                add_generation_prompt=True,
                bos_token=self._files.bos_token,
                eos_token=self._files.eos_token,
                tools=None,
            )
        except jinja2.TemplateError as error:
            raise InvalidRequest("messages", f"the model's chat template refused them: {error}") from error
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
        if self._control.fullmatch(token) or not self._is_byte_level:
            return _sentencepiece_bytes(token)
        return bytes(_BYTES[character] for character in token if character in _BYTES)

    def is_control(self, token_id: int) -> bool:
        """Whether it is left out of text."""
        return token_id in self._control_ids

    def decode_stream(self, skips_special_tokens: bool = True) -> DecodeStream:
        """For one output: `step(tokenizer, id)`; see TextStream."""
        return DecodeStream(skip_special_tokens=skips_special_tokens)

    def step(self, stream: DecodeStream, token_id: int) -> str:
        """The text that a further token completes; empty while a character is incomplete."""
        return stream.step(self._trusted, token_id) or ""

    def decode(self, token_ids: Sequence[int], skips_special_tokens: bool = True) -> str:
        text: str = self._trusted.decode(list(token_ids), skip_special_tokens=skips_special_tokens)
        return text

    def _disarm(self, text: str) -> str:
        """Replace spelled control tokens, and what would be taken for marks, by marks that the template passes
        through unchanged."""
        return self._control.sub(lambda match: f"{_MARK}{self._controls.index(match[0])}{_END}", text)

    def _encode_rendered(self, rendered: str) -> list[int]:
        """The template's text with control tokens, what stood behind a mark without."""
        ids: list[int] = []
        for index, part in enumerate(re.split(f"{_MARK}(\\d+){_END}", rendered)):
            if index % 2:
                ids += _encode(self._plain, self._controls[int(part)])
            elif part:
                ids += _encode(self._trusted, part)
        return ids


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


def _compile(source: str) -> jinja2.Template:
    """Raises ModelLoadError when it is no template."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = _raise
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise ModelLoadError(f"the model's chat template is not understood: {error}") from error


def _raise(message: str) -> Any:
    raise jinja2.TemplateError(message)
