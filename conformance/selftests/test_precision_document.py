from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.harness.measure.interval import Interval, exactly, printed
from conformance.harness.precision.document import PATH, Claim, load_document, rederive

DOCUMENT = load_document()
UNKNOWN = {"ladder-kvarn5-median", "ladder-kvarn6-median"}


def test_the_documents_arithmetic_agrees_with_its_digits_except_where_figures_are_lost() -> None:
    verdicts = {row.id: row.verdict for row in rederive(DOCUMENT)}
    assert {name for name, verdict in verdicts.items() if verdict == "unknown"} == UNKNOWN
    assert {verdict for name, verdict in verdicts.items() if name not in UNKNOWN} == {"agrees"}
    assert sum("/kv_mib/" in name for name in verdicts) == 15  # those the text prints; the model's own are no claims


@pytest.mark.parametrize("claim", [claim for claim in DOCUMENT.claims if claim.stated], ids=lambda claim: claim.id)
@pytest.mark.parametrize("direction", [-1, 1])
def test_a_statement_off_by_more_than_its_rounding_disagrees(claim: Claim, direction: int) -> None:
    assert claim.stated is not None
    stated = printed(claim.stated)
    off = stated.low + direction * 3 * (stated.high - stated.low)
    wrong = claim.model_copy(update={"stated": f"{float(off):.8f}"})
    [verdict] = [
        row.verdict for row in rederive(DOCUMENT.model_copy(update={"claims": (wrong,)})) if row.id == claim.id
    ]
    assert verdict == "disagrees"


@pytest.mark.parametrize("claim", [claim for claim in DOCUMENT.claims if not claim.stated], ids=lambda claim: claim.id)
def test_a_comparison_the_wrong_way_round_disagrees(claim: Claim) -> None:
    turned = claim.model_copy(update={"of": claim.of[::-1]})
    verdict = rederive(DOCUMENT.model_copy(update={"claims": (turned,)}))[0].verdict
    assert verdict == ("unknown" if claim.id in UNKNOWN else "disagrees")


def test_a_comparison_within_the_rounding_is_unknown() -> None:
    claim = DOCUMENT.claims[-1].model_copy(
        update={"of": ("qwen/median_kld/kvarn5/1024", "qwen/median_kld/q8_0/1024")}  # both print as 0.000897
    )
    assert rederive(DOCUMENT.model_copy(update={"claims": (claim,)}))[0].verdict == "unknown"


def test_a_wrong_cache_size_disagrees(tmp_path: Path) -> None:
    text = PATH.read_text(encoding="utf-8").replace('"1188.38"', '"1188.39"')
    changed = tmp_path / "document.yaml"
    changed.write_text(text, encoding="utf-8")
    wrong = {row.id for row in rederive(load_document(changed)) if row.verdict == "disagrees"}
    assert wrong == {"qwen/kv_mib/kvarn4/0"}


def test_a_claim_about_a_missing_figure_and_a_malformed_file_are_refused_in_one_line(tmp_path: Path) -> None:
    claim = DOCUMENT.claims[0].model_copy(update={"of": ("qwen/median_kld/q9_0/0", "qwen/median_kld/q4_0/0")})
    with pytest.raises(ValueError, match="q4_0-median-falls: there is no figure qwen/median_kld/q9_0/0"):
        rederive(DOCUMENT.model_copy(update={"claims": (claim,)}))
    changed = tmp_path / "document.yaml"
    changed.write_text(PATH.read_text(encoding="utf-8").replace("label: unknown", "label: perhaps"), encoding="utf-8")
    with pytest.raises(ValueError, match=r"document\.yaml: figures\.\d+\.label"):
        load_document(changed)


NUMBERS = st.fractions(min_value=-100, max_value=100, max_denominator=1000)
INTERVALS = st.tuples(NUMBERS, NUMBERS).map(lambda ends: Interval(min(ends), max(ends)))


@given(a=INTERVALS, b=INTERVALS, at=st.tuples(*[st.fractions(min_value=0, max_value=1, max_denominator=8)] * 2))
def test_an_interval_holds_what_its_members_give(a: Interval, b: Interval, at: tuple[Fraction, Fraction]) -> None:
    x, y = (each.low + share * (each.high - each.low) for each, share in zip((a, b), at, strict=True))
    assert (a + b).overlaps(exactly(x + y))
    assert (a - b).overlaps(exactly(x - y))
    assert (a * b).overlaps(exactly(x * y))
    if b.low <= 0 <= b.high:
        with pytest.raises(ZeroDivisionError):
            a / b
    else:
        assert (a / b).overlaps(exactly(x / y))


@given(number=st.decimals(min_value=-1000, max_value=1000, places=6), digits=st.integers(0, 5))
def test_a_number_lies_in_what_it_prints_as_and_an_end_is_half_a_digit_away(number: object, digits: int) -> None:
    text = f"{number:.{digits}f}"
    shown = printed(text)
    assert shown.overlaps(exactly(Fraction(str(number))))
    assert shown.high - shown.low == Fraction(1, 10**digits)


def test_thousands_are_printed_as_such_and_words_are_not_numbers() -> None:
    assert printed("131e3") == Interval(Fraction(130500), Fraction(131500))
    with pytest.raises(ValueError, match="'about 32' is not a printed number"):
        printed("about 32")
