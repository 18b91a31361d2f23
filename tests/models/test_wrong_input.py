"""Wrong arguments of each method. Arguments that all methods refuse alike are in test_protocol."""

import pyro.distributions as dist
import pytest
import torch
from builders import matern, waves

from pyro_nngp.kernels import RBF
from pyro_nngp.likelihoods import Bernoulli, Binomial, Categorical, Gaussian, NegativeBinomial, Poisson, StudentT
from pyro_nngp.models import BSGP, LMC, LOO, NPVI, SVGP, SWSGP, VNNGP, Vecchia
from pyro_nngp.variational import Amortized, FullRank, MeanField, SparseCholesky

N, M = 40, 12
SETTINGS = {
    BSGP: {"inducing": M},
    LOO: {"num_neighbors": 6},
    SVGP: {"inducing": M},
    SWSGP: {"inducing": M, "num_neighbors": 5},
    VNNGP: {"num_neighbors": 6},
    Vecchia: {"num_neighbors": 6},
}
ONES = torch.ones(N)
LABELS = torch.arange(N) % 3
CASES = [
    (BSGP, {"inducing": N + 1}, r"BSGP: expected inducing in 2\.\.40, got 41"),
    (BSGP, {"inducing": torch.zeros(M, 3)}, r"expected inducing of shape \(M, 2\)"),
    (BSGP, {"objective": "elbo"}, r"expected objective to be 'fitc' or 'vfe', got 'elbo'"),
    (BSGP, {"inducing_prior": "gaussian"}, r"expected inducing_prior to be one of"),
    (BSGP, {"inducing_prior": dist.Normal(torch.zeros(M, 3), 1.0).to_event(2)}, r"a distribution over \(12, 2\)"),
    (BSGP, {"inducing_prior": 3}, r"BSGP: expected inducing_prior to be callable, got int"),
    (BSGP, {"num_layers": 0}, r"BSGP: expected num_layers >= 1, got 0"),
    (BSGP, {"num_draws": 1.5}, r"BSGP: expected num_draws to be an int, got 1.5"),
    (BSGP, {"hidden_dim": 0}, r"BSGP: expected hidden_dim >= 1, got 0"),
    (BSGP, {"hidden_dim": 10**15}, r"BSGP: expected hidden layers to fit into memory, got \d+ GiB"),
    (BSGP, {"likelihood": Gaussian(torch.ones(3))}, r"expected likelihood with hyperparameters that broadcast to \("),
    (BSGP, {"kernel": [RBF(2), RBF(2)]}, r"expected kernel to be a list of num_layers = 1, got 2 kernels"),
    (BSGP, {"likelihood": dist.Normal}, r"BSGP: expected likelihood to be a Likelihood, got the class Normal"),
    (BSGP, {"y": torch.full((N,), torch.nan)}, r"BSGP: expected y with values, got NaN in all rows"),
    (BSGP, {"num_inducing": 3}, r"got 'num_inducing'\. Write inducing="),
    (LOO, {"num_neighbors": N}, r"expected num_neighbors in 1\.\.39, got 40"),
    (LOO, {"likelihood": Poisson(), "y": ONES}, r"expected likelihood to be one of Gaussian.*got Poisson"),
    (LOO, {"likelihood": Bernoulli("probit"), "y": ONES}, r"expected likelihood to have the logit link"),
    (LOO, {"likelihood": Bernoulli(), "y": 2 * ONES}, r"expected y to be labels 0 and 1"),
    (LOO, {"likelihood": Bernoulli(), "y": LABELS.float() - 1}, r"expected y to be labels 0 and 1"),
    (LOO, {"likelihood": Categorical(3), "y": LABELS % 2}, r"expected y to hold every class, got none of .*2"),
    (LOO, {"likelihood": Categorical(2), "y": LABELS}, r"expected y to be labels in 0\.\.1"),
    (LOO, {"likelihood": Binomial(3), "y": 4 * ONES}, r"expected y to be counts in 0\.\.3"),
    (LOO, {"likelihood": NegativeBinomial(), "y": ONES / 2}, r"expected y to be counts"),
    (LOO, {"guide": "normal"}, r"expected guide to be LogNormal\(\) or Conjugate\(\), got 'normal'"),
    (LOO, {"divergence": "none"}, r"expected divergence to be 'posterior' or 'prior', got 'none'"),
    (LOO, {"coupling": "sum"}, r"expected coupling to be 'odds' or 'probabilities', got 'sum'"),
    (SVGP, {"inducing": N + 1}, r"SVGP: expected inducing in 2\.\.40, got 41"),
    (SVGP, {"inducing": torch.zeros(9, 3)}, r"SVGP: expected inducing of shape \(M, 2\)"),
    (SVGP, {"metric": torch.ones(7)}, r"SVGP: expected metric a scalar or of shape \(2,\), got \(7,\)"),
    (SVGP, {"metric": "banana"}, r"SVGP: expected metric to be callable, got str"),
    (SVGP, {"objective": "ppgpr"}, r"expected objective to be 'vfe' or 'fitc', got 'ppgpr'. For PPGPR train under"),
    (SVGP, {"objective": "fitc", "likelihood": None, "y": None}, r"likelihood to be given with objective='fitc'"),
    (SVGP, {"guide": SparseCholesky(3)}, r"expected guide to be FullRank\(\) or MeanField\(\), got SparseCholesky"),
    (SVGP, {"guide": FullRank(loc=torch.zeros(3))}, r"DenseGaussian: expected loc of shape \(12, 1\)"),
    (SVGP, {"guide": MeanField(scale=0.0)}, r"DenseGaussian: expected scale to be finite and > 0"),
    (SVGP, {"num_inducing": 3}, r"got 'num_inducing'\. Write inducing="),
    (SWSGP, {"num_neighbors": M + 1}, r"SWSGP: expected num_neighbors in 1\.\.12, got 13"),
    (SWSGP, {"num_neighbors": 0}, r"SWSGP: expected num_neighbors in 1\.\.12, got 0"),
    (SWSGP, {"inducing": N + 1}, r"SWSGP: expected inducing in 2\.\.40, got 41"),
    (SWSGP, {"inducing": torch.zeros(9, 3)}, r"SWSGP: expected inducing of shape \(M, 2\)"),
    (
        SWSGP,
        {"inducing": torch.rand(10_001, 2), "guide": FullRank()},
        r"guide MeanField\(\) beyond M = 10000",
    ),
    (SWSGP, {"guide": SparseCholesky()}, r"expected guide to be MeanField\(\) or FullRank\(\), got SparseCholesky"),
    (SWSGP, {"guide": MeanField(torch.zeros(3))}, r"LocalGaussian: expected loc of shape \(12, 1\)"),
    (SWSGP, {"guide": MeanField(scale=0.0)}, r"LocalGaussian: expected scale to be finite and > 0"),
    (SWSGP, {"guide_neighbors": 3}, r"SWSGP: expected keyword .*, got 'guide_neighbors'"),
    (VNNGP, {"y": None}, r"expected y with a likelihood"),
    (VNNGP, {"num_neighbors": N}, r"expected num_neighbors"),
    (VNNGP, {"num_neighbors": 0}, r"expected num_neighbors"),
    (VNNGP, {"likelihood": Poisson(), "y": -ONES}, r"Poisson"),
    (VNNGP, {"likelihood": Categorical(3), "y": LABELS[:, None].expand(N, 2)}, r"y of shape \(N,\) for Categorical"),
    (VNNGP, {"likelihood": Binomial()}, r"expected trials of each row for Binomial\(\), got None\. Pass tri"),
    (VNNGP, {"inducing": N + 1}, r"expected inducing in 2\.\.40, got 41"),
    (VNNGP, {"inducing": torch.zeros(9, 3)}, r"expected inducing of shape \(M, 2\)"),
    (VNNGP, {"learn_inducing": True}, r"expected learn_inducing False with inducing points at the data"),
    (VNNGP, {"guide": SparseCholesky(9)}, r"expected guide\.num_columns in 1\.\.6"),
    (VNNGP, {"guide": MeanField(torch.zeros(3))}, r"expected loc of shape \(40, 1\)"),
    (VNNGP, {"guide": MeanField(scale=0.0)}, r"expected scale to be finite and > 0"),
    (VNNGP, {"guide": "mean-field"}, r"PseudoObservations\(\), .* or Amortized\(\), got 'mean-field'\. They are in"),
    (VNNGP, {"guide": FullRank()}, r"VNNGP: expected guide to be PseudoObservations\(\), Mean.*, got FullRank"),
    (VNNGP, {"guide": Amortized("network")}, r"guide.encoder to be a torch module with .*, got 'network'"),
    (VNNGP, {"guide": Amortized(torch.nn.Linear(2, 2))}, r"to be .* `num_context`, got Linear.* as SiteEncoder"),
    (VNNGP, {"num_neighbours": 3}, r"got 'num_neighbours'\. Write num_neighbors="),
    (Vecchia, {"num_neighbors": N}, r"expected num_neighbors in 1\.\.39, got 40"),
    (Vecchia, {"likelihood": StudentT()}, r"expected likelihood to be Gaussian, got StudentT"),
    (Vecchia, {"ordering": "pca"}, r"expected ordering one of"),
]


@pytest.mark.parametrize("method", [VNNGP, NPVI, SVGP, LMC])
def test_solvers_check_steps_and_tolerance(method):
    x, y = waves(N)
    given = {"inducing": M} if method is SVGP else {"num_neighbors": 4}
    gp = method(x, torch.stack([y, -y], -1) if method is LMC else y, matern(), Gaussian(), **given)
    with pytest.raises(ValueError, match=rf"{method.__name__}\.solve: expected max_steps"):
        gp.solve(max_steps=-1)
    with pytest.raises(ValueError, match=rf"{method.__name__}\.solve: expected tolerance"):
        gp.solve(tolerance=-1.0)


@pytest.mark.parametrize(("method", "change", "message"), CASES)
def test_wrong_input(method, change, message):
    x, y = waves(N, dtype=torch.float32)
    settings = {"x": x, "y": y, "kernel": matern(dtype=torch.float32), "likelihood": Gaussian()} | SETTINGS[method]
    with pytest.raises((ValueError, TypeError, MemoryError), match=message):
        method(**settings | change)
