"""Page identities: what makes two pages interchangeable, and only that."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import fields, replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_ext.core.page import IDENTITY_BYTES, Namespace, PrefixScope, page_identities, root_salt
from hicache_ext.core.policy.lru import TierAwareLru
from hicache_ext.core.tree import TieredRadixTree
from tests.core.fakes import prompt, toks

NAMESPACE = Namespace(
    model="m",
    weight_version="1",
    kv_dtype="bfloat16",
    layers=2,
    kv_heads=3,
    head_dims=(64, 64),
    rotary="theta=10000",
    page_size=4,
    kind="mha",
)
SCOPE = PrefixScope()
steady = settings(deadline=None, derandomize=True)
token_lists = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=24)


def ids(tokens: np.ndarray, page_size: int = 4, *, namespace: bytes = b"n", scope: PrefixScope = SCOPE):
    return page_identities(root_salt(namespace, scope), tokens, page_size)


def test_identity_is_the_documented_hash() -> None:
    """Written down a second time, so that a change of the stored format does not go unnoticed."""

    def framed(*values: bytes) -> bytes:
        return b"".join(struct.pack("<Q", len(v)) + v for v in values)

    salt = hashlib.sha256(b"hicache-ext root" + framed(b"n", b"key", b"salt", b"adapter")).digest()[:16]
    first = hashlib.sha256(salt + struct.pack("<4q", 1, 2, 3, 4)).digest()[:16]
    second = hashlib.sha256(first + struct.pack("<4q", 5, 6, 7, -1)).digest()[:16]
    scope = PrefixScope("key", "salt", "adapter")
    assert ids(toks(1, 2, 3, 4, 5, 6, 7, -1), scope=scope) == [first, second]


def test_identity_golden_values() -> None:
    """A change of these makes every stored page unreadable: raise FORMAT_VERSION with it."""
    assert NAMESPACE.digest().hex() == "170da2f4917ff4cc8ddeb01042bb666ea3f0e5e3176b8e93b41dfe95f90572ac"
    pages = page_identities(root_salt(NAMESPACE.digest(), SCOPE), np.arange(8), 4)
    assert [p.hex() for p in pages] == [
        "c92690807e02a8a0a938b40b53497e75",
        "780891bb4594092766a6b4f740a7eeb4",
    ]


def test_identities_are_sixteen_bytes_and_distinct_along_a_constant_run() -> None:
    pages = ids(np.zeros(40, np.int64))
    assert {len(p) for p in pages} == {IDENTITY_BYTES}
    assert len(set(pages)) == 10


def test_identity_depends_on_everything_before_it() -> None:
    base = ids(prompt(4, 1, 2, 3))
    other = ids(prompt(4, 9, 2, 3))
    assert not set(base) & set(other)


def test_every_field_of_the_namespace_counts() -> None:
    seen = {NAMESPACE.digest()}
    for field in fields(Namespace):
        value = getattr(NAMESPACE, field.name)
        changed: Any = value + "x" if isinstance(value, str) else (value, 1)
        if isinstance(value, int):
            changed = value + 1
        seen.add(replace(NAMESPACE, **{field.name: changed}).digest())
    assert len(seen) == len(fields(Namespace)) + 1


def test_namespace_knows_no_tensor_parallel_degree() -> None:
    """Kind 14: a page is stored by head group, so servers of any TP degree share it."""
    assert not [f.name for f in fields(Namespace) if "tp" in f.name or "rank" in f.name]


def test_namespace_fields_are_framed() -> None:
    assert replace(NAMESPACE, model="ab", weight_version="c").digest() != (
        replace(NAMESPACE, model="a", weight_version="bc").digest()
    )


def test_namespace_separates_identities() -> None:
    assert not set(ids(np.arange(8), namespace=b"a")) & set(ids(np.arange(8), namespace=b"b"))


def test_scopes_are_framed_and_separate() -> None:
    """Each of these has the text of another one if its fields are joined."""
    scopes = [
        PrefixScope(),
        PrefixScope("ab", "c", "d"),
        PrefixScope("a", "bc", "d"),
        PrefixScope("abc", "", "d"),
        PrefixScope("", "abc", "d"),
        PrefixScope("abcd", "", ""),
        PrefixScope("", "abcd", ""),
        PrefixScope("", "", "abcd"),
        PrefixScope("ab", "cd", ""),
    ]
    for one, other in combinations(scopes, 2):
        assert not set(ids(np.arange(8), scope=one)) & set(ids(np.arange(8), scope=other)), (one, other)
    assert root_salt(b"ab", PrefixScope("c")) != root_salt(b"a", PrefixScope("bc"))


def test_page_size_separates_identities() -> None:
    """Even where one page of the one has the tokens of several of the other."""
    tokens = np.arange(16)
    sets = [set(ids(tokens, size)) for size in (1, 2, 4, 8, 16)]
    assert len(set().union(*sets)) == sum(len(s) for s in sets)


@pytest.mark.parametrize("length", [1, 3, 5])
def test_a_partial_page_has_no_identity(length: int) -> None:
    with pytest.raises(ValueError, match="not a multiple of the page size 4"):
        ids(np.arange(length))


def test_dtype_and_strides_of_the_tokens_do_not_count() -> None:
    plain = np.arange(8)
    assert ids(plain.astype(np.int32)) == ids(plain)
    assert ids(plain.astype(">i8")) == ids(plain)
    assert ids(np.repeat(plain, 2)[::2]) == ids(plain)


@steady
@given(token_lists, token_lists, st.sampled_from([1, 2, 4]))
def test_equal_identities_mean_equal_prefixes(a: list[int], b: list[int], page: int) -> None:
    """Pages of two prompts are equal exactly as far as their whole-page prefixes are."""
    left, right = (np.array(t[: len(t) // page * page], dtype=np.int64) for t in (a, b))
    pages = [ids(t, page) for t in (left, right)]
    common = 0
    for x, y in zip(left.tolist(), right.tolist(), strict=False):
        if x != y:
            break
        common += 1
    shared = common // page
    assert pages[0][:shared] == pages[1][:shared]
    assert not set(pages[0][shared:]) & set(pages[1][shared:])


@steady
@given(token_lists, st.integers(0, 24))
def test_identities_continue_from_any_page(tokens: list[int], cut: int) -> None:
    run = np.array(tokens[: len(tokens) // 2 * 2], dtype=np.int64)
    cut = min(cut // 2 * 2, len(run))
    parent = root_salt(b"n", SCOPE)
    upper = page_identities(parent, run[:cut], 2)
    lower = page_identities(upper[-1] if upper else parent, run[cut:], 2)
    assert upper + lower == page_identities(parent, run, 2)


@steady
@given(st.lists(st.lists(st.integers(0, 2), max_size=16), min_size=1, max_size=8), st.data())
def test_lazy_identities_equal_direct_ones(prompts: list[list[int]], data: st.DataObject) -> None:
    """Whatever is inserted in between: splits cut what was computed, the rest is hashed when asked for."""
    page, scope = 2, PrefixScope("k", "s", "l")
    tree = TieredRadixTree(page, TierAwareLru(), namespace=b"space")
    inserted = []
    for tokens in prompts:
        run = np.array(tokens[: len(tokens) // page * page], dtype=np.int64)
        tree.insert(scope, run, np.arange(len(run)))
        inserted.append(run)
        asked = data.draw(st.sampled_from(inserted))
        if len(asked):
            tree.identities(tree.match(scope, asked).host_node)
    for run in inserted:
        path = list(tree.path(tree.match(scope, run).host_node))[::-1]
        got = [identity for node in path for identity in tree.identities(node)]
        assert got == page_identities(root_salt(b"space", scope), run, page)


def test_identities_of_the_root_are_none() -> None:
    tree = TieredRadixTree(4, TierAwareLru(), namespace=b"space")
    assert tree.identities(tree.root) == []
