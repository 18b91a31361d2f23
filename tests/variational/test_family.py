"""What families of q(u) have in common."""

import torch
from builders import F64, matern, normal, uniform

from pyro_nngp.likelihoods import Gaussian
from pyro_nngp.models import VNNGP
from pyro_nngp.models.base.intervals import information_of
from pyro_nngp.variational import MeanField


def mean_field(likelihood):
    torch.manual_seed(0)
    return VNNGP(uniform(20), normal(20), matern(), likelihood, num_neighbors=5, guide=MeanField())


def test_gaussian_data_are_observations_of_f_with_the_precision_of_the_noise():
    gp = mean_field(Gaussian(torch.tensor(0.25, dtype=F64)))
    precision = gp.q.site_precision(gp.posterior(gp.bound()))
    torch.testing.assert_close(precision.detach(), torch.full((20,), 4.0, dtype=F64))


def test_a_mean_field_family_has_no_profile_and_no_intervals_from_one():
    gp = mean_field(Gaussian())
    assert not gp.profile.applies
    assert isinstance(information_of(gp), str)
