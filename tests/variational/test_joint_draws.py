"""Joint draws given observations by themselves; those of methods are in ``tests/models/base/test_trend.py``."""

import torch
from builders import matern, normal, uniform

from pyro_nngp.bound import Bound
from pyro_nngp.coefficients import Trend
from pyro_nngp.kernels import bind
from pyro_nngp.neighbors import NeighborGraph
from pyro_nngp.variational.joint_draws import draws_given_observations


def test_coefficients_move_all_new_values_of_a_draw_together():
    """Far from data, f less the mean function is the prior plus one coefficient for all points."""
    x, x_new = uniform(20), 40 + 30 * uniform(3)
    near = NeighborGraph(x, 5).extend(x_new, 5, 0)[1]
    trend = Trend(lambda x: torch.ones_like(x[:, :1]), torch.full((1, 1), 2.0).double(), True)
    bound = Bound(None, (bind(matern()),), None, None, 1e-6, trend=trend)
    draws = draws_given_observations(bound, x, x_new, near, normal(20), torch.ones(20).double(), 4000)
    want = 4 + 1.3 * torch.eye(3).double()
    error = ((want.diagonal()[:, None] * want.diagonal() + want.square()) / 4000).sqrt()
    assert ((torch.cov(draws.T) - want) / error).abs().max() < 6
