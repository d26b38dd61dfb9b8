"""What the timed checks stand on: contexts that are as deep as they should be, and a clock that stops outside the build."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from conformance.harness.bench import DECODED, Bench, Setup, decode_seconds
from conformance.harness.engine import Context, ContextSettings, DecodeError, TokenBatch
from conformance.harness.state import census

SETTINGS = ContextSettings(n_ctx=512, n_seq_max=2, kv_unified=True)


@pytest.fixture(scope="module", params=["decode-cost-mini", "qwen35-mini", "gemma3-mini", "mamba2-mini"])
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    bench = Bench(Setup("bundled", request.param))
    yield bench
    bench.close()


@pytest.mark.parametrize("tokens", [1, 64, 65, 300])
def test_a_filled_context_holds_as_many_tokens_as_a_decoded_one(bench: Bench, tokens: int) -> None:
    with bench.context(SETTINGS) as filled, bench.context(SETTINGS) as decoded:
        bench.fill(filled, tokens)
        decoded.decode(*bench.texts(0, tokens), outputs="none")
        for context in (filled, decoded):
            assert context.pos_max() == tokens - 1
        assert filled.pos_min() == decoded.pos_min()
        assert census(bench.state(filled.save())) == census(bench.state(decoded.save()))
        assert np.isfinite(filled.decode([1, 2])).all()


def test_a_token_is_timed_inside_the_build_and_makes_its_sequence_longer(bench: Bench) -> None:
    with bench.context(SETTINGS) as context:
        bench.fill(context, 20)
        before = context.library.seconds
        first, second = decode_seconds(context), decode_seconds(context)
        inside = context.library.seconds - before
        assert 0 < first + second < inside
        assert (context.pos_max(0), context.pos_max(1)) == (19 + 2 * DECODED, -1)
        assert decode_seconds(context, 1) > 0
        assert (context.pos_max(0), context.pos_max(1)) == (19 + 2 * DECODED, DECODED - 1)


def test_time_outside_of_decode_calls_does_not_count(bench: Bench) -> None:
    with bench.context(SETTINGS) as context:
        bench.fill(context, 20)
        decoding = context.seconds
        blob = context.save()
        context.restore(blob)
        context.perf_counts()
        assert context.seconds == decoding > 0


def test_a_decode_that_fails_is_no_time() -> None:
    class Refuses(Context):
        def process(self, batch: TokenBatch) -> int:
            return 1

    bench = Bench(Setup("bundled", "mamba2-mini"))
    with Refuses(bench.model, SETTINGS) as context, pytest.raises(DecodeError, match="returned 1 for one token at 0"):
        decode_seconds(context)
    bench.close()
