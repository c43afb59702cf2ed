import json
import math
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from vox_plugin_api import messages as m

reproducible = settings(deadline=None, derandomize=True)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=20,
)


def shuffled(value: object) -> object:
    """The same value with every dictionary's keys in the opposite order."""
    if isinstance(value, dict):
        return {key: shuffled(value[key]) for key in reversed(value)}
    return [shuffled(item) for item in value] if isinstance(value, list) else value


@reproducible
@given(value=st.dictionaries(st.text(max_size=8), JSON, max_size=5))
def test_equal_values_have_equal_bytes_and_the_bytes_give_the_value_back(value: dict[str, object]) -> None:
    data = m.canonical_json(value)
    assert m.canonical_json(shuffled(value)) == data
    assert json.loads(data) == value


def test_the_canonical_form_is_this() -> None:
    assert m.canonical_json({"b": [1, None], "a": {"z": "é", "y": True}}) == (
        '{"a":{"y":true,"z":"é"},"b":[1,null]}'.encode()
    )


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_number_that_json_does_not_have_is_refused(number: float) -> None:
    with pytest.raises(ValueError, match="JSON"):
        m.canonical_json({"x": number})


@reproducible
@given(bits=st.integers(0, 2**32 - 1))
def test_every_float32_crosses_as_its_bits(bits: int) -> None:
    text = f"{bits:08x}"
    number = m.f32_from_bits(text)
    if math.isnan(number):
        assert math.isnan(m.TokenLogprob.model_validate({"token_id": 1, "logprob": text}).logprob)
        return
    message = m.TokenLogprob.model_validate_json(f'{{"token_id":1,"logprob":"{text}"}}')
    assert struct.pack(">f", message.logprob).hex() == text
    assert f'"logprob":"{text}"'.encode() in m.canonical_json(message)


@reproducible
@given(number=st.floats(width=64, allow_nan=False, allow_infinity=False, min_value=-1e38, max_value=1e38))
def test_a_python_float_crosses_rounded_to_float32(number: float) -> None:
    crossed = m.SamplingParams.model_validate_json(m.canonical_json(m.SamplingParams(top_p=number)))
    assert crossed.top_p == struct.unpack("f", struct.pack("f", number))[0]


def test_no_floating_point_literal_crosses_in_a_request() -> None:
    params = m.GenerateParams(
        token_ids=[1], max_tokens=1, sampling=m.SamplingParams(temperature=0.7, logit_bias={5: -1.5})
    )
    data = m.canonical_json(params)
    assert b"." not in data
    assert m.GenerateParams.model_validate_json(data).sampling.logit_bias == {5: -1.5}


@pytest.mark.parametrize(
    ("model", "values", "field"),
    [
        (m.GenerateParams, {"token_ids": [], "max_tokens": 1}, "token_ids"),
        (m.GenerateParams, {"token_ids": [1], "max_tokens": -1}, "max_tokens"),
        (m.GenerateParams, {"token_ids": [1], "max_tokens": 1, "logprobs": 21}, "logprobs"),
        (m.SamplingParams, {"seed": 2**64}, "seed"),
        (m.LoadModelParams, {"model_dir": "/m", "model_digest": "ABC"}, "model_digest"),
        (m.SamplingParams, {"top_p": "3f80"}, "top_p"),
    ],
)
def test_a_value_out_of_bounds_is_refused_by_name(model: type, values: dict, field: str) -> None:
    with pytest.raises(ValidationError) as caught:
        model(**values)
    assert [error["loc"] for error in caught.value.errors()] == [(field,)]


@pytest.mark.parametrize(
    ("ours", "theirs", "version"),
    [
        ((1, 1), (1, 1), 1),
        ((1, 3), (2, 5), 3),
        ((2, 5), (1, 3), 3),
        ((1, 2), (3, 4), None),
        ((3, 4), (1, 2), None),
    ],
)
def test_two_sides_use_the_highest_version_they_share(
    ours: tuple[int, int], theirs: tuple[int, int], version: int | None
) -> None:
    first, second = (m.ProtocolRange(min=low, max=high) for low, high in (ours, theirs))
    assert first.highest_common(second) == version
