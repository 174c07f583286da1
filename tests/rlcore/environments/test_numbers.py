from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore.environments.numbers import as_number, last_number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("7", 7),
        ("The answer is 7.", 7),
        ("3 + 4 = 7!", 7),
        ("5 - 8 = -3", -3),
        ("5-8", 8),  # an operator, no sign
        ("it is -3", -3),
        ("\u22123", -3),
        ("1,234,567", 1234567),
        ("0.50 dollars", 0.5),
        ("(12)", 12),
        ("**12**", 12),
        ("1, 2", 2),
        ("", None),
        ("none at all", None),
        ("x2", None),
    ],
)
def test_the_last_number_counts(text: str, number: float | None) -> None:
    assert last_number(text) == number


@given(
    st.integers(-(10**9), 10**9), st.sampled_from(["{}", "= {}", "It is {}.", "{:,}", "<b>{}</b>"])
)
def test_an_integer_is_found_however_it_is_written(number: int, form: str) -> None:
    assert last_number(form.format(number)) == number


@given(st.text())
def test_any_text_is_taken(text: str) -> None:
    last_number(text)


def test_only_a_number_alone_is_one() -> None:
    assert as_number(" 12 ") == 12
    assert as_number("12 apples") is None
    assert as_number("[1, 2]") is None
