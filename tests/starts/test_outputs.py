"""Starts of several outputs: levels and spreads of each, shared latent functions."""

import torch

from pyro_nngp.inference import fit
from pyro_nngp.models import CoregionalizedLOO, Vecchia

F64 = torch.float64
N = 300
UTM = torch.tensor([5e5, 5e6], dtype=F64)


def test_outputs_have_levels_of_their_own(field):
    x, _, y = field
    both = torch.stack([y, 50 + y.flip(0)], -1)
    gp = Vecchia(x, both)
    torch.testing.assert_close(gp.mean.value.detach(), both.median(0).values)
    gp.solve()
    for output in range(2):
        one = Vecchia(x, both[:, output], gp.kernel, gp.likelihood)
        one.solve()
        torch.testing.assert_close(gp.mean.value[output], one.mean.value)


def test_correlated_outputs_in_raw_units(field):
    x, f, y = field
    both = torch.stack([3e5 + 1e5 * y, -2 + 1e-3 * (f + 0.1 * y)], -1)
    gp = CoregionalizedLOO(UTM + 1e5 * x[:N], both[:N], 2, num_neighbors=8)
    fit(gp, 5, batch_size=100, progress=False)
    loc = gp(UTM + 1e5 * x[N:])[0].detach()
    for output in range(2):
        assert 1 - float((loc[output] - both[N:, output]).square().mean() / both[N:, output].var()) > 0.8
