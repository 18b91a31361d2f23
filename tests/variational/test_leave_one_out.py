"""The cavity distribution undoes conditioning."""

import torch

from pyro_nngp.variational.leave_one_out import without_site

DTYPE = torch.float64


def test_cavity_undoes_conditioning():
    prior_loc, prior_var, target, precision = (torch.tensor(v, dtype=DTYPE) for v in (0.3, 1.7, -0.4, 2.5))
    var = 1 / (1 / prior_var + precision)
    loc = var * (prior_loc / prior_var + precision * target)
    torch.testing.assert_close(without_site(loc, var, target, precision), (prior_loc, prior_var), rtol=1e-12, atol=0)
