"""Inputs, targets, kernels and methods that many tests build on.

Random values come from the global generator, which every test finds at the same seed, unless a builder takes a seed.
"""

import pytest
import torch

from pyro_nngp.kernels import Matern52
from pyro_nngp.likelihoods import Bernoulli, Binomial, Categorical, Gaussian, NegativeBinomial, Poisson, StudentT
from pyro_nngp.models import LOO, NPVI, SVGP, SWSGP, VNNGP, MLLk, Vecchia
from pyro_nngp.variational import Amortized, SparseCholesky
from pyro_nngp.variational.encoders import ConditionalEncoder, GraphConvolutionEncoder, SiteEncoder

F64 = torch.float64
N, K, P = 60, 8, 7  # rows, neighbors and new points for METHODS
METHODS = {
    "VNNGP": (VNNGP, {"num_neighbors": K}),
    "VNNGP-sparse": (VNNGP, {"num_neighbors": K, "guide": SparseCholesky(4)}),
    "VNNGP-inducing": (VNNGP, {"num_neighbors": K, "inducing": 20, "learn_inducing": True}),
    "LOO": (LOO, {"num_neighbors": K}),
    "Vecchia": (Vecchia, {"num_neighbors": K}),
    "Vecchia-inducing": (Vecchia, {"num_neighbors": K, "inducing": 12}),
    "MLLk": (MLLk, {"num_neighbors": K}),
    "NPVI": (NPVI, {"num_neighbors": K}),
    "NPVI-NN": (NPVI, {"num_neighbors": K, "guide": lambda: Amortized(GraphConvolutionEncoder())}),
    "NPVI-conditional": (NPVI, {"num_neighbors": K, "guide": lambda: Amortized(ConditionalEncoder())}),
    "NPVI-sites": (NPVI, {"num_neighbors": K, "guide": lambda: Amortized(SiteEncoder(2))}),
    "SWSGP": (SWSGP, {"num_neighbors": K, "inducing": 20}),
    "SVGP": (SVGP, {"inducing": 20}),
}
RELATIVES = "NPVI-conditional", "NPVI-sites", "VNNGP-sparse", "Vecchia-inducing"  # of other METHODS
AUGMENTED = [  # likelihoods that augmentation makes Gaussian, and targets of each for a latent function
    (Bernoulli, lambda f: labels(f)),
    (lambda: Binomial(5), lambda f: (5 * f.sigmoid()).round()),
    (lambda: NegativeBinomial(2.5), lambda f: (f + 1).exp().round()),
    (lambda: StudentT(4.0, 0.3), lambda f: f),
    (lambda: Categorical(3), lambda f: classes(f)),
]


def slow_except(cases, *quick):
    """Cases of a parametrized test, all of which but the quick ones are marked slow."""
    return [case if case in quick else pytest.param(case, marks=pytest.mark.slow) for case in cases]


def methods():
    """Names of METHODS for a parametrized test; slow are those that differ from others in parts tested elsewhere."""
    return slow_except(METHODS, *(METHODS.keys() - set(RELATIVES)))


def scalar(value):
    return torch.tensor(value, dtype=F64)


def zero(x):
    """A mean function that is zero."""
    return torch.zeros_like(x[:, 0])


def labels(f):
    """Labels of the sign of f."""
    return (f > 0).to(f.dtype)


def classes(f):
    """Three classes of values of f."""
    return torch.bucketize(f, torch.tensor([-0.4, 0.4], dtype=f.dtype))


def tensor(*values):
    return torch.tensor(values, dtype=F64)


def normal(*shape):
    """Standard normal values."""
    return torch.randn(*shape, dtype=F64)


def uniform(n, dim=2, dtype=F64, seed=None):
    """Inputs (n, dim) on the unit cube."""
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    return torch.rand(n, dim, dtype=dtype, generator=generator)


def matern(lengthscale=(0.3, 0.5), variance=1.3, kind=Matern52, dtype=F64):
    """A Matern kernel over two dimensions."""
    return kind(2, torch.tensor(variance, dtype=dtype), torch.tensor(lengthscale, dtype=dtype))


def waves(n=48, dtype=F64):
    """Inputs on the unit square and noisy targets of a diagonal wave."""
    x = uniform(n, dtype=dtype)
    return x, torch.sin(5 * x.sum(-1)) + 0.2 * torch.randn(n, dtype=dtype)


def surface(likelihood, n=200):
    """Noisy values, or counts with Poisson, on a smooth surface over the unit square, and nine new points."""
    generator = torch.Generator().manual_seed(3)
    x = torch.rand(n, 2, generator=generator, dtype=F64)
    f = torch.sin(6 * x[:, 0]) * torch.cos(5 * x[:, 1])
    y = f + 0.1 * torch.randn(n, generator=generator, dtype=F64)
    y = torch.poisson((f + 1).exp(), generator=generator) if likelihood is Poisson else y
    return x, y, torch.rand(9, 2, generator=generator, dtype=F64)


def data(dtype=F64):
    """Inputs and targets of :func:`build`."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(N, 2, generator=generator, dtype=dtype)
    return x, torch.sin(5 * x[:, 0]) + x[:, 1] + 0.1 * torch.randn(N, generator=generator, dtype=dtype)


def fresh(settings):
    """Settings with a new instance of each that is made by a function, such as a network."""
    return {key: value() if callable(value) else value for key, value in settings.items()}


def build(name, dtype=F64, seed=0, **hyperparameters):
    """A small instance of one of METHODS with Gaussian noise."""
    method, settings = METHODS[name][0], fresh(METHODS[name][1])
    torch.manual_seed(seed)
    x, y = data(dtype)
    kernel = Matern52(2, **{"lengthscale": 0.5, "variance": 1.0, **hyperparameters})
    return method(x, y, kernel, Gaussian(0.05), seed=seed, **settings)


def stir(gp, amount=0.3):
    """Move the parameters of q, so that nothing is zero or one by accident."""
    q = getattr(gp, "q", None)
    with torch.no_grad():
        for param in () if q is None else q.parameters():
            param.add_(amount * torch.randn_like(param))
    return gp


def q_of(gp, rows=None):
    """q(u) of a method at some of its points (None: all), at the present hyperparameters."""
    return gp.q.at_rows(gp.posterior(gp.bound()), rows)


def solve_alone(gp, **options):
    """Find q(u) without the level of the mean and the difference of evidences, which `solve` of a method finds too."""
    gp.q.solve(lambda: gp.posterior(gp.bound()), level=False, **options)
