import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import MCMC, NUTS
from pyro.infer.autoguide.initialization import init_to_value

from pyro_nngp.inducing.priors import Determinantal, Flat, Interacting, Strauss, inducing_prior
from pyro_nngp.kernels import RBF, Matern12, Matern32, Matern52

F64 = torch.float64
M, D = 7, 2


def points(m=M):
    return torch.randn(m, D, dtype=F64)


def normal(m=M):
    return dist.Normal(torch.zeros(m, D, dtype=F64), 1.0).to_event(2)


def kernel():
    return RBF(D, variance=torch.tensor(1.7, dtype=F64), lengthscale=torch.tensor([0.6, 1.1], dtype=F64))


def named(name, z):
    """What a model makes of a name."""
    return inducing_prior("test", name, tuple(z.shape))(kernel(), z)


def test_normal():
    z = points()
    want = -0.5 * (z.square().sum() + z.numel() * torch.tensor(2 * torch.pi, dtype=F64).log())
    torch.testing.assert_close(named("normal", z).log_prob(z), want, rtol=1e-12, atol=0)


def test_uniform():
    z = 100 * points()
    assert float(named("uniform", z).log_prob(z)) == 0
    assert named("uniform", z).log_prob(torch.stack([z, z])).shape == (2,)


def test_determinantal_is_the_log_determinant():
    z = points()
    scaled = z / torch.tensor([0.6, 1.1], dtype=F64)
    cov = 1.7 * torch.exp(-0.5 * (scaled[:, None] - scaled).square().sum(-1))
    want = torch.linalg.eigvalsh(cov + 1e-6 * torch.diag(cov.diagonal())).log().sum()
    prior = Determinantal(kernel(), Flat(M, D), correlation=False)
    torch.testing.assert_close(prior.log_prob(z).detach(), want, rtol=1e-9, atol=0)
    of_correlations = want - M * torch.tensor(1.7, dtype=F64).log()
    torch.testing.assert_close(named("determinantal", z).log_prob(z).detach(), of_correlations, rtol=1e-9, atol=0)
    based = Determinantal(kernel(), normal()).log_prob(z).detach()
    torch.testing.assert_close(based, of_correlations + normal().log_prob(z))


def test_correlations_do_not_see_the_variance_of_the_kernel():
    z = points()
    values = [
        [float(Determinantal(RBF(D, variance=v).double(), normal(), c).log_prob(z).detach()) for v in (1.0, 5.0)]
        for c in (True, False)
    ]
    assert values[0][0] == pytest.approx(values[0][1], rel=1e-6)
    assert values[1][1] - values[1][0] == pytest.approx(M * float(torch.tensor(5.0).log()), rel=1e-5)


def test_strauss_counts_close_pairs():
    z, prior = points(), Strauss(Flat(M, D), radius=1.2, repulsion=0.3, softness=0.0)
    close = sum(float((z[i] - z[j]).norm()) < 1.2 for i in range(M) for j in range(i))
    assert 0 < close < M * (M - 1) // 2
    assert float(prior.num_close_pairs(z)) == close
    want = close * torch.tensor(0.3, dtype=F64).log()
    torch.testing.assert_close(prior.log_prob(z), want, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", ["uniform", "determinantal", "strauss"])
def test_a_flat_base_lets_a_far_point_go_and_a_normal_one_does_not(name):
    z = points()
    z[0] = 50.0
    farther = z.clone()
    farther[0] = 500.0
    flat = named(name, z)
    torch.testing.assert_close(flat.log_prob(farther), flat.log_prob(z), rtol=1e-12, atol=1e-12)
    if name != "uniform":
        flat.base = normal()
        want = D * (50.0**2 - 500.0**2) / 2
        assert float((flat.log_prob(farther) - flat.log_prob(z)).detach()) == pytest.approx(want, rel=1e-9)


def test_smooth_strauss_tends_to_the_hard_one():
    z = points()
    hard = float(Strauss(Flat(M, D), 1.2, softness=0.0).num_close_pairs(z))
    errors = [abs(float(Strauss(Flat(M, D), 1.2, softness=s).num_close_pairs(z)) - hard) for s in (0.5, 1e-4)]
    assert errors[0] > 1e-2
    assert errors[1] < 1e-6


def test_softness_is_the_width_of_the_step():
    """At the radius a pair counts one half, and the slope in the distance is that of a logistic step of this width."""
    prior, r = Strauss(Flat(2, 1), 0.8, softness=0.1), torch.tensor(0.8, dtype=F64, requires_grad=True)
    count = prior.num_close_pairs(torch.stack([torch.zeros(1, dtype=F64), r[None]]))
    assert float(count.detach()) == pytest.approx(0.5)
    assert float(torch.autograd.grad(count, r)[0]) == pytest.approx(-0.25 / 0.1)


@pytest.mark.parametrize("name", ["normal", "uniform", "determinantal", "strauss"])
@pytest.mark.parametrize("family", [RBF, Matern12, Matern32, Matern52])
@pytest.mark.parametrize("dtype", [F64, torch.float32])
def test_gradients_are_finite_also_where_points_coincide(name, family, dtype):
    z = points().to(dtype)
    z[1], z[4] = z[0], z[0]
    z.requires_grad_()
    prior = inducing_prior("test", name, tuple(z.shape))(family(D).to(dtype), z.detach())
    log_prob = prior.log_prob(z)
    assert bool(log_prob.isfinite())
    if log_prob.requires_grad:
        assert bool(torch.autograd.grad(log_prob, z)[0].isfinite().all())
    else:
        assert name == "uniform"


@pytest.mark.parametrize("name", ["determinantal", "strauss"])
def test_gradients_are_those_of_the_density(name):
    z = points().requires_grad_()
    prior = named(name, z.detach()) if name == "determinantal" else Strauss(normal(), 1.0, softness=0.2)
    assert torch.autograd.gradcheck(prior.log_prob, z)


def test_point_processes_repel():
    for prior in (named("determinantal", points(2)), Strauss(Flat(2, D))):
        near, far = torch.zeros(2, D, dtype=F64), torch.zeros(2, D, dtype=F64)
        near[1, 0], far[1, 0] = 0.1, 3.0
        assert bool(prior.log_prob(near) < prior.log_prob(far) - 0.5)


def test_a_box_is_a_base():
    box = dist.Uniform(-torch.ones(M, D, dtype=F64), torch.ones(M, D, dtype=F64)).to_event(2)
    prior = Strauss(box)
    assert float(box.log_prob(box.sample())) == pytest.approx(-M * D * float(torch.tensor(2.0).log()))
    outside = torch.full((M, D), 2.0, dtype=F64)
    assert not bool(prior.support.check(outside))

    def model():
        pyro.sample("z", prior)

    start = init_to_value(values={"z": box.sample()})
    mcmc = MCMC(NUTS(model, init_strategy=start, max_plate_nesting=0, max_tree_depth=3), 10, 10, disable_progbar=True)
    mcmc.run()
    assert float(mcmc.get_samples()["z"].abs().max()) < 1


@pytest.mark.parametrize("prior", [Flat(M, D), Strauss(normal()), Determinantal(RBF(D), normal())])
def test_unnormalized_densities_have_no_draws(prior):
    with pytest.raises(
        NotImplementedError, match=r"expected a prior that is sampled from .* Start chains at given values"
    ):
        prior.sample()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"radius": 0.0}, r"Strauss: expected radius to be finite and > 0"),
        ({"repulsion": 0.0}, r"expected repulsion to be finite and > 0 and <= 1"),
        ({"repulsion": 1.1}, r"expected repulsion to be finite and > 0 and <= 1"),
        ({"softness": -1.0}, r"expected softness to be finite and >= 0"),
        ({"base": dist.Normal(torch.zeros(M, D), 1.0)}, r"expected base to be a distribution over \(M, D\)"),
    ],
)
def test_wrong_parameters(settings, message):
    with pytest.raises(ValueError, match=message):
        Strauss(**{"base": normal()} | settings)


def test_wrong_priors():
    with pytest.raises(ValueError, match=r"test: expected inducing_prior to be one of 'normal', .*, got 'gaussian'"):
        inducing_prior("test", "gaussian", (M, D))
    with pytest.raises(ValueError, match=r"expected inducing_prior to be a distribution over \(7, 3\)"):
        inducing_prior("test", normal(), (M, 3))


def test_a_prior_without_an_interaction_is_told_so():
    class Bare(Interacting):
        pass

    match = r"Bare: expected interaction to be defined by the subclass, got nothing\. Return one logarithm"
    with pytest.raises(NotImplementedError, match=match):
        Bare(normal()).log_prob(points())
