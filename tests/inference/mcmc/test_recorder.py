"""Statistics of each draw of HMC and NUTS."""

import os
import pickle

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import HMC, MCMC, NUTS
from pyro.infer.mcmc.mcmc_kernel import MCMCKernel

from pyro_nngp.inference import Recorder, to_arviz

F64 = torch.float64


def model():
    scale = pyro.sample("scale", dist.LogNormal(torch.tensor(0.0, dtype=F64), 0.5))
    with pyro.plate("data", 3):
        pyro.sample("x", dist.Normal(torch.zeros(3, dtype=F64), scale))


def log_joint(posterior):
    """In unconstrained space: of log(scale) and x."""
    scale, x = (torch.as_tensor(posterior[name].values) for name in ("scale", "x"))
    return (
        dist.Normal(0.0, 0.5).log_prob(scale.log()) + dist.Normal(0.0, scale[..., None]).log_prob(x).sum(-1)
    ).numpy()


def export(kernel, num_samples=150, warmup_steps=40, num_chains=1, hook=None):
    pyro.set_rng_seed(0)
    hook = Recorder() if hook is None else hook
    mcmc = MCMC(kernel, num_samples, warmup_steps, num_chains=num_chains, disable_progbar=True, hook_fn=hook)
    mcmc.run()
    return to_arviz(mcmc, progress=False), mcmc


@pytest.mark.slow
def test_densities_and_energies_of_nuts():
    hook, shown = Recorder(), []

    def shows(kernel, *call):
        hook(kernel, *call)
        shown.append(kernel.logging())

    found, mcmc = export(NUTS(model), hook=shows)
    stats = found.sample_stats
    np.testing.assert_allclose(stats["lp"], log_joint(found.posterior), rtol=1e-9)
    kinetic = stats["energy"].values[0, 1:] + stats["lp"].values[0, :-1]  # of four momenta
    assert (kinetic > 0).all()
    assert abs(kinetic.mean() - 2) < 4 * 2**0.5 / len(kinetic) ** 0.5
    assert stats["acceptance_rate"].dims == ("chain", "draw")
    assert f"{stats['acceptance_rate'].values.mean():.3f}" == shown[-1]["acc. prob"]
    assert f"{stats['acceptance_rate'].values[0, :70].mean():.3f}" == shown[109]["acc. prob"]
    assert {f"{size:.2e}" for size in stats["step_size"].values[0]} == {shown[-1]["step size"]}
    assert (stats["tree_depth"].values[0] == [n.bit_length() for n in stats["n_steps"].values[0].tolist()]).all()
    assert not stats["reached_max_tree_depth"].any()
    assert "warmup_posterior" not in found
    assert mcmc.diagnostics()["acceptance rate"]["chain 0"] > 0.5


def test_steps_are_the_gradients_that_were_taken():
    counts = []

    def potential(z):
        counts[-1] += 1
        return 0.5 * (z["z"] / torch.tensor([1.0, 20.0])).square().sum()

    hook = Recorder()

    def counted(*call):
        hook(*call)
        steps.append(counts[-1])
        counts.append(0)

    for kernel, options in ((NUTS, {"max_tree_depth": 3}), (HMC, {"num_steps": 5})):
        steps = []
        counts.append(0)
        kernel = kernel(
            potential_fn=potential, step_size=0.3, adapt_step_size=False, adapt_mass_matrix=False, **options
        )
        start = {"z": torch.zeros(2)}
        mcmc = MCMC(kernel, 20, 2, initial_params=start, disable_progbar=True, hook_fn=counted)
        mcmc.run()
        found = mcmc.diagnostics()["recorded"]["chain 0"]["draws"]
        assert found["n_steps"].tolist() == steps[2:]
        assert (found["step_size"] == 0.3).all()
        if "max_tree_depth" in options:
            assert found["reached_max_tree_depth"].tolist() == [n > 3 for n in steps[2:]]


def test_acceptance_is_that_of_each_draw():
    def potential(z):
        return 50 * z["z"].square().sum()

    rates = {}
    for step in (1e-3, 10.0):
        kernel = HMC(
            potential_fn=potential, step_size=step, num_steps=1, adapt_step_size=False, adapt_mass_matrix=False
        )
        mcmc = MCMC(
            kernel, 12, 3, initial_params={"z": torch.full((1,), 0.1)}, disable_progbar=True, hook_fn=Recorder()
        )
        mcmc.run()
        rates[step] = mcmc.diagnostics()["recorded"]["chain 0"]["draws"]["acceptance_rate"]
    assert (rates[1e-3] > 0.99).all()
    assert (rates[10.0] < 1e-6).all()


@pytest.mark.slow
def test_warmup_is_kept_on_request():
    found, _ = export(NUTS(model), 10, 30, hook=Recorder(warmup=True))
    assert found.warmup_posterior["x"].dims == ("chain", "draw", "data")
    assert found.warmup_posterior.sizes["draw"] == 30
    np.testing.assert_allclose(found.warmup_sample_stats["lp"], log_joint(found.warmup_posterior), rtol=1e-9)
    assert len(np.unique(found.warmup_sample_stats["step_size"])) > 10
    assert len(found.posterior["draw"]) == 10
    fewer = to_arviz(export(NUTS(model), 10, 30, hook=Recorder(warmup=True))[1], num_samples=2, var_names=["~x"])
    assert list(fewer.warmup_posterior.data_vars) == ["scale"]
    assert fewer.warmup_posterior.sizes["draw"] == 30
    assert fewer.sample_stats["lp"].values.tolist() == found.sample_stats["lp"].values[:, [0, 9]].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("cores", [1, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:num_chains")  # are drawn one after the other
def test_chains_of_one_process_and_of_several(cores, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    found, mcmc = export(NUTS(model), 20, 10, num_chains=2)
    stats = found.sample_stats
    assert stats["energy"].shape == (2, 20)
    np.testing.assert_allclose(stats["lp"], log_joint(found.posterior), rtol=1e-9)
    assert np.isfinite(stats["energy"]).all()
    assert (stats["energy"].values[:, 1:] + stats["lp"].values[:, :-1] > 0).all()
    assert not np.array_equal(stats["lp"][0], stats["lp"][1])
    pickle.dumps(mcmc.kernel.diagnostics)


def test_other_kernels_are_refused():
    class Other(MCMCKernel):
        def sample(self, params):
            return params

    with pytest.raises(TypeError, match=r"Recorder: expected the kernel to be HMC or NUTS, got Other\. Other kernels"):
        Recorder()(Other(), {}, "Sample", 0)
