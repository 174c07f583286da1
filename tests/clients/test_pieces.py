"""Which part of an answer was drafted, whatever chunks its tokens come in."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from clients.chat.pieces import Piece, Pieces, origins

CHARACTERS = st.text(alphabet="ab <", min_size=1, max_size=4)


def test_a_step_is_its_accepted_drafts_and_then_one_token_of_the_target():
    assert origins([1, 3, 2]) == [False, True, True, False, True, False]


@given(st.lists(st.lists(CHARACTERS, min_size=1, max_size=4), max_size=6), st.data())
def test_every_character_has_its_tokens_origin_however_steps_are_merged(steps, data):
    """``steps``: the tokens of each step as text. A chunk carries the steps up to a random place."""
    pieces, shown, place = Pieces(), [], 0
    while place < len(steps):
        end = data.draw(st.integers(place + 1, len(steps)))
        tokens = [token for step in steps[place:end] for token in step]
        shown += pieces.add("".join(tokens), tokens, [len(step) for step in steps[place:end]])
        place = end
    told = [(c, piece.accepted) for piece in shown for c in piece.text]
    assert told == [
        (c, i + 1 < len(step)) for step in steps for i, token in enumerate(step) for c in token
    ]


@given(st.lists(st.tuples(st.text("ab", max_size=5), st.lists(st.text("ab", max_size=3)))))
def test_the_text_comes_out_whole_whatever_the_tokens_are(chunks):
    pieces = Pieces()
    for text, tokens in chunks:
        assert "".join(p.text for p in pieces.add(text, tokens, [len(tokens)])) == text


def test_the_text_of_a_token_may_come_with_the_next_chunk():
    pieces = Pieces()
    assert pieces.add("a", ["a", "", "\N{SNOWMAN}x"], [3]) == [Piece("a", True)]
    assert pieces.add("\N{SNOWMAN}", [], []) == [Piece("\N{SNOWMAN}", False)]
    assert pieces.add("xb", ["b", "c"], [2]) == [Piece("x", False), Piece("b", True)]


def test_a_special_token_without_text_is_passed_over():
    pieces = Pieces()
    shown = pieces.add("ab", ["<|x|>", "a", "b", "<|im_end|>"], [1, 3])
    assert shown == [Piece("ab", True)]


def test_what_the_server_does_not_tell_is_unknown():
    pieces = Pieces()
    assert pieces.add("ab", ["a", "b"], []) == [Piece("ab", None)]
    assert pieces.add("c", ["z"], [1]) == [Piece("c", None)]
    assert pieces.add("d", ["d"], [1]) == [Piece("d", False)]
