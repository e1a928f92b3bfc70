from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.producer.openai.errors import OpenAIError, error_of
from penstock.shared.errors import MAX_MESSAGE_CHARS, UnknownModelError, ValidationError, cut
from penstock.shared.values.checks import check_encodable, check_text
from penstock.shared.values.shown import MAX_SHOWN_CHARS, format_number, shown

TEXT = st.text(st.characters())  # lone surrogates, too
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(TEXT | st.integers(), inner) | st.tuples(inner, inner),
)


@given(VALUES)
def test_any_value_is_shown_short_and_encodable(value: Any) -> None:
    assert len(shown(value).encode()) <= 4 * MAX_SHOWN_CHARS
    assert len(shown(value)) <= MAX_SHOWN_CHARS


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0000421, "0.0000421"), (1e16, "10,000,000,000,000,000"), (1000.0, "1,000"), (0.1 + 0.2, "0.3"), (-2.5, "-2.5")],
)
def test_a_number_has_no_exponent(value: float, text: str) -> None:
    assert format_number(value, separator=",") == text
    assert format_number(value) == text.replace(",", "")


def test_short_values_are_shown_as_their_repr() -> None:
    for value in ("it's", 5, -0.5, None, ["a", {"b": (1,)}], {"z": 1, "a": [2]}, {}, b"x", {"a", "b"} & {"a"}):
        assert shown(value) == repr(value)


def test_large_values_are_not_rendered_in_full() -> None:
    nested: list[Any] = []
    nested.append(nested)
    for value in ("x" * 10**6, list(range(10**6)), {str(i): i for i in range(10**5)}, 10**5000, nested, b"x" * 10**6):
        assert len(shown(value)) <= MAX_SHOWN_CHARS
    assert shown(10**5000) == "an integer of 16610 bits"
    assert shown("a" * 500 + "z").startswith("'aaa")
    assert shown("a" * 500 + "z").endswith("z'")


# Drawn by the letter, a text of that length takes a hundred times as long as the tested code.
LONG_TEXT = st.text(st.characters(), min_size=1).map(lambda part: part * (MAX_MESSAGE_CHARS // len(part) + 1))


@given(TEXT | LONG_TEXT)
def test_a_message_is_short_and_keeps_field_and_remedy(value: str) -> None:
    for error in (ValidationError(f"field must be short, got {value}; leave it out"),):
        message = str(error)
        assert len(message) <= 6 * MAX_MESSAGE_CHARS  # each surrogate is six characters
        assert message.encode()
        assert message.startswith("field must be short, got ")
        assert message.endswith("; leave it out")


def test_library_messages_about_a_value_are_shortened_too() -> None:
    assert len(str(ValidationError("x" * 10**6))) <= MAX_MESSAGE_CHARS
    error = OpenAIError(400, "y" * 10**6, param="z" * 10**6)
    assert len(error.message) <= MAX_MESSAGE_CHARS
    assert len(error.param or "") <= MAX_SHOWN_CHARS
    assert len(error_of(UnknownModelError(f"no model {shown('m' * 10**6)}")).message) < 1000
    assert cut("short") == "short"


@given(TEXT)
def test_text_can_be_encoded_or_is_refused_by_name(value: str) -> None:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        with pytest.raises(ValidationError, match=rf"^field must be text .* position {error.start};"):
            check_text("field", value)
    else:
        assert check_text("field", value) is value


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"a": [1, {"b": "x\ud800"}]}, r"tools.a[1].b must be text that UTF-8 can encode"),
        ({"a": {"\udcff": 1}}, r"a key of tools.a must be text"),
        ({"not a name": ["\ud800"]}, r"tools['not a name'][0] must be text"),
        ([object()], r"tools[0] must be plain data that JSON can say, got <object"),
        ([1, 2**64], r"tools[1] must be plain data that JSON can say, got 18446744073709551616"),
        ({"a": {(1, 2): 3}}, "tools.a must be plain data"),
    ],
)
def test_the_part_that_cannot_be_sent_is_named(value: Any, expected: str) -> None:
    with pytest.raises(ValidationError, match="^" + re.escape(expected)):
        check_encodable("tools", value)


def test_values_that_contain_themselves_are_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(ValidationError, match="tools is nested too deeply"):
        check_encodable("tools", value)
