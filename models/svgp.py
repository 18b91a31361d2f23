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
from typing import Any, Literal, cast

import pyro
import pyro.distributions as dist
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.distributions import Distribution

from pyro_nngp._checks import check_choice, fail
from pyro_nngp._memory import at_once
from pyro_nngp._shared import shared
from pyro_nngp.conditionals import graph_conditional, whitened_conditional
from pyro_nngp.data.tables import Table, from_tables
from pyro_nngp.distributions import NNGP
from pyro_nngp.hyperparameters import pyro_entry
from pyro_nngp.inducing.points import inducing_points, nearest_inducing
from pyro_nngp.kernels import bind
from pyro_nngp.kernels.base import bind_double
from pyro_nngp.likelihoods import Gaussian, Likelihood
from pyro_nngp.likelihoods.augmentation import gaussian_observations
from pyro_nngp.likelihoods.convolved import convolved
from pyro_nngp.linalg import cholesky, half_solve, reverse_cholesky
from pyro_nngp.models.tower import Densities, Draw, PredictiveMethod, rows_of
from pyro_nngp.neighbors import NeighborGraph
from pyro_nngp.variational import (
    DenseGaussian,
    InducingLeaveOneOut,
    combined,
    combined_variance,
    factor,
    neighbor_variance,
)
from pyro_nngp.variational.natural_gradient import natural_gradient, warn_unsettled

_BLOCK = 2**22  # whitened weights held at once while the data are streamed


class SVGP(PredictiveMethod):
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
        mean_field: whether q(nu) is diagonal; it has a dense Cholesky factor otherwise.
        objective: "vfe" or "fitc", as above; they differ in the model.
        mean: mean function ``(B, D) -> (B,)`` or ``(B, 1)``, such as ``torch.nn.Linear(D, 1)``; None is a learnable
            constant.
        loc: initial mean of q(nu), (M,) or (M, L); None is zero.
        scale: initial standard deviation of q(nu); 1 is the prior's.
        jitter: relative nugget; None takes 1e-6.
        metric: metric of neighbors: lengthscales, or a distance function; None is that of the kernel.
        start: another trained method, whose kernel, likelihood and mean are copied where none is given here.
        offset, weights, trials, limits: of each row, as in :class:`~pyro_nngp.models.tower.GPMethod`.
        seed: seed of k-means.

    Raises:
        ValueError, TypeError: for NaN or infinity, wrong shapes, mixed dtypes or devices, M out of range, an unknown
            objective, targets outside the support of the likelihood.

    Reference: Hensman, Matthews, Ghahramani (2015), "Scalable variational Gaussian process classification", AISTATS.
    """

    vectorizes = maps_draws = True
    can_distribute = True
    has_row_tables = False
    predicts_from_rows = False

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
        mean_field: bool = False,
        objective: Literal["vfe", "fitc"] = "vfe",
        mean: Callable | None = None,
        loc: Float[Tensor, "M *L"] | None = None,
        scale: float = 1.0,
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
        self.fitc = objective == "fitc"
        self._place_inducing(inducing_points("SVGP", x, inducing, seed), learn_inducing)
        self.q = DenseGaussian(self.num_inducing, self.num_latents, mean_field, loc, scale, like=x)
        self.finish()

    @property
    def num_inducing(self) -> int:
        """M."""
        return len(self.z)

    @pyro_entry
    def model(self, idx: Int[Tensor, " I"] | None = None) -> Tensor:
        """The generative model, on a batch of data points.

        Args:
            idx: rows of the data; None is all.

        Returns:
            y at the batch, or f at the batch when there is no likelihood. Latent dimensions lead: (..., I).
        """
        self.start_model(idx)
        prior = dist.Normal(self.x.new_zeros(()), 1.0).expand((*self.latent_shape, self.num_inducing))
        with self.shared_sites():
            nu = pyro.sample(self.site("nu"), prior.to_event(1 + len(self.latent_shape)))
        return self._given(nu, idx)

    @pyro_entry
    def guide(self, idx: Int[Tensor, " I"] | None = None) -> Tensor:
        """q(nu), q(f | nu) = p(f | nu) and the hyperparameters' guide, on the batch of :meth:`model`; returns f."""
        self.start_guide(idx)
        q = self.q.distribution()
        with self.shared_sites():
            nu = pyro.sample(self.site("nu"), q.to_event(len(self.latent_shape)))
        return self._given(nu, idx, q)

    @property
    def can_solve(self) -> bool:
        """Whether :meth:`solve` applies: there is a likelihood."""
        return self.likelihood is not None

    @pyro_entry
    @torch.no_grad()
    def solve(self, max_steps: int = 20, tolerance: float = 1e-3) -> None:
        r"""Set q(nu) to its optimum for the present hyperparameters and inducing points, without step sizes.

        Gaussian observations of f with targets t and precisions :math:`\lambda` give

        .. math:: q(\nu) = N(P^{-1} A^\top \Lambda (t - \mu), P^{-1}), \qquad P = I + A^\top \Lambda A

        (Titsias 2009, eq. 10, whitened); a mean-field q has the variances :math:`1 / P_{jj}`. Other likelihoods take
        natural-gradient steps, until means of f move by less than `tolerance` standard deviations.

        Args:
            max_steps: largest number of steps.
            tolerance: stop when means of f move by less, see above.

        Raises:
            ValueError: if there is no likelihood.

        Cost: O(N M^2) per step and output, streamed in blocks of the data.
        """
        if self.likelihood is None:
            fail("SVGP.solve", "a likelihood", "in the model", None, "Train q(nu) by gradients.")
        self._place_medians()
        likelihood, y = self.likelihood_at(), cast(Tensor, self._targets(None))
        if self.fitc:
            likelihood = convolved(likelihood, torch.cat([var for _, _, var in self._blocks()]))
        if isinstance(likelihood, Gaussian):
            target, noise = gaussian_observations(likelihood, y, None, self.x.dtype)
            self._condition(target, 1 / noise.expand(torch.broadcast_shapes(noise.shape, y.shape)))
            return

        def state() -> tuple[Tensor, Tensor, float]:
            q = self.q.distribution()
            root = factor(q)
            divergence = (root.square().sum() + q.mean.square().sum()) / 2 - root.diagonal(dim1=-2, dim2=-1).log().sum()
            return *self._marginals(), float(divergence)

        def step(targets: Tensor, precision: Tensor) -> tuple[Tensor, Tensor, float]:
            self._condition(targets, precision)
            return state()

        before = [p.clone() for p in self.solved_parameters()]
        first = not bool(self.q.distribution().mean.any())
        steps, moved, improved = natural_gradient(likelihood, y, state(), step, max_steps, tolerance, total=self.total)
        if not improved:
            for p, old in zip(self.solved_parameters(), before, strict=True):
                p.copy_(old)
        warn_unsettled("SVGP.solve", moved, improved or steps >= max_steps, first)

    def solved_parameters(self) -> list[nn.Parameter]:
        """The parameters that :meth:`solve` sets."""
        return list(self.q.parameters())

    def append_rows(self, x: Tensor, y: Tensor | None, by_row: dict[str, Tensor]) -> None:
        super().append_rows(x, y, by_row)
        if self.can_solve:
            self.solve()

    def _given(self, nu: Tensor, idx: Tensor | None, q: Distribution | None = None) -> Tensor:
        """The sites f and y given nu in the model; in the guide (q given) only f, with its marginal."""
        x, plates = self._inputs(idx), self.plates(idx)
        a, var, _ = shared((self, "f"), lambda: whitened_conditional(self.covariance(), x, self.z, self.jitter))
        mean, nu = self._mean_at(x, rows_of(idx)), self.outside(nu, 1 + len(self.latent_shape))
        loc, marginal = mean + combined(nu, a), None
        if q is not None:
            marginal = (mean + combined(q.mean, a), combined_variance(q, a) + (0 if self.fitc else var))
        f = self.record_f(plates, loc, marginal) if self.fitc else self.sample_f(plates, loc, var, marginal)
        if q is not None:
            return f
        noisier = convolved(self.likelihood_at(rows_of(idx)), var) if self.fitc else None
        return self.observe(plates, f, idx, noisier)

    def _blocks(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Whitened weights and conditional variances of f at the data, block by block."""
        size = at_once(_BLOCK, self.num_inducing)
        for start in range(0, self.num_data, size):
            rows = slice(start, start + size)
            a, var, _ = whitened_conditional(self.kernel, self.x[rows], self.z, self.jitter)
            yield rows, a, var

    def _marginals(self) -> tuple[Tensor, Tensor]:
        """Means and variances of f at the data: with objective 'fitc', of its projection."""
        q, parts = self.q.distribution(), []
        for rows, a, var in self._blocks():
            spread = combined_variance(q, a) + (0 if self.fitc else var)
            parts.append((self._mean_at(self.x[rows], rows) + q.mean @ a.mT, spread))
        locs, variances = zip(*parts, strict=True)
        return torch.cat(locs, -1), torch.cat(variances, -1)

    def _condition(self, targets: Float[Tensor, "*L N"], precision: Float[Tensor, "*L N"]) -> None:
        """Set q(nu) to the posterior given Gaussian observations of f, in float64."""
        eye = torch.eye(self.num_inducing, dtype=torch.float64, device=self.x.device)
        system = torch.zeros_like(eye).repeat(*self.latent_shape, 1, 1)
        right = torch.zeros_like(system[..., 0])
        for rows, a, _ in self._blocks():
            a, weight = a.double(), precision[..., rows].double()
            residual = targets[..., rows].double() - self._mean_at(self.x[rows], rows).double()
            system += (a.mT * weight[..., None, :]) @ a
            right += (weight * residual) @ a
        system, right = eye + self.total(system), self.total(right)
        root = half_solve(reverse_cholesky(system).mT, eye)
        loc = (root @ (root.mT @ right[..., None]))[..., 0]
        if self.q.mean_field:
            root = torch.diag_embed(system.diagonal(dim1=-2, dim2=-1).rsqrt())
        self.q.assign(dist.MultivariateNormal(loc, scale_tril=root))

    def plan(self, x_new: Tensor, num_neighbors: int | None) -> int | None:
        """H."""
        self._check_neighbors(num_neighbors, self.num_inducing)
        return num_neighbors

    def draw_entries(self, num_new: int, plan: int | tuple[int | None, int] | None) -> int | None:
        """Those of the covariances of inducing and new points; joint draws by neighbors are made one by one."""
        m = self.num_inducing
        if isinstance(plan, tuple):
            return (m + num_new) ** 2 if plan[0] is None else None
        return m * (m + num_new)

    def loo_entries(self, rows: Tensor | None, num_neighbors: int | None) -> int | None:
        """Those of the weights of a block of data; data that are not Gaussian take steps from the last solution."""
        if not isinstance(self.likelihood, Gaussian):
            return None
        return self.num_inducing * (self.num_inducing + min(self.num_data, at_once(_BLOCK, self.num_inducing)))

    def moments(self, x_new: Tensor, plan: int | None, draw: Draw | None) -> tuple[Tensor, Tensor]:
        """O(M^3 + P M^2), or O(M^3 + P H^3)."""
        mean, q = self._mean_at(x_new), self.q.distribution() if draw is None else None
        nu = self._drawn_nu(cast(Draw, draw)) if q is None else q.mean
        if plan is None:
            a, var, _ = whitened_conditional(self.kernel, x_new, self.z, self.jitter)
            loc, spread = mean + nu @ a.mT, 0 if q is None else combined_variance(q, a)
            return loc, (var + spread).expand(loc.shape)
        neighbors = nearest_inducing(x_new, self.z, plan, self.neighbor_metric())
        w, var = graph_conditional(self.kernel, x_new, self.z, neighbors, jitter=self.jitter)
        _, _, tril = whitened_conditional(self.kernel, x_new[:1], self.z, self.jitter)
        loc = mean + (w * (nu @ tril.mT)[..., neighbors]).sum(-1)
        root = None if q is None else tril @ factor(q)
        spread = 0 if root is None else neighbor_variance(w, neighbors, root @ root.mT)
        return loc, (var + spread).expand(loc.shape)

    def leave_one_out(self, rows: Tensor, num_neighbors: int | None, sampled: bool) -> Densities:
        """Densities from the posterior of nu at these hyperparameters, whatever q(nu) is; O(N M^2 + M^3) per step."""
        self.refuse_neighbors(num_neighbors)
        leave_one_out = InducingLeaveOneOut(self.fitc or sampled, self.total)

        def moments(likelihood: Likelihood, y: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
            eye, prior_var = torch.eye(self.num_inducing).to(self.x), bind(self.kernel).diag(self.x)
            return leave_one_out(likelihood, y, mean, self._blocks, eye, prior_var)

        return self.scores(rows, moments)

    def joint_plan(self, x_new: Tensor, num_neighbors: int | None, seed: int) -> tuple[int | None, int]:
        """H, at most the number of other new points, and the seed of the order."""
        self._check_neighbors(num_neighbors, self.num_inducing + len(x_new) - 1)
        nearest = 0 if num_neighbors is None else min(num_neighbors, len(x_new) - 1)
        return nearest or None, seed

    def joint_draws(self, x_new: Tensor, plan: tuple[int | None, int], count: int, draw: Draw | None) -> Tensor:
        """O(M^3 + P M^2), and O(P^3) exactly or O(P H^2 (H + M)) by neighbors; computed in float64."""
        num_neighbors, seed = plan
        x, cov = x_new.double(), bind_double(self.kernel, x_new.dtype)
        a, var, _ = whitened_conditional(cov, x, self.z.double(), self.jitter)
        if draw is None:
            nu = self.q.distribution().sample((count,)).double()
        else:
            nu = self._drawn_nu(draw).double().expand(count, *self.latent_shape, -1)
        if num_neighbors is None:
            rest = cov(x, x) - a @ a.mT
            rest.diagonal(dim1=-2, dim2=-1).copy_(var)
            noise = torch.randn((*nu.shape[:-1], len(x)), dtype=x.dtype, device=x.device)
            left_open = noise @ cholesky(rest, 0.0).mT
        else:
            dim = x.shape[1]
            graph = NeighborGraph(x, num_neighbors, seed=seed, metric=self.neighbor_metric())

            def residual(one: Tensor, other: Tensor) -> Tensor:
                """Covariance of f given nu; the columns are inputs, then whitened weights."""
                return cov(one[..., :dim], other[..., :dim]) - one[..., dim:] @ other[..., dim:].mT

            prior = NNGP(residual, graph, points=torch.cat([x, a], -1), jitter=self.jitter)
            left_open = prior.sample(nu.shape[:-1])
        return self._mean_at(x_new) + (nu @ a.mT + left_open).to(x_new)

    def _drawn_nu(self, draw: Draw) -> Tensor:
        return self._drawn(draw, "nu", (*self.latent_shape, self.num_inducing))
