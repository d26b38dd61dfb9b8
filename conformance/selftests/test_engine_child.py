"""A child survives nothing and its parent everything."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from conformance.harness.engine import DecodeError
from conformance.harness.engine.child import Child, ChildDeath, ChildError, Crashed, TimedOut


def refuse(code: int) -> None:
    raise DecodeError(code, "no room")


def raise_something_that_cannot_travel() -> None:
    class Local(Exception):
        pass

    raise Local("lost")


def abort_with_last_words() -> None:
    import os

    os.write(2, b"/src/ggml.c:42: GGML_ASSERT(n > 0) failed\n")
    os.abort()


@pytest.fixture
def child() -> Iterator[Child]:
    with Child(memory_limit=4 << 30) as child:
        yield child


def test_values_come_back(child: Child) -> None:
    assert child.call("math:hypot", 3.0, 4.0) == 5.0


@pytest.mark.parametrize(
    ("function", "arguments", "death", "how"),
    [
        (abort_with_last_words, (), Crashed, "SIGABRT"),
        ("os:_exit", (3,), Crashed, "exited with code 3"),
        ("ctypes:string_at", (0,), Crashed, "SIGSEGV"),
        ("time:sleep", (60,), TimedOut, "no answer within 1 s"),
    ],
)
def test_a_death_is_told_and_the_next_call_works(
    child: Child, function: object, arguments: tuple[object, ...], death: type[ChildDeath], how: str
) -> None:
    with pytest.raises(death, match=how):
        child.call(function, *arguments, timeout=1)  # type: ignore[arg-type]
    assert child.call("math:sqrt", 9.0) == 3.0


def test_the_last_words_of_an_abort_are_kept(child: Child) -> None:
    child.call("math:sqrt", 4.0)
    with pytest.raises(Crashed, match=r"ggml.c:42: GGML_ASSERT"):
        child.call(abort_with_last_words)


def test_memory_is_bounded(child: Child) -> None:
    with pytest.raises(MemoryError):
        child.call("builtins:bytearray", 8 << 30)


def test_exceptions_keep_their_type_and_fields(child: Child) -> None:
    with pytest.raises(DecodeError, match="no room") as caught:
        child.call(refuse, 1)
    assert caught.value.code == 1
    with pytest.raises(ChildError, match="lost"):
        child.call(raise_something_that_cannot_travel)


def test_the_environment_is_the_childs_own() -> None:
    with Child(environment={"LLAMA_ATTN_ROT_DISABLE": "1"}) as child:
        assert child.call("os:getenv", "LLAMA_ATTN_ROT_DISABLE") == "1"
