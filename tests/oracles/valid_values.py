"""Valid values of the arguments of every public function, class and method.

VALID maps names of arguments to functions that make a value; a key with dots, such as `AutoNNGP.model`, holds for that
entrance and goes before the plain name. None takes the default.
"""

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch

import pyro_nngp as nngp
from pyro_nngp import inference, kernels, likelihoods
from pyro_nngp import variational as q

N, K = 24, 4


def x() -> torch.Tensor:
    return torch.rand(N, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def y() -> torch.Tensor:
    return torch.sin(5 * x().sum(-1)) + 0.1 * torch.randn(N, generator=torch.Generator().manual_seed(1)).double()


def labels() -> torch.Tensor:
    return (y() > 0).double()


def kernel() -> Any:
    return kernels.Matern52(2, torch.tensor(1.0).double(), torch.tensor(0.4).double())


def gp() -> Any:
    return nngp.Vecchia(x(), y(), kernel(), likelihoods.Gaussian(0.1), num_neighbors=K)


def program() -> Any:
    graph = nngp.NeighborGraph(x(), K)

    def model(*_: Any, noise: float = 0.3) -> None:
        f = pyro.sample("f", nngp.NNGP(kernel(), graph))
        pyro.sample("y", dist.Normal(f, noise).to_event(1), obs=y())

    return model


def simple_program(*_: Any, **__: Any) -> None:
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    with pyro.plate("rows", N):
        pyro.sample("y", dist.Normal(mean, 1.0), obs=y().float())


def binary_program(*_: Any, **__: Any) -> None:
    f = pyro.sample("f", nngp.NNGP(kernel(), nngp.NeighborGraph(x(), K)))
    pyro.sample("y", dist.Bernoulli(logits=f).to_event(1), obs=labels())


def inference_guide(*_: Any, **__: Any) -> None:
    pyro.sample("mean", dist.Normal(0.0, 0.2))


@cache
def fitted() -> Any:
    return inference.fit(gp(), 2, progress=False)


@cache
def validated() -> Any:
    return nngp.cross_validate(gp(), 2, progress=False)


@cache
def drawn() -> Any:
    mcmc = inference.SGMCMC(inference.SGLD(simple_program, 0.01), 4, 2, num_chains=1, disable_progbar=True)
    mcmc.run()
    return mcmc


def axes() -> dict[str, np.ndarray]:
    return {"east": np.linspace(0, 1, 3), "north": np.linspace(0, 1, 2)}


def folder() -> Path:
    return Path(tempfile.mkdtemp())


def saved() -> Path:
    path = folder() / "model.pt"
    gp().save(path)
    return path


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def triangle() -> torch.Tensor:
    return torch.eye(4).double() + 0.1 * torch.ones(4, 4).double().tril()


def neighbors() -> torch.Tensor:
    return nngp.NeighborGraph(x(), K).neighbors


def in_order() -> torch.Tensor:
    graph = nngp.NeighborGraph(x(), K, ordering=torch.arange(N))
    return graph.neighbors


def normals() -> list[Any]:
    return [dist.Normal(y(), 1.0), dist.Normal(y(), 2.0)]


# fmt: off
VALID = {
    "x": x, "y": y, "X": x, "points": x, "x_new": lambda: x()[:3] + 0.01, "queries": lambda: x()[:3] + 0.01,
    "z": lambda: x()[:5], "kernel": kernel, "kern": kernel, "kern0": kernel, "kern1": kernel, "gp": gp,
    "graph": lambda: nngp.NeighborGraph(x(), K), "num_neighbors": lambda: K, "k": lambda: 3, "seed": lambda: 0,
    "path": lambda: folder() / "new", "likelihood": lambda: likelihoods.Gaussian(0.1), "template": axes,
    "module": kernel, "num_samples": lambda: 3, "progress": lambda: False, "result": fitted,
    "grid": lambda: nngp.predict_grid(gp(), axes(), columns=["east", "north"], progress=False), "results": validated,
    "input_dim": lambda: 2, "time_dim": lambda: 0, "degrees": lambda: 10 * x(), "train": x, "alpha": lambda: 0.1,
    "source": fitted, "model": program, "num_bins": lambda: 2, "levels": lambda: torch.tensor([0.5, 0.9]).double(),
    "jitter": lambda: 1e-6, "disable_progbar": lambda: True, "num_points": lambda: 10,
    "fractions": lambda: [0.5, 0.5], "cell_size": lambda: 0.3, "fraction": lambda: 0.3, "ordering": lambda: "maximin",
    "exclude": lambda: None, "column": lambda: 0, "num_values": lambda: 3, "num_rows": lambda: 3, "tril": triangle,
    "right": lambda: normal(4, 2), "matrix": lambda: triangle() @ triangle().mT,
    "cov": lambda: triangle() @ triangle().mT, "diagonal": lambda: torch.ones(4).double(), "w": lambda: normal(N, K),
    "neighbors": in_order, "base": lambda: dist.Normal(torch.zeros(5, 2).double(), 1.0).to_event(2),
    "inducing": lambda: 8, "num_lags": lambda: 3, "num_draws": lambda: 3, "points_": x, "approximate": neighbors,
    "exact": neighbors, "batch_size": lambda: 8, "size": lambda: N, "num_centers": lambda: 3,
    "rows": lambda: torch.arange(5), "idx": lambda: torch.arange(5),
    "reliability": lambda: inference.reliability(torch.rand(N), labels(), num_bins=2), "components": normals,
    "concentration": lambda: torch.tensor(2.0).double(), "dispersion": lambda: torch.tensor(1.0).double(),
    "power": lambda: torch.tensor(1.5).double(), "var": lambda: torch.ones(N).double(),
    "quantile": lambda: torch.tensor(0.3).double(), "tilt": lambda: torch.zeros(N).double(),
    "sample_shape": lambda: torch.Size([2]), "values": lambda: likelihoods.Gaussian(0.1),
    "counts": lambda: likelihoods.Poisson(), "cutpoints": lambda: torch.tensor([-1.0, 1.0]),
    "edges": lambda: torch.tensor([-1.0, 0.0, 1.0]),
    "outputs": lambda: [likelihoods.Gaussian(0.1), likelihoods.Bernoulli()], "coverage": lambda: 0.9,
    "probability": lambda: 0.9, "warmup_steps": lambda: 1, "initial": lambda: 0.1, "delay": lambda: 10.0,
    "period": lambda: 10, "lr": lambda: 0.1, "params": lambda: [torch.ones(3, 2, requires_grad=True)],
    "guide": lambda: None, "metric": lambda: None, "kernels": lambda: [kernel()], "num_latents": lambda: 1,
    "encoder": lambda: q.encoders.SiteEncoder(2), "noise": lambda: None, "other": validated,
    "classes": lambda: [0, 1], "vscaling_fn": lambda: lambda x: x[:, 0] + 1, "warp": lambda: lambda x: x,
    "factor": lambda: lambda x: x[:, 0] + 1, "ranks": lambda: {"f": torch.arange(10).double()},
    "num_simulations": lambda: 2, "simulate": lambda: lambda: ({"a": torch.zeros(())}, None),
    "infer": lambda: lambda _: {"a": torch.zeros(5)}, "method": gp, "angle": lambda: 0.1, "n_samples": lambda: 2,
    "Y": lambda: y()[:, None], "sample_weight": lambda: None, "values_": y, "limit": lambda: torch.arange(3) + 4,
    "targets": lambda: None, "name": lambda: "x", "variance_": lambda: 1.0, "value": y, "owner": gp,
    "custom": lambda: {}, "points_only": x, "folds": lambda: 2, "score": lambda: lambda: 0.0,
    "noise_var": lambda: 0.1, "num_steps": lambda: 1,
}
VALID |= {
    "log_prob.value": y, "fit.method": gp, "LMC.y": lambda: torch.stack([y(), y()], -1),
    "CoregionalizedLOO.y": lambda: torch.stack([y(), y()], -1), "LMC.num_latents": lambda: 1,
    "LMC.likelihood": lambda: likelihoods.Gaussian(0.1), "storage.save.model": gp, "load.path": saved,
    "AutoNNGP.model": program, "QuickNUTS.model": program, "SGLD.model": lambda: simple_program,
    "SGHMC.model": lambda: simple_program, "SGNHT.model": lambda: simple_program,
    "quantiles.probability": lambda: 0.5, "distributions.PolyaGamma.log_prob.value": lambda: torch.ones(N).double(),
    "distributions.InverseGaussian.log_prob.value": lambda: torch.ones(N).double(),
    "distributions.Tweedie.log_prob.value": lambda: torch.ones(N).double(),
    "distributions.GeneralizedPareto.log_prob.value": lambda: torch.ones(N).double(),
    "Determinantal.log_prob.value": lambda: normal(5, 2), "Strauss.log_prob.value": lambda: normal(5, 2),
    "SGMCMC.num_samples": lambda: 20, "VNNGP.inducing": None,
    "SGMCMC.kernel": lambda: inference.SGLD(simple_program, 0.01),
    "step_size_refinement.kernel": lambda: inference.SGLD(simple_program, 0.01),
    "step_size_refinement.num_samples": lambda: 8, "PolyaGammaGibbs.model": lambda: binary_program,
    "PointwiseLogLikelihood.source": lambda: drawn(), "psis_khat.model": lambda: simple_program,
    "psis_khat.guide": lambda: inference_guide, "psis_khat.num_samples": lambda: 30, "to_arviz.source": drawn,
    "extend.y": lambda: y()[:3], "extend.x": lambda: x()[:3] + 0.01, "condition_on.x": lambda: x()[:3] + 0.01,
    "condition_on.y": lambda: y()[:3], "nll.predictive": lambda: dist.Normal(y(), 1.0),
    "pit.predictive": lambda: dist.Normal(y(), 1.0), "auc.y": labels, "brier.y": labels, "error_rate.y": labels,
    "error_rate.label": labels, "reliability.y": labels, "draws": lambda: normal(10, N),
    "prob": lambda: torch.rand(N).double(), "label": labels, "lower": lambda: y() - 1, "upper": lambda: y() + 1,
    "loc": y, "scale": lambda: torch.ones(N).double(), "mean": y, "auc.score": y, "crps_gaussian.y": y,
    "plot_band.x": lambda: x()[:, 0], "plot_band.variance": lambda: torch.ones(N).double(),
    "ordinal.link": lambda: "logit", "log_densities": y, "f": lambda: normal(N), "log_mean": lambda: normal(N),
    "log_scale": lambda: normal(N), "coverage_curve.values": lambda: torch.rand(60).double(),
    "symmetry.values": lambda: torch.rand(60).double(), "uniformity.values": lambda: torch.rand(200).double(),
    "plot_coverage.values": lambda: torch.rand(60).double(), "plot_pit.values": lambda: torch.rand(60).double(),
    "plot_residuals.result": validated, "plot_fit.result": fitted, "plot_scores.score": lambda: "nll",
    "plot_map.grid": VALID["grid"], "nn_conditional.z": lambda: x()[:, None] + 0.1 * normal(N, 3, 2),
    "SparseCholeskyNormal.weights": lambda: None,
    "SparseCholeskyNormal.rows": lambda: None, "SparseCholeskyNormal.scale": lambda: torch.ones(N).double(),
    "NormalLaplace.scale": lambda: 1.0 + torch.zeros(N).double(), "solve_triangular.right": lambda: normal(N),
    "solve_triangular.levels": lambda: None, "VecchiaFactor.levels": lambda: None, "cholesky.jitter": lambda: 1e-6,
    "reverse_cholesky.matrix": VALID["matrix"], "Mixture.components": normals,
    "ZeroTruncated.counts": lambda: likelihoods.Poisson(), "Hurdle.counts": lambda: likelihoods.Poisson(),
    "Censored.upper": lambda: 9.0, "NNGPClassifier.fit.y": labels, "NNGPClassifier.score.y": labels,
    "NNGPCountRegressor.fit.y": labels, "NNGPClassifier.partial_fit.y": labels,
    "NNGPCountRegressor.partial_fit.y": labels, "quantiles.quantiles": lambda: [0.1, 0.5],
    "predict_given.y_new": lambda: torch.tensor([[0.3, float("nan")]] * 3).double(),
    "predict_grid.columns": lambda: ["east", "north"], "Gneiting.kern": lambda: kernels.Matern52(1, active_dims=[0]),
    "Gneiting.time_dim": lambda: 1, "VerticalScaling.vscaling_fn": VALID["vscaling_fn"],
    "Binomial.total_count": lambda: 5, "BetaBinomial.total_count": lambda: 5, "Categorical.num_classes": lambda: 3,
    "posterior.X": lambda: x()[None, :3], "condition_on_observations.X": lambda: x()[:3] + 0.01,
    "condition_on_observations.Y": lambda: y()[:3, None], "NNGPClassifier.method": lambda: "vnngp",
    "NNGPRegressor.method": lambda: "vecchia", "NNGPCountRegressor.method": lambda: "vnngp",
    "method_options": lambda: None, "fit_options": lambda: {"num_steps": 2}, "NNGPClassifier.kernel": lambda: None,
    "NNGPRegressor.kernel": lambda: None, "NNGPCountRegressor.kernel": lambda: None,
    "NNGPClassifier.likelihood": lambda: None, "NNGPRegressor.likelihood": lambda: None,
    "NNGPCountRegressor.likelihood": lambda: None, "PerOutput.outputs": lambda: likelihoods.Gaussian(0.1),
    "union_of_sites.outputs": lambda: (x(), y()), "check.y": lambda: torch.ones(N).double(),
    "Beta.check.y": lambda: 0.5 * torch.ones(N).double(), "Multinomial.check.y": lambda: torch.ones(N, 3).double(),
    "Linear.variance": lambda: 1.0, "sample_new.f": y, "NNGP.predict.f": y, "lon_lat.degrees": VALID["degrees"],
    "save.model": gp, "compare_to_exact.num_neighbors": lambda: [2, 4], "Standardizer.inverse.values": x,
    "transform.values": x, "inverse.values": x, "score.y": y, "nearest_before.limit": VALID["limit"],
    "loading.x": lambda: x()[:3], "points": x, "bathymetry.dtype": lambda: torch.float64,
    "predict.noise": lambda: None, "FullScaleNNGP.inducing": lambda: x()[:5],
    "variational.MeanField.loc": lambda: None, "variational.MeanField.scale": lambda: 1.0,
    "FullRank.loc": lambda: None, "FullRank.scale": lambda: 1.0, "SparseCholesky.loc": lambda: None,
    "SparseCholesky.scale": lambda: 1.0, "NNGP.points": lambda: None, "whitened_conditional.z": lambda: x()[:5],
    "plot_relevance.gp": lambda: nngp.Vecchia(x(), y(), kernels.Matern52(2), num_neighbors=K),
    "Strauss.sample_shape": lambda: torch.Size([]),
}
# fmt: on
EVEN_IF_OPTIONAL = {  # values that go before defaults
    *("disable_progbar", "fit_options", "inducing", "jitter", "kernel", "kernels", "num_draws", "num_neighbors"),
    *("progress", "seed"),
}
