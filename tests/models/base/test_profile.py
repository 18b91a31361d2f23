"""Training on fewer rows first: which rows these are, what the method takes over, and how fit goes through stages."""

from contextlib import contextmanager

import pytest
import torch
from builders import F64, uniform

from pyro_nngp.inference import Checkpoint, fit
from pyro_nngp.kernels import Matern52
from pyro_nngp.likelihoods import Bernoulli, Gaussian
from pyro_nngp.loadings import FactorLoadings
from pyro_nngp.models import LMC, NPVI, VNNGP
from pyro_nngp.models.base.profile import Profile
from pyro_nngp.variational import MeanField


def labels(n, method=VNNGP, **given):
    """A method on labels; of three outputs that share a factor for LMC."""
    torch.manual_seed(3)
    x = uniform(n)
    f = torch.sin(6 * x[:, :1]) * torch.tensor([2.0, -1.5, 1.0], dtype=F64)
    y = torch.bernoulli(f.sigmoid())
    return method(x, y if method is LMC else y[:, 0], Matern52(2), Bernoulli(), **given)


def coupled(n):
    return labels(n, LMC, num_latents=1, num_neighbors=4)


def factors(n):
    return labels(n, LMC, mixing=FactorLoadings(3, 1), num_neighbors=4)


@pytest.mark.parametrize("build", [labels, coupled, factors])
def test_a_first_stage_has_the_first_rows_and_hands_on_all_that_does_not_belong_to_rows(build):
    gp = build(4000)
    q, first = gp.q.loc.clone(), gp.graph.order[:2000]
    kernel = "kernel.0.lengthscale" if build is not labels else "kernel.lengthscale"
    with gp.profile.first_stage() as part:
        assert torch.equal(part.x, gp.x[first])
        assert torch.equal(part.y, gp.y[first])
        for parameter in part.parameters():
            parameter.data.add_(0.1)
        told = {
            name: value for name, value in part.state_dict().items() if name.startswith(("kernel", "mixing", "mean"))
        }
    assert any(name.startswith(kernel) for name in told)
    for name, value in told.items():
        assert torch.equal(gp.state_dict()[name], value)
    assert torch.equal(gp.q.loc, q)


@pytest.mark.parametrize("build", [labels, coupled])
def test_the_prior_of_a_first_stage_is_the_marginal_of_the_prior_of_all_rows(build):
    """Predecessors of the first rows of an ordering are first rows: K of them, nearest by the same metric."""
    gp = build(4000)
    order = gp.graph.order
    place = torch.empty_like(order).scatter_(0, order, torch.arange(4000))
    with gp.profile.first_stage() as part:
        mine = torch.where(part.graph.neighbors < 0, -1, part.graph.order.argsort()[part.graph.neighbors])
        every = gp.graph.neighbors[order[:2000]]
        want = torch.where(every < 0, -1, place[every])
        assert torch.equal(mine[part.graph.order].sort(-1).values, want.sort(-1).values)


def test_stages_have_a_quarter_of_the_rows():
    gp = labels(16_400, num_neighbors=4)
    with gp.profile.first_stage() as part, part.profile.first_stage() as first, first.profile.first_stage() as none:
        assert (part.num_data, first.num_data, none) == (4100, 2000, None)


def gaussian(n):
    return LMC(uniform(n), uniform(n), Matern52(2), Gaussian(), num_neighbors=4)


@pytest.mark.parametrize(
    "gp",
    [
        lambda: labels(3999, num_neighbors=4),
        lambda: labels(4000, num_neighbors=4, guide=MeanField()),
        lambda: labels(4000, NPVI, num_neighbors=4),
        lambda: factors(3999),
        lambda: gaussian(4000),
    ],
)
def test_few_rows_and_guides_that_are_not_solved_for_at_each_step_have_no_first_stage(gp):
    with gp().profile.first_stage() as part:
        assert part is None


def test_a_solved_method_has_no_first_stage():
    gp = labels(4000, num_neighbors=4)
    gp.solve()
    with gp.profile.first_stage() as part:
        assert part is None


def test_training_starts_from_where_the_first_stage_has_ended(tmp_path):
    stages = []

    class Stages(Profile):
        @contextmanager
        def first_stage(self):
            with super().first_stage() as none:
                assert none is None
            if self.method.num_data < 120:
                yield None
                return
            stages.append(self.method.subset(torch.arange(60)))
            yield stages[-1]
            self.method.kernel.load_state_dict(stages[-1].kernel.state_dict())

    class InStages(LMC):
        @property
        def profile(self):
            return Stages(self, in_rounds=True)

    def staged():
        whole = factors(120)
        return InStages(whole.x, whole.y, Matern52(2), Bernoulli(), mixing=FactorLoadings(3, 1))

    gp = staged()
    start = gp.kernel[0].lengthscale.clone()
    first = []
    fit(gp, max_seconds=1e-9, progress=False, callback=lambda step, loss: first.append(step))
    assert not first  # time is up
    gp = staged()
    fit(gp, progress=False, checkpoint=tmp_path / "run", callback=lambda *_: first.append(gp.kernel[0].lengthscale))
    assert len(stages) == 2
    assert not torch.equal(stages[1].kernel[0].lengthscale, start)
    assert (first[0] / stages[1].kernel[0].lengthscale).log().abs().max() < (first[0] / start).log().abs().max()
    fit(staged(), progress=False, checkpoint=tmp_path / "run")
    assert len(stages) == 2  # resumed


def test_the_result_tells_of_stages():
    gp = labels(4000, num_neighbors=4)
    result = fit(gp, progress=False)
    ((rows, steps),) = result.stages
    assert rows == 2000
    assert steps > result.steps  # most of the way was made there
    assert f"{result.steps} steps of L-BFGS on 4000 rows after {steps} on 2000, " in repr(result)


def test_the_curvature_of_a_stage_tells_how_far_the_optimum_is():
    def trained(**given):
        return fit(labels(4000, num_neighbors=4), progress=False, **given)

    result, exact = trained(), trained(tolerance=1e-6)
    assert 3 * result.steps < exact.steps
    assert 4000 * (result.losses[-1] - exact.losses[-1]) < 0.2  # nats


def test_a_run_that_is_resumed_knows_the_curvature_of_its_stage(tmp_path):
    def trained(name, stop=None):
        def callback(step, _):
            if step == stop:
                raise InterruptedError

        file = Checkpoint(tmp_path / name, every=1)
        return fit(labels(4000, num_neighbors=4), progress=False, checkpoint=file, callback=callback)

    whole = trained("whole")
    with pytest.raises(InterruptedError):
        trained("part", stop=1)
    assert trained("part").losses.tolist() == whole.losses.tolist()


@pytest.mark.parametrize("optimizer", [None, "adam"])
def test_steps_that_are_given_or_of_another_optimizer_train_all_rows_at_once(optimizer, monkeypatch):
    gp = labels(4000, num_neighbors=4)
    monkeypatch.setattr(Profile, "first_stage", lambda self: pytest.fail("a first stage"))
    fit(gp, num_steps=1, optimizer=optimizer, progress=False)
