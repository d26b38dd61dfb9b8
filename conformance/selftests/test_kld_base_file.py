import hashlib
import json
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from conformance.harness.measure.kld import Floats, KldError, log_probabilities
from conformance.harness.measure.kld_base import encode_records, read_base, write_base

CHUNKS, CONTEXT, VOCABULARY = 3, 10, 33
SCORED = CONTEXT - 1 - CONTEXT // 2


def tokens() -> NDArray[np.int32]:
    return (np.arange(CHUNKS * CONTEXT, dtype=np.int32) * 7 % VOCABULARY).reshape(CHUNKS, CONTEXT)


def logits() -> Floats:
    return (np.random.default_rng(1).standard_normal((CHUNKS * SCORED, VOCABULARY)) * 6).astype(np.float32)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "base.kld"
    write_base(path, tokens(), [logits()[:5], logits()[5:]], "model")
    return path


@pytest.fixture
def foreign(path: Path) -> Path:
    """The same file as another program would have left it: without a digest file."""
    path.with_name("base.kld.digest.json").unlink()
    return path


def test_a_base_file_is_laid_out_as_llama_perplexity_lays_it_out(path: Path) -> None:
    written = path.read_bytes()
    header = struct.pack("<8siii", b"_logits_", CONTEXT, VOCABULARY, CHUNKS) + tokens().astype("<i4").tobytes()
    assert written.startswith(header)
    records = np.frombuffer(written[len(header) :], "<u2").reshape(CHUNKS, SCORED, 2 * ((VOCABULARY + 1) // 2) + 4)
    base = read_base(path)
    for chunk in range(CHUNKS):
        np.testing.assert_array_equal(base.records(chunk), records[chunk])
    np.testing.assert_array_equal(records.reshape(-1, 38), encode_records(logits()))


def test_records_are_those_of_llama_perplexity() -> None:
    i = np.arange(40 * 33).reshape(40, 33)
    records = encode_records((((i * 7919) % 2003 - 1001) / 96).astype(np.float32))
    # log_softmax of tools/perplexity/perplexity.cpp, run once on these logits; least likely ones clamp to 0
    assert records[0, 4:12].tolist() == [0, 63402, 59434, 55466, 51498, 47530, 43562, 39594]
    codes = np.ascontiguousarray(records[:, 4:]).tobytes()
    assert hashlib.sha256(codes).hexdigest() == "5da0fdbab4816aaa8d0b3f949d4658c2a14c949e40987a5a81e0004f19f8f0e7"
    assert records[0, :4].view("<f4") == pytest.approx([2.4414435e-04, -16.943569], rel=1e-7)


@given(some=hnp.arrays(np.float32, (3, 6), elements=st.floats(-40, 40, width=32)))
def test_records_hold_log_probabilities_down_to_16_below_the_likeliest(some: Floats) -> None:
    back = log_probabilities(encode_records(some), 6)
    exact = some.astype(np.float64)
    exact -= np.log(np.exp(exact - exact.max(axis=1, keepdims=True)).sum(axis=1, keepdims=True))
    exact -= some.max(axis=1, keepdims=True)
    clamped = np.maximum(exact, exact.max(axis=1, keepdims=True) - 16)
    np.testing.assert_allclose(back, clamped, atol=16 / 65535 / 2 + 2e-5)


def test_ours_is_verified_and_tells_which_positions_it_scores(path: Path) -> None:
    base = read_base(path)
    assert (base.verified, base.model_sha256, base.first) == (True, "model", 5)
    np.testing.assert_array_equal(base.tokens, tokens())
    np.testing.assert_array_equal(base.following, tokens()[:, 6:])
    base.require(tokens(), VOCABULARY, "model")


def test_a_foreign_file_is_read_and_marked_unverified(foreign: Path) -> None:
    base = read_base(foreign)
    assert (base.verified, base.model_sha256) == (False, None)
    base.require(tokens(), VOCABULARY, "any model")


def test_a_base_of_other_text_is_refused_even_when_foreign(foreign: Path) -> None:
    other = tokens()
    other[2, 9] += 1
    with pytest.raises(KldError, match=r"base\.kld: the base was made of other text or another tokenizer"):
        read_base(foreign).require(other, VOCABULARY, "model")
    with pytest.raises(KldError, match="other text"):
        read_base(foreign).require(tokens()[:2], VOCABULARY, "model")


def test_a_base_of_another_model_is_refused(path: Path) -> None:
    with pytest.raises(KldError, match=r"base\.kld: the base was made with another model"):
        read_base(path).require(tokens(), VOCABULARY, "other model")
    with pytest.raises(KldError, match="has 33 tokens, the model 34"):
        read_base(path).require(tokens(), VOCABULARY + 1, "model")


@pytest.mark.parametrize("cut", [0, 7, 19, 30, -1])
def test_a_file_cut_short_is_refused(foreign: Path, cut: int) -> None:
    foreign.write_bytes(foreign.read_bytes()[:cut])
    with pytest.raises(KldError, match=r"base\.kld: (not a KLD base file|has \d+ bytes where its header promises)"):
        read_base(foreign)


@pytest.mark.parametrize(
    ("at", "value"), [(0, b"_Logits_"), (8, b"\x01"), (12, b"\0\0\0\0"), (16, b"\xff\xff\xff\xff")]
)
def test_a_header_that_cannot_be_is_refused(foreign: Path, at: int, value: bytes) -> None:
    content = bytearray(foreign.read_bytes())
    content[at : at + len(value)] = value
    foreign.write_bytes(content)
    with pytest.raises(KldError, match="not a KLD base file of version 1"):
        read_base(foreign)


def test_a_file_changed_after_it_was_written_is_refused(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    with pytest.raises(KldError, match=r"has changed since base\.kld\.digest\.json was written"):
        read_base(path)


@pytest.mark.parametrize("content", ["{", "[]", json.dumps({"base_sha256": "0"})])
def test_a_digest_file_that_is_none_is_refused(path: Path, content: str) -> None:
    path.with_name("base.kld.digest.json").write_text(content, encoding="utf-8")
    with pytest.raises(KldError, match=r"digest\.json: not the digest file of a KLD base"):
        read_base(path)


def test_a_missing_file_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(KldError, match=r"none\.kld: cannot be read: No such file"):
        read_base(tmp_path / "none.kld")


def test_nothing_is_left_of_a_base_that_could_not_be_finished(tmp_path: Path) -> None:
    path = tmp_path / "base.kld"
    with pytest.raises(KldError, match="11 positions of logits for 3 chunks of 10; give 12"):
        write_base(path, tokens(), [logits()[:11]], "model")
    spoilt = logits()
    spoilt[7, 3] = np.inf
    with pytest.raises(KldError, match="infinite or not a number"):
        write_base(path, tokens(), [logits()[:5], spoilt[5:]], "model")
    assert list(tmp_path.iterdir()) == []
