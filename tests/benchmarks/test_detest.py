"""The DETEST problems are the published ones, and seminode solves them accurately and at a fair price."""

import math

import numpy as np
import pytest
import torch
from scipy import integrate

from benchmarks import detest
from benchmarks.detest import PROBLEMS, DetestProblem, Run

CLOSED_FORM = [problem for problem in PROBLEMS.values() if problem.exact is not None]

# First and last component of y(20), from Algorithm 648: W. H. Enright, J. D. Pryce, "Two FORTRAN packages for
# assessing initial value methods", ACM Trans. Math. Softw. 13 (1987) 1-27.
PUBLISHED = {
    "A1": (2.061153353012535e-09, 2.061153353012535e-09),
    "A2": (2.182178902359887e-01, 2.182178902359887e-01),
    "A3": (2.491650271850414e00, 2.491650271850414e00),
    "A4": (1.773016648131483e01, 1.773016648131483e01),
    "A5": (-7.887826688964196e-01, -7.887826688964196e-01),
    "B1": (6.761876008576667e-01, 1.860816099640036e-01),
    "B2": (1.000000001030576e00, 9.999999989694235e-01),
    "B3": (2.061153488557776e-09, 9.474277177183630e-01),
    "B4": (9.826950928005993e-01, 9.129452507276399e-01),
    "B5": (-9.396570798729192e-01, 7.414126596199957e-01),
    "C1": (2.061153622240064e-09, 9.979127409508656e-01),
    "C2": (2.061153577984930e-09, 9.999999814496180e-01),
    "C3": (2.948119211022058e-03, 2.762434379029886e-03),
    "C4": (3.124111453721466e-03, 1.891330702629865e-14),
    "C5": (-4.792730224323733e00, -3.189687411323877e-02),
    "D1": (2.198835352008397e-01, 3.287977990962036e-01),
    "D2": (-1.777027357140412e-01, 1.211074890053952e-01),
    "D3": (-5.780432953035361e-01, -6.504915126712089e-02),
    "D4": (-9.538990293416394e-01, -1.539574259125825e-01),
    "D5": (-1.295266250987574e00, -1.270838154278686e-01),
    "E1": (1.456723600728308e-01, -9.883500195574063e-02),
    "E2": (2.008149762174948e00, -4.250887527320057e-02),
    "E3": (-1.004178858647128e-01, 2.411400132095954e-01),
    "E4": (3.395091444646555e01, 2.767822659672869e-01),
    "E5": (1.411797390542629e01, 2.400000000000002e00),
}


def names(problems):
    return [problem.name for problem in problems]


def trajectory(problem: DetestProblem) -> torch.Tensor:
    """The reference solution at nine times, time axis first."""
    sol = integrate.solve_ivp(
        lambda t, y: problem.field(torch.tensor(t, dtype=torch.float64), torch.from_numpy(y)).numpy(),
        (0.0, problem.t_end),
        problem.y0.numpy(),
        method="DOP853",
        t_eval=np.linspace(0.0, problem.t_end, 9),
        rtol=1e-12,
        atol=1e-13,
    )
    return torch.from_numpy(sol.y.T.copy())


# The problems.


def test_the_set_is_complete():
    assert list(PROBLEMS) == [letter + digit for letter in "ABCDE" for digit in "12345"]
    sizes = [1] * 5 + [2, 3, 3, 3, 3] + [10, 10, 10, 51, 30] + [4] * 5 + [2] * 5
    assert [problem.y0.numel() for problem in PROBLEMS.values()] == sizes
    assert names(problem for problem in PROBLEMS.values() if problem.exact is None) == [
        "B1",
        "C5",
        "E2",
        "E3",
    ]


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=names(PROBLEMS.values()))
def test_field_keeps_shape_and_dtype(problem):
    dy = problem.field(torch.tensor(0.0, dtype=torch.float64), problem.y0)
    assert problem.t_end == 20.0
    assert dy.dtype == problem.y0.dtype == torch.float64
    assert dy.shape == problem.y0.shape == (problem.y0.numel(),)


@pytest.mark.parametrize("problem", CLOSED_FORM, ids=names(CLOSED_FORM))
def test_closed_form_satisfies_the_equation(problem):
    torch.testing.assert_close(problem.exact(0.0), problem.y0, rtol=1e-14, atol=1e-14)
    h = 1e-3
    for t in (0.5, 3.7, 11.2, 19.5):
        values = [problem.exact(t + k * h) for k in (-2, -1, 1, 2)]
        derivative = (values[0] - 8 * values[1] + 8 * values[2] - values[3]) / (12 * h)
        expected = problem.field(torch.tensor(t, dtype=torch.float64), problem.exact(t))
        torch.testing.assert_close(derivative, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=names(PROBLEMS.values()))
def test_reference_is_the_published_solution(problem):
    end = detest.reference(problem)
    published = torch.tensor(PUBLISHED[problem.name], dtype=torch.float64)
    torch.testing.assert_close(end[[0, -1]], published, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("problem", CLOSED_FORM, ids=names(CLOSED_FORM))
def test_numerical_reference_meets_the_closed_form(problem):
    end, _ = detest.solve_scipy(problem, "DOP853", rtol=1e-13, atol=1e-14)
    assert detest.endpoint_error(problem, end) < 1e-11


def test_five_bodies_are_six_bodies_seen_from_the_sun():
    """Newton's law in an inertial frame, body by body, minus the acceleration of the Sun."""
    y = PROBLEMS["C5"].y0.numpy().reshape(2, 5, 3)
    masses = [detest.SUN_MASS, *detest.PLANET_MASSES.tolist()]
    places = [np.zeros(3), *y[0]]

    def acceleration(i):
        pulls = [
            m * (x - places[i]) / np.linalg.norm(x - places[i]) ** 3
            for j, (m, x) in enumerate(zip(masses, places, strict=True))
            if j != i
        ]
        return detest.GRAVITY * np.sum(pulls, axis=0)

    expected = np.concatenate([y[1], [acceleration(i) - acceleration(0) for i in range(1, 6)]])
    actual = PROBLEMS["C5"].field(torch.tensor(0.0, dtype=torch.float64), PROBLEMS["C5"].y0)
    np.testing.assert_allclose(actual.reshape(10, 3).numpy(), expected, rtol=1e-13, atol=1e-16)


def five_body_invariants(y: torch.Tensor) -> torch.Tensor:
    """Energy and angular momentum of Sun and planets about their centre of mass."""
    masses = torch.cat([torch.tensor([detest.SUN_MASS], dtype=torch.float64), detest.PLANET_MASSES])
    bodies = torch.cat([torch.zeros(2, 1, 3, dtype=torch.float64), y.view(2, 5, 3)], dim=1)
    position, velocity = bodies - (masses[:, None] * bodies).sum(1, keepdim=True) / masses.sum()
    kinetic = (masses * velocity.square().sum(-1)).sum() / 2
    i, j = torch.triu_indices(6, 6, offset=1)
    potential = -detest.GRAVITY * (masses[i] * masses[j] / (position[i] - position[j]).norm(dim=-1)).sum()
    spin = (masses[:, None] * torch.linalg.cross(position, velocity)).sum(0)
    return torch.cat([(kinetic + potential)[None], spin])


def orbit_invariants(y: torch.Tensor) -> torch.Tensor:
    """Energy and angular momentum."""
    x1, x2, v1, v2 = y.unbind()
    return torch.stack([(v1**2 + v2**2) / 2 - 1 / torch.hypot(x1, x2), x1 * v2 - x2 * v1])


def population_invariant(y: torch.Tensor) -> torch.Tensor:
    return y[0] - y[0].log() + 2 * (y[1] - y[1].log())


@pytest.mark.parametrize(
    ("name", "invariants"),
    [("B1", population_invariant), ("C5", five_body_invariants)] + [(f"D{i}", orbit_invariants) for i in range(1, 6)],
)
def test_invariants_hold_along_the_solution(name, invariants):
    first, *later = [invariants(y) for y in trajectory(PROBLEMS[name])]
    for value in later:
        torch.testing.assert_close(value, first, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("E2", lambda t, x, dx: (1 - x * x) * dx - x),
        ("E3", lambda t, x, dx: x * x * x / 6 - x + 2 * math.sin(2.78535 * t)),
    ],
)
def test_oscillators(name, field):
    for t, x, dx in [(0.0, 2.0, 0.0), (1.3, -0.7, 0.4), (17.0, 1.5, -2.5)]:
        actual = PROBLEMS[name].field(torch.tensor(t, dtype=torch.float64), detest.vector(x, dx))
        torch.testing.assert_close(actual, detest.vector(dx, field(t, x, dx)), rtol=1e-14, atol=1e-14)


# The measurement.


def runs(points):
    return [Run(error, nfe) for error, nfe in points]


def test_ratio_at_equal_error():
    theirs = runs([(10.0**-k, 100 * 2**k) for k in range(3, 9)])
    shifted = runs([(10.0 ** (-k - 0.5), 150 * 2**k) for k in range(3, 9)])
    assert detest.nfe_ratio(theirs, theirs) == pytest.approx(1.0)
    assert detest.nfe_ratio(shifted, theirs) == pytest.approx(1.5 / math.sqrt(2))
    assert math.isnan(detest.nfe_ratio(runs([(1e-3, 10), (1e-4, 20)]), runs([(1e-6, 10), (1e-7, 20)])))


def test_work_precision_is_monotone_and_drops_rounding():
    error, nfe = detest.work_precision(
        runs([(1e-3, 10), (1e-6, 20), (1e-5, 30), (1e-7, 40), (1e-14, 50), (math.nan, 5)])
    )
    np.testing.assert_allclose(np.exp(error), [1e-7, 10**-5.5, 1e-3])
    np.testing.assert_allclose(np.exp(nfe), [40, math.sqrt(600), 10])


def test_command_prints_and_writes_the_tables(tmp_path, capsys):
    path = tmp_path / "detest.md"
    detest.main(["--problems", "A1,E5", "--rtols", "1e-3,1e-4", "--markdown", str(path)])
    printed = capsys.readouterr()
    assert printed.out == path.read_text()
    assert "dopri5 / RK45: 2 problems, median NFE ratio" in printed.out
    assert len([line for line in printed.out.splitlines() if line.startswith("|") and "e-04" in line]) >= 2
    assert "E5" in printed.err


def test_command_refuses_an_unknown_problem(capsys):
    with pytest.raises(SystemExit):
        detest.main(["--problems", "A1,Z9"])
    assert "unknown Z9" in capsys.readouterr().err


# seminode on the problems.


@pytest.mark.parametrize("solver", detest.SEMINODE)
@pytest.mark.parametrize("letter", "ABCDE")
def test_endpoint_error_follows_the_tolerance(letter, solver):
    rtol = 1e-6
    # An error in the energy of an orbit changes its period, so errors of class D grow like the square of time.
    bound = (5e3 if letter == "D" else 3e2) * rtol
    errors = {
        name: detest.measure(problem, solver, rtol, rtol).error
        for name, problem in PROBLEMS.items()
        if name.startswith(letter)
    }
    assert {name: error for name, error in errors.items() if not error <= bound} == {}


@pytest.mark.slow
def test_dopri5_needs_no_more_evaluations_than_scipy():
    ratios = [
        detest.nfe_ratio(detest.ladder(problem, "dopri5"), detest.ladder(problem, "RK45"))
        for problem in PROBLEMS.values()
    ]
    assert np.isfinite(ratios).sum() >= 20
    assert np.nanmedian(ratios) <= detest.REQUIRED_RATIO
