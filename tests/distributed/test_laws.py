"""Laws of methods on several processes: results are those of one, minibatches average, checkpoints continue."""

import pytest
import torch
from builders import fresh

from pyro_nngp.distributed import ShardedData
from pyro_nngp.inference import Checkpoint, Schedule, fit
from pyro_nngp.likelihoods import Bernoulli, Binomial, Gaussian, NegativeBinomial, Poisson, StudentT
from pyro_nngp.means import LinearMean
from pyro_nngp.models import LOO, NPVI, SVGP, SWSGP, VNNGP, MLLk, Vecchia
from pyro_nngp.variational import (
    Amortized,
    Conjugate,
    FullRank,
    MeanField,
    PseudoObservations,
    SparseCholesky,
    factored_posterior,
)
from pyro_nngp.variational.encoders import ConditionalEncoder, GraphConvolutionEncoder, SiteEncoder
from tests.builders import surface
from tests.oracles.processes import check_same, on_processes

pytestmark = pytest.mark.filterwarnings("ignore:(SWSGP|VNNGP). intervals of f from Poisson data")

N = 200
FEW = {"num_neighbors": 8}
CASES = {  # functions are called for the arguments
    "vecchia": (Vecchia, Gaussian, {}),  # the exact process
    "vecchia with a trend": (Vecchia, Gaussian, FEW | {"mean": lambda: LinearMean(2)}),
    "vecchia, weights and offset": (Vecchia, Gaussian, FEW),
    "loo": (LOO, Gaussian, {}),
    "loo of heavy tails": (LOO, lambda: StudentT(0.1, 4.0), FEW | {"guide": Conjugate()}),
    "loo of counts": (LOO, NegativeBinomial, FEW),
    "loo of labels": (LOO, Bernoulli, FEW | {"guide": Conjugate()}),
    "loo of trials": (LOO, Binomial, FEW | {"guide": Conjugate()}),
    "mllk": (MLLk, Gaussian, {"num_neighbors": 6}),
    "sites": (VNNGP, Gaussian, FEW),
    "sites of counts": (VNNGP, Poisson, FEW),
    "sites of counts, npvi": (NPVI, Poisson, FEW | {"guide": PseudoObservations()}),
    "sites with a trend": (VNNGP, Gaussian, FEW | {"mean": lambda: LinearMean(2, prior="weak")}),
    "sites of two outputs": (VNNGP, Poisson, FEW),
    "sites, weights and offset": (VNNGP, Poisson, FEW),
    "mean-field": (VNNGP, Gaussian, FEW | {"guide": MeanField()}),
    "mean-field of counts": (VNNGP, Poisson, FEW | {"guide": MeanField()}),
    "factor": (VNNGP, Gaussian, FEW | {"guide": SparseCholesky(5)}),
    "factor of counts": (VNNGP, Poisson, FEW | {"guide": SparseCholesky(5)}),
    "npvi": (NPVI, Gaussian, FEW),
    "npvi of counts": (NPVI, Poisson, FEW),
    "network of counts": (NPVI, Poisson, FEW | {"guide": lambda: Amortized(ConditionalEncoder())}),
    "network": (NPVI, Gaussian, FEW | {"guide": lambda: Amortized(GraphConvolutionEncoder())}),
    "network of sites": (NPVI, Gaussian, FEW | {"guide": lambda: Amortized(SiteEncoder(2))}),
    "network, vnngp": (VNNGP, Poisson, FEW | {"guide": lambda: Amortized(ConditionalEncoder())}),
    "svgp": (SVGP, Gaussian, {"inducing": 20}),
    "svgp of counts": (SVGP, Poisson, {"inducing": 12}),
    "svgp, fitc": (SVGP, Gaussian, {"inducing": 12, "objective": "fitc", "learn_inducing": False}),
    "swsgp": (SWSGP, Gaussian, FEW | {"inducing": 40}),
    "swsgp of fixed points": (SWSGP, Gaussian, FEW | {"inducing": 40, "learn_inducing": False}),
    "swsgp, full covariance": (SWSGP, Poisson, FEW | {"inducing": 20, "guide": FullRank()}),
    "inducing": (VNNGP, Poisson, FEW | {"inducing": 30}),
    "inducing, factor": (
        VNNGP,
        Gaussian,
        FEW | {"inducing": 30, "learn_inducing": True, "guide": SparseCholesky(4)},
    ),
}
QUICK = "loo of labels", "sites", "swsgp"
DRAWN = "sites with a trend", "loo of heavy tails"  # values that training draws, on each process others
BY_QUASI_NEWTON = "vecchia", "vecchia with a trend", "loo", "loo of counts", "loo of labels", "mllk"


def slow_except(*quick, cases=CASES):
    return [pytest.param(case, marks=[] if case in quick else pytest.mark.slow) for case in cases]


def build(case, sharded=True):
    """A method of the case on all rows, or on those of this process."""
    method, likelihood, options = CASES[case]
    torch.manual_seed(0)  # networks
    options = fresh(options)
    x, y, _ = surface(Poisson if likelihood in (Poisson, NegativeBinomial) else Gaussian)
    by_row = {}
    if likelihood in (Bernoulli, Binomial):
        y = (y > 0).double()
    if likelihood is Binomial:
        by_row["trials"] = torch.arange(1, N + 1).remainder(5) + 1.0
        y = y * by_row["trials"]
    if "two outputs" in case:
        y = torch.stack([y, y.flip(0)], -1)
    if "weights" in case:
        by_row = {"offset": x[:, 0], "weights": 1 + (x[:, 1] > 0.5).double()}
    data = [ShardedData(x, y, **by_row)] if sharded else [x, y]
    return method(*data, likelihood=likelihood(), **options, **({} if sharded else by_row))


def moments(gp):
    new = surface(Gaussian)[2]
    by_row = {"offset": new[:, 0]} if gp.offset is not None else {}
    trials = {"trials": torch.full((9,), 5.0)} if isinstance(gp.likelihood, Binomial) else {}
    return torch.stack([*gp(new, **by_row), gp.predict(new, **by_row, **trials).variance]).detach()


def train(gp, num_steps, batch_size, every=3, **options):
    """Train by Adam, with searches for neighbors and solutions between the steps where there are any."""
    if hasattr(gp, "refresh_neighbors"):
        options["refresh_every"] = every
    if getattr(gp, "can_solve", False):
        options["solve_every"] = min(every, 2)
    return fit(gp, num_steps, batch_size=batch_size, progress=False, **options).losses


def parts(gp):
    """What training has changed, whatever rows a process has."""
    found = {"lengthscale": gp.kernel.lengthscale.detach(), "moments": moments(gp)}
    if hasattr(gp, "z"):
        found["inducing"] = gp.z.detach()
    q = getattr(gp, "q", None)
    if hasattr(q, "encoder"):
        found["weights"] = torch.cat([param.detach().flatten() for param in q.encoder.parameters()])
    if hasattr(q, "excess"):
        found["slope"] = q.excess.slope
    return found


def on(count, folder, work, *args):
    """What a function returns on each of some processes; a single one is in no group."""
    folder.mkdir(exist_ok=True)
    return on_processes(count, folder, work, *args) if count > 1 else [work(*args)]


def trained(case, sharded):
    """Everything that is found by solving, by training on all rows, and by predictions."""
    gp, found = build(case, sharded), {}
    if getattr(gp, "can_solve", False):
        for _ in range(2):
            gp.solve()
            found["solved"] = moments(gp)
            gp.kernel.lengthscale = 0.8 * gp.kernel.lengthscale.detach()
            if hasattr(gp, "refresh_neighbors"):
                gp.refresh_neighbors()
                found["refreshed"] = moments(gp)
    if case == "sites with a trend":
        found |= {"coefficients": gp.mean.posterior_loc, "covariance": gp.mean.posterior_tril}
    if case in DRAWN:
        return found
    found["losses"] = train(gp, 5, N)
    found |= parts(gp)
    if hasattr(gp, "z"):
        found["draws"] = gp.sample(surface(Gaussian)[2], 3, seed=0)
    if case in BY_QUASI_NEWTON:
        gp = build(case, sharded)
        found["default losses"] = fit(gp, progress=False).losses
        found |= {f"default {name}": value for name, value in parts(gp).items()}
    if isinstance(gp, Vecchia):
        found["log density"] = gp.log_prob()
    return found


@pytest.mark.parametrize("case", slow_except(*QUICK))
def test_two_processes_are_one(case, tmp_path, monkeypatch):
    monkeypatch.setattr(factored_posterior, "MOST_OPERATIONS", 0.0)  # of several processes there is no sparse factor
    expected = trained(case, False)
    for found in on_processes(2, tmp_path, trained, case, True):
        check_same(found, expected, 1e-6)


ALONE = (
    *("vecchia, weights and offset", "loo of heavy tails", "sites with a trend", "sites, weights and offset"),
    *("factor of counts", "npvi of counts", "network of sites", "svgp, fitc", "swsgp, full covariance"),
    "inducing, factor",
)


@pytest.mark.parametrize("case", ALONE)
def test_a_process_in_no_group_has_the_results_of_plain_rows(case, monkeypatch):
    monkeypatch.setattr(factored_posterior, "MOST_OPERATIONS", 0.0)
    check_same(trained(case, True), trained(case, False), 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("case", ["vecchia", "loo of counts", "mllk"])
def test_any_number_of_processes_is_one(case, count, tmp_path):
    expected = trained(case, False)
    for found in on(count, tmp_path, trained, case, True):
        check_same(found, expected, 1e-6)


def still(case, batch_size):
    """Losses of steps too small to move anything."""
    gp = build(case)
    return {"losses": train(gp, 5, batch_size, every=0, lr=1e-30, schedule=Schedule(()))}


@pytest.mark.parametrize("case", slow_except("vecchia", cases=("vecchia", "svgp", "swsgp", "network of counts")))
def test_minibatches_of_an_epoch_average_to_the_loss_of_all_rows(case, tmp_path):
    batches = on(2, tmp_path / "batches", still, case, N // 5)
    whole = on(2, tmp_path / "all", still, case, N)
    assert torch.equal(batches[0]["losses"], batches[1]["losses"])
    assert batches[0]["losses"].std() > 0.001
    torch.testing.assert_close(batches[0]["losses"].mean(), whole[0]["losses"][0], rtol=1e-6, atol=0)


class Stop(Exception):
    """Ends a run in the middle."""


def in_minibatches(case, batch_size, path=None, end=None):
    def stop(step, loss):
        if step == end:
            raise Stop

    gp, checkpoint = build(case), None if path is None else Checkpoint(path / "checkpoint", every=3)
    try:
        losses = train(gp, 10, batch_size, checkpoint=checkpoint, callback=stop)
    except Stop:
        return {}
    folders = [] if path is None else list((path / "checkpoint").iterdir())
    assert len(folders) <= 2  # the last one, and perhaps one that is being removed
    return {"losses": losses, **parts(gp)}


CONTINUED = (
    *("loo of counts", "sites of counts", "mean-field of counts", "factor of counts", "npvi of counts"),
    *("network of counts", "svgp", "swsgp", "swsgp of fixed points", "inducing, factor"),
)


@pytest.mark.slow
@pytest.mark.parametrize("case", CONTINUED)
def test_processes_stay_together_and_a_checkpoint_continues_bit_for_bit(case, tmp_path):
    one, other = on(2, tmp_path / "whole", in_minibatches, case, 60)
    assert torch.equal(one["losses"], other["losses"])
    assert torch.equal(one["lengthscale"], other["lengthscale"])
    on(2, tmp_path / "begun", in_minibatches, case, 60, tmp_path, 5)
    found = on(2, tmp_path / "continued", in_minibatches, case, 60, tmp_path)[0]
    for name, value in one.items():
        assert torch.equal(found[name], value), name


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 3), (3, 1)])
@pytest.mark.parametrize("case", ["loo of counts", "sites of counts", "npvi of counts"])
def test_another_number_of_processes_continues(case, before, after, tmp_path):
    expected = in_minibatches(case, N)
    on(before, tmp_path / "begun", in_minibatches, case, N, tmp_path, 5)
    for found in on(after, tmp_path / "continued", in_minibatches, case, N, tmp_path):
        check_same(found, expected, 1e-6)


CONDITIONED = "vecchia", "sites of counts", "sites, weights and offset"  # on observations: draws have the same bits
SCORED = (
    *CONDITIONED,
    *("loo of heavy tails", "sites of two outputs", "npvi of counts", "svgp of counts", "svgp, fitc", "inducing"),
    "swsgp, full covariance",
)


def scored(case, sharded):
    """Densities of all rows and of two by their places in the data, joint posteriors, and draws from one seed."""
    gp, new = build(case, sharded), surface(Gaussian)[2]
    if getattr(gp, "can_solve", False):
        gp.solve()
    densities = gp.loo()
    rows = gp.shard.rows if sharded else torch.arange(N)
    some = (rows < 2).nonzero()[:, 0] if sharded and gp.shard.world.size == 1 else torch.arange(2)
    torch.testing.assert_close(gp.loo(some), densities[..., some], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gp.loo_by_draw(some, from_guide=True)({}), densities[..., some], rtol=1e-5, atol=1e-5)
    found = {"loo": gp.shard.in_order(densities) if sharded else densities}
    if case in CONDITIONED:
        found["joint mean"], found["joint covariance"] = (part.detach() for part in gp.joint(new.view(3, 3, 2)))
        one = gp.sample(new[:1], 2, num_neighbors=1, seed=0)
        found["one neighbor"] = torch.cat([one.flatten(), gp(new[:1], num_neighbors=1)[0].detach()])
    if case in CONDITIONED or "inducing" in CASES[case][2]:
        found["draws"] = gp.sample(new, 3, seed=1)
    if isinstance(gp, Vecchia):
        torch.manual_seed(0)
        found["predictions"] = gp.predictions_by_draw(new, seed=1)({})[1]
    return found


@pytest.mark.parametrize("case", [case for case in SCORED if case in ALONE])
def test_a_process_in_no_group_has_the_densities_and_draws_of_plain_rows(case, monkeypatch):
    monkeypatch.setattr(factored_posterior, "MOST_OPERATIONS", 0.0)
    check_same(scored(case, True), scored(case, False), 1e-6)


@pytest.mark.parametrize("case", slow_except("sites of counts", "svgp of counts", cases=SCORED))
def test_densities_and_draws_of_two_processes_are_those_of_one(case, tmp_path, monkeypatch):
    monkeypatch.setattr(factored_posterior, "MOST_OPERATIONS", 0.0)  # of several processes there is no sparse factor
    expected = scored(case, False)
    for found in on_processes(2, tmp_path, scored, case, True):
        check_same(found, expected, 1e-6)
