"""A front over the rig; tokenizers of the tiny and the bundled model, and one whose tokens overlap in every way."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from core.errors import ModelLoadError
from core.model_path import resolve_model
from gateway.text.tokenizer import TextTokenizer
from tests.gateway.peers import Rig
from tests.gateway.served import Served
from tokenizer.files import TokenizerFiles, load_tokenizer_files


@pytest.fixture(scope="session")
def tiny_tokenizer(tiny_model: Path) -> TextTokenizer:
    return TextTokenizer(load_tokenizer_files(tiny_model))


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    try:
        return resolve_model("smollm2")
    except ModelLoadError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> TextTokenizer:
    return TextTokenizer(load_tokenizer_files(smollm2_path))


def byte_symbols() -> list[str]:
    """The characters that byte-level tokenizers write bytes as, in byte order."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(value) if value in printable else chr(next(others)) for value in range(256)]


SYLLABLES = ["ab", "ba", "aa", "abc", "cab", "bca", "abcabc", "Pari", " Pa", "s.", "\n\n", "é", "€u", "日本"]


@pytest.fixture(scope="session")
def syllables() -> TextTokenizer:
    """Ids 0 to 255 are bytes, those after that SYLLABLES, the last a control token."""
    symbols = byte_symbols()
    spelled = ["".join(symbols[byte] for byte in text.encode()) for text in SYLLABLES]
    vocabulary = {token: number for number, token in enumerate([*symbols, *spelled])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return TextTokenizer(TokenizerFiles(tokenizer, "", "", "", (), False))


@pytest_asyncio.fixture
async def served(tiny_tokenizer, tiny_model) -> AsyncIterator[Served]:
    rig = Rig()
    await rig.connect()
    served = Served(rig, tiny_tokenizer, tiny_model)
    yield served
    rig.assert_clean()
    await served.grammars.close()
    await rig.close()
