"""A `tokenizers.Tokenizer` and a chat template from a model's own files: a Hugging Face directory, or the metadata of
a GGUF. Needs neither torch nor transformers."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from core.errors import ModelLoadError
from core.gguf_header import read_metadata

_CONTROL_TOKEN = 3
_USER_TOKEN = 4
_GPT4_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """What a model says about its text. `chat_template` is Jinja source, empty when the model has none; `add_bos` is
    for plain text only, a template writes its own."""

    tokenizer: Tokenizer
    chat_template: str
    bos_token: str
    eos_token: str
    eos_token_ids: tuple[int, ...]
    add_bos: bool


def load_tokenizer_files(path: Path) -> TokenizerFiles:
    """Raises ModelLoadError naming what is missing or not understood."""
    try:
        return _from_directory(path) if path.is_dir() else _from_gguf(path)
    except (OSError, ValueError, KeyError) as error:
        raise ModelLoadError(f"{path}: the tokenizer does not load: {error}") from error


def _from_directory(path: Path) -> TokenizerFiles:
    file = path / "tokenizer.json"
    if not file.is_file():
        raise ModelLoadError(f"{path} has no tokenizer.json")
    tokenizer = _parse(file)
    settings = _read_json(path / "tokenizer_config.json")
    template = settings.get("chat_template") or ""
    if (path / "chat_template.jinja").is_file():
        template = (path / "chat_template.jinja").read_text(encoding="utf-8")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}["default"]
    eos, bos = _token_text(settings.get("eos_token")), _token_text(settings.get("bos_token"))
    eos_ids = _eos_ids(path, tokenizer, eos)
    return TokenizerFiles(tokenizer, template, bos, eos, eos_ids, _adds_bos(tokenizer, bos))


def _parse(file: Path) -> Tokenizer:
    text = file.read_text(encoding="utf-8")
    try:
        return Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing narrower
        raise ModelLoadError(f"{file}: the tokenizer does not load: {error}") from error


def _adds_bos(tokenizer: Tokenizer, bos: str) -> bool:
    """Whether the tokenizer's own post-processor puts the beginning-of-sequence token before plain text."""
    bos_id = tokenizer.token_to_id(bos) if bos else None
    return bos_id is not None and tokenizer.encode("a", add_special_tokens=True).ids[0] == bos_id


def _eos_ids(path: Path, tokenizer: Tokenizer, eos: str) -> tuple[int, ...]:
    """Every id that ends an output: generation_config.json and config.json may name several."""
    ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        value = _read_json(path / name).get("eos_token_id")
        ids += value if isinstance(value, list) else [] if value is None else [value]
    own = tokenizer.token_to_id(eos) if eos else None
    return tuple(dict.fromkeys(ids + ([] if own is None else [own])))


def _read_json(path: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return values


def _token_text(value: Any) -> str:
    """tokenizer_config.json writes a special token as text or as an object with its text."""
    return str(value["content"]) if isinstance(value, dict) else str(value or "")


def _from_gguf(path: Path) -> TokenizerFiles:
    metadata: dict[str, Any] = dict(read_metadata(path))

    def get(name: str, default: Any = None) -> Any:
        return metadata.get(name, default)

    kind = get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ModelLoadError(f"{path}: tokenizer model {kind!r} is not supported; give the model's directory")
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    tokenizer = _byte_level_bpe(
        tokens, metadata["tokenizer.ggml.merges"], get("tokenizer.ggml.pre", "gpt-2"), path
    )
    for token_id, token_type in enumerate(get("tokenizer.ggml.token_type", [])):
        if token_type in (_CONTROL_TOKEN, _USER_TOKEN):
            token = AddedToken(tokens[token_id], special=token_type == _CONTROL_TOKEN, normalized=False)
            (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])
    bos_id, eos_id = get("tokenizer.ggml.bos_token_id"), get("tokenizer.ggml.eos_token_id")
    ends = tuple(dict.fromkeys(i for i in (eos_id, get("tokenizer.ggml.eot_token_id")) if i is not None))
    return TokenizerFiles(
        tokenizer,
        get("tokenizer.chat_template", ""),
        "" if bos_id is None else tokens[bos_id],
        "" if eos_id is None else tokens[eos_id],
        ends,
        bool(get("tokenizer.ggml.add_bos_token", False)),
    )


def _byte_level_bpe(tokens: list[str], merges: list[str], pre: str, path: Path) -> Tokenizer:
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, pairs, fuse_unk=False, ignore_merges=pre == "llama-bpe"))
    tokenizer.pre_tokenizer = _pre_tokenizer(pre, path)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pre_tokenizer(pre: str, path: Path) -> pre_tokenizers.PreTokenizer:
    """How text is split before merging; GGUF names it by the family that introduced it."""
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    bare = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    match pre:
        case "gpt-2" | "default":
            return whole
        case "smollm":
            return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), whole])
        case "llama-bpe" | "llama3":
            return pre_tokenizers.Sequence([_split(r"\p{N}{1,3}"), bare])
        case "qwen2":
            return pre_tokenizers.Sequence([_split(r"\p{N}"), bare])
    raise ModelLoadError(f"{path}: pre-tokenizer {pre!r} is not supported; give the model's directory")


def _split(digits: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(_GPT4_PATTERN % digits), behavior="isolated")
