"""The shared vocabulary: one token per byte, in the file as in the tokenizer that predicts it."""

from __future__ import annotations

import pytest
from gguf import GGUFReader
from hypothesis import given
from hypothesis import strategies as st

from fixtures import models
from fixtures.vocabulary import SPECIAL_TOKENS, tokenize

CONTROL = 3


@pytest.fixture(scope="module")
def stored() -> tuple[list[str], list[int]]:
    reader = GGUFReader(models.path("qwen3-mini-32"))
    tokens, types = (reader.fields[f"tokenizer.ggml.{key}"].contents() for key in ("tokens", "token_type"))
    return tokens, types


def byte_of(spelled: str) -> int:
    """Byte-level BPE read backwards: the n-th byte without a printable Latin-1 character is spelled chr(256 + n)."""
    unprintable = [*range(0x21), *range(0x7F, 0xA1), 0xAD]
    return unprintable[ord(spelled) - 256] if ord(spelled) >= 256 else ord(spelled)


@given(parts=st.lists(st.one_of(st.text(), st.sampled_from(SPECIAL_TOKENS))))
def test_text_becomes_tokens_and_the_stored_spellings_give_it_back(
    parts: list[str], stored: tuple[list[str], list[int]]
) -> None:
    tokens, types = stored
    back = b"".join(
        tokens[token].encode() if types[token] == CONTROL else bytes([byte_of(tokens[token])])
        for token in tokenize("".join(parts))
    )
    assert back.decode("utf-8") == "".join(parts)


def test_a_special_token_is_one_token_and_every_byte_another() -> None:
    assert tokenize("<|im_start|>é<|im_end|>") == [257, 0xC3, 0xA9, 258]
    assert tokenize("<|im_start") == list(b"<|im_start")


def test_the_stored_spellings_are_those_of_gpt2(stored: tuple[list[str], list[int]]) -> None:
    tokens, types = stored
    assert (tokens[ord(" ")], tokens[ord("\n")], tokens[0xAD], tokens[ord("A")]) == ("Ġ", "Ċ", "Ń", "A")
    assert len(set(tokens)) == len(tokens) == 264
    assert types == [1] * 256 + [CONTROL] * 8
