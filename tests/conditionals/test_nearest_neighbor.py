import pyro.distributions as dist
import pytest
import torch
from builders import scalar, tensor
from pyro.nn import PyroSample
from pyro.ops.integrator import potential_grad

from pyro_nngp._memory import block_limit
from pyro_nngp.conditionals.nearest_neighbor import graph_conditional, nn_conditional
from pyro_nngp.kernels import RBF, Matern32, Matern52
from pyro_nngp.linalg import DEFAULT_JITTER, NotPositiveDefiniteError

F64 = torch.float64


def problem(b=7, k=5, d=3):
    x, z = torch.randn(b, d, dtype=F64), torch.randn(b, k, d, dtype=F64)
    return x, z, torch.rand(b, k) > 0.3, torch.rand(b, k, dtype=F64)


def dense(kernel, x, z, mask, noise, jitter):
    """One target at a time, masked neighbors left out, by plain linear algebra."""
    weights, variances = torch.zeros(z.shape[:2], dtype=x.dtype), torch.zeros(len(x), dtype=x.dtype)
    for b in range(len(x)):
        near = z[b][mask[b]]
        cov = kernel(near) + torch.diag(noise[b][mask[b]] + jitter * kernel(near, diag=True))
        cross, own = kernel(near, x[b : b + 1])[:, 0], kernel(x[b : b + 1], diag=True)[0] * (1 + jitter)
        w = torch.cholesky_solve(cross[:, None], torch.linalg.cholesky(cov))[:, 0]
        weights[b, mask[b]], variances[b] = w, own - cross @ w
    return weights, variances


@pytest.mark.parametrize("jitter", [0.0, 1e-3])
def test_agrees_with_the_dense_formula(jitter):
    x, z, mask, noise = problem()
    kernel = Matern52(3, variance=scalar(1.7), lengthscale=tensor(0.7, 1.0, 1.9))
    want = dense(kernel, x, z, mask, noise, jitter)
    got = nn_conditional(kernel, x, z, mask, noise, jitter)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("shape", [(), (5,), (7, 1), (1, 5)])
def test_noise_broadcasts_to_the_neighbors(shape):
    x, z, mask, _ = problem()
    noise = torch.rand(shape, dtype=F64)
    want = nn_conditional(Matern52(3).double(), x, z, mask, noise.expand(7, 5).contiguous())
    torch.testing.assert_close(nn_conditional(Matern52(3).double(), x, z, mask, noise), want)


@pytest.mark.slow
def test_gradients_of_both_orders():
    x, z, mask, noise = problem(b=3, k=4)
    lengthscale = tensor(0.7, 1.0, 1.9)

    def weights_and_variance(x, z, noise, lengthscale):
        unit = RBF(3).double().bind()
        return nn_conditional(lambda a, b: unit(a / lengthscale, b / lengthscale), x, z, mask[:3, :4], noise, 1e-2)

    inputs = [t.clone().requires_grad_() for t in (x, z, noise, lengthscale)]
    torch.autograd.gradcheck(weights_and_variance, inputs)
    torch.autograd.gradgradcheck(weights_and_variance, inputs)


@pytest.mark.parametrize("native", ["0", "1"])
@pytest.mark.parametrize("kernel", [Matern52, lambda *args, **kwargs: Matern52(*args, **kwargs) + RBF(3).double()])
def test_vmap_over_hyperparameters_gives_the_members_and_their_gradients(monkeypatch, kernel, native):
    monkeypatch.setenv("PYRO_NNGP_NATIVE", native)
    x, z, mask, noise = problem()
    lengthscales = (0.5 + torch.rand(4, 3, dtype=F64)).requires_grad_()
    noises = torch.rand(4, *noise.shape, dtype=F64).requires_grad_()
    weights = torch.randn(7, 5, dtype=F64)

    def member(lengthscale, added):
        k = kernel(3, lengthscale=PyroSample(dist.Delta(lengthscale, event_dim=1)), variance=torch.ones((), dtype=F64))
        w, var = nn_conditional(k, x, z, mask, added)
        return (w * weights).sum() + var.log().sum()

    mapped = torch.func.vmap(member, in_dims=(1, 0))(lengthscales.mT, noises)
    looped = torch.stack([member(*each) for each in zip(lengthscales, noises, strict=True)])
    torch.testing.assert_close(mapped, looped, rtol=1e-12, atol=0)
    got, want = (torch.autograd.grad(value.square().sum(), (lengthscales, noises)) for value in (mapped, looped))
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


def test_members_of_a_vmap_take_nuggets_of_their_own():
    x, z = torch.zeros(1, 1), torch.linspace(0, 1, 12)[None, :, None]

    def member(lengthscale):
        kernel = RBF(1, lengthscale=PyroSample(dist.Delta(lengthscale)))
        return nn_conditional(kernel, x, z, jitter=0.0)[0]

    scales = torch.tensor([0.05, 30.0])
    with pytest.warns(UserWarning, match="took an extra nugget"):
        mapped = torch.func.vmap(member)(scales)
    with pytest.warns(UserWarning, match="took an extra nugget"):
        alone = member(scales[1])
    torch.testing.assert_close(mapped, torch.stack([member(scales[0]), alone]), rtol=0, atol=0)


def test_masked_neighbors_weigh_nothing_and_pass_no_gradient():
    x, z, mask, noise = problem()
    z = z.requires_grad_()
    w, var = nn_conditional(Matern32(3).double(), x, z, mask, noise)
    assert (w[~mask] == 0).all()
    (w.sum() + var.log().sum()).backward()
    assert z.grad.isfinite().all()
    assert (z.grad[~mask] == 0).all()
    assert (z.grad[mask].abs().sum(-1) > 0).all()


def test_without_any_neighbor_the_prior_variance_remains():
    x, z, _, _ = problem()
    w, var = nn_conditional(RBF(3).double(), x, z, torch.zeros(7, 5, dtype=torch.bool), jitter=0.25)
    assert (w == 0).all()
    torch.testing.assert_close(var, torch.full((7,), 1.25, dtype=F64))


@pytest.mark.parametrize("kernel", [RBF(3), RBF(3) + Matern32(3)])
def test_no_target_has_no_weights(kernel):
    x, z, mask, noise = (part[:0] for part in problem())
    w, var = nn_conditional(kernel.double(), x, z, mask, noise)
    assert (w.shape, var.shape) == ((0, 5), (0,))
    (w.sum() + var.sum()).backward()
    assert not any(p.grad.any() for p in kernel.parameters())


def test_order_of_neighbors_and_translation_do_not_matter():
    x, z, mask, noise = problem()
    kernel = Matern52(3).double()
    shuffled = torch.randperm(5)
    w, var = nn_conditional(kernel, x, z, mask, noise)
    w2, var2 = nn_conditional(kernel, x + 10, z[:, shuffled] + 10, mask[:, shuffled], noise[:, shuffled])
    torch.testing.assert_close((w[:, shuffled], var), (w2, var2), rtol=1e-10, atol=1e-12)


def test_chunks_do_not_matter():
    x, z, mask, noise = problem(b=50)
    kernel = Matern52(3).double()
    whole = nn_conditional(lambda a, b: kernel(a, b), x, z, mask, noise)
    with block_limit(1):
        torch.testing.assert_close(nn_conditional(lambda a, b: kernel(a, b), x, z, mask, noise), whole, rtol=0, atol=0)


def test_gathered_neighbors_are_the_same():
    points, rows = torch.randn(30, 2, dtype=F64), torch.randint(-1, 30, (9, 4))
    x, noise, kernel = torch.randn(9, 2, dtype=F64), torch.rand(30, dtype=F64), Matern52(2).double()
    rows, _ = rows.sort(dim=-1, descending=True)
    want = nn_conditional(kernel, x, points[rows.clamp(min=0)], rows >= 0, noise[rows.clamp(min=0)])
    torch.testing.assert_close(graph_conditional(kernel, x, points, rows, noise), want, rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_exact_duplicates_give_a_positive_variance(dtype):
    z = torch.tensor([[[0.0], [0.0], [1.0]]], dtype=dtype)
    w, var = nn_conditional(RBF(1).to(dtype), torch.zeros(1, 1, dtype=dtype), z)
    jitter = DEFAULT_JITTER
    torch.testing.assert_close(w[0, :2], torch.full((2,), 0.5, dtype=dtype), rtol=2e-2, atol=0)
    assert jitter <= var < 2.1 * jitter


def test_float32_is_close_to_float64_far_from_the_origin():
    x = (torch.rand(200, 2, dtype=F64) + 1000).float().double()
    z = (x[:, None] + 0.2 * torch.randn(200, 8, 2, dtype=F64)).float().double()
    want = nn_conditional(Matern32(2).double(), x, z, jitter=1e-4)
    got = nn_conditional(Matern32(2), x.float(), z.float(), jitter=1e-4)
    torch.testing.assert_close([t.double() for t in got], list(want), rtol=2e-3, atol=2e-3)


def singular(x, z):
    """A kernel of rank one with a negative twist: indefinite until the nugget reaches 1e-4."""
    return torch.ones(x.shape[-2], z.shape[-2], dtype=x.dtype) - 2e-5 * torch.eye(
        x.shape[-2], z.shape[-2], dtype=x.dtype
    )


def test_failing_members_alone_take_more_jitter_and_say_so():
    x, z, _, _ = problem(b=4)
    kernel = RBF(3).double()
    good = nn_conditional(lambda a, b: kernel(a, b), x, z)

    def sometimes(a, b):
        value = kernel(a, b).clone()
        if a.shape[-2] > 1:
            value[1] = singular(a[1], b[1])
        return value

    with pytest.warns(UserWarning, match=r"1 of the covariances were indefinite.*nugget of up to 1e-04"):
        w, var = nn_conditional(sometimes, x, z)
    keep = [0, 2, 3]
    torch.testing.assert_close((w[keep], var[keep]), (good[0][keep], good[1][keep]), rtol=0, atol=0)
    assert w[1].isfinite().all()


def test_hopeless_covariances_raise():
    x, z, _, _ = problem()
    with pytest.raises(NotPositiveDefiniteError, match=r"of size 5 in torch.float64 stayed indefinite"):
        nn_conditional(lambda a, b: -RBF(3).double()(a, b), x, z)


def test_hamiltonian_monte_carlo_takes_hopeless_covariances_for_a_divergence():
    x, z, _, _ = problem()

    def potential(position):
        return nn_conditional(lambda a, b: position["scale"] * RBF(3).double()(a, b), x, z)[1].sum()

    _, energy = potential_grad(potential, {"scale": scalar(-1.0)})
    assert energy.isnan()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(7, 2, dtype=F64)}, r"expected x, z of shapes \(B, D\), \(B, K, D\)"),
        ({"z": torch.zeros(6, 5, 3, dtype=F64)}, r"expected x, z of shapes"),
        ({"mask": torch.ones(7, 4, dtype=torch.bool)}, r"expected mask of shape \(7, 5\)"),
        ({"x": torch.zeros(7, 3)}, r"expected z of the dtype of x"),
    ],
)
def test_wrong_input(change, message):
    x, z, mask, _ = problem()
    with pytest.raises((ValueError, TypeError), match=message):
        nn_conditional(RBF(3).double(), **({"x": x, "z": z, "mask": mask} | change))


def test_extra_nuggets_do_not_depend_on_units_where_neighbors_are_missing():
    """Multiplication by a power of two is exact."""
    x, z = torch.zeros(1, 1), torch.linspace(0, 1, 24)[None, :, None]
    mask = torch.arange(24) < 12

    kernel = RBF(1, lengthscale=30.0).requires_grad_(False)

    def conditional(unit):
        with pytest.warns(UserWarning, match="took an extra nugget"):
            return nn_conditional(lambda a, b: unit * kernel(a, b), x, z, mask[None], jitter=0.0)

    (w, var), want = conditional(2.0**-20), conditional(1.0)
    torch.testing.assert_close((w, var * 2**20), want, rtol=0, atol=0)
