"""Who is recognized when it comes back."""

from __future__ import annotations

import numpy as np

from hicache_ext.core.page import PrefixScope
from hicache_ext.core.policy.ghosts import Ghosts
from hicache_ext.core.policy.lru import TierAwareLru
from hicache_ext.core.residency import Residency
from hicache_ext.core.tree import Node, TieredRadixTree

SCOPE = PrefixScope()


def tree_with(*runs: list[int]) -> tuple[TieredRadixTree, list[Node]]:
    """A tree of one-token pages, and the node that each run added to it."""
    tree = TieredRadixTree(1, TierAwareLru())
    added = []
    for run in runs:
        (node,) = tree.insert(SCOPE, np.array(run), np.arange(len(run))).added
        added.append(node)
    return tree, added


def forget(tree: TieredRadixTree, ghosts: Ghosts[str], node: Node, payload: str) -> None:
    ghosts.put(node, payload)
    tree.set_device(node, Residency.ABSENT)
    tree.prune(node)


def test_a_prompt_that_left_from_its_end_on_is_recognized_whole_when_it_comes_back_in_one_run() -> None:
    tree, (first, second, third) = tree_with([1, 2], [1, 2, 3, 4], [1, 2, 3, 4, 5])
    ghosts: Ghosts[str] = Ghosts(10, page_size=1)
    for node, name in ((third, "third"), (second, "second"), (first, "first")):
        forget(tree, ghosts, node, name)
    (back,) = tree.insert(SCOPE, np.array([1, 2, 3, 4, 5, 6]), np.arange(6)).added
    assert list(ghosts.take_run(back)) == ["first", "second", "third"]
    assert len(ghosts) == 0


def test_only_what_comes_back_is_taken() -> None:
    tree, (first, second) = tree_with([1, 2], [1, 2, 3, 4])
    ghosts: Ghosts[str] = Ghosts(10, page_size=1)
    forget(tree, ghosts, second, "second")
    forget(tree, ghosts, first, "first")
    (back,) = tree.insert(SCOPE, np.array([1, 2, 9]), np.arange(3)).added
    assert list(ghosts.take_run(back)) == ["first"]
    assert len(ghosts) == 1


def test_the_oldest_goes_when_there_are_more_than_the_limit() -> None:
    _, nodes = tree_with([1], [2], [3])
    ghosts: Ghosts[str] = Ghosts(2, page_size=1)
    gone = [ghosts.put(node, name) for node, name in zip(nodes, "abc", strict=True)]
    assert gone == [None, None, "a"]
    assert [ghosts.take(node) for node in nodes] == [None, "b", "c"]
