from __future__ import annotations

import pytest

from rlcore.environments import extract
from rlcore.errors import UsageError


def test_the_last_tags_hold_the_answer() -> None:
    assert extract.answer_tags("<answer>1</answer> no, <ANSWER> 2\n3 </ANSWER>") == "2\n3"
    assert extract.answer_tags("1") is None


def test_without_tags_a_long_answer_is_the_whole_reply() -> None:
    reply = "a b\nc d\n\n"
    assert extract.tags_or_rest(reply, lines=1) == "c d"
    assert extract.tags_or_rest(reply, lines=2) == "a b\nc d"
    assert extract.tags_or_rest("<answer>x</answer> done", lines=2) == "x"


def test_an_empty_reply_has_no_answer() -> None:
    for find in (extract.answer_tags, extract.last_line, extract.whole):
        assert find("") is None
        assert find(" \n ") is None


def test_an_unknown_extraction_names_those_there_are() -> None:
    with pytest.raises(UsageError, match="last_number"):
        extract.check_extraction("first_word")
