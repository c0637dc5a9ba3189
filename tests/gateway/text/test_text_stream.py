"""Tokens to text with stop strings, against the whole text cut where the first stop string is complete."""

from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.ask import TextOptions
from gateway.text.text_stream import TextStream
from gateway.text.tokenizer import TextTokenizer

NUM_IDS = 256 + 15
BYTES = {character: ord(character) for character in "abcP \n"}
IDS = st.lists(
    st.one_of(st.sampled_from(list(BYTES.values())), st.integers(256, NUM_IDS - 1), st.integers(0, 255)),
    max_size=24,
)
STOPS = st.lists(
    st.one_of(
        st.text("abc", min_size=1, max_size=5), st.sampled_from(["Pari", "é", "日", "\n\n", " ", "�", "€ua"])
    ),
    max_size=4,
)


def cut(text: str, stops: Sequence[str]) -> str:
    """Up to the stop string that is complete first; of several, the one that begins first."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)]
    return text


def pieces_of(
    tokenizer: TextTokenizer, ids: Sequence[int], stops: Sequence[str]
) -> tuple[list[str], TextStream]:
    """What is shown token by token until a stop, with the rest at the end."""
    stream = TextStream(tokenizer, TextOptions(tuple(stops)))
    pieces = []
    for token_id in ids:
        pieces.append(stream.push(token_id))
        if stream.is_stopped:
            break
    return [*pieces, stream.finish()], stream


@given(ids=IDS, stops=STOPS)
@example(ids=[256, 99], stops=["abc", "c"])
@example(ids=[259], stops=["abc", "b"])
@example(ids=[262], stops=["bcabc", "ca"])
def test_what_is_shown_is_the_whole_text_cut_at_the_first_complete_stop(syllables, ids, stops):
    pieces, stream = pieces_of(syllables, ids, stops)
    whole = syllables.decode(ids)
    assert "".join(pieces) == cut(whole, stops)
    assert stream.is_stopped == any(stop in whole for stop in stops)


@given(ids=st.lists(st.sampled_from([*BYTES.values(), *range(256, NUM_IDS - 1)]), max_size=24), stops=STOPS)
def test_all_is_shown_at_once_but_what_may_become_a_stop(syllables, ids, stops):
    stream = TextStream(syllables, TextOptions(tuple(stops)))
    shown = ""
    for index, token_id in enumerate(ids):
        shown += stream.push(token_id)
        if stream.is_stopped:
            break
        text = syllables.decode(ids[: index + 1])
        held = max((n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])), default=0)
        assert shown == text[: len(text) - held]


@given(text=st.text(max_size=30))
def test_a_character_is_never_split(syllables, text):
    pieces, _ = pieces_of(syllables, list(text.encode()), [])
    assert "".join(pieces) == text
    if "�" not in text:
        assert not any("�" in piece for piece in pieces)


def feed(tokenizer: TextTokenizer, text: str, stops: Sequence[str]) -> list[str]:
    """A byte a token."""
    pieces, _ = pieces_of(tokenizer, list(text.encode()), stops)
    return [piece for piece in pieces if piece]


def test_a_stop_spread_over_tokens_is_held_back_and_never_shown(tiny_tokenizer):
    assert "".join(feed(tiny_tokenizer, "ABCDEFGHIJKL", ["DEFGHIJ"])) == "ABC"


def test_a_stop_inside_a_token_is_found(syllables):
    pieces, stream = pieces_of(syllables, [264, 114, 105, 265], ["Pari"])  # " Pa" "r" "i" "s."
    assert "".join(pieces) == " "
    assert stream.is_stopped


def test_text_that_began_like_a_stop_is_shown_once_it_is_none(tiny_tokenizer):
    assert feed(tiny_tokenizer, "DEFX", ["DEFGHIJ"]) == ["DEFX"]
    assert feed(tiny_tokenizer, "DEDEF!", ["DEFG"]) == ["DE", "DEF!"]


def test_text_held_back_at_the_end_is_shown(tiny_tokenizer):
    assert feed(tiny_tokenizer, "xDEFGHI", ["DEFGHIJ"]) == ["x", "DEFGHI"]


def test_of_stops_with_a_common_beginning_the_first_complete_one_counts(tiny_tokenizer):
    stops = ["abcd", "abce", "abcfgh", "ab!"]
    assert "".join(feed(tiny_tokenizer, "xxabcfgabce", stops)) == "xxabcfg"


def test_a_stop_of_one_character(tiny_tokenizer):
    assert feed(tiny_tokenizer, "a.b", ["."]) == ["a"]


def test_after_a_stop_nothing_is_shown(tiny_tokenizer):
    stream = TextStream(tiny_tokenizer, TextOptions((".",)))
    assert [stream.push(ord(character)) for character in "a.bc"] == ["a", "", "", ""]
    assert stream.finish() == ""


def test_a_control_token_is_no_text(tiny_tokenizer):
    pieces, _ = pieces_of(tiny_tokenizer, [104, 258, 105], [])
    assert "".join(pieces) == "hi"


def test_an_incomplete_character_is_replaced_at_the_end(tiny_tokenizer):
    assert feed(tiny_tokenizer, "a", []) == ["a"]
    pieces, _ = pieces_of(tiny_tokenizer, [97, *"é".encode()[:1]], [])
    assert pieces == ["a", "", "�"]


@pytest.mark.parametrize("stop", ["�", "b�"])
def test_a_stop_that_the_last_replacement_completes_is_found_at_the_end(tiny_tokenizer, stop):
    pieces, stream = pieces_of(tiny_tokenizer, [97, 98, 0xC3], [stop])
    assert "".join(pieces) == cut("ab�", [stop])
    assert stream.is_stopped
