import hashlib

import numpy as np
import pytest
from gguf import quants
from gguf.constants import GGMLQuantizationType
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from conformance.harness.precision.body import body
from conformance.harness.precision.codecs import CODECS, BlockCodec, Codec, CodecError, Floats, codec
from conformance.harness.precision.rotation import hadamard, native_width, rotate

EVERY = pytest.mark.parametrize("each", CODECS.values(), ids=str)
FAMILY = [BlockCodec(bits, minimum) for bits in range(2, 7) for minimum in (False, True)]


def rows(count: int = 2, width: int = 64) -> st.SearchStrategy[Floats]:
    one = st.floats(-1000, 1000, width=32, allow_subnormal=False)
    return hnp.arrays(np.float32, (count, width), elements=one)


def allowed_error(each: Codec, values: Floats) -> Floats:
    """How far rounding may move each value of a type: half a step, a whole one where the end level is missing."""
    blocks = values.reshape(-1, 32).astype(np.float64)
    peak = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=1)[:, None], axis=1)
    size = np.abs(peak)
    if each.name == "f32":
        error = np.zeros_like(blocks)
    elif each.name in ("f16", "bf16"):
        error = np.abs(blocks) * 2.0 ** (-11 if each.name == "f16" else -8) + 2.0**-25
    elif each.name == "iq4_nl":
        error = size / 4 + 2.0**-18 + 0 * blocks
    else:
        bits = int(each.name[1])
        if each.name == "q8_0":
            error = size / 127 / 2 + 0 * blocks
        elif each.name.endswith("_0"):
            step = size / 2 ** (bits - 1)
            error = np.where(-blocks * np.sign(peak) > size - step, step, step / 2)
        else:
            step = (blocks.max(axis=1, keepdims=True) - blocks.min(axis=1, keepdims=True)) / (2**bits - 1)
            error = step / 2 + 0 * blocks
        error += size * 2.0**-10 + 2.0**-18  # scale and minimum are fp16
    return error.reshape(values.shape).astype(np.float32)


@EVERY
@given(values=rows())
def test_a_value_comes_back_within_half_a_step(each: Codec, values: Floats) -> None:
    assert np.all(np.abs(each.round_trip(values) - values) <= allowed_error(each, values))


@pytest.mark.parametrize("each", [each for each in CODECS.values() if each.name != "iq4_nl"], ids=str)  # fits its scale
@given(values=rows())
def test_what_was_read_back_once_is_read_back_the_same_again(each: Codec, values: Floats) -> None:
    once = each.round_trip(values)
    again = each.round_trip(once)
    if each.name.endswith("_1"):  # the sum of minimum and steps is rounded to float32 on the way
        assert np.all(np.abs(again - once) <= np.abs(once).max() * 2.0**-11)
    else:
        np.testing.assert_array_equal(again, once)


@EVERY
def test_zeros_stay_zero_and_constants_keep_eleven_bits(each: Codec) -> None:
    assert not each.round_trip(np.zeros((2, 64), np.float32)).any()
    for constant in (np.float32(0.3), np.float32(-417.25)):
        back = each.round_trip(np.full((2, 64), constant))
        assert np.all(back == back[0, 0])
        assert abs(back[0, 0] / constant - 1) <= (2.0**-8 if each.name == "bf16" else 2.0**-11)


@EVERY
@given(values=rows(count=1, width=128), where=st.integers(0, 127), outlier=st.sampled_from([-6e4, -3e3, 2e3, 6e4]))
def test_an_outlier_touches_no_block_but_its_own(each: Codec, values: Floats, where: int, outlier: float) -> None:
    spoilt = values.copy()
    spoilt[0, where] = outlier
    before, after = each.round_trip(values), each.round_trip(spoilt)
    elsewhere = np.arange(128) // 32 != where // 32
    np.testing.assert_array_equal(after[:, elsewhere], before[:, elsewhere])


@EVERY
@given(where=st.integers(0, 127), bad=st.sampled_from([np.nan, np.inf, -np.inf]))
def test_what_is_not_finite_is_refused_wherever_it_stands(each: Codec, where: int, bad: float) -> None:
    values = np.linspace(-1, 1, 128, dtype=np.float32)
    values[where] = bad
    with pytest.raises(CodecError, match="infinite or not a number"):
        each.encode(values)


@EVERY
def test_a_value_beyond_the_16_bit_floats_of_a_type_is_refused(each: Codec) -> None:
    values = np.zeros(64, np.float32)
    values[40] = np.finfo(np.float32).max
    if each.name == "f32":
        np.testing.assert_array_equal(each.round_trip(values), values)
        return
    with pytest.raises(CodecError, match="too large"):
        each.encode(values)


@EVERY
@given(values=hnp.arrays(np.float32, (2, 3, 64), elements=st.floats(-9, 9, width=32)))
def test_rows_are_coded_one_by_one_whatever_their_arrangement(each: Codec, values: Floats) -> None:
    coded = each.encode(values)
    assert coded.shape == (2, 3, each.bytes_per_row(64))
    assert coded.dtype == np.uint8
    np.testing.assert_array_equal(coded[1, 2], each.encode(values[1, 2]))
    np.testing.assert_array_equal(each.decode(coded)[1, 2], each.decode(coded[1, 2]))


def test_rows_that_end_inside_a_block_are_refused() -> None:
    with pytest.raises(CodecError, match="q4_0: a row of 48 values"):
        codec("q4_0").encode(np.zeros((2, 48), np.float32))
    with pytest.raises(CodecError, match="q4_0: a row of 35 bytes"):
        codec("q4_0").decode(np.zeros((2, 35), np.uint8))


def test_an_unknown_type_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(CodecError, match=r"no cache type 'q7_0'.* q6_1, q8_0"):
        codec("q7_0")


@pytest.mark.parametrize("name", ["q4_0", "q4_1", "q5_0", "q5_1"])
@given(values=rows())
def test_the_family_at_four_and_five_bits_is_ggmls(name: str, values: Floats) -> None:
    values = np.where(
        np.abs(values) < 1e-30, np.float32(0), values
    )  # below, ggml divides by a scale that has no inverse
    ours = BlockCodec(int(name[1]), name.endswith("_1"))
    np.testing.assert_array_equal(ours.encode(values), codec(name).encode(values))
    np.testing.assert_array_equal(ours.round_trip(values), codec(name).round_trip(values))


@pytest.mark.parametrize("each", FAMILY, ids=str)
def test_codes_stand_in_fields_as_described(each: BlockCodec) -> None:
    block = np.random.default_rng(1).integers(0, 256, each.block_bytes, dtype=np.uint8)
    header = np.array([0.5, -3.0][: each.minimum + 1], np.float16).view(np.uint8)
    block[: len(header)] = header
    expected = np.empty(32, np.float32)
    for j in range(32):
        code, start = 0, len(header)
        for width in (1, 2, 4):
            if each.bits & width:
                field = int.from_bytes(block[start : start + 4 * width].tobytes(), "little")
                bit = j if width == 1 else 8 * (j % (4 * width)) + width * (j // (4 * width))
                code = code << width | (field >> bit) % (1 << width)
                start += 4 * width
        expected[j] = code * 0.5 - 3 if each.minimum else (code - 2 ** (each.bits - 1)) * 0.5
    np.testing.assert_array_equal(each.decode(block), expected)


def test_iq4_nl_is_what_ggml_makes_of_these_blocks() -> None:
    i = np.arange(64 * 32)
    values = ((i * 7919 + i // 32 * 104729) % 2003 - 1001).astype(np.float32) / np.float32(256) * (1 + i // 32 % 5)
    coded = codec("iq4_nl").encode(values.astype(np.float32))
    # quantize_row_iq4_nl_ref of llama.cpp as of llama-cpp-python 0.3.36, compiled for x86-64 without FMA
    assert (
        hashlib.sha256(coded.tobytes()).hexdigest()
        == "68bccd8139e6ac22c71c356e9960554235b2e6eaafafffb1644bfa0d3cd834bd"
    )


@given(coded=hnp.arrays(np.uint8, (2, 36)))
def test_iq4_nl_is_decoded_as_gguf_does(coded: np.ndarray) -> None:
    coded[:, [1, 19]] &= 0x3F  # keeps the scales finite
    expected = quants.dequantize(coded, GGMLQuantizationType.IQ4_NL)
    np.testing.assert_array_equal(codec("iq4_nl").decode(coded), expected)


@pytest.mark.parametrize("n", [64, 128, 256, 512])
def test_a_rotation_is_the_orthonormal_walsh_hadamard_matrix(n: int) -> None:
    index = np.arange(n)
    ones = np.array([k.bit_count() for k in range(n)])
    signs = 1 - 2 * (ones[index[:, None] & index] % 2)
    np.testing.assert_allclose(hadamard(n), signs / np.sqrt(n), rtol=1e-6)


@given(values=rows(width=512), width=st.sampled_from([64, 128, 256, 512]))
def test_rotating_keeps_products_and_rotating_twice_keeps_the_rows(values: Floats, width: int) -> None:
    turned = rotate(values, width)
    peak = float(np.abs(values).max())
    np.testing.assert_allclose(rotate(turned, width), values, atol=1e-4 * peak)
    products = values.astype(np.float64) @ values.T
    np.testing.assert_allclose(turned.astype(np.float64) @ turned.T, products, atol=1e-2 * peak * peak)


def test_a_rotation_must_fit_the_rows() -> None:
    with pytest.raises(CodecError, match="power of two"):
        hadamard(96)
    with pytest.raises(CodecError, match="96 values cannot be rotated 64 at a time"):
        rotate(np.zeros((2, 96), np.float32), 64)


@pytest.mark.parametrize(
    ("head_dim", "k", "v"),
    [(48, None, None), (64, 64, 64), (80, None, None), (96, None, None), (128, 128, 64), (192, 64, 64), (256, 256, 64)],
)
def test_native_caches_rotate_k_widely_and_v_over_64(head_dim: int, k: int | None, v: int | None) -> None:
    assert (native_width(head_dim, "k"), native_width(head_dim, "v")) == (k, v)


def test_rotation_spreads_an_outlier_channel_and_plain_floats_are_left_alone() -> None:
    values = np.random.default_rng(2).standard_normal((64, 128)).astype(np.float32)
    values[:, 17] = 60

    def error(name: str, rotated: bool) -> float:
        return float(np.square(body(name, 128, "k", rotated=rotated).round_trip(values) - values).mean())

    assert error("q4_0", True) < error("q4_0", False) / 2
    assert error("f16", True) == error("f16", False)


@pytest.mark.parametrize("name", ["q4_0", "kvarn4"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, np.finfo(np.float32).max])
def test_rotation_hides_no_value_that_must_be_refused(name: str, bad: float) -> None:
    values = np.ones((128, 128), np.float32)
    values[70, 3:9] = bad
    with pytest.raises(CodecError, match=f"{name}: a value is"):
        body(name, 128, "k").round_trip(values)


@pytest.mark.parametrize("name", ["q4_0", "iq4_nl", "f16", "kvarn4"])
def test_no_rows_are_no_trouble(name: str) -> None:
    assert body(name, 128, "v").round_trip(np.zeros((0, 256), np.float32)).shape == (0, 256)
