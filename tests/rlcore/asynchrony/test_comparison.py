"""A rise has to be larger than the noise and worth it; a fall is suspected sooner."""

from __future__ import annotations

from rlcore.asynchrony.comparison import fell, rose

NOISY = [1.0, 1.5, 0.5, 1.2, 0.8]


def shifted(by: float) -> list[float]:
    return [rate + by for rate in NOISY]


def test_a_difference_within_the_noise_is_none():
    assert not rose(NOISY, shifted(0.3))
    assert rose(NOISY, shifted(0.6))
    assert not fell(NOISY, shifted(-0.1))
    assert fell(NOISY, shifted(-0.3))


def test_a_difference_too_small_to_matter_is_none_however_certain():
    assert not rose([1.0] * 5, [1.01] * 5)
    assert rose([1.0] * 5, [1.03] * 5)
    assert not fell([1.0] * 5, [0.99] * 5)
    assert fell([1.0] * 5, [0.97] * 5)


def test_a_rise_is_no_fall_and_a_fall_no_rise():
    assert not fell([1.0] * 5, [2.0] * 5)
    assert not rose([2.0] * 5, [1.0] * 5)
