"""Log-signatures, against iterated integrals in exact arithmetic and a naive logarithm of words."""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from fractions import Fraction
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

import seminode as sn
from seminode import paths
from seminode.paths.lyndon import lyndon_words

Word = tuple[int, ...]
Series = dict[Word, Fraction]


def walk(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Random paths (batch..., K, channels) through multiples of 1/8, which fractions and floats write alike."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-12, 13, shape, generator=generator).to(dtype) / 8


def iterated_integrals(x: Tensor, depth: int) -> Series:
    """∫ dX^{i₁} … dX^{iₖ} over t₁ < … < tₖ: on each piece polynomials, integrated one after the other."""
    knots = [[Fraction(v) for v in row] for row in x.tolist()]
    channels = range(x.shape[-1])
    total: Series = {(): Fraction(1)}
    for k in range(1, depth + 1):
        total.update(dict.fromkeys(itertools.product(channels, repeat=k), Fraction(0)))
    for before, after in itertools.pairwise(knots):
        steps = [b - a for a, b in zip(before, after, strict=True)]
        inside: dict[Word, list[Fraction]] = {(): [Fraction(1)]}  # polynomials in u from 0 to 1
        for word in sorted(total, key=len):
            if word:
                *_, letter = word
                integrand = inside[word[:-1]]
                integral = [steps[letter] * c / (m + 1) for m, c in enumerate(integrand)]
                inside[word] = [total[word], *integral]
        total = {word: sum(polynomial, Fraction(0)) for word, polynomial in inside.items()}
    return total


def product(a: Series, b: Series, depth: int) -> Series:
    result: Series = defaultdict(Fraction)
    for (u, x), (v, y) in itertools.product(a.items(), b.items()):
        if len(u) + len(v) <= depth:
            result[u + v] += x * y
    return result


def logarithm(signature: Series, depth: int) -> Series:
    """Σₙ (−1)ⁿ⁺¹/n · (S − 1)ⁿ."""
    rest = {word: c for word, c in signature.items() if word}
    power, result = rest, defaultdict(Fraction, rest)
    for n in range(2, depth + 1):
        power = product(power, rest, depth)
        for word, c in power.items():
            result[word] += Fraction((-1) ** (n + 1), n) * c
    return result


def bracket(word: Word) -> Series:
    """The Lie bracket of a Lyndon word, split before its smallest proper suffix."""
    if len(word) == 1:
        return {word: Fraction(1)}
    cut = min(range(1, len(word)), key=lambda i: word[i:])
    u, v = bracket(word[:cut]), bracket(word[cut:])
    result = product(u, v, len(word))
    for w, c in product(v, u, len(word)).items():
        result[w] -= c
    return result


SIZES = [(1, 3), (2, 1), (2, 2), (2, 3), (2, 4), (3, 2), (3, 3), (3, 4), (4, 3)]


@pytest.mark.parametrize(("channels", "depth"), SIZES)
def test_words_are_those_of_the_exact_logarithm(channels: int, depth: int) -> None:
    x = walk(5, channels)
    exact = logarithm(iterated_integrals(x, depth), depth)
    found = paths.logsignature(x, depth)
    expected = torch.tensor([float(exact[w]) for w in lyndon_words(channels, depth)], dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(paths.logsignature(x.float(), depth), expected.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("channels", "depth"), [*SIZES, (2, 6)])
def test_brackets_make_up_the_whole_logarithm(channels: int, depth: int) -> None:
    """Not only at Lyndon words: Σ λ_w [w] has the right coefficient at every word."""
    x = walk(4, channels, seed=1)
    exact = logarithm(iterated_integrals(x, depth), depth)
    made: dict[Word, float] = defaultdict(float)
    coefficients = paths.logsignature(x, depth, basis="brackets").tolist()
    for word, coefficient in zip(lyndon_words(channels, depth), coefficients, strict=True):
        for w, c in bracket(word).items():
            made[w] += coefficient * float(c)
    for word in exact:
        assert made[word] == pytest.approx(float(exact[word]), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("channels", [1, 2, 3, 5])
@pytest.mark.parametrize("depth", [1, 2, 3, 4, 5])
def test_as_many_as_necklaces(channels: int, depth: int) -> None:
    words = lyndon_words(channels, depth)
    rotations = (
        w
        for k in range(1, depth + 1)
        for w in itertools.product(range(channels), repeat=k)
        if all(w < w[i:] + w[:i] for i in range(1, k))
    )
    assert list(words) == list(rotations)
    assert len(words) == paths.logsignature_channels(channels, depth)
    assert paths.logsignature(walk(3, channels), depth).shape == (len(words),)


def test_low_levels_in_closed_form() -> None:
    x = walk(7, 6, 3)
    total = x[:, -1] - x[:, 0]
    assert torch.equal(paths.logsignature(x, 1), total)
    y, dx = x[:, :-1] - x[:, :1], x.diff(dim=1)
    area = 0.5 * (torch.einsum("bni,bnj->bij", y, dx) - torch.einsum("bni,bnj->bji", y, dx))
    pairs = torch.stack((area[:, 0, 1], area[:, 0, 2], area[:, 1, 2]), -1)
    for basis in ("words", "brackets"):
        torch.testing.assert_close(paths.logsignature(x, 2, basis=basis), torch.cat((total, pairs), -1))


@pytest.mark.parametrize("basis", ["words", "brackets"])
def test_what_does_not_matter(basis: Literal["words", "brackets"]) -> None:
    """The pace, knots on the way, a shift; what does: going back gives the negative, and cancels."""
    x = walk(4, 6, 3)
    found = paths.logsignature(x, 4, basis=basis)
    at = torch.tensor([0.0, 0.2, 0.9, 1.0, 1.5, 2.0, 2.3, 3.0, 4.0, 4.1, 5.0], dtype=torch.float64)
    refined = paths.linear(x).evaluate(at).movedim(0, 1)
    torch.testing.assert_close(paths.logsignature(refined, 4, basis=basis), found)
    torch.testing.assert_close(paths.logsignature(x + 7.0, 4, basis=basis), found)
    torch.testing.assert_close(paths.logsignature(x.flip(1), 4, basis=basis), -found)
    there_and_back = torch.cat((x, x.flip(1)[:, 1:]), 1)
    torch.testing.assert_close(paths.logsignature(there_and_back, 4, basis=basis), torch.zeros_like(found))


def test_chen() -> None:
    """In exact arithmetic the reference obeys it, so what agrees with the reference does."""
    x = walk(6, 2)
    whole = iterated_integrals(x, 4)
    parts = product(iterated_integrals(x[:4], 4), iterated_integrals(x[3:], 4), 4)
    assert whole == parts


def test_differentiable() -> None:
    x = walk(2, 4, 2).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: paths.logsignature(x, 3), x)
    assert torch.autograd.gradcheck(lambda x: paths.logsignature(x, 4, basis="brackets"), x)
    times = torch.tensor([0.0, 1.1, 1.7, 3.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, times: paths.logsignature_windows(x, 3, 0.8, times), (x, times))


def test_windows_of_whole_steps() -> None:
    x = walk(2, 5, 21, 3)
    knots = paths.logsignature_windows(x, 3, 4.0)
    assert knots.shape == (2, 5, 6, 14)
    torch.testing.assert_close(knots[..., 0, :3], x[..., 0, :])
    assert bool((knots[..., 0, 3:] == 0).all())
    for i in range(5):
        window = paths.logsignature(x[..., 4 * i : 4 * i + 5, :], 3)
        torch.testing.assert_close(knots[..., i + 1, :] - knots[..., i, :], window)
    torch.testing.assert_close(knots[..., -1, :3], x[..., -1, :])
    torch.testing.assert_close(paths.logsignature_windows(x, 1, 4.0), x[..., ::4, :])


@pytest.mark.parametrize("own", [False, True], ids=["shared", "own times"])
@pytest.mark.parametrize("lengths", [None, [12, 5, 1]], ids=["whole", "lengths"])
def test_windows_that_cut_through_steps(own: bool, lengths: Any) -> None:
    """Irregular knots, gaps, a last window that is shorter: as if the path were cut at the edges."""
    generator = torch.Generator().manual_seed(4)
    times = (0.1 + torch.rand(*([3, 12] if own else [12]), generator=generator, dtype=torch.float64)).cumsum(-1)
    x = walk(3, 12, 2)
    x[:, 1:][torch.rand(3, 11, 2, generator=generator) < 0.3] = torch.nan
    knots = paths.logsignature_windows(x, 3, 0.9, times, lengths=lengths)
    path = paths.linear(x, times, lengths=lengths)
    t0, t1 = path.interval
    edges = [*torch.arange(t0, t1, 0.9, dtype=torch.float64).tolist(), t1]
    assert knots.shape == (3, len(edges), 5)
    for i, (a, b) in enumerate(itertools.pairwise(edges)):
        inner = path.times[(path.times > a) & (path.times < b)].unique()
        at = torch.cat((torch.tensor([a], dtype=torch.float64), inner, torch.tensor([b], dtype=torch.float64)))
        window = paths.logsignature(path.evaluate(at).movedim(0, 1), 3)
        torch.testing.assert_close(knots[:, i + 1] - knots[:, i], window)
    if lengths:
        assert bool((knots[2].diff(dim=0) == 0).all())


@pytest.mark.parametrize("window", [0.1, 0.3, 0.7])
def test_rounding_makes_no_extra_window(window: float) -> None:
    for count in range(2, 40):
        times = [window * i for i in range(count + 1)]
        x = walk(count + 1, 2)
        for dtype in (torch.float64, torch.float32):
            knots = paths.logsignature_windows(x.to(dtype), 2, window, torch.tensor(times, dtype=dtype))
            assert knots.shape == (count + 1, 3)


def test_log_ode_method() -> None:
    """y′ = y·A_i dX^i over a window is y·exp(Σ λ_w [A]_w) up to the terms left out, one order more for each level."""
    generator = torch.Generator().manual_seed(5)
    matrices = torch.randn(2, 3, 3, generator=generator, dtype=torch.float64)

    def commutator(word: Word) -> Tensor:
        total = torch.zeros(3, 3, dtype=torch.float64)
        for w, c in bracket(word).items():
            total += float(c) * functools.reduce(torch.matmul, [matrices[i] for i in w])
        return total

    def error(size: float, depth: int) -> float:
        x = size * walk(6, 2, seed=6)
        exact = torch.eye(3, dtype=torch.float64)
        for step in x.diff(dim=0):
            exact = exact @ torch.matrix_exp((step.reshape(2, 1, 1) * matrices).sum(0))
        coefficients = paths.logsignature(x, depth, basis="brackets")
        exponent = sum(c * commutator(w) for c, w in zip(coefficients, lyndon_words(2, depth), strict=True))
        return float((torch.matrix_exp(torch.as_tensor(exponent)) - exact).abs().max())

    for depth in (1, 2, 3, 4):
        assert error(0.02, depth) / error(0.01, depth) == pytest.approx(2.0 ** (depth + 1), rel=0.2)


def test_a_solve_along_windows() -> None:
    knots = paths.logsignature_windows(walk(4, 101, 2, dtype=torch.float32), 2, 10.0)
    path = paths.linear(knots)
    sol = sn.solve(lambda t, z: 0.01 * path.derivative(t), torch.zeros(4, 3), path.interval, jumps=path.jumps)
    assert sol.stats.jumps == 9
    torch.testing.assert_close(sol.ys[-1], 0.01 * (knots[:, -1] - knots[:, 0]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((walk(4, 2), 0), ValueError, "depth: expected a whole number of at least 1, found 0"),
        ((walk(4, 2), 2.0), ValueError, "depth: expected a whole number of at least 1, found 2.0"),
        ((walk(4, 2), 2, "letters"), ValueError, "basis: expected 'words' or 'brackets', found 'letters'"),
        ((walk(1, 2), 2), ValueError, "x: expected at least 2 knots"),
        ((walk(4, 2) / 0.0, 2), ValueError, "x: expected finite values"),
    ],
)
def test_mistakes(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        paths.logsignature(*arguments)


@pytest.mark.parametrize("window", [0.0, -1.0, float("inf")])
def test_mistaken_windows(window: float) -> None:
    with pytest.raises(ValueError, match="window_length: expected a"):
        paths.logsignature_windows(walk(4, 2), 2, window)


def test_edges_of_windows() -> None:
    times = torch.tensor([0.5, 1.0, 4.0], dtype=torch.float64, requires_grad=True)
    edges = paths.window_edges(times, 1.5)
    assert edges.tolist() == [0.5, 2.0, 3.5, 4.0]
    (grad,) = torch.autograd.grad(edges.sum(), times)
    assert grad.tolist() == [3.0, 0.0, 1.0]
