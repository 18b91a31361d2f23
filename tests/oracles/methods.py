"""Small instances of all methods, for tests of what they have in common."""

import torch

from pyro_nngp.kernels import Matern52
from pyro_nngp.likelihoods import Gaussian
from pyro_nngp.models import LOO, NPVI, SVGP, SWSGP, VNNGP, MLLk, Vecchia
from pyro_nngp.variational.encoders import ConditionalEncoder, GraphConvolutionEncoder, SiteEncoder

N, K, P = 60, 8, 7
METHODS = {
    "VNNGP": (VNNGP, {"num_neighbors": K}),
    "VNNGP-sparse": (VNNGP, {"num_neighbors": K, "guide_neighbors": 4}),
    "VNNGP-inducing": (VNNGP, {"num_neighbors": K, "inducing": 20, "learn_inducing": True}),
    "LOO": (LOO, {"num_neighbors": K}),
    "Vecchia": (Vecchia, {"num_neighbors": K}),
    "MLLk": (MLLk, {"num_neighbors": K}),
    "NPVI": (NPVI, {"num_neighbors": K}),
    "NPVI-NN": (NPVI, {"num_neighbors": K, "encoder": lambda: GraphConvolutionEncoder()}),
    "NPVI-conditional": (NPVI, {"num_neighbors": K, "encoder": lambda: ConditionalEncoder()}),
    "NPVI-sites": (NPVI, {"num_neighbors": K, "encoder": lambda: SiteEncoder(2)}),
    "SWSGP": (SWSGP, {"num_neighbors": K, "inducing": 20}),
    "SVGP": (SVGP, {"inducing": 20}),
}


def data(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(N, 2, generator=generator, dtype=dtype)
    return x, torch.sin(5 * x[:, 0]) + x[:, 1] + 0.1 * torch.randn(N, generator=generator, dtype=dtype)


def build(name, dtype=torch.float64, seed=0, **hyperparameters):
    method, settings = METHODS[name]
    settings = {key: value() if callable(value) else value for key, value in settings.items()}
    torch.manual_seed(seed)
    x, y = data(dtype)
    kernel = Matern52(2, **{"lengthscale": 0.5, "variance": 1.0, **hyperparameters})
    return method(x, y, kernel, Gaussian(0.05), seed=seed, **settings)
