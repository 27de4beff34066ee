"""Filling of gaps: along straight lines, forward, and of channels that were never observed."""

from __future__ import annotations

import pytest
import torch
from observations import irregular, series

from seminode import paths

NAN = torch.nan


def test_linear_fill_is_the_path_at_its_knots() -> None:
    x, times = series(3, 9, 2, gaps=0.5), irregular(9)
    filled = paths.linear_fill(x, times)
    torch.testing.assert_close(filled, paths.linear(x, times).evaluate(times).movedim(0, -2))
    assert torch.equal(filled[~x.isnan()], x[~x.isnan()])


def test_rectilinear_knots_are_the_path_at_its_knots() -> None:
    x = paths.append_time(series(3, 6, 2), irregular(6))
    path = paths.rectilinear(x)
    torch.testing.assert_close(paths.rectilinear_knots(x), path.evaluate(path.times).movedim(0, -2))


@pytest.mark.parametrize("dim", [0, -2, 1])
def test_forward_fill(dim: int) -> None:
    x = torch.tensor([[NAN, 1.0], [2.0, NAN], [NAN, NAN], [3.0, NAN]]).movedim(0, dim)
    expected = torch.tensor([[NAN, 1.0], [2.0, 1.0], [2.0, 1.0], [3.0, 1.0]]).movedim(0, dim)
    torch.testing.assert_close(paths.forward_fill(x, dim), expected, equal_nan=True)


def test_filling_is_differentiable() -> None:
    """A gap passes its gradient on to the observation that fills it, and NaN spoils nothing."""
    x = torch.tensor([[1.0], [NAN], [4.0]], requires_grad=True)
    (grad,) = torch.autograd.grad(paths.forward_fill(x).sum(), x)
    assert grad.flatten().tolist() == [2.0, 0.0, 1.0]
    (grad,) = torch.autograd.grad(paths.linear_fill(x).sum(), x)
    assert grad.flatten().tolist() == [1.5, 0.0, 1.5]


def test_fill_unobserved_leaves_other_gaps() -> None:
    x = series(2, 5, 3, gaps=0.5)
    assert paths.fill_unobserved(x) is x
    x[1, :, 2] = NAN
    filled = paths.fill_unobserved(x, 7.0)
    assert filled[1, :, 2].tolist() == [7.0] * 5
    others = torch.ones(2, 3, dtype=torch.bool)
    others[1, 2] = False
    torch.testing.assert_close(filled.movedim(1, -1)[others], x.movedim(1, -1)[others], equal_nan=True)
    with pytest.raises(ValueError, match=r"x\[1, :, 2\]: expected at least one observation .* \(paths.fill_unobserved"):
        paths.natural_cubic(x)


@pytest.mark.parametrize("lengths", [None, torch.tensor([7, 5])])
def test_loose_ends_of_a_natural_spline(lengths: torch.Tensor | None) -> None:
    """The same as the spline through the observations and the first and last knot, with all other knots missing."""
    x = series(2, 7, 1, gaps=0.0)
    x[:, :2] = NAN
    x[0, -2:] = NAN
    x[1, 3:5] = NAN
    anchored = x.clone()
    anchored[:, 0] = x[:, 2]
    anchored[0, -1] = x[0, -3]
    anchored[1, -1 if lengths is None else 4] = x[1, -1 if lengths is None else 2]
    loose = paths.natural_cubic(x, lengths=lengths, ends="loose")
    expected = paths.natural_cubic(anchored, lengths=lengths, ends="held")
    torch.testing.assert_close(loose.coefficients, expected.coefficients)
    held = paths.natural_cubic(x, lengths=lengths)
    assert not torch.allclose(loose.coefficients, held.coefficients)
    with pytest.raises(ValueError, match="ends: expected 'held' or 'loose', found 'free'"):
        paths.natural_cubic(x, ends="free")  # type: ignore[arg-type]
