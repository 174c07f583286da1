"""Tenants' salts and ranks cannot be made to meet by anything a client sends."""

from __future__ import annotations

from hypothesis import assume, given
from hypothesis import strategies as st

from rlcore.engine.isolation import OWN_RANKS, ranked, tenant_salt

TENANTS = st.text(max_size=20)
SALTS = st.none() | st.text(max_size=60)


@given(TENANTS, SALTS, TENANTS, SALTS)
def test_only_the_same_tenant_with_the_same_wish_has_the_same_salt(one, own, other, theirs):
    same = (one, own) == (other, theirs)
    assert (tenant_salt(one, own) == tenant_salt(other, theirs)) == same


@given(TENANTS, TENANTS)
def test_a_salt_that_was_seen_opens_nothing_when_sent_back(one, other):
    assume(one != other)
    assert tenant_salt(other, tenant_salt(one, None)) != tenant_salt(one, None)


BIG = st.integers(-(2**63), 2**63 - 1)


@given(st.integers(-100, 100), BIG, st.integers(-100, 100), BIG)
def test_a_better_tenant_comes_first_whatever_the_bodies_ask_for(one, own, other, theirs):
    if one < other:
        assert ranked(one, own) < ranked(other, theirs)
    half = OWN_RANKS // 2
    if one == other and -half <= own < theirs < half:
        assert ranked(one, own) < ranked(other, theirs)
