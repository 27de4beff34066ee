"""Lyndon words. They index a basis of the free Lie algebra.

A word is a Lyndon word if it is smaller than all its rotations. Letters are the channels 0, 1, …
"""

from __future__ import annotations

from collections import defaultdict
from functools import lru_cache
from itertools import groupby

Word = tuple[int, ...]
Polynomial = dict[Word, int]


def logsignature_channels(channels: int, depth: int) -> int:
    """The number of channels of a log-signature, which is the number of Lyndon words of up to `depth` letters.

    Witt's formula: Σₖ 1/k Σ_{m | k} μ(k/m)·channelsᵐ. Reutenauer, *Free Lie Algebras* (1993); Reizenstein and Graham,
    *The iisignature library*, ACM TOMS 2020, arXiv:1802.08252.

    Arguments:
        channels: number of channels of the path.
        depth: of the log-signature.

    Example:
        >>> from seminode import paths
        >>> [paths.logsignature_channels(3, depth) for depth in (1, 2, 3, 4)]
        [3, 6, 14, 32]
    """
    total = 0
    for k in range(1, depth + 1):
        total += sum(_mobius(k // m) * channels**m for m in range(1, k + 1) if k % m == 0) // k
    return total


def _mobius(n: int) -> int:
    sign, p = 1, 2
    while n > 1:
        if n % p == 0:
            n //= p
            if n % p == 0:
                return 0
            sign = -sign
        p += 1
    return sign


@lru_cache(maxsize=64)
def lyndon_words(channels: int, depth: int) -> tuple[Word, ...]:
    """All Lyndon words of up to `depth` letters, by length, then in alphabetical order (Duval, 1988)."""
    words: list[Word] = []
    word = [-1]
    while word:
        word[-1] += 1
        words.append(tuple(word))
        word = [word[i % len(word)] for i in range(depth)]
        while word and word[-1] == channels - 1:
            word.pop()
    return tuple(sorted(words, key=lambda w: (len(w), w)))


@lru_cache(maxsize=4096)
def _expanded(word: Word) -> tuple[tuple[Word, int], ...]:
    """The standard bracket of a Lyndon word as a polynomial: [u, v] = uv − vu, where v is its longest Lyndon suffix."""
    if len(word) == 1:
        return ((word, 1),)
    cut = next(i for i in range(1, len(word)) if _is_lyndon(word[i:]))
    total: Polynomial = defaultdict(int)
    for u, a in _expanded(word[:cut]):
        for v, b in _expanded(word[cut:]):
            total[u + v] += a * b
            total[v + u] -= a * b
    return tuple((w, c) for w, c in total.items() if c)


def _is_lyndon(word: Word) -> bool:
    return all(word < word[i:] for i in range(1, len(word)))


@lru_cache(maxsize=64)
def bracket_terms(channels: int, depth: int) -> tuple[tuple[int, int, int], ...]:
    """Triples (row, column, c), sorted: bracket coefficient `row` is the sum of c times word coefficient `column`.

    The bracket of a Lyndon word v is v plus larger words with the same letters. So forward substitution among words
    with the same letters gives the coefficients of the brackets.
    """
    words = lyndon_words(channels, depth)
    place = {word: i for i, word in enumerate(words)}
    terms: list[tuple[int, int, int]] = []
    for _, group in groupby(sorted(words, key=lambda w: (len(w), sorted(w), w)), key=sorted):
        solved: list[tuple[Word, Polynomial]] = []
        for word in group:
            row: Polynomial = defaultdict(int, {word: 1})
            for smaller, combination in solved:
                factor = dict(_expanded(smaller)).get(word, 0)
                for w, c in combination.items():
                    row[w] -= factor * c
            solved.append((word, row))
            terms.extend((place[word], place[w], c) for w, c in row.items() if c)
    return tuple(sorted(terms))
