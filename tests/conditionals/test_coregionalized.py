import torch
from builders import scalar

from pyro_nngp.conditionals.coregionalized import gathered, latent_conditional
from pyro_nngp.kernels import RBF, Matern52, bind

F64 = torch.float64
B, K, R, L = 3, 4, 2, 3


def problem():
    generator = torch.Generator().manual_seed(0)
    x, near, rows, noise = (
        torch.rand(*shape, generator=generator, dtype=F64) for shape in ((B, 2), (B, K, 2), (B, K, R, L), (B, K, R))
    )
    return x, near, rows - 0.5, noise + 0.1


def dense(kernels, x, near, rows, noise, jitter):
    """One point at a time, from the joint covariance of u at all places."""
    kernels = kernels * L if len(kernels) == 1 else kernels
    found = []
    for b in range(B):
        places = torch.cat([near[b], x[b : b + 1]])
        cov = torch.block_diag(*[k(places, places) + jitter * torch.diag(k.diag(places)) for k in kernels])
        observe = torch.zeros(K * R, L * (K + 1), dtype=F64)
        for j in range(K):
            for number in range(L):
                observe[j * R : (j + 1) * R, number * (K + 1) + j] = rows[b, j, :, number]
        here = torch.arange(L) * (K + 1) + K
        total = observe @ cov @ observe.mT + torch.diag(noise[b].flatten())
        weights = torch.linalg.solve(total, (cov @ observe.mT)[here].mT).mT
        found.append((weights, cov[here][:, here] - weights @ (observe @ cov)[:, here]))
    return [torch.stack(parts) for parts in zip(*found, strict=True)]


def test_the_conditional_is_the_dense_one():
    each = [Matern52(2, lengthscale=0.5), RBF(2, variance=2.0), Matern52(2, lengthscale=0.2)]
    for kernels in ([bind(k) for k in each], [bind(each[0])]):
        found, want = (function(kernels, *problem(), 1e-4) for function in (latent_conditional, dense))
        torch.testing.assert_close(found, tuple(want), rtol=1e-9, atol=1e-9)


def test_gradients_are_right():
    x, near, rows, noise = problem()
    kernel = bind(Matern52(2, lengthscale=scalar(0.5)))

    def conditional(rows, noise):
        return latent_conditional([kernel], x, near, rows, noise, 1e-6)

    assert torch.autograd.gradcheck(conditional, (rows.requires_grad_(), noise.requires_grad_()))


def test_places_without_neighbors_count_nothing():
    x, near, rows, noise = problem()
    kernels = [bind(RBF(2))]
    table, delta = rows[0], noise[0]
    padded, added = gathered(table, delta, torch.tensor([[0, 2, -1]]))
    wide = latent_conditional(kernels, x[:1], near[:1, [0, 2, 3]], padded, added, 0.0)
    narrow = latent_conditional(kernels, x[:1], near[:1, [0, 2]], rows[:1, [0, 2]], noise[:1, [0, 2]], 0.0)
    torch.testing.assert_close(wide[1], narrow[1])
    torch.testing.assert_close(wide[0][..., : 2 * R], narrow[0])
    assert (wide[0][..., 2 * R :] == 0).all()
