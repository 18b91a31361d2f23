"""Ranks of simulation-based calibration in the form of ArviZ."""

import warnings

import pytest
import torch

from pyro_nngp.inference import sbc_ranks, sbc_to_arviz

with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)  # ArviZ 0.x speaks of 1.x once a day
    import arviz as az


def test_ranks_are_draws_of_one_chain():
    ranks = {"slope": torch.rand(20), "beta": torch.rand(20, 2, 3)}
    found = sbc_to_arviz(ranks, dims={"beta": ["covariate", "output"]}, coords={"covariate": ["a", "b"]}).prior_sbc
    assert found["slope"].dims == ("chain", "draw")
    assert found["beta"].dims == ("chain", "draw", "covariate", "output")
    assert found["covariate"].values.tolist() == ["a", "b"]
    assert found["output"].values.tolist() == [0, 1, 2]
    for name, value in ranks.items():
        assert torch.equal(torch.as_tensor(found[name].values)[0], value)
    assert found.attrs["sample_dims"] == ["chain", "draw"]
    assert found.attrs["creation_library"] == "pyro_nngp"
    assert sbc_to_arviz({"beta": ranks["beta"]}).prior_sbc["beta"].dims[2:] == ("beta_dim_0", "beta_dim_1")


@pytest.mark.skipif(not hasattr(az, "plot_ecdf_pit"), reason="of ArviZ 1.x")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Matplotlib, to ArviZ
def test_the_plot_of_arviz_takes_it():
    torch.manual_seed(0)

    def simulate():
        theta = torch.randn(())
        return {"theta": theta}, theta + torch.randn(())

    ranks = sbc_ranks(simulate, lambda y: {"theta": y / 2 + torch.randn(99) / 2**0.5}, 200, progress=False)
    import matplotlib as mpl

    mpl.use("Agg")
    az.plot_ecdf_pit(sbc_to_arviz(ranks), backend="matplotlib")
    mpl.pyplot.close("all")


def test_refusals():
    with pytest.raises(TypeError, match=r"sbc_to_arviz: expected ranks to be a dict of ranks, got \[\]\. Pass what"):
        sbc_to_arviz([])
    with pytest.raises(TypeError, match=r"expected ranks\['a'\] to be a torch.Tensor, got list"):
        sbc_to_arviz({"a": [0.1]})
    with pytest.raises(ValueError, match=r"expected ranks to be of one number of simulations, got \[2, 3\]"):
        sbc_to_arviz({"a": torch.rand(2), "b": torch.rand(3)})
    with pytest.raises(ValueError, match=r"expected dims to name the 1 dimensions of 'a' after the first, got \[\]"):
        sbc_to_arviz({"a": torch.rand(2, 3)}, dims={"a": []})
    with pytest.raises(
        TypeError, match=r"sbc_to_arviz: expected coords to be a dict, got list\. Pass names and values"
    ):
        sbc_to_arviz({"a": torch.rand(2)}, coords=["a"])
    with pytest.raises(ValueError, match=r"expected coords among \['a_dim_0', 'chain', 'draw'\], got b\. Check"):
        sbc_to_arviz({"a": torch.rand(2, 3)}, coords={"b": [1]})
    with pytest.raises(ValueError, match=r"expected coords\['draw'\] to have 2 labels, got \[1\]\. Give each one"):
        sbc_to_arviz({"a": torch.rand(2)}, coords={"draw": [1]})
