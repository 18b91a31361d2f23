r"""Sparse variational Gaussian process with inducing points (Titsias 2009; Hensman, Matthews, Ghahramani 2015).

.. math:: \mathrm{ELBO} = \sum_i E_{q(f_i)} \log p(y_i \mid f_i) - KL[q(\nu) \,\|\, N(0, I)], \qquad u = L \nu,
   \quad L L^\top = K_{zz}

(Hensman et al. 2015, eq. 19, whitened.) This is the inducing-point baseline of the nearest-neighbor papers. Its
variants:

=========  ============================  ===========================================================================
SVGP-M-H   Tran et al. 2021              ``forward(x_new, num_neighbors=H)``
PPGPR      Jankowiak et al. 2020         trained under :class:`~pyro_nngp.inference.PredictiveLogLikelihood`
FITC-SVGP  Rossi et al. 2021             ``objective="fitc"``
PG-VI      Wenzel et al. 2019            likelihood :class:`~pyro_nngp.likelihoods.PolyaGammaBound`, ``solve()``
=========  ============================  ===========================================================================

It is written here because ``pyro.contrib.gp.models.VariationalSparseGP`` reads variational parameters in its model, so
that other guides, NUTS and ``Predictive`` cannot run it, and GPyTorch's models are not pairs of model and guide.

Differs from the papers: nothing in the bound; :meth:`SVGP.solve` finds the optimal q for any likelihood.

Cost per step: O(|I| M^2 + M^3), memory O(|I| M + M^2).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import pyro
import pyro.distributions as dist
import torch
from jaxtyping import Float, Int
from pyro.nn import pyro_method
from torch import Tensor, nn
from torch.distributions import Distribution

from pyro_nngp._checks import check_choice, fail
from pyro_nngp._kinds import check_steps
from pyro_nngp._memory import at_once
from pyro_nngp._shared import shared
from pyro_nngp.bound import Bound
from pyro_nngp.conditionals import graph_conditional, whitened_conditional
from pyro_nngp.data.tables import Table, from_tables
from pyro_nngp.distributions import NNGP
from pyro_nngp.hyperparameters.reading import parameter_site
from pyro_nngp.inducing.points import inducing_points, nearest_inducing, place_inducing
from pyro_nngp.kernels import neighbor_metric
from pyro_nngp.kernels.binding import bind_double
from pyro_nngp.likelihoods import Likelihood
from pyro_nngp.likelihoods.augmentation import gaussian_observations
from pyro_nngp.likelihoods.convolved import convolved
from pyro_nngp.linalg import cholesky, half_solve, reverse_cholesky
from pyro_nngp.models.base import Draw, Method, Posterior, Program
from pyro_nngp.models.base.arguments import check_family, smooth_kernel
from pyro_nngp.models.base.draws import drawn_values
from pyro_nngp.models.base.several_processes import distribute
from pyro_nngp.neighbors import NeighborGraph
from pyro_nngp.rows import Part
from pyro_nngp.variational import (
    DenseGaussian,
    FullRank,
    InducingLeaveOneOut,
    MeanField,
    combined,
    combined_variance,
    factor,
    neighbor_variance,
)
from pyro_nngp.variational.natural_gradient import natural_gradient, warn_unsettled

_BLOCK = 2**22  # whitened weights held at once while the data are streamed


class SVGP(Method):
    r"""Sparse variational Gaussian process.

    Generative model, with whitened weights a and conditional variances v of f given the M inducing values:

    .. math::
        \nu &\sim N(0, I_M), \\
        f_i \mid \nu &\sim N(\mu(x_i) + a_i^\top \nu, v_i), \quad a_i = L^{-1} k_z(x_i),
            \quad v_i = k(x_i, x_i) - a_i^\top a_i, \quad i = 1..N, \\
        y_i \mid f_i &\sim p(y_i \mid f_i).

    With ``objective="fitc"`` the noise v belongs to the likelihood: f is :math:`\mu(x_i) + a_i^\top \nu` and
    :math:`y_i \sim \int p(y_i \mid f) N(f \mid f_i, v_i) df`. Sites: ``nu``, ``f``, ``y``, and one for each
    hyperparameter that has a prior (:class:`~pyro.nn.PyroSample` attributes of kernel, mean and likelihood, assigned
    before the model is built).

    Predictions are from all inducing points, or with ``num_neighbors=H`` from the H nearest (SVGP-M-H). Joint draws are
    exact; with ``num_neighbors=H``, the process f given nu is drawn at each new point given the H nearest earlier ones.

    Args:
        x: inputs (N, D).
        y: targets (N,), or (N, T) for T outputs of similar spread: independent functions of one kernel, and one noise.
            None where the model returns f for use in a larger program.
        kernel: a kernel, or any callable ``(..., n, D), (..., m, D) -> (..., n, m)``; None is Matern52 with one
            lengthscale per column. Unset hyperparameters start from the data (:mod:`pyro_nngp.starts.from_data`).
        likelihood: p(y | f); None is Gaussian, or without y makes ``model`` return f at the batch.
        inducing: an int M starts the inducing points by k-means; a tensor (M, D) gives them; None is M = min(512, N).
        learn_inducing: whether the inducing points are parameters.
        guide: family of q(nu): :class:`~pyro_nngp.variational.FullRank`, which None is, or
            :class:`~pyro_nngp.variational.MeanField`. Unless they set others, they start at the mean and the standard
            deviation of the prior, 0 and 1.
        objective: "vfe" or "fitc", as above; they differ in the model.
        mean: mean function ``(B, D) -> (B,)`` or ``(B, 1)``, such as ``torch.nn.Linear(D, 1)``; None is a learnable
            constant.
        jitter: relative nugget; None takes 1e-6.
        metric: metric of neighbors: lengthscales, or a distance function; None takes the metric of the kernel.
        start: another trained method, whose kernel, likelihood and mean are copied where none is given here.
        offset, weights, trials, limits: of each row, as in :class:`~pyro_nngp.models.base.Method`.
        seed: seed of k-means.

    Raises:
        ValueError, TypeError: for NaN or infinity, wrong shapes, mixed dtypes or devices, M out of range, an unknown
            objective, targets outside the support of the likelihood.

    Reference: Hensman, Matthews, Ghahramani (2015), "Scalable variational Gaussian process classification", AISTATS.
    """

    q: DenseGaussian
    _points = ("z",)
    _default_kernel = staticmethod(smooth_kernel)
    _distribute = distribute

    @from_tables
    def __init__(
        self,
        x: Float[Tensor, "N D"] | Table,
        y: Float[Tensor, "N *T"] | Int[Tensor, "N *T"] | Table | None,
        kernel: Any = None,
        likelihood: Likelihood | None = None,
        *,
        inducing: int | Float[Tensor, "M D"] | None = None,
        learn_inducing: bool = True,
        guide: FullRank | MeanField | None = None,
        objective: Literal["vfe", "fitc"] = "vfe",
        mean: Callable | None = None,
        jitter: float | None = None,
        metric: Float[Tensor, " *D"] | Callable | None = None,
        start: Any = None,
        offset: Float[Tensor, "N *L"] | Table | None = None,
        weights: Float[Tensor, " N"] | Int[Tensor, " N"] | Table | None = None,
        trials: Float[Tensor, " N"] | Int[Tensor, " N"] | Table | None = None,
        limits: Float[Tensor, " N"] | Table | None = None,
        seed: int = 0,
    ) -> None:
        by_row = {"offset": offset, "weights": weights, "trials": trials, "limits": limits}
        super().__init__(x, y, kernel, likelihood, mean, jitter, metric, start, **by_row)
        check_choice("SVGP", "objective", objective, ("vfe", "fitc"), "For PPGPR train under PredictiveLogLikelihood.")
        if objective == "fitc" and likelihood is None:
            fail("SVGP", "likelihood", "to be given with objective='fitc'", None, "It takes the noise of f given nu.")
        guide = FullRank() if guide is None else guide
        check_family("SVGP", guide, FullRank, MeanField)
        self.fitc = objective == "fitc"
        place_inducing(self, inducing_points("SVGP", x, inducing, seed), x, learn_inducing)
        scale = 1.0 if guide.scale is None else guide.scale
        diagonal = isinstance(guide, MeanField)
        self.q = DenseGaussian(self.num_inducing, self.num_latents, diagonal, guide.loc, scale, like=x)
        self._start()

    @property
    def num_inducing(self) -> int:
        """M."""
        return len(self.z)

    @pyro_method
    def model(self, idx: Int[Tensor, " I"] | None = None) -> Tensor:
        """The generative model, on a batch of data points.

        Args:
            idx: rows of the data; None is all.

        Returns:
            y at the batch, or f at the batch when there is no likelihood. Latent dimensions lead: (..., I).
        """
        program = Program.model(self, idx)
        shape = *self.latent_shape, len(program.bound.others["z"])
        prior = dist.Normal(self.x.new_zeros(()), 1.0).expand(shape)
        with self.rows.shared():  # nu ~ N(0, I)
            nu = pyro.sample(self.site("nu"), prior.to_event(len(shape)))
        f, var = self._f_given(program, nu)
        # y_i | f_i ~ p(y_i | f_i), with FITC int p(y_i | f) N(f | f_i, v_i) df
        return program.observe(f, convolved(program.likelihood(), var) if self.fitc else None)

    @pyro_method
    def guide(self, idx: Int[Tensor, " I"] | None = None) -> Tensor:
        """q(nu), q(f | nu) = p(f | nu) and the hyperparameters' guide, on the batch of :meth:`model`; returns f."""
        program = Program.guide(self, idx)
        q: Any = self.q.distribution(parameter_site)
        with self.rows.shared():
            nu = pyro.sample(self.site("nu"), q.to_event(len(self.latent_shape)))
        return self._f_given(program, nu, q)[0]

    def _f_given(self, program: Program, nu: Tensor, q: Distribution | None = None) -> tuple[Tensor, Tensor]:
        """The site f given nu, and v; in the guide (q given) f has its marginal, for the integrating ELBO."""
        bound = program.bound
        points = program.x, bound.others["z"], bound.jitter
        a, var, _ = shared((self, "f"), lambda: whitened_conditional(bound.at_data, *points))
        mean, nu = program.mean(), program.outside(nu, 1 + len(self.latent_shape))
        loc, marginal = mean + combined(nu, a), None
        if q is not None:  # N(mu_i + a_i^T m, a_i^T S a_i + v_i)
            marginal = mean + combined(q.mean, a), combined_variance(q, a) + (0 if self.fitc else var)
        # f_i | nu ~ N(mu_i + a_i^T nu, v_i), with FITC its mean
        f = program.record_f(loc, marginal) if self.fitc else program.sample_f(loc, var, marginal)
        return f, var

    def posterior(self, bound: Bound, draw: Draw | None = None, part: Part | None = None) -> "GivenInducing":
        """f under q(nu), or given the values of nu in a draw."""
        return GivenInducing(self.rows, None, bound, self.q, self.fitc, self.metric, draw, self.site("nu"))

    @property
    def can_solve(self) -> bool:
        """Whether :meth:`solve` applies: there is a likelihood."""
        return self.likelihood is not None

    @torch.no_grad()
    def solve(self, max_steps: int = 20, tolerance: float = 1e-3) -> None:
        r"""Set q(nu) to its optimum for the present hyperparameters and inducing points, without step sizes.

        For Gaussian observations of f it is :meth:`GivenInducing.optimum`. Other likelihoods take natural-gradient
        steps, until means of f move by less than `tolerance` standard deviations.

        Args:
            max_steps: largest number of steps.
            tolerance: stop when means of f move by less, see above.

        Raises:
            ValueError: if there is no likelihood.

        Cost: O(N M^2) per step and output, streamed in blocks of the data.
        """
        if self.likelihood is None:
            fail("SVGP.solve", "a likelihood", "in the model", None, "Train q(nu) by gradients.")
        check_steps("SVGP.solve", max_steps, tolerance)
        posterior, rows = self.posterior(self.bound()), self.rows
        likelihood, y = rows.likelihood(posterior.bound), rows.targets()
        if self.fitc:
            likelihood = convolved(likelihood, torch.cat([var for _, _, var in posterior.blocks()]))
        if likelihood.is_gaussian:
            target, noise = gaussian_observations(likelihood, y, None, self.x.dtype)
            precision = 1 / noise.expand(torch.broadcast_shapes(noise.shape, y.shape))
            self.q.assign(posterior.optimum(target, precision))
            return

        def state() -> tuple[Tensor, Tensor, float]:
            q = self.q.distribution()
            root = factor(q)
            divergence = (root.square().sum() + q.mean.square().sum()) / 2 - root.diagonal(dim1=-2, dim2=-1).log().sum()
            return *posterior.marginals(), float(divergence)

        def step(targets: Tensor, precision: Tensor) -> tuple[Tensor, Tensor, float]:
            self.q.assign(posterior.optimum(targets, precision))
            return state()

        before = [p.clone() for p in self.solved_parameters()]
        first = not bool(self.q.distribution().mean.any())
        steps, moved, improved = natural_gradient(likelihood, y, state(), step, max_steps, tolerance, total=rows.total)
        if not improved:
            for p, old in zip(self.solved_parameters(), before, strict=True):
                p.copy_(old)
        warn_unsettled("SVGP.solve", moved, improved or steps >= max_steps, first)

    def solved_parameters(self) -> list[nn.Parameter]:
        """The parameters that :meth:`solve` sets."""
        return list(self.q.parameters())

    def _append_rows(self, x: Tensor, y: Tensor | None, by_row: dict[str, Tensor]) -> None:
        super()._append_rows(x, y, by_row)
        if self.can_solve:
            self.solve()

    def _keep_rows(self, rows: Int[Tensor, " S"]) -> None:
        super()._keep_rows(rows)
        self.q.restart(self.posterior(self.bound()))
        if self.can_solve:
            self.solve()


@dataclass(frozen=True)
class GivenInducing(Posterior):
    r"""f under q(nu) = N(m, S), or given nu, through weights :math:`a(x) = L^{-1} k_z(x)` and variances v(x).

    Attributes:
        q: the family.
        fitc: whether v is noise of the data.
        metric: the user's metric of neighbors; None takes the metric of the kernel.
        draw: the values of all sites in one posterior draw, nu among them; None integrates over q(nu).
        site: name of the site nu.
    """

    q: DenseGaussian
    fitc: bool
    metric: Any = None
    draw: Draw | None = None
    site: str = "nu"

    @property
    def z(self) -> Float[Tensor, "M D"]:
        """The inducing points, at their present places."""
        return self.bound.others["z"]

    @property
    def nu(self) -> Float[Tensor, "*L M"]:
        """Values of nu in the draw."""
        assert self.draw is not None
        return drawn_values(self.bound.where, self.draw, self.site, (*self.bound.latent_shape, len(self.z)))

    def given_nu(self, x: Float[Tensor, "B D"]) -> tuple[Tensor, Tensor, Tensor]:
        """Weights a (B, M) and variances v (B,) of f at x given nu, and L."""
        return whitened_conditional(self.bound.kernel, x, self.z, self.bound.jitter)

    def blocks(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Weights a and variances v at the data, block by block."""
        size = at_once(_BLOCK, len(self.z))
        for start in range(0, self.rows.num_data, size):
            part = slice(start, start + size)
            a, var, _ = self.given_nu(self.rows.x[part])
            yield part, a, var

    def marginals(self) -> tuple[Float[Tensor, "*L N"], Float[Tensor, "*L N"]]:
        """Means and variances of f at the data: with objective 'fitc', of its projection."""
        q, moments = self.q.distribution(), []
        for part, a, var in self.blocks():
            spread = combined_variance(q, a) + (0 if self.fitc else var)
            moments.append((self.rows.mean(self.bound, part) + q.mean @ a.mT, spread))
        loc, variance = (torch.cat(parts, -1) for parts in zip(*moments, strict=True))
        return loc, variance

    def optimum(self, targets: Float[Tensor, "*L N"], precision: Float[Tensor, "*L N"]) -> Distribution:
        r"""The optimal q(nu) for Gaussian observations of f with targets t and precisions :math:`\lambda`, in float64.

        .. math:: q(\nu) = N(P^{-1} A^\top \Lambda (t - \mu), P^{-1}), \qquad P = I + A^\top \Lambda A

        (Titsias 2009, eq. 10, whitened); a mean-field q has the variances :math:`1 / P_{jj}`.
        """
        eye = torch.eye(len(self.z), dtype=torch.float64, device=self.rows.x.device)
        system = torch.zeros_like(eye).repeat(*self.bound.latent_shape, 1, 1)
        right = torch.zeros_like(system[..., 0])
        for part, a, _ in self.blocks():
            a, weight = a.double(), precision[..., part].double()
            residual = targets[..., part].double() - self.rows.mean(self.bound, part).double()
            system += (a.mT * weight[..., None, :]) @ a
            right += (weight * residual) @ a
        system, right = eye + self.rows.total(system), self.rows.total(right)
        root = half_solve(reverse_cholesky(system).mT, eye)
        loc = (root @ (root.mT @ right[..., None]))[..., 0]
        if self.q.mean_field:
            root = torch.diag_embed(system.diagonal(dim1=-2, dim2=-1).rsqrt())
        return dist.MultivariateNormal(loc, scale_tril=root)

    # Neighbors: all inducing points, unless a number is given.

    def neighbors(self, x_new: Float[Tensor, "P D"], num_neighbors: int | None) -> Int[Tensor, "P H"] | None:
        """Rows of the nearest inducing points; None is all of them."""
        self._check_neighbors(num_neighbors, len(self.z))
        return None if num_neighbors is None else nearest_inducing(x_new, self.z, num_neighbors, self._metric())

    def joint_neighbors(
        self, x_new: Float[Tensor, "P D"], num_neighbors: int | None, seed: int
    ) -> tuple[NeighborGraph | None]:
        """A graph of the new points, in which the process given nu is drawn; None draws it exactly."""
        self._check_neighbors(num_neighbors, len(self.z) + len(x_new) - 1)
        nearest = 0 if num_neighbors is None else min(num_neighbors, len(x_new) - 1)
        return (NeighborGraph(x_new.double(), nearest, seed=seed, metric=self._metric()) if nearest else None,)

    def _metric(self) -> Any:
        return neighbor_metric(self.bound.kernel, self.rows.x) if self.metric is None else self.metric

    def others(self, rows: Int[Tensor, " I"], num_neighbors: int | None) -> Int[Tensor, " I"]:
        self._refuse_neighbors(num_neighbors, ".loo")
        return rows

    # Values.

    def moments(self, x_new: Float[Tensor, "P D"], near: Int[Tensor, "P H"] | None) -> tuple[Tensor, Tensor]:
        """O(M^3 + P M^2), or O(M^3 + P H^3)."""
        bound, q = self.bound, self.q.distribution() if self.draw is None else None
        nu, mean = self.nu if q is None else q.mean, bound.mean(x_new)
        if near is None:
            a, var, _ = self.given_nu(x_new)
            loc, spread = mean + nu @ a.mT, 0 if q is None else combined_variance(q, a)
            return loc, (var + spread).expand(loc.shape)
        w, var = graph_conditional(bound.at_data, x_new, self.z, near, jitter=bound.jitter)
        _, _, tril = self.given_nu(x_new[:1])
        loc = mean + (w * (nu @ tril.mT)[..., near]).sum(-1)
        root = None if q is None else tril @ factor(q)
        spread = 0 if root is None else neighbor_variance(w, near, root @ root.mT)
        return loc, (var + spread).expand(loc.shape)

    def joint(
        self, x_new: Float[Tensor, "P D"], near: tuple[NeighborGraph | None], count: int
    ) -> Float[Tensor, "S *L P"]:
        """O(M^3 + P M^2), and O(P^3) exactly or O(P H^2 (H + M)) by neighbors; computed in float64."""
        bound, (graph,) = self.bound, near
        x, cov = x_new.double(), bind_double(bound.kernel, x_new.dtype)
        a, var, _ = whitened_conditional(cov, x, self.z.double(), bound.jitter)
        if self.draw is None:
            nu = self.q.distribution().sample(torch.Size((count,))).double()
        else:
            nu = self.nu.double().expand(count, *bound.latent_shape, -1)
        if graph is None:
            rest = cov(x, x) - a @ a.mT
            rest.diagonal(dim1=-2, dim2=-1).copy_(var)
            noise = torch.randn((*nu.shape[:-1], len(x)), dtype=x.dtype, device=x.device)
            left_open = noise @ cholesky(rest, 0.0).mT
        else:
            dim = x.shape[1]

            def residual(one: Tensor, other: Tensor) -> Tensor:
                """Covariance of f given nu; the columns are inputs, then whitened weights."""
                return cov(one[..., :dim], other[..., :dim]) - one[..., dim:] @ other[..., dim:].mT

            prior = NNGP(residual, graph, points=torch.cat([x, a], -1), jitter=bound.jitter)
            left_open = prior.sample(nu.shape[:-1])
        return bound.mean(x_new) + (nu @ a.mT + left_open).to(x_new)

    def leave_one_out(self, others: Int[Tensor, " I"]) -> Float[Tensor, "*T I"]:
        """Densities from the posterior of nu at these hyperparameters, whatever q(nu) is; O(N M^2 + M^3) per step."""
        solve = InducingLeaveOneOut(self.rows.total)
        eye, prior_var = torch.eye(len(self.z)).to(self.rows.x), self.bound.covariance.diag(self.rows.x)
        fitc = self.fitc or self.draw is not None

        def moments(likelihood: Likelihood, y: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
            return solve(likelihood, y, mean, self.blocks, eye, prior_var, fitc)

        return self.densities(others, moments)

    def entries(self, x_new: Float[Tensor, "P D"], near: Any) -> int | None:
        """Entries of the covariances of inducing and new points; joint draws by neighbors are made one by one."""
        m = len(self.z)
        if not isinstance(near, tuple):
            return m * (m + len(x_new))
        return (m + len(x_new)) ** 2 if near[0] is None else None

    def loo_entries(self, others: Any) -> int | None:
        """Entries of the weights of a block of data; steps for data that are not Gaussian look at values."""
        if not self.bound.likelihood.is_gaussian:
            return None
        m = len(self.z)
        return m * (m + min(self.rows.num_data, at_once(_BLOCK, m)))


__all__ = ["SVGP"]
