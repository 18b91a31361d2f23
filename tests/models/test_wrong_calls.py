"""Wrong arguments of calls of methods that are built: errors name the call, the argument and the expectation."""

import pytest
import torch
from builders import F64, matern, uniform, waves

from pyro_nngp.conditionals import graph_conditional, nn_conditional, whitened_conditional
from pyro_nngp.distributed import ShardedData
from pyro_nngp.distributed.sources import ParquetColumns
from pyro_nngp.distributed.table import ShardedGraph
from pyro_nngp.likelihoods import Bernoulli, Binomial, Categorical, Gaussian, Multinomial, Ordinal, Poisson
from pyro_nngp.loadings import FactorLoadings
from pyro_nngp.models import BSGP, LMC, LOO, SVGP, SWSGP, VNNGP, CoregionalizedLOO, MLLk, Vecchia
from pyro_nngp.variational import MeanField
from pyro_nngp.variational.encoders import ConditionalEncoder

N = 40
X, Y = waves(N)
OUTPUTS, NEW = torch.stack([Y, -Y], -1), uniform(3)


def exact(**given):
    return Vecchia(X, Y, matern(), num_neighbors=4, **given)


def counts(**given):
    return VNNGP(X, (Y > 0).to(F64), matern(), Binomial(), trials=torch.ones(N, dtype=F64), num_neighbors=4, **given)


def coupled(mixing=None, **given):
    return LMC(X, OUTPUTS, matern(), Gaussian(), mixing=mixing, num_neighbors=4, **given)


def correlated(x=X, **given):
    return CoregionalizedLOO(x, OUTPUTS, **({"kernels": 1, "num_neighbors": 4} | given))


def several(y=OUTPUTS, **given):
    return LMC(X, y, **({"kernels": matern(), "likelihood": Gaussian(), "num_neighbors": 4} | given))


def near(noise=None, mask=None, jitter=None):
    return nn_conditional(matern(), NEW, X[:12].view(3, 4, 2), noise=noise, mask=mask, jitter=jitter)


def at_graph(noise=None, points=X):
    return graph_conditional(matern(), NEW, points, torch.zeros(3, 2, dtype=torch.int64), noise)


CALLS = [
    (lambda: exact(weights="many"), r"Vecchia: expected weights to be a torch.Tensor, got str"),
    (lambda: exact().predict(NEW, offset="sea"), r"Vecchia.predict: expected offset to be a torch.Tensor, got str"),
    (
        lambda: exact().predict(NEW, offset=torch.full((3,), torch.nan)),
        r"Vecchia.predict: expected offset to be finite",
    ),
    (lambda: counts().predict(NEW, trials=3), r"VNNGP.predict: expected trials to be a torch.Tensor, got int"),
    (lambda: exact().sample_y(NEW, 2, seed="one"), r"Vecchia.sample_y: expected seed"),
    (lambda: exact().extend(NEW, "y"), r"Vecchia.extend: expected y"),
    (lambda: exact().predictions_by_draw(NEW, from_guide="yes"), r"predictions_by_draw: expected from_guide"),
    (lambda: exact().loo_by_draw(from_guide="yes"), r"loo_by_draw: expected from_guide to be"),
    (lambda: exact().log_prob(batch_size=0), r"Vecchia.log_prob: expected batch_size >= 1, got 0"),
    (lambda: BSGP(X, Y, matern(), Gaussian(), inducing=9, fixed_draws=3), r"BSGP: expected fixed_draws to be"),
    (lambda: correlated(X * torch.nan), r"CoregionalizedLOO: expected x to be finite"),
    (lambda: correlated(kernels=N + 1), r"CoregionalizedLOO: expected kernels in 1\.\.40, got 41"),
    (lambda: correlated(mixing="free"), r"CoregionalizedLOO: expected mixing to be a torch.Tensor, got str"),
    (lambda: correlated(mixing=torch.ones(2, 1)), r"CoregionalizedLOO: expected mixing of the dtype of x"),
    (lambda: LMC(X * torch.nan, OUTPUTS, matern(), Gaussian()), r"LMC: expected x to be finite"),
    (lambda: coupled("free"), r"LMC: expected mixing .*, got str"),
    (lambda: coupled(torch.ones(2, 1)), r"LMC: expected mixing of the dtype of x"),
    (lambda: coupled().loading(NEW[:, :1]), r"LMC.loading: expected x_new with 2 columns"),
    (lambda: coupled().output_covariance(NEW[:, :1]), r"LMC.output_covariance: expected x_new with 2 columns"),
    (
        lambda: coupled(FactorLoadings(2, 1)).correlations("all"),
        r"LMC.correlations: expected probability to be a number",
    ),
    (lambda: coupled().predict_given(NEW, "y"), r"LMC.predict_given: expected y_new to be a torch.Tensor, got str"),
    (lambda: several(likelihood=Gaussian(), offset="sea"), r"LMC: expected offset to be a torch.Tensor, got str"),
    (
        lambda: LOO(X, (Y > 0).to(F64), matern(), Bernoulli(), num_neighbors=4).solve(0),
        r"LOO.solve: expected num_sweeps >= 1",
    ),
    (
        lambda: LOO(X, (Y > 0).to(F64), matern(), Bernoulli(), num_neighbors=4).solve(batch_size=0),
        r"LOO.solve: expected batch_size >= 1, got 0",
    ),
    (
        lambda: MLLk(X, (Y > 0).to(F64), matern(), Bernoulli(), num_neighbors=4),
        r"MLLk: expected likelihood to be Gaussian",
    ),
    (lambda: SVGP(X, None, matern(), inducing=9).solve(), r"SVGP.solve: expected a likelihood in the model, got None"),
    (
        lambda: SWSGP(X, Y, matern(), Gaussian(), inducing=9, num_neighbors=4).log_density(torch.tensor([N])),
        r"SWSGP.log_density: expected rows in 0\.\.39",
    ),
    (
        lambda: VNNGP(X, Y, matern(), Gaussian(), num_neighbors=4, learn_inducing="yes"),
        r"VNNGP: expected learn_inducing to be True or False, got str",
    ),
    (lambda: exact().loo(num_neighbors=N), r"Vecchia: expected num_neighbors in 1\.\.39, got 40"),
    (lambda: correlated().loo(num_neighbors=N), r"CoregionalizedLOO: expected num_neighbors in 1\.\.39, got 40"),
    (
        lambda: VNNGP(X, Y, matern(), Gaussian(), num_neighbors=4).loo(num_neighbors=N),
        r"VNNGP: expected num_neighbors in 1\.\.39, got 40",
    ),
    (
        lambda: VNNGP(X, None, matern(), num_neighbors=4).loo(),
        r"VNNGP.loo: expected a likelihood in the model, got None",
    ),
    (lambda: BSGP(X, Y, matern(), Gaussian(), inducing=9).loo(), r"BSGP.loo: expected samples"),
    (
        lambda: VNNGP(X, Y.abs().long(), matern(), Categorical(10**12), num_neighbors=4),
        r"VNNGP: expected latent functions to fit into memory",
    ),
    (lambda: exact().extend(NEW, NEW[:, 0].float()), r"Vecchia.extend: expected y of the dtype of x"),
    (lambda: exact().extend(NEW, NEW[:, 0] * torch.inf), r"Vecchia.extend: expected y to be finite"),
    (
        lambda: VNNGP(X, Y, matern(), num_neighbors=4, guide=MeanField(Y.to("meta"))),
        r"LocalGaussian: expected loc to have values",
    ),
    (lambda: coupled(torch.ones(2, 1, dtype=F64, device="meta")), r"LMC: expected mixing to have values, got a meta"),
    (lambda: coupled().latent_functions(NEW[:, :1]), r"LMC.latent_functions: expected x_new with 2 columns"),
    (lambda: coupled().joint_outputs(NEW[:, :1]), r"LMC.joint_outputs: expected x_new with 2 columns"),
    (
        lambda: CoregionalizedLOO(X, torch.where(OUTPUTS > 0, OUTPUTS, -torch.inf), 1, num_neighbors=4),
        r"CoregionalizedLOO: expected y to be finite",
    ),
    (lambda: several(num_latents=0), r"LMC: expected num_latents >= 1, got 0"),
    (
        lambda: LMC(X, OUTPUTS * torch.inf, matern(), Gaussian(), num_neighbors=4),
        r"LMC: expected y to be finite, got 80 NaN or infinite",
    ),
    (
        lambda: several(y=OUTPUTS.abs().round(), likelihood=Poisson()).predict_given(NEW, -torch.ones(3, 2, dtype=F64)),
        r"Poisson: expected y to be counts",
    ),
    (lambda: Multinomial().expected_log_prob(*torch.ones(3, 1, 4)), r"Multinomial: expected"),
    (lambda: ParquetColumns(3, "x"), r"ParquetColumns: expected path to be a path, got int"),
    (
        lambda: graph_conditional(matern(), NEW, X, torch.full((3, 2), N)),
        r"graph_conditional: expected neighbors in -1\.\.39, got 40",
    ),
    (
        lambda: VNNGP(ShardedData(X, Y, weights=-torch.ones(N, dtype=F64)), num_neighbors=4),
        r"VNNGP: expected weights > 0",
    ),
    (lambda: ConditionalEncoder(widths=(0,)), r"ConditionalEncoder: expected widths"),
    (
        lambda: whitened_conditional(matern(), NEW, X[:5], jitter="small"),
        r"whitened_conditional: expected jitter to be",
    ),
    (
        lambda: whitened_conditional(matern(), NEW, X[:5].long()),
        r"whitened_conditional: expected z of a floating-point dtype",
    ),
    (lambda: near(mask=[True]), r"nn_conditional: expected mask to be a torch.Tensor, got list"),
    (lambda: near(noise=[0.1]), r"nn_conditional: expected noise to be a torch.Tensor, got list"),
    (lambda: near(noise=torch.ones(3, 7, dtype=F64)), r"nn_conditional: expected noise to broadcast to \(3, 4\)"),
    (lambda: near(jitter="small"), r"nn_conditional: expected jitter to be a number, got 'small'"),
    (lambda: at_graph(noise=0.1), r"expected noise to be a torch.Tensor, got float"),
    (lambda: at_graph(points=X.to("meta")), r"expected points to have values, got a meta tensor"),
    (lambda: Ordinal([0.0, 1.0]), r"Ordinal: expected cutpoints to be a torch.Tensor, got list"),
    (
        lambda: Ordinal(torch.tensor([0, 1])),
        r"Ordinal: expected cutpoints to be finite, in floating point, got \[0, 1\]",
    ),
    (lambda: Ordinal(torch.tensor([0.0, torch.inf])), r"Ordinal: expected cutpoints to be finite"),
    (lambda: ShardedGraph(ShardedData(X, Y), N), r"ShardedGraph: expected num_neighbors in 1\.\.39, got 40"),
    (lambda: ShardedGraph(ShardedData(X, Y), 4).resize(N), r"ShardedGraph.resize: expected num_neighbors in 1\.\.39"),
    (lambda: ShardedData(X, Y, seed="one"), r"ShardedData: expected seed"),
]


@pytest.mark.parametrize(("call", "message"), CALLS)
def test_wrong_calls(call, message):
    with pytest.raises((ValueError, TypeError, IndexError, MemoryError), match=message):
        call()
