"""The checksum: its definition, and that it sees what memory, disks and bugs do to pages."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import combinations

import numpy as np
import pytest

from hicache_ext.core.checksum import _CACHED_BYTES, checksums, multipliers

MASK = 2**64 - 1


def reference_multiplier(i: int) -> int:
    """SplitMix64 with the seed 0, its ``i``-th output from 0, made odd; written from the paper."""
    z = (i + 1) * 0x9E3779B97F4A7C15 & MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
    return (z ^ z >> 31) | 1


def reference(words: list[int]) -> int:
    return sum((w ^ w >> 32) * reference_multiplier(i) for i, w in enumerate(words)) & MASK


def sums(words: np.ndarray) -> np.ndarray:
    return checksums(words, multipliers(words.shape[-1]))


def of(words: np.ndarray) -> int:
    """Checksum of one run."""
    return int(sums(words[None])[0])


def random_words(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**64, size=shape, dtype=np.uint64)


def kv_words(seed: int, *shape: int) -> np.ndarray:
    """Bfloat16 numbers around 0, as KV is: few exponents, so that words look alike in half of their bits."""
    *rows, words = shape
    numbers = np.random.default_rng(seed).normal(size=(*rows, 4 * words)).astype(np.float32)
    return (numbers.view(np.uint32) >> 16).astype(np.uint16).view(np.uint64)


# Definition


def test_multipliers_are_those_of_splitmix64() -> None:
    """The first outputs for the seed 0, as its reference implementation in C prints them."""
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC]
    assert multipliers(4).tolist() == [m | 1 for m in published]
    assert multipliers(300).tolist() == [reference_multiplier(i) for i in range(300)]


def test_multipliers_are_odd_differ_and_do_not_depend_on_how_many_there_are() -> None:
    many = multipliers(1 << 18)
    assert many.dtype == np.uint64 and (many & np.uint64(1)).all()
    assert len(np.unique(many)) == len(many)
    assert np.array_equal(multipliers(1000), many[:1000]) and len(multipliers(0)) == 0


@pytest.mark.parametrize("n", [1, 2, 3, 7, 64, 129])
def test_it_is_what_the_docstring_says(n: int) -> None:
    words = random_words(n, 5, n)
    words[1] = 0
    words[2] = MASK
    words[3] = 1 << 63
    found = sums(words)
    assert found.dtype == np.uint64 and found.shape == (5,)
    assert found.tolist() == [reference(row) for row in words.tolist()]


def test_known_values() -> None:
    """Worked out by hand: a change of the definition makes pages of older runs unreadable."""
    first = 0xE220A8397B1DCDAF
    assert of(np.array([1], np.uint64)) == first
    assert of(np.array([1 << 32], np.uint64)) == ((1 << 32) + 1) * first & MASK
    assert of(np.array([0, 1], np.uint64)) == 0x6E789E6AA1B965F5
    assert of(np.zeros(100, np.uint64)) == 0


def test_sums_wrap_around_without_a_warning() -> None:
    """Modulo 2^64 is the definition, and also what every device does."""
    words = np.full((3, 1000), MASK, dtype=np.uint64)
    with warnings.catch_warnings(), np.errstate(all="raise"):
        warnings.simplefilter("error")
        found = sums(words)
    # All bits set fold to the high half only.
    expected = (MASK ^ MASK >> 32) * sum(map(reference_multiplier, range(1000))) & MASK
    assert found.tolist() == [expected] * 3


@pytest.mark.parametrize("shape", [(0, 8), (0, 0), (2, 0, 8)])
def test_nothing_has_no_checksum(shape: tuple[int, ...]) -> None:
    assert sums(np.empty(shape, np.uint64)).shape == shape[:-1]


def test_the_checksum_of_an_empty_run_is_zero() -> None:
    assert sums(np.empty((3, 0), np.uint64)).tolist() == [0, 0, 0]


def test_rows_may_lie_apart_and_backwards() -> None:
    """Payloads lie between headers."""
    buffer = random_words(1, 6, 40)
    apart, backwards = buffer[::2, 4:36], buffer[::-1, :32]
    assert not apart.flags.c_contiguous
    for rows in (apart, backwards, buffer[3:4, 8:9]):
        assert sums(rows).tolist() == [reference(row) for row in rows.tolist()]


def test_leading_axes_are_kept() -> None:
    buffer = random_words(2, 3, 2, 5, 12)
    found = sums(buffer[:, :, 1:, :8])
    assert found.shape == (3, 2, 4)
    for index in np.ndindex(3, 2, 4):
        assert int(found[index]) == reference(buffer[:, :, 1:, :8][index].tolist())


@pytest.mark.parametrize("n", [1, 1000, _CACHED_BYTES // 8, _CACHED_BYTES // 8 + 1])
def test_rows_do_not_depend_on_how_many_are_summed_at_a_time(n: int) -> None:
    """Parts of the work end in the middle of the rows, and a row may be larger than a part."""
    per_part = max(_CACHED_BYTES // (8 * n), 1)
    rows = min(2 * per_part + 1, 1 << 16)
    words = random_words(3, rows, n)
    together = sums(words)
    picked = sorted({0, min(per_part, rows) - 1, min(per_part, rows - 1), rows - 1})
    assert [int(together[i]) for i in picked] == [of(words[i]) for i in picked]


def test_the_source_is_left_alone() -> None:
    words = random_words(4, 2, 100)
    before = words.copy()
    words.flags.writeable = False
    sums(words)
    assert np.array_equal(words, before)


def test_factors_of_another_length_are_noticed() -> None:
    with pytest.raises(ValueError):
        checksums(random_words(5, 2, 8), multipliers(7))


# Small damage, exhaustively


@pytest.mark.parametrize("page", [kv_words(6, 4, 48), random_words(6, 4, 48), np.zeros((4, 48), np.uint64)])
def test_every_flipped_bit_is_seen(page: np.ndarray) -> None:
    """Each bit of each word of each slab."""
    slabs, n = page.shape
    sound = sums(page)
    bits = np.uint64(1) << np.arange(64, dtype=np.uint64)
    for slab in range(slabs):
        damaged = np.repeat(page[slab][None], n * 64, axis=0).reshape(n, 64, n)
        damaged[np.arange(n), :, np.arange(n)] ^= bits
        assert (damaged != page[slab]).sum() == n * 64
        assert (sums(damaged) != sound[slab]).all()


def test_every_pair_of_flipped_high_bits_is_seen() -> None:
    """Without folding, changes of the two highest bits would cancel."""
    page = kv_words(7, 1, 24)[0]
    sound = of(page)
    places = [(word, bit) for word in range(24) for bit in (31, 61, 62, 63)]
    pairs = list(combinations(places, 2))
    damaged = np.repeat(page[None], len(pairs), axis=0)
    for row, pair in enumerate(pairs):
        for word, bit in pair:
            damaged[row, word] ^= np.uint64(1 << bit)
    assert (sums(damaged) != np.uint64(sound)).all()


def test_signs_of_two_numbers_are_seen() -> None:
    """The highest bit of a word is the sign of a bfloat16 number: the change that a weak sum forgets."""
    page = kv_words(8, 1, 256)[0]
    pairs = np.array(list(combinations(range(256), 2)))
    damaged = np.repeat(page[None], len(pairs), axis=0)
    damaged[np.arange(len(pairs)), pairs[:, 0]] ^= np.uint64(1 << 63)
    damaged[np.arange(len(pairs)), pairs[:, 1]] ^= np.uint64(1 << 63)
    assert (sums(damaged) != np.uint64(of(page))).all()


def test_every_two_words_that_change_places_are_seen() -> None:
    page = kv_words(9, 1, 128)[0]
    assert len(np.unique(page)) == 128
    pairs = np.array(list(combinations(range(128), 2)))
    damaged = np.repeat(page[None], len(pairs), axis=0)
    rows = np.arange(len(pairs))
    damaged[rows, pairs[:, 0]], damaged[rows, pairs[:, 1]] = page[pairs[:, 1]], page[pairs[:, 0]]
    assert (sums(damaged) != np.uint64(of(page))).all()


def test_every_two_slabs_that_change_places_are_seen() -> None:
    """Layers, and K with V: each has a checksum of its own."""
    layers = 12
    page = kv_words(10, 2 * layers, 32)
    sound = sums(page)
    for one, other in combinations(range(2 * layers), 2):
        damaged = page.copy()
        damaged[[one, other]] = page[[other, one]]
        assert np.flatnonzero(sums(damaged) != sound).tolist() == [one, other]


def test_k_and_v_that_change_places_as_a_whole_are_seen() -> None:
    page = kv_words(11, 2, 12, 32)
    assert (sums(page[::-1]) != sums(page)).all()


def test_every_two_payloads_that_change_places_are_seen() -> None:
    pages = kv_words(12, 16, 6, 24)
    sound = sums(pages)
    for one, other in combinations(range(16), 2):
        damaged = pages.copy()
        damaged[[one, other]] = pages[[other, one]]
        seen = (sums(damaged) != sound).any(axis=1)
        assert np.flatnonzero(seen).tolist() == [one, other]


# Large slabs, at random


class Slab:
    """A slab of 64 tokens with 8 heads of 128 bfloat16 numbers.

    A word adds to the checksum by itself, so what damage changes is worked out from the damaged words only.
    """

    def __init__(self, words: np.ndarray) -> None:
        self.words = words
        self.factors = multipliers(len(words))
        self.terms = self.fold(words) * self.factors

    @staticmethod
    def fold(words: np.ndarray) -> np.ndarray:
        return words ^ (words >> np.uint64(32))

    def change(self, place: np.ndarray, to: np.ndarray) -> np.ndarray:
        """By how much the checksum changes if the word at ``place`` becomes ``to``."""
        return (self.fold(to) - self.fold(self.words[place])) * self.factors[place]

    def assert_seen(self, changes: np.ndarray, damaged: Callable[[int], np.ndarray]) -> int:
        """No change is 0, and a sample of them is what the whole damaged slab says."""
        sound = of(self.words)
        for case in np.linspace(0, len(changes) - 1, 25).astype(int).tolist():
            assert (of(damaged(case)) - sound) & MASK == int(changes[case]), case
        assert np.count_nonzero(changes) == len(changes)
        return len(changes)


def flips(slab: Slab, rng: np.random.Generator, cases: int) -> int:
    place = rng.integers(len(slab.words), size=cases)
    to = slab.words[place] ^ (np.uint64(1) << rng.integers(64, size=cases, dtype=np.uint64))

    def damaged(case: int) -> np.ndarray:
        out = slab.words.copy()
        out[place[case]] = to[case]
        return out

    return slab.assert_seen(slab.change(place, to), damaged)


def double_flips(slab: Slab, rng: np.random.Generator, cases: int) -> int:
    """Two bits, mostly high ones and often the same of two words: those that cancel most easily."""
    high = np.uint64(64) - np.minimum(rng.geometric(0.4, size=(2, cases)), 64).astype(np.uint64)
    high[1] = np.where(rng.random(cases) < 0.5, high[0], high[1])
    place = rng.integers(len(slab.words), size=(2, cases))
    place[1] = np.where(place[0] == place[1], (place[1] + 1) % len(slab.words), place[1])
    to = slab.words[place] ^ (np.uint64(1) << high)

    def damaged(case: int) -> np.ndarray:
        out = slab.words.copy()
        out[place[:, case]] = to[:, case]
        return out

    return slab.assert_seen(slab.change(place[0], to[0]) + slab.change(place[1], to[1]), damaged)


def garbage(slab: Slab, rng: np.random.Generator, cases: int) -> int:
    """A word that becomes anything."""
    place = rng.integers(len(slab.words), size=cases)
    to = rng.integers(0, 2**64, size=cases, dtype=np.uint64)

    def damaged(case: int) -> np.ndarray:
        out = slab.words.copy()
        out[place[case]] = to[case]
        return out

    return slab.assert_seen(slab.change(place, to), damaged)


def swaps(slab: Slab, rng: np.random.Generator, cases: int, size: int) -> int:
    """Two runs of ``size`` words change places: words, heads, tokens."""
    runs = len(slab.words) // size
    one, other = rng.integers(runs, size=(2, cases))
    one, other = one[one != other], other[one != other]
    by_run = slab.words.reshape(runs, size)
    differ = (by_run[one] != by_run[other]).any(axis=1)
    one, other = one[differ], other[differ]
    folded, factors = slab.fold(by_run), slab.factors.reshape(runs, size)
    changes = ((folded[other] - folded[one]) * (factors[one] - factors[other])).sum(axis=1, dtype=np.uint64)

    def damaged(case: int) -> np.ndarray:
        out = by_run.copy()
        out[one[case]], out[other[case]] = by_run[other[case]], by_run[one[case]]
        return out.reshape(-1)

    return slab.assert_seen(changes, damaged)


def truncations(slab: Slab, rest: np.ndarray) -> int:
    """Cut at each byte: what follows is ``rest``, such as zeros or what was there before."""
    cut = np.arange(8 * len(slab.words))
    word, byte = cut // 8, (cut % 8).astype(np.uint64)
    kept = (np.uint64(1) << (np.uint64(8) * byte)) - np.uint64(1)
    edge = (slab.words[word] & kept) | (rest[word] & ~kept)
    swapped = slab.fold(rest) * slab.factors - slab.terms
    after = np.append(np.cumsum(swapped[::-1], dtype=np.uint64)[::-1], np.uint64(0))
    changes = slab.change(word, edge) + after[word + 1]
    mine, other = slab.words.view(np.uint8), rest.view(np.uint8)
    last = int(np.flatnonzero(mine != other)[-1])
    cut, changes = cut[: last + 1], changes[: last + 1]

    def damaged(case: int) -> np.ndarray:
        return np.concatenate([mine[: cut[case]], other[cut[case] :]]).view(np.uint64)

    return slab.assert_seen(changes, damaged)


WORDS = 64 * 8 * 128 * 2 // 8


@pytest.mark.timeout(120)
def test_millions_of_cases_of_damage_are_all_seen() -> None:
    rng = np.random.default_rng(20261129)
    seen = 0
    for words in (kv_words(13, WORDS), random_words(13, WORDS), np.zeros(WORDS, np.uint64)):
        slab = Slab(words)
        seen += flips(slab, rng, 100_000)
        seen += double_flips(slab, rng, 500_000)
        seen += garbage(slab, rng, 100_000)
    for words in (kv_words(14, WORDS), random_words(14, WORDS)):
        slab = Slab(words)
        for size, cases in ((1, 60_000), (32, 20_000), (256, 2_000)):
            seen += swaps(slab, rng, cases, size)
        for rest in (np.zeros(WORDS, np.uint64), np.full(WORDS, MASK, np.uint64), kv_words(15, WORDS)):
            seen += truncations(slab, rest)
    assert seen >= 2_500_000


def test_slabs_of_many_pages_all_have_checksums_of_their_own() -> None:
    """So that no two of them can change places unseen: half a million pairs."""
    found = sums(kv_words(16, 1024, 64)).tolist()
    assert len(set(found)) == len(found)
