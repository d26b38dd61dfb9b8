"""How much a run may look within a given time, from the speed that was measured on the models at hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from conformance.harness.bench import Acquaintance
from conformance.harness.contract.schema import Invariant, Space

_PASSES = 4.0  # assumed: how often a case decodes its tokens, over all contexts
_CASE_SECONDS = 0.2  # assumed: what a case costs beside its tokens
_FEWEST_TOKENS = 16
_SHARE = 0.8  # of the budget that is planned for; the rest is for what the estimate misses
_SMALLEST = 1e-3


@dataclass(frozen=True)
class Sizing:
    """How one pair of invariant and model is searched.

    Attributes:
        examples: cases to draw.
        invariant: the invariant, its text lengths and transcripts cut to what fits.
        seconds: what that is expected to take, computed from the measured speed.
        note: what was left out against the profile, empty when nothing was.
    """

    examples: int
    invariant: Invariant
    seconds: float
    note: str = ""


def fit(pairs: Sequence[tuple[Invariant, Acquaintance, int]], seconds: float = math.inf) -> list[Sizing | None]:
    """Size the search of each pair (invariant, acquaintance, examples in the profile).

    Where all of them together take longer than `seconds`, examples, text lengths and transcripts shrink by one common share. Where
    even the smallest searches take too long, pairs from the end of the sequence are left out: None.
    """
    room = seconds * _SHARE

    def sized(share: float) -> list[Sizing]:
        return [_reduced(*pair, share) for pair in pairs]

    def fits(sizings: Sequence[Sizing]) -> bool:
        return sum(sizing.seconds for sizing in sizings) <= room

    everything = sized(1.0)
    if fits(everything):
        return list(everything)
    low, high = math.log(_SMALLEST), 0.0
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(sized(math.exp(middle))) else (low, middle)
    chosen: list[Sizing | None] = list(sized(math.exp(low)))
    spent = 0.0
    for place, sizing in enumerate(chosen):
        assert sizing is not None
        spent += sizing.seconds
        if spent > room:
            chosen[place:] = [None] * (len(chosen) - place)
            break
    return chosen


def _reduced(invariant: Invariant, acquaintance: Acquaintance, examples: int, share: float) -> Sizing:
    fewer = max(1, math.ceil(examples * share))
    search = {name: _shorter(name, space, share) for name, space in invariant.search.items()}
    shorter = invariant.model_copy(update={"search": search})
    cuts = [f"{fewer} of {examples} cases"] if fewer < examples else []
    if search != invariant.search:
        longest, before = (sum(map(max, texts(each))) for each in (shorter, invariant))
        if longest < before:
            cuts.append(f"texts of up to {longest:.0f} of {before:.0f} tokens")
        decoded, of = (sum(map(max, tasks(each))) for each in (shorter, invariant))
        if decoded < of:
            cuts.append(f"tasks of up to {decoded} of {of} decoded tokens")
    return Sizing(fewer, shorter, _seconds(shorter, acquaintance, fewer), ", ".join(cuts))


def _shorter(name: str, space: Space, share: float) -> Space:
    if space.transcript is not None and share < 1:
        least, most = space.transcript.decoded_tokens
        fewer = space.transcript.decoding_at_most(max(least + int((most - least) * share), _FEWEST_TOKENS))
        return space if fewer.decoded_tokens == (least, most) else space.model_copy(update={"transcript": fewer})
    if space.range is None or not name.endswith("tokens"):
        return space
    low, high = space.range
    highest = min(high, max(low, _FEWEST_TOKENS, low + int((high - low) * share)))
    return space.model_copy(update={"range": (low, highest)})


def texts(invariant: Invariant) -> list[tuple[int, int]]:
    """The range of lengths of each text that a case decodes, in tokens."""
    return [space.range for name, space in invariant.search.items() if space.range and name.endswith("tokens")]


def tasks(invariant: Invariant) -> list[tuple[int, int]]:
    """The range of what each transcript has a case decode, in tokens over all its contexts."""
    return [space.transcript.decoded_tokens for space in invariant.search.values() if space.transcript]


def _seconds(invariant: Invariant, acquaintance: Acquaintance, examples: int) -> float:
    tokens = _PASSES * sum((shortest + longest) / 2 for shortest, longest in texts(invariant))
    tokens += sum((least + most) / 2 for least, most in tasks(invariant))
    return examples * (_CASE_SECONDS + tokens / acquaintance.prefill_tokens_per_second)
