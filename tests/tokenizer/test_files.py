"""A model's own files: what they say about its text, and that what is broken or missing is named."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, processors

from core.errors import ModelLoadError
from gateway.text.chat import Chat, Message
from gateway.text.tokenizer import TextTokenizer
from tokenizer.files import TokenizerFiles, load_tokenizer_files


class Directory:
    """A copy of the tiny model's directory, to be changed."""

    def __init__(self, source: Path, path: Path) -> None:
        self.path = Path(shutil.copytree(source, path))

    def change(self, name: str, **values: Any) -> None:
        file = self.path / name
        old = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps({**old, **values}))

    def load(self) -> TokenizerFiles:
        return load_tokenizer_files(self.path)


@pytest.fixture
def directory(tiny_model: Path, tmp_path: Path) -> Directory:
    return Directory(tiny_model, tmp_path / "model")


def test_a_directory_says_what_begins_and_ends_an_output(directory):
    directory.change("generation_config.json", eos_token_id=[256, 258])
    directory.change("tokenizer_config.json", bos_token={"content": "<|im_start|>"})
    files = directory.load()
    assert (files.bos_token, files.eos_token, files.eos_token_ids) == (
        "<|im_start|>",
        "<|im_end|>",
        (256, 258),
    )


def test_a_template_may_be_a_file_or_one_of_several(directory):
    directory.change("tokenizer_config.json", chat_template=[{"name": "default", "template": "A"}])
    assert directory.load().chat_template == "A"
    (directory.path / "chat_template.jinja").write_text("B")
    assert directory.load().chat_template == "B"


def test_the_beginning_of_sequence_is_added_once_where_the_tokenizer_itself_adds_it(directory):
    file = directory.path / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.post_processor = processors.TemplateProcessing(
        "<|endoftext|> $A", special_tokens=[("<|endoftext|>", 256)]
    )
    tokenizer.save(str(file))
    text = TextTokenizer(directory.load())
    assert text.encode_text("hi") == [256, *b"hi"]
    assert text.encode_text("<|endoftext|>hi") == [256, *b"<|endoftext|>hi"]
    assert text.encode_chat(Chat((Message("user", "hi"),)))[0] == 257, "a template writes its own"


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_broken_file_is_named(directory, name):
    (directory.path / name).write_text("{")
    with pytest.raises(ModelLoadError, match=str(directory.path)):
        directory.load()


def test_a_missing_tokenizer_is_named(directory):
    (directory.path / "tokenizer.json").unlink()
    with pytest.raises(ModelLoadError, match=r"no tokenizer\.json"):
        directory.load()


def test_a_file_that_is_no_gguf_is_named(tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"nonsense")
    with pytest.raises(ModelLoadError, match=r"model\.gguf"):
        load_tokenizer_files(file)
