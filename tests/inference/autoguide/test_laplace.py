"""The normal approximation to a density without a gradient: mode, curvature and how often the density is evaluated."""

import numpy as np
import pytest

from pyro_nngp.inference.autoguide import laplace

PRECISION = np.array([[400.0, -90.0, 3.0], [-90.0, 60.0, 1.0], [3.0, 1.0, 9.0]])
TOP = np.array([0.7, -1.4, 2.1])


class Counted:
    """A log density that knows how often it was evaluated."""

    def __init__(self, log_density):
        self.log_density, self.calls = log_density, 0

    def __call__(self, u):
        self.calls += 1
        return self.log_density(u)


def mode(log_density, start):
    """The mode of a density that holds everywhere."""
    return laplace.mode(log_density, start, lambda u, least: log_density(u))


def normal(u):
    return -(u - TOP) @ PRECISION @ (u - TOP) / 2


def test_a_normal_density_is_found_exactly():
    counted = Counted(normal)
    found, cov = mode(counted, np.zeros(3))
    np.testing.assert_allclose(found, TOP, atol=1e-8)
    np.testing.assert_allclose(cov, np.linalg.inv(PRECISION), rtol=1e-6)
    assert counted.calls <= 50  # five quadratic functions of seven and ten points, and steps of at most one


@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_log_gamma_densities(scale):
    """Of logs of gamma variables, skew, with curvatures `scale` times (1, 4)."""
    shape = scale * np.array([1.0, 4.0])
    counted = Counted(lambda u: float((shape * (u - np.exp(u))).sum()))
    found, cov = mode(counted, np.array([2.5, -1.5]))
    assert (np.abs(found) < 0.3 / np.sqrt(shape)).all()
    np.testing.assert_allclose(cov, np.diag(1 / shape), rtol=0.15, atol=0.01 / scale)
    assert counted.calls <= 70


def test_flat_and_impossible_directions():
    """Where nothing is known the standard deviation is 1, and a cliff beside the mode does not hide it."""
    found, cov = mode(lambda u: -8 * (u[0] - 0.3) ** 2 - 1e-4 * u[1] ** 2, np.zeros(2))
    assert abs(found[0] - 0.3) < 1e-6
    np.testing.assert_allclose(np.diag(cov), [1 / 16, 1.0], rtol=1e-3)
    found, _ = mode(lambda u: -1e10 if u[0] > 0.55 else -200 * (u[0] - 0.5) ** 2, np.zeros(1))
    assert abs(found[0] - 0.5) < 0.02


def test_a_density_that_holds_near_a_point_alone_is_followed_by_moves():
    """The local density grows without limit away from its point; that of the moves does not."""
    center = [0.0]

    def exact(u):
        return float(-8 * (u[0] - 3) ** 2)

    def local(u):
        return exact(u) + 100 * (u[0] - center[0]) ** 4

    def move(u, least):
        if exact(u) > least:
            center[0] = u[0]
        return exact(u)

    found, cov = laplace.mode(local, np.zeros(1), move)
    assert abs(found[0] - 3) < 1e-6
    np.testing.assert_allclose(cov, [[1 / 16]], rtol=0.3)  # the fourth power has a part in the differences


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_start_far_from_the_mode(seed):
    """The evidence of a process by logs of variance, range and noise, which is not concave where the noise is small."""
    random = np.random.default_rng(seed)
    x = np.sort(random.uniform(0, 10, 60))
    distance = np.sqrt(3) * np.abs(x[:, None] - x)

    def cov(variance, scale):
        return variance * (1 + distance / scale) * np.exp(-distance / scale)

    y = np.linalg.cholesky(cov(0.45, 0.6) + 1e-9 * np.eye(60)) @ random.standard_normal(60)
    y += 0.58 * random.standard_normal(60)

    def log_density(u):
        variance, scale, noise = np.exp(u)
        total = cov(variance, scale) + noise**2 * np.eye(60)
        evidence = -np.linalg.slogdet(total)[1] - y @ np.linalg.solve(total, y)
        return float(evidence - np.square(u - np.log([0.5, 1.0, 0.3])).sum()) / 2

    near, _ = mode(log_density, np.log([0.5, 0.6, 0.5]))
    far, _ = mode(log_density, np.log([3.0, 30.0, 0.02]))
    np.testing.assert_allclose(far, near, atol=0.1)  # a third of a standard deviation


def test_a_density_without_a_mode():
    with pytest.warns(UserWarning, match=r"expected the mode of u, got a density that still rises, by 1.5 nats"):
        found, _ = laplace.mode(lambda u: float(3 * u[0]), np.zeros(1), lambda u, least: float(3 * u[0]), ["u"])
    assert found[0] > 10
