"""The emulated tail on the bundled build: what lies in the cache, by which way it got there, and what it costs."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from conformance.harness.contract.census import ModelCensus, census_of_gguf
from conformance.harness.engine import Context, Library, Model
from conformance.harness.measure.kld import score
from conformance.harness.precision.body import body
from conformance.harness.precision.codecs import CodecError
from conformance.harness.precision.emulation import CacheChoice, TailedSequence, settings_for
from conformance.harness.precision.scoring import Arm, Scorer, first_scored
from conformance.harness.precision.tail import TailError
from conformance.harness.state import parse, part
from fixtures import models

TEXT = np.random.default_rng(3).integers(0, 256, 200, dtype=np.int32)


@pytest.fixture(scope="module")
def bundled() -> Library:
    return Library("bundled")


@pytest.fixture(scope="module", params=["qwen3-mini", "gemma3-mini", "holo3-mini"])
def subject(bundled: Library, request: pytest.FixtureRequest) -> Iterator[tuple[Model, ModelCensus]]:
    path = models.path(request.param)
    with Model(bundled, path) as model:
        yield model, census_of_gguf(path)


@pytest.fixture(scope="module")
def dense(bundled: Library) -> Iterator[tuple[Model, ModelCensus]]:
    path = models.path("qwen3-mini")
    with Model(bundled, path) as model:
        yield model, census_of_gguf(path)


@pytest.mark.parametrize("ubatch", [1, 16])
@pytest.mark.parametrize("tail", [0, 24, 100])
def test_editing_in_place_and_through_the_saved_state_give_the_same_logits(
    subject: tuple[Model, ModelCensus], ubatch: int, tail: int
) -> None:
    model, census = subject
    logits = []
    for in_place in (True, False):
        with Context(model, settings_for(256, ubatch)) as context:
            tailed = TailedSequence(context, census, CacheChoice.of("q4_0", tail), in_place=in_place)
            logits.append(tailed.decode(TEXT))
            assert tailed.in_place is in_place
            assert tailed.rewritten_rows > 0
    assert np.array_equal(logits[0], logits[1])


def test_the_newest_rows_are_exact_and_the_older_ones_are_what_the_body_gives_back(
    dense: tuple[Model, ModelCensus],
) -> None:
    model, census = dense
    with Context(model, settings_for(256, 1)) as context:
        context.decode(TEXT)
        exact = part(parse(context.save()), 0, "k").values().copy()
    with Context(model, settings_for(256, 1)) as context:
        TailedSequence(context, census, CacheChoice.of("q4_0", 30)).decode(TEXT)
        seen = part(parse(context.save()), 0, "k").values()
    kept = body("q4_0", 64, "k").round_trip(exact.astype(np.float32)).astype(np.float16)
    assert np.array_equal(seen[-30:], exact[-30:])
    assert np.array_equal(seen[:-30], kept[:-30])


def test_a_step_rewrites_only_the_rows_that_leave_the_tail_by_it(dense: tuple[Model, ModelCensus]) -> None:
    model, census = dense
    with Context(model, settings_for(256, 8)) as context:
        tailed = TailedSequence(context, census, CacheChoice.of("q5_0", 40))
        tailed.decode(TEXT[:80])
        before = tailed.rewritten_rows
        tailed.decode(TEXT[80:96])
        assert tailed.rewritten_rows - before == 16 * 2 * len(census.attention or ())


def test_kvarn_rewrites_whole_groups_behind_the_sink(dense: tuple[Model, ModelCensus]) -> None:
    model, census = dense
    text = np.random.default_rng(4).integers(0, 256, 500, dtype=np.int32)
    with Context(model, settings_for(512, 32)) as context:
        tailed = TailedSequence(context, census, CacheChoice.of("kvarn2"))
        tailed.decode(text)
        exact = tailed.exact_rows(0)
    assert exact[:128].all()
    assert not exact[128:256].any()
    assert exact[256:].all()  # 372 rows have left the tail, and the group up to 384 is not complete


def test_rows_that_were_rewritten_stay_so_after_a_roll_back_and_are_counted(dense: tuple[Model, ModelCensus]) -> None:
    model, census = dense
    with Context(model, settings_for(256, 4)) as context:
        tailed = TailedSequence(context, census, CacheChoice.of("q4_0", 40))
        tailed.decode(TEXT[:120])
        tailed.roll_back(100)
        assert tailed.missing == 20
        tailed.decode(TEXT[100:120])
        assert tailed.missing == 0


def test_rows_that_were_only_due_lack_nothing_after_a_roll_back_into_their_step(
    dense: tuple[Model, ModelCensus],
) -> None:
    model, census = dense
    with Context(model, settings_for(256, 16)) as context:
        tailed = TailedSequence(context, census, CacheChoice.of("q4_0", 4))
        tailed.decode(TEXT[:40])
        tailed.roll_back(36)
        assert tailed.missing == 0
        assert tailed.exact_rows(0)[-4:].all()


def test_a_restored_tail_continues_as_the_saved_one(dense: tuple[Model, ModelCensus]) -> None:
    model, census = dense
    with Context(model, settings_for(256, 4)) as context:
        tailed = TailedSequence(context, census, CacheChoice.of("q4_0", 40))
        tailed.decode(TEXT[:120])
        saved = tailed.save()
        expected = tailed.decode(TEXT[120:160])
        tailed.restore(saved)
        assert tailed.rows == 120
        assert np.array_equal(tailed.decode(TEXT[120:160]), expected)


def test_what_cannot_be_emulated_is_refused(dense: tuple[Model, ModelCensus]) -> None:
    model, census = dense
    with Context(model, settings_for(256, 4, type_k="q8_0")) as context, pytest.raises(TailError, match="f16"):
        TailedSequence(context, census, CacheChoice.of("q4_0"))
    with Context(model, settings_for(256, 4)) as context:
        with pytest.raises(CodecError, match="q9_0"):
            TailedSequence(context, census, CacheChoice.of("q9_0"))
        with pytest.raises(TailError, match="-1"):
            TailedSequence(context, census, CacheChoice.of("q4_0", -1))


@pytest.mark.parametrize("arm", [Arm(CacheChoice.of("q4_0", 20)), Arm.native_of("q8_0")])
def test_an_arm_is_scored_over_the_second_half_of_the_text(dense: tuple[Model, ModelCensus], arm: Arm) -> None:
    model, census = dense
    scorer = Scorer(model, census, ubatch=16)
    exact = scorer.exact(TEXT)
    scores = scorer.scores(arm, TEXT, exact)
    logits = np.concatenate(list(scorer.steps(arm, TEXT)))
    assert len(exact) == len(TEXT) - 1 - len(TEXT) // 2
    assert np.array_equal(scores.kld, score(exact, logits, TEXT[first_scored(len(TEXT)) + 1 :]).kld)
    assert np.array_equal(scores.kld, scorer.scores(arm, TEXT).kld)
    assert np.median(scores.kld) > 0
