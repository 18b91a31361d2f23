import pyro.distributions as dist
import torch

from pyro_nngp.distributions.partly_observed import PartlyObservedNormal

F64 = torch.float64


def test_missing_entries_are_integrated_out():
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(5, 3, 3, generator=generator, dtype=F64)
    cov, loc = root @ root.mT + torch.eye(3), torch.randn(5, 3, generator=generator, dtype=F64)
    y = torch.randn(5, 3, generator=generator, dtype=F64)
    q = PartlyObservedNormal(loc, cov, validate_args=False)
    whole = dist.MultivariateNormal(loc, cov).log_prob(y)
    torch.testing.assert_close(q.log_prob(y), whole)
    pattern = torch.tensor([[0, 0, 0], [1, 0, 0], [0, 1, 1], [0, 1, 0], [1, 1, 1]], dtype=torch.bool)
    found = q.expand((5,)).log_prob(y.masked_fill(pattern, torch.nan))
    for i, missing in enumerate(pattern):
        rows = (~missing).nonzero()[:, 0]
        if not len(rows):
            want = torch.zeros((), dtype=F64)
        else:
            want = dist.MultivariateNormal(loc[i, rows], cov[i][rows][:, rows]).log_prob(y[i, rows])
        torch.testing.assert_close(found[i], want)
