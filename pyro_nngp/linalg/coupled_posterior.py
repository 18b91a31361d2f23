r"""Several independent nearest-neighbor priors that are coupled by Gaussian observations of sums of their values.

Latent functions l = 1..L have the priors :math:`N(0, \Lambda_l^{-1})` over N points, and at point i there are T
observations with precisions :math:`\tau_i` of :math:`A_i u_i`, :math:`A_i` the loadings (T, L). The posterior precision
is

.. math:: P = \mathrm{blockdiag}(\Lambda_1, .., \Lambda_L) + \mathrm{blockdiag}_i(A_i^\top \mathrm{diag}(\tau_i) A_i),

the second part in blocks of the L values at a point. As for one function
(:mod:`pyro_nngp.variational.posterior_mean`), conjugate gradients are on P where the data say more than the neighbors,
here with the blocks of P at each point as preconditioner. Elsewhere, and as soon as 20 iterations no longer halve the
residual, they are in whitened coordinates.

With a plan there is a sparse factor instead (:mod:`pyro_nngp.linalg.multifrontal`), whose families are those of each
prior and the L values at each point, and few values have a dense one.

Cost: O(N L (K + T)) time per iteration and O(N L (K + T)) memory; up to 3,000 values one dense factorization instead.
Symbols: N points, K neighbors, T observations per point, L latent functions.
"""

from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pyro_nngp.linalg.conjugate_gradients import conjugate_gradients, warn_of_residual
from pyro_nngp.linalg.dense_factor import (
    add_diagonal,
    cholesky,
    factor_inverse,
    factor_log_det,
    factor_solve,
    half_solve,
)
from pyro_nngp.linalg.multifrontal import MultifrontalFactor
from pyro_nngp.linalg.nested_dissection import Elimination, families_of, nested_dissection
from pyro_nngp.linalg.vecchia_factor import VecchiaFactor, determines

_DENSE_UP_TO = 3000  # values: beyond, iterations are quicker
_LOOK = 20  # iterations between checks of the residual
_PLAIN, _MOST = 200, 2000  # largest numbers of iterations
_RELATIVE = 1e-3  # the unit of the residual is at least this part of the right-hand side, because of rounding


def coupled_elimination(
    x: Float[Tensor, "N D"], neighbors: Int[Tensor, "N K"], num_functions: int, most: float
) -> Elimination | None:
    """The order of elimination for P, function by function; None if it takes more operations than `most`."""
    points, families = torch.arange(len(x), device=x.device)[:, None], families_of(neighbors.long())
    first = len(x) * torch.arange(num_functions, device=x.device)
    tables = [*(families + start for start in first), points + first]
    return nested_dissection(x.repeat(num_functions, 1), tables, most)


class CoupledPosterior:
    """Gaussian posterior of L latent functions at N points.

    Args:
        factors: (I - A, V) of each prior, from :meth:`~pyro_nngp.linalg.VecchiaFactor.prepared`; one for all L is given
            L times.
        loading: A, (N, T, L), or (1, T, L) if all points share it.
        precision: tau >= 0, (T, N).
        dense_up_to: number of values up to which P is factorized without a plan.
        max_iterations: largest number of iterations in whitened coordinates; a warning reports if they did not suffice.
        plan: from :func:`coupled_elimination`, for a sparse factor.

    Attributes:
        gram: A' diag(tau) A at each point, (N, L, L).
        is_dense: whether P has a dense factor.
        is_direct: whether it has a dense or a sparse one.
    """

    def __init__(
        self,
        factors: Sequence[VecchiaFactor],
        loading: Float[Tensor, "#N T L"],
        precision: Float[Tensor, "T N"],
        dense_up_to: int = _DENSE_UP_TO,
        max_iterations: int = _MOST,
        plan: Elimination | None = None,
    ) -> None:
        n = precision.shape[1]
        self.factors, self.precision = list(factors), precision.double()
        self.loading = loading.double().expand(n, *loading.shape[1:])
        self.gram = torch.einsum("ntl,tn,ntk->nlk", self.loading, self.precision, self.loading)
        self.is_dense = plan is None and len(self.factors) * n <= dense_up_to
        self.is_direct = self.is_dense or plan is not None
        self._most, self._plan = max_iterations, plan

    def mean(
        self,
        target: Float[Tensor, "T N"],
        start: Float[Tensor, "L N"],
        tolerance: float = 1e-3,
        reduction: float = 0.0,
        near: "CoupledPosterior | None" = None,
    ) -> Float[Tensor, "L N"]:
        """Posterior mean; arguments as for :func:`~pyro_nngp.variational.posterior_mean.posterior_mean`.

        Args:
            target: values of the observations.
            start: initial mean.
            tolerance: the mean costs the ELBO at most tolerance^2 / 2 nats per value.
            reduction: stop also when the residual has fallen to this part of its start.
            near: a posterior with a factor and about these precisions, which preconditions iterations in place of a
                factor of this one.
        """
        right, start = self.transposed(self.precision * target.double()), start.double()
        return self._solve(right, start, tolerance, reduction, near)

    def solve(self, right: Float[Tensor, "*S L N"], tolerance: float = 1e-3) -> Float[Tensor, "*S L N"]:
        """P^-1 right; the tolerance is as of :meth:`mean`."""
        return self._solve(right.double(), torch.zeros_like(right, dtype=torch.float64), tolerance, 0.0)

    def inner_products(self, right: Float[Tensor, "S L N"]) -> Float[Tensor, "S S"]:
        """Right P^-1 right', by a factor, in half the time of :meth:`solve`."""
        if not self.is_dense:
            return self.sparse.inner_products(right.flatten(1))
        root = half_solve(self.tril, right.flatten(1).mT)
        return root.mT @ root

    def covariances(self) -> Float[Tensor, "N L L"]:
        """Covariances of the latent values at each point, by a factor."""
        if not self.is_dense:
            return self.sparse.moments[1][-1]
        return self.dense_covariance.diagonal(dim1=1, dim2=3).permute(2, 0, 1)

    @cached_property
    def dense_covariance(self) -> Float[Tensor, "L N L N"]:
        """Covariances of all values, by a dense factor."""
        size = len(self.factors), -1
        return factor_inverse(self.tril).unflatten(0, size).unflatten(2, size)

    def log_det(self) -> float:
        """The log determinant of P, by a factor."""
        return float(factor_log_det(self.tril)) if self.is_dense else self.sparse.log_det

    def draw(self, mean: Float[Tensor, "L N"], tolerance: float = 1e-6) -> Float[Tensor, "L N"]:
        """One draw from the posterior with the given mean."""
        noise = torch.randn_like(self.precision), torch.randn_like(mean.double())
        if self.is_direct:
            return mean + self.central_draws(noise[0][None], noise[1][None], tolerance)[0].to(mean)
        right = self.color_transposed(self.transposed(self.precision.sqrt() * noise[0])) + noise[1]
        return mean + self.color(self._solve_white(right, None, tolerance, None)).to(mean)

    def central_draws(
        self, of_data: Float[Tensor, "S T N"], of_prior: Float[Tensor, "S L N"], tolerance: float
    ) -> Float[Tensor, "S L N"]:
        """Deviations of draws from the mean for standard normal e and z: P^-1 (A' tau^(1/2) e + Lambda^(1/2)' z)."""
        right = self.transposed(self.precision.sqrt() * of_data) + self._each("whiten_transposed", of_prior)
        return self.solve(right, tolerance)

    def at(self, u: Float[Tensor, "*S L N"]) -> Float[Tensor, "*S T N"]:
        """A u, the sums that are observed."""
        return torch.einsum("ntl,...ln->...tn", self.loading, u)

    def transposed(self, f: Float[Tensor, "*S T N"]) -> Float[Tensor, "*S L N"]:
        """A' f."""
        return torch.einsum("ntl,...tn->...ln", self.loading, f)

    def product(self, u: Float[Tensor, "*S L N"]) -> Float[Tensor, "*S L N"]:
        """P u."""
        return self.prior_product(u) + self._gram_product(u)

    def prior_product(self, u: Float[Tensor, "*S L N"]) -> Float[Tensor, "*S L N"]:
        """Product of the precision of the priors and u."""
        return self._each("product", u)

    def color(self, z: Float[Tensor, "*S L N"]) -> Float[Tensor, "*S L N"]:
        """Map white values to u, function by function."""
        return self._each("color", z)

    def color_transposed(self, u: Float[Tensor, "*S L N"]) -> Float[Tensor, "*S L N"]:
        """Product of the transpose of the map :meth:`color` and u."""
        return self._each("color_transposed", u)

    def whiten(self, u: Float[Tensor, "*S L N"]) -> Float[Tensor, "*S L N"]:
        """White values of u; inverts :meth:`color`."""
        return self._each("whiten", u)

    def _gram_product(self, u: Tensor) -> Tensor:
        return torch.einsum("nlk,...kn->...ln", self.gram, u)

    def _each(self, operation: str, values: Tensor) -> Tensor:
        each = zip(self.factors, values.unbind(-2), strict=True)
        return torch.stack([getattr(factor, operation)(u) for factor, u in each], -2)

    def _solve(
        self,
        right: Tensor,
        start: Tensor,
        tolerance: float,
        reduction: float,
        near: "CoupledPosterior | None" = None,
    ) -> Tensor:
        """Solve P u = right, (*S, L, N)."""
        if self.is_direct and near is None:
            return self._solve_directly(right)
        shape = right.shape

        def flat(values: Tensor) -> Tensor:
            return values.reshape(*shape[:-2], -1)

        def norm(residual: Tensor) -> Tensor:
            return flat(self.color_transposed(residual.reshape(shape))).norm(dim=-1)

        size = torch.clamp(_RELATIVE * norm(right), min=shape[-2:].numel() ** 0.5)
        if reduction:
            tolerance = max(tolerance, reduction * float((norm(right - self.product(start)) / size).max()))
        if near is not None or determines(self._variances(), self.gram.diagonal(dim1=1, dim2=2)):
            inexact = self._inexact_solver() if near is None else near._solve_directly
            solution, left = conjugate_gradients(
                lambda v: flat(self.product(v.reshape(shape))),
                flat(right),
                flat(start),
                None,
                tolerance,
                _PLAIN,
                norm=norm,
                size=size,
                every=_LOOK if near is None else 1,
                halving=near is None,
                precondition=lambda r: flat(inexact(r.reshape(shape))),
            )
            start = solution.reshape(shape)
            if left <= tolerance:
                return start
            if self.is_direct:
                return self._solve_directly(right)
        z = self._solve_white(self.color_transposed(right), self.whiten(start), tolerance, size)
        return self.color(z)

    def _variances(self) -> Float[Tensor, "N L"]:
        return torch.stack([factor.var for factor in self.factors], -1)

    def _solve_white(self, right: Tensor, start: Tensor | None, tolerance: float, size: Tensor | None) -> Tensor:
        shape, root = right.shape, self._variances().sqrt()
        eye = torch.eye(shape[-2], dtype=root.dtype, device=root.device)
        tril = cholesky(eye + root[:, :, None] * self.gram * root[:, None], 0.0)

        def flat(values: Tensor) -> Tensor:
            return values.reshape(*shape[:-2], -1)

        z, worst = conjugate_gradients(
            lambda z: z + flat(self.color_transposed(self._gram_product(self.color(z.reshape(shape))))),
            flat(right),
            None if start is None else flat(start),
            None,
            tolerance,
            self._most,
            size=size,
            precondition=lambda r: flat(_point_by_point(tril, r.reshape(shape))),
        )
        if not worst <= tolerance:
            warn_of_residual("CoupledPosterior", worst, self._most)
        return z.reshape(shape)

    @cached_property
    def sparse(self) -> MultifrontalFactor:
        """The sparse Cholesky factor of P, with a table of families for each prior and one for the points."""
        assert self._plan is not None  # where there is no dense factor
        tables = [*(factor.root().values for factor in self.factors), self.gram]
        return MultifrontalFactor(self._plan, tables, self.gram.new_zeros(len(self.factors) * len(self.gram)))

    @cached_property
    def tril(self) -> Float[Tensor, "LN LN"]:
        """Dense Cholesky factor of P, latent function by latent function."""
        dense = torch.block_diag(*[factor.dense() for factor in self.factors])
        count, n = len(self.factors), len(self.gram)
        by_point = dense.view(count, n, count, n)
        every = torch.arange(n, device=dense.device)
        by_point[:, every, :, every] += self.gram
        return cholesky(dense, 0.0)

    def _inexact_solver(self) -> Callable[[Tensor], Tensor]:
        """A solver with the blocks of P at each point."""
        diagonals = torch.stack([factor.diagonal() for factor in self.factors], -1)
        tril = cholesky(add_diagonal(self.gram, diagonals), 0.0)
        return lambda right: _point_by_point(tril, right)

    def _solve_directly(self, right: Float[Tensor, "*S L N"]) -> Float[Tensor, "*S L N"]:
        flat = right.reshape(-1, right.shape[-2:].numel())
        solution = factor_solve(self.tril, flat.mT).mT if self.is_dense else self.sparse.solve(flat)
        return solution.reshape(right.shape)


def _point_by_point(tril: Float[Tensor, "N L L"], values: Float[Tensor, "*S L N"]) -> Float[Tensor, "*S L N"]:
    """Solve with the Cholesky factors of L x L matrices, one for each point."""
    by_point = values.movedim(-1, 0).reshape(len(tril), -1, tril.shape[-1])
    return factor_solve(tril, by_point.mT).mT.reshape(values.shape[-1], *values.shape[:-1]).movedim(0, -1)
