"""What ``print`` shows of a method, and its table of hyperparameters."""

import pandas as pd
import pyro.distributions as dist
import pytest
import torch
from pyro.nn import PyroSample

import pyro_nngp as nngp
from pyro_nngp.kernels import Matern52
from pyro_nngp.likelihoods import Gaussian
from pyro_nngp.means import LinearMean

X = torch.linspace(0, 1, 40, dtype=torch.float64)[:, None].expand(-1, 2).clone()


@pytest.mark.parametrize("method", ["Vecchia", "VNNGP", "LOO", "NPVI", "SVGP", "SWSGP", "BSGP"])
def test_methods_show_data_and_hyperparameters(method):
    y = torch.sin(5 * X[:, 0])
    settings = {"inducing": 10} if method in ("SVGP", "SWSGP", "BSGP") else {}
    settings |= {} if method in ("SVGP", "BSGP") else {"num_neighbors": 5}
    gp = getattr(nngp, method)(X + 0.01 * torch.randn_like(X), y, Matern52(2, 0.5, 0.25), Gaussian(0.0625), **settings)
    text = repr(gp)
    assert f"{method}(\n  N=40, D=2, float64 on cpu" in text
    assert "(likelihood): Gaussian(variance=0.0625)" in text


@pytest.mark.slow
def test_summary_lists_every_hyperparameter():
    y = torch.sin(5 * X[:, 0])
    kernel = Matern52(2, 0.5)
    kernel.lengthscale = PyroSample(dist.LogNormal(torch.zeros(2).double(), 1.0).to_event(1))
    gp = nngp.Vecchia(X, y, kernel, Gaussian(0.0625), num_neighbors=5, mean=LinearMean(2))
    with torch.no_grad():
        gp.hyper_guide.loc_0.copy_(torch.tensor([0.0, 1.0]))
        gp.hyper_guide.log_scale_0.copy_(torch.tensor([0.5, 0.1]).log())
    table = gp.summary(0.9)
    names = ["kernel.variance", "kernel.lengthscale[0]", "kernel.lengthscale[1]", "likelihood.variance", "mean.value"]
    assert list(table.index) == [*names, "mean.slope[0]", "mean.slope[1]"]
    assert table.loc["kernel.variance", "estimate"] == pytest.approx(0.5)
    assert table.loc["kernel.variance", "lower"] < 0.5 < table.loc["kernel.variance", "upper"]
    draws = torch.stack([gp.hyper_guide.draw()[gp.kernel, "lengthscale"].detach() for _ in range(4000)])
    for i in range(2):
        row = table.loc[f"kernel.lengthscale[{i}]"]
        ends = draws[:, i].quantile(torch.tensor([0.5, 0.05, 0.95]).double())
        assert row[["estimate", "lower", "upper"]].tolist() == pytest.approx(ends.tolist(), rel=0.06)
        assert row["prior"] == "LogNormal"


def test_summary_refuses_other_probabilities():
    gp = nngp.Vecchia(X, X[:, 0], num_neighbors=5)
    with pytest.raises(ValueError, match="Vecchia.summary: expected probability in \\(0, 1\\), got 95"):
        gp.summary(95)
    with pytest.raises(TypeError, match="Vecchia.summary: expected probability to be a number"):
        gp.summary("wide")


def test_summary_of_sampled_layers_leaves_latent_variables_out():
    gp = nngp.BSGP(X, torch.sin(5 * X[:, 0]), inducing=10)
    names = list(gp.summary().index)
    assert "layers.0.kernel.variance" in names
    assert not [name for name in names if name.endswith((".z", ".u", ".v"))]


@pytest.mark.parametrize("method", [nngp.LMC, nngp.CoregionalizedLOO])
def test_summary_lists_the_mixing_of_several_outputs(method):
    y = torch.sin(5 * X)
    gp = method(X + 0.01 * torch.randn_like(X), y, 1, num_neighbors=5, mixing=torch.tensor([[2.0], [3.0]]).double())
    table = gp.summary()["estimate"]
    assert table[["mixing[0,0]", "mixing[1,0]"]].tolist() == pytest.approx([2.0, 3.0])
    prior = PyroSample(dist.Normal(torch.zeros(2, 1).double(), 1.0).to_event(2))
    gp = method(X + 0.01 * torch.randn_like(X), y, 1, num_neighbors=5, mixing=prior)
    assert list(gp.summary()["prior"][["mixing[0,0]", "mixing[1,0]"]]) == ["Normal", "Normal"]


def test_summary_names_the_outputs():
    x, y = pd.DataFrame(X.numpy(), columns=["u", "v"]), pd.DataFrame({"price": X[:, 0], "rent": X[:, 1] + 3})
    table = nngp.CoregionalizedLOO(x, y, 1, num_neighbors=5).summary()
    for name in ("mean.value[price]", "mean.value[rent]", "likelihood.variance[price]", "mixing[price]"):
        assert name in table.index
