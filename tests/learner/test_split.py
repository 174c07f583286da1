"""What is held out is a matter of the prompt alone, and stays so."""

import json

from hypothesis import given
from hypothesis import strategies as st

from learner.split import EARLY_SHARE, REMEMBERED_PROMPTS, HeldoutSplit

hashes = st.binary(min_size=16, max_size=16).map(bytes.hex)


def numbered(count: int) -> list[str]:
    """Hashes spread evenly, as a hash function gives them."""
    return [f"{(i * 2654435761) % 2**32:08x}{'0' * 24}" for i in range(count)]


@given(st.lists(hashes, max_size=30), st.floats(0.01, 0.99))
def test_two_splits_of_the_same_share_agree_in_any_order(prompts, share):
    one, other = HeldoutSplit(share, 100), HeldoutSplit(share, 100)
    forward = {p: one.is_heldout(p, 100) for p in prompts}
    backward = {p: other.is_heldout(p, 100) for p in reversed(prompts)}
    assert forward == backward


@given(st.lists(st.tuples(hashes, st.integers(0, 300)), max_size=30), st.floats(0.01, 0.99))
def test_a_prompt_never_changes_sides_however_much_is_held_out(asked, share):
    split = HeldoutSplit(share, 100)
    first: dict[str, bool] = {}
    for prompt, tokens in asked + asked[::-1]:
        side = split.is_heldout(prompt, tokens)
        assert first.setdefault(prompt, side) == side


@given(st.lists(st.tuples(hashes, st.integers(0, 300)), max_size=30), hashes)
def test_decisions_survive_a_restart(asked, later):
    split = HeldoutSplit(0.15, 100)
    before = {p: split.is_heldout(p, tokens) for p, tokens in asked}
    again = HeldoutSplit(0.15, 100)
    again.load_state(json.loads(json.dumps(split.state())))
    assert {p: again.is_heldout(p, 0) for p in before} == before
    assert again.is_heldout(later, 100) == split.is_heldout(later, 100)


@given(hashes, st.floats(0.01, 0.99))
def test_what_is_held_out_at_the_late_share_is_held_out_early_too(prompt, share):
    late = HeldoutSplit(share, 100).is_heldout(prompt, 100)
    early = HeldoutSplit(share, 100).is_heldout(prompt, 0)
    assert early or not late


def test_the_shares_are_what_they_say():
    prompts = numbered(20_000)
    for tokens, wanted in ((100, 0.15), (0, EARLY_SHARE)):
        split = HeldoutSplit(0.15, 100)
        share = sum(split.is_heldout(p, tokens) for p in prompts) / len(prompts)
        assert abs(share - wanted) < 0.01


def test_its_memory_is_bounded():
    split = HeldoutSplit(0.15, 100)
    for prompt in numbered(REMEMBERED_PROMPTS + 50):
        split.is_heldout(prompt, 100)
    assert len(split.state()) == REMEMBERED_PROMPTS
