r"""Several independent nearest-neighbor priors that are coupled by Gaussian observations of sums of their values.

Latent functions l = 1..L have the priors :math:`N(0, \Lambda_l^{-1})` over N points, and at point i there are T
observations with precisions :math:`\tau_i` of :math:`A_i u_i`, :math:`A_i` the loadings (T, L). The posterior precision
is

.. math:: P = \mathrm{blockdiag}(\Lambda_1, .., \Lambda_L) + \mathrm{blockdiag}_i(A_i^\top \mathrm{diag}(\tau_i) A_i),

the second part in blocks of the L values at a point. As for one function
(:mod:`pyro_nngp.variational.posterior_mean`), conjugate gradients start on P, here with the blocks of P at each point
as preconditioner, and continue in whitened coordinates when 20 iterations no longer halve the residual.

Cost: O(N L (K + T)) time per iteration and O(N L (K + T)) memory; up to 1,000 values one dense factorization instead.
Symbols: N points, K neighbors, T observations per point, L latent functions.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from pyro_nngp.linalg.cholesky import cholesky
from pyro_nngp.linalg.conjugate_gradients import conjugate_gradients, warn_of_residual
from pyro_nngp.linalg.vecchia_factor import VecchiaFactor

_DENSE_UP_TO = 1000  # values
_LOOK = 20  # iterations between checks of the residual
_PLAIN, _MOST = 200, 2000  # largest numbers of iterations
_RELATIVE = 1e-3  # the unit of the residual is at least this part of the right-hand side, because of rounding


class CoupledPosterior:
    """The Gaussian posterior of L latent functions at N points.

    Args:
        factors: (I - A, V) of each prior, from :meth:`~pyro_nngp.linalg.VecchiaFactor.prepared`; one for all L is given
            L times.
        loading: A, (N, T, L), or (1, T, L) for the same at all points.
        precision: tau >= 0, (T, N).
        dense_up_to: number of values up to which P is factorized.
        max_iterations: largest number of iterations in whitened coordinates; a warning reports if they did not suffice.

    Attributes:
        gram: A' diag(tau) A at each point, (N, L, L).
        is_dense: whether P is factorized.
    """

    def __init__(
        self,
        factors: Sequence[VecchiaFactor],
        loading: Float[Tensor, "#N T L"],
        precision: Float[Tensor, "T N"],
        dense_up_to: int = _DENSE_UP_TO,
        max_iterations: int = _MOST,
    ) -> None:
        n = precision.shape[1]
        self.factors, self.precision = list(factors), precision.double()
        self.loading = loading.double().expand(n, *loading.shape[1:])
        self.gram = torch.einsum("ntl,tn,ntk->nlk", self.loading, self.precision, self.loading)
        self.is_dense = len(self.factors) * n <= dense_up_to
        self._most = max_iterations
        self._tril: Tensor | None = None

    def mean(
        self,
        target: Float[Tensor, "T N"],
        start: Float[Tensor, "L N"],
        easy: bool = True,
        tolerance: float = 1e-3,
        reduction: float = 0.0,
    ) -> tuple[Float[Tensor, "L N"], bool]:
        """The posterior mean; arguments and results as of :func:`~pyro_nngp.variational.posterior_mean.posterior_mean`.

        Args:
            target: values of the observations.
            start: initial mean.
            easy: whether to begin with iterations on P.
            tolerance: the mean costs the ELBO at most tolerance^2 / 2 nats per value.
            reduction: stop also when the residual has fallen to this part of its start.
        """
        right, start = self.transposed(self.precision * target.double()), start.double()
        return self._solve(right, start, easy, tolerance, reduction)

    def draw(self, mean: Float[Tensor, "L N"], tolerance: float = 1e-6) -> Float[Tensor, "L N"]:
        """One draw, with this mean."""
        noise = torch.randn_like(self.precision), torch.randn_like(mean.double())
        if self.is_dense:
            tril = self.factor()
            half = torch.linalg.solve_triangular(tril.mT, noise[1].reshape(-1, 1), upper=True)
            return mean + half.reshape(mean.shape).to(mean)
        right = self.color_transposed(self.transposed(self.precision.sqrt() * noise[0])) + noise[1]
        return mean + self.color(self._solve_white(right, None, tolerance, None)).to(mean)

    def central_draw(
        self, of_data: Float[Tensor, "T N"], of_prior: Float[Tensor, "L N"], tolerance: float
    ) -> Float[Tensor, "L N"]:
        """A draw less the mean, from given standard normal numbers: P^-1 (A' tau^(1/2) e + Lambda^(1/2)' z)."""
        right = self.transposed(self.precision.sqrt() * of_data) + self._each("whiten_transposed", of_prior)
        return self._solve(right, torch.zeros_like(right), True, tolerance, 0.0)[0]

    def at(self, u: Float[Tensor, "L N"]) -> Float[Tensor, "T N"]:
        """The sums A u that are observed."""
        return torch.einsum("ntl,ln->tn", self.loading, u)

    def transposed(self, f: Float[Tensor, "T N"]) -> Float[Tensor, "L N"]:
        """A' f."""
        return torch.einsum("ntl,tn->ln", self.loading, f)

    def product(self, u: Float[Tensor, "L N"]) -> Float[Tensor, "L N"]:
        """P u."""
        return self.prior_product(u) + torch.einsum("nlk,kn->ln", self.gram, u)

    def prior_product(self, u: Float[Tensor, "L N"]) -> Float[Tensor, "L N"]:
        """The product with the precision of the priors."""
        return self._each("product", u)

    def color(self, z: Float[Tensor, "L N"]) -> Float[Tensor, "L N"]:
        """Map white values to u, function by function."""
        return self._each("color", z)

    def color_transposed(self, u: Float[Tensor, "L N"]) -> Float[Tensor, "L N"]:
        """The transpose of :meth:`color`."""
        return self._each("color_transposed", u)

    def whiten(self, u: Float[Tensor, "L N"]) -> Float[Tensor, "L N"]:
        """The inverse of :meth:`color`."""
        return self._each("whiten", u)

    def _each(self, operation: str, values: Tensor) -> Tensor:
        found = [getattr(factor, operation)(row) for factor, row in zip(self.factors, values, strict=True)]
        return torch.stack(found)

    def _solve(
        self, right: Tensor, start: Tensor, easy: bool, tolerance: float, reduction: float
    ) -> tuple[Tensor, bool]:
        """Solve P u = right; results as of :meth:`mean`."""
        if self.is_dense:
            return self._solve_dense(right), easy

        def norm(residual: Tensor) -> Tensor:
            return self.color_transposed(residual.reshape(start.shape)).norm()[None]

        size = torch.clamp(_RELATIVE * norm(right), min=start.numel() ** 0.5)
        if reduction:
            tolerance = max(tolerance, reduction * float(norm(right - self.product(start)) / size))
        if easy:
            tril = self._blocks()
            inner, left = conjugate_gradients(
                lambda v: _half(tril, self.product(_half(tril, v.reshape(start.shape), True))).reshape(1, -1),
                _half(tril, right).reshape(1, -1),
                _times(tril, start).reshape(1, -1),
                None,
                tolerance,
                _PLAIN,
                norm=lambda r: norm(_times_lower(tril, r.reshape(start.shape))),
                size=size,
                every=_LOOK,
                halving=True,
            )
            start = _half(tril, inner.reshape(start.shape), True)
            if left <= tolerance:
                return start, True
        z = self._solve_white(self.color_transposed(right), self.whiten(start), tolerance, size)
        return self.color(z), False

    def _solve_white(self, right: Tensor, start: Tensor | None, tolerance: float, size: Tensor | None) -> Tensor:
        var = torch.stack([factor.var for factor in self.factors])
        diagonal = (1 + var * self.gram.diagonal(dim1=-2, dim2=-1).mT).reshape(1, -1)

        def product(z: Tensor) -> Tensor:
            u = self.color(z.reshape(right.shape))
            return z + self.color_transposed(torch.einsum("nlk,kn->ln", self.gram, u)).reshape(1, -1)

        first = None if start is None else start.reshape(1, -1)
        right_row, most = right.reshape(1, -1), self._most
        z, worst = conjugate_gradients(product, right_row, first, diagonal, tolerance, most, size=size)
        if worst > tolerance:
            warn_of_residual("CoupledPosterior", worst, most, stacklevel=4)
        return z.reshape(right.shape)

    def _blocks(self) -> Float[Tensor, "N L L"]:
        """Cholesky factors of the blocks of P at each point."""
        own = torch.stack([factor.diagonal() for factor in self.factors], -1)
        return torch.linalg.cholesky(self.gram + torch.diag_embed(own))

    def factor(self) -> Float[Tensor, "LN LN"]:
        """Cholesky factor of P, latent function by latent function."""
        if self._tril is None:
            dense = torch.block_diag(*[factor.dense() for factor in self.factors])
            count, n = len(self.factors), len(self.gram)
            by_point = dense.view(count, n, count, n)
            every = torch.arange(n, device=dense.device)
            by_point[:, every, :, every] += self.gram
            self._tril = cholesky(dense, 0.0)
        return self._tril

    def _solve_dense(self, right: Tensor) -> Tensor:
        return torch.cholesky_solve(right.reshape(-1, 1), self.factor()).reshape(right.shape)


def _half(tril: Tensor, values: Tensor, transposed: bool = False) -> Tensor:
    """Solve with the factors of the blocks, or their transposes, point by point; values (L, N)."""
    system = tril.mT if transposed else tril
    return torch.linalg.solve_triangular(system, values.mT[..., None], upper=transposed)[..., 0].mT


def _times(tril: Tensor, values: Tensor) -> Tensor:
    return (tril.mT @ values.mT[..., None])[..., 0].mT


def _times_lower(tril: Tensor, values: Tensor) -> Tensor:
    return (tril @ values.mT[..., None])[..., 0].mT
