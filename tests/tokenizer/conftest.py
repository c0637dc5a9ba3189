"""The tiny model's vocabulary: ids below 256 are bytes, 258 ends an output."""

from pathlib import Path

import pytest
from llguidance import LLTokenizer

from tokenizer.files import load_tokenizer_files
from tokenizer.grammar import build_tokenizer


@pytest.fixture(scope="session")
def vocabulary(tiny_model: Path) -> LLTokenizer:
    return build_tokenizer(load_tokenizer_files(tiny_model), 512)
