r"""Leave-one-out Gaussian processes on nearest neighbors, LOO-k (Jankowiak and Pleiss 2021).

Hyperparameters maximize the density of each datum given its K nearest others,

.. math:: \sum_n \log p(y_n \mid y_{n(n)}, X_{n(n)}, x_n) \qquad\text{(eq. 9)}

or, with auxiliary variables that make the likelihood Gaussian, its variational analog

.. math:: \sum_n E_q \log p(y_n \mid y_{n(n)}, \omega_{n(n)}) - \sum_n KL(q(\omega_n) \,\|\, p(\omega_n))
   \qquad\text{(eq. 12)}

Differs from the paper: the paper also takes gradients of eq. 12 in q. But the density of :math:`y_n` already has
:math:`\omega_n` integrated out, so nothing rewards moving :math:`q(\omega_n)` away from the prior: labels stay near
:math:`\pm 2` on the scale of f, and probabilities away from 0 and 1. The reward is in the factor
:math:`(2\pi/\omega)^{1/2} e^{1 / 8\omega}`, the part of the joint density of y and :math:`\omega` that the paper drops
(the exponential, eq. 25) or leaves out (the root, eq. 24). With both factors, the divergence is from the posterior
:math:`p(\omega_n \mid y_n, y_{n(n)}, \omega_{n(n)})`, and each term is below the log density of :math:`y_n`, so q
cannot run away (``divergence="posterior"``, :mod:`pyro_nngp.likelihoods.augmentation`). Here q(omega) goes to that
posterior by coordinate ascent, without gradients (:meth:`LOO.solve`, called by :func:`~pyro_nngp.inference.fit`); eq.
12 then trains kernel and mean only. ``fit(..., solve_every=0)`` with ``divergence="prior"`` follows the paper.

What is left is a leak: :math:`q(\omega_m)` of a neighbor m of n was found with :math:`y_n`. On few or clustered labels
training exploits it by a variance in the hundreds. :meth:`LOO.loo` finds the variables of neighbors again without
:math:`y_n`, and ``fit`` warns where that changes the densities much; ``divergence="posterior"`` has no leak, and
separates classes less well.

Further differences: both sums have the same factor (the paper prints 1/N before the first only), and as q moves from
the prior, the loss that ``fit`` reports rises with the second sum, which says nothing about predictions. Divergences
are computed by quadrature instead of from one draw, with the Polya-Gamma density on the whole half-line. Predictions
use :math:`E_q \omega` where the paper takes a draw. For classes, the odds of the one-against-all probabilities are
divided by their sum; the paper divides the probabilities (eq. 33, ``coupling="probabilities"``), which leaves C - 1
times the uncertainty of a single binary label.

Cost per step: O(B K^3) for each latent function, independent of N.
"""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Literal, cast

import pyro
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.distributions import Distribution

from pyro_nngp._checks import check_choice, check_inputs, check_tensor, fail
from pyro_nngp._memory import at_once
from pyro_nngp._tape import operation
from pyro_nngp.data.tables import Table, from_tables
from pyro_nngp.distributed import ShardedTable
from pyro_nngp.hyperparameters import pyro_entry
from pyro_nngp.likelihoods import Gaussian, Likelihood, NegativeBinomial, StudentT
from pyro_nngp.likelihoods.augmentation import (
    AugmentedMarginal,
    Coupling,
    auxiliary_prior,
    check_augmentable,
    coded_labels,
    gaussian_observations,
    predictive,
    squared_latent,
)
from pyro_nngp.likelihoods.pseudo_observations import pseudo_observations
from pyro_nngp.models.base import (
    ByRow,
    Densities,
    Draw,
    GPMethod,
    Plates,
    ResponseMethod,
    first_neighbors,
    latents_first,
    rows_of,
)
from pyro_nngp.neighbors import Batch, NearestOthers, distinct_rows
from pyro_nngp.variational import LocalConjugate, LocalLogNormal, conjugate_posterior

_OWN_SWEEPS = 8  # of a variable given the others: contracts by a factor of three and more
_PAIR_ENTRIES = 2**23  # of the neighbor covariances of the pairs at once


class LOO(ResponseMethod):
    r"""Gaussian process trained on nearest-neighbor leave-one-out densities.

    The model, n(n) the K nearest other points of point n and :math:`(\tilde y_m, \delta_m)` the target and its noise
    variance as the auxiliary variables :math:`\omega` make them Gaussian observations of f:

    .. math::
        \omega_n &\sim p(\omega), \quad n = 1..N, \\
        f_n \mid \tilde y_{n(n)} &\sim N\big(\mu(x_n) + w_n^\top (\tilde y_{n(n)} - \mu(x_{n(n)})),\, v_n\big), \\
        y_n \mid f_n &\sim p(y_n \mid f_n),

    with f integrated out. The product over n is a pseudo-likelihood: its factors are leave-one-out densities of one
    Gaussian process, not the conditionals of a joint density.

    =====================  ===========================================  ========================================
    likelihood             :math:`\omega`                               observation, noise variance
    =====================  ===========================================  ========================================
    Gaussian               none                                         :math:`y,\ \sigma^2`
    StudentT               :math:`Gamma(\nu/2, \nu/2)`                  :math:`y,\ s^2/\omega`
    Bernoulli (logit)      :math:`PG(1, 0)`                             :math:`(y - 1/2)/\omega,\ 1/\omega`
    Binomial               :math:`PG(n, 0)`                             :math:`(y - n/2)/\omega,\ 1/\omega`
    NegativeBinomial       :math:`PG(y + r, 0)`                         :math:`(y - r)/(2\omega),\ 1/\omega`
    Categorical            :math:`PG(1, 0)`, one per class              as Bernoulli, one class against all
    =====================  ===========================================  ========================================

    Class probabilities are computed from the C one-against-all probabilities (`coupling`). Sites: ``y``, and where
    there are auxiliary variables ``omega`` at the batch and ``omega_halo`` at its neighbors outside (without a density:
    each variable counts when its row is in the batch).

    Args:
        x: inputs (N, D).
        y: targets (N,), or (N, T) for T outputs of similar spread: independent functions of one kernel, and one noise;
            binary labels as 0 and 1, -1 and 1, or booleans.
        kernel: a kernel, or any callable ``(..., n, D), (..., m, D) -> (..., n, m)``; None is Matern52 with one
            lengthscale per column. Unset hyperparameters start from the data (:mod:`pyro_nngp.models.base.starts`).
        likelihood: one of the table; None is :class:`~pyro_nngp.likelihoods.Gaussian`.
        num_neighbors: K; None is 32, doubled up to 128 where that lowers predictive variances by more than 10 %
            (:meth:`~pyro_nngp.models.base.NeighborChoice.choose_neighbors`).
        guide: family of q(omega): "lognormal" as in the paper, or "conjugate" for PG(b, c), or a Gamma, with a free
            parameter each. None is "conjugate" for NegativeBinomial, whose divergence is then a closed form instead of
            a sum of Polya-Gamma densities that each step has to differentiate, and "lognormal" for others.
        divergence: of q(omega_n) from the "posterior" of omega_n given its datum and neighbors, or from the "prior" as
            in the paper. If q(omega) is solved for, as ``fit`` does, and its prior has no hyperparameters, then with
            "prior" kernel and mean maximize the leave-one-out densities themselves. None is "prior" in that case
            (Bernoulli, Binomial, Categorical) and "posterior" for StudentT and NegativeBinomial. With a few hundred
            or clustered labels "posterior" is the safer choice.
        coupling: for classes: the "odds" of the one-against-all probabilities divided by their sum, as if C independent
            labels were known to have exactly one 1, or the "probabilities" divided by theirs, as in the paper (eq. 33).
            The former suits classes that can be separated, the latter those that overlap.
        mean: mean function ``(B, D) -> (B,)``, ``(B, 1)``, or ``(B, L)`` for L outputs or classes; None is a learnable
            constant for each.
        jitter: relative nugget; None takes 1e-6.
        metric: metric of neighbors: lengthscales, or a distance function; None is that of the kernel.
        start: another trained method, whose kernel, likelihood and mean are copied where none is given here.
        offset, weights, trials: of each row, as in :class:`~pyro_nngp.models.base.GPMethod`.
        seed: seed of the order that breaks ties between neighbors at one distance.

    Raises:
        ValueError, TypeError: for NaN or infinity, wrong shapes, mixed dtypes or devices, K out of range, targets
            outside the support of the likelihood, a class that does not occur, a likelihood that is not in the table.

    Reference: Jankowiak, Pleiss (2021), "Scalable cross validation losses for Gaussian process models".
    """

    vectorizes = draws_together = True

    @from_tables
    def __init__(
        self,
        x: Float[Tensor, "N D"] | Table,
        y: Any,
        kernel: Any = None,
        likelihood: Likelihood | None = None,
        *,
        num_neighbors: int | None = None,
        guide: Literal["lognormal", "conjugate"] | None = None,
        divergence: Literal["posterior", "prior"] | None = None,
        coupling: Coupling = "odds",
        mean: Callable | None = None,
        jitter: float | None = None,
        metric: Float[Tensor, " *D"] | Callable | None = None,
        start: Any = None,
        offset: Float[Tensor, "N *L"] | Table | None = None,
        weights: Float[Tensor, " N"] | Int[Tensor, " N"] | Table | None = None,
        trials: Float[Tensor, " N"] | Int[Tensor, " N"] | Table | None = None,
        seed: int = 0,
    ) -> None:
        check_inputs("LOO", "x", x)
        if likelihood is None:
            of_start = cast(Likelihood, start.likelihood) if isinstance(start, GPMethod) else Gaussian()
            likelihood = copy.deepcopy(of_start).to(x)
        check_augmentable("LOO", likelihood)
        if guide is None:
            guide = "conjugate" if isinstance(likelihood, NegativeBinomial) else "lognormal"
        check_choice("LOO", "guide", guide, ("lognormal", "conjugate"))
        if divergence is None:
            divergence = "posterior" if isinstance(likelihood, StudentT | NegativeBinomial) else "prior"
        check_choice("LOO", "divergence", divergence, ("posterior", "prior"))
        check_choice("LOO", "coupling", coupling, ("odds", "probabilities"))
        check_tensor("LOO", "y", y)
        coded = coded_labels("LOO", likelihood, y, x.dtype)
        by_row = {"offset": offset, "weights": weights, "trials": trials}
        super().__init__(x, coded, kernel, likelihood, mean, jitter, metric, start, **by_row)
        if weights is not None and not isinstance(likelihood, Gaussian):
            cure = "Use VNNGP for other weighted data."
            fail("LOO", "weights", "None unless noise is Gaussian", type(likelihood).__name__, cure)
        self.divergence, self.coupling = divergence, coupling
        self.graph = NearestOthers(
            x, first_neighbors("LOO", num_neighbors, x), seed=seed, metric=self.neighbor_metric()
        )
        self.local: LocalLogNormal | LocalConjugate | None = None
        if not isinstance(likelihood, Gaussian):
            self.local = self._start_omega(guide == "lognormal", slice(None))
        self.finish(self.choose_neighbors if num_neighbors is None else None)

    @pyro_entry
    def model(self, idx: Int[Tensor, " I"] | None = None, batch: Batch | None = None) -> Tensor:
        """The auxiliary variables and the leave-one-out densities of a batch of data; returns its y.

        Args:
            idx: rows of the data; None is all.
            batch: `idx` and their neighbors, from :meth:`batch_args`; None finds them.
        """
        self.start_model(idx)
        batch = self.graph.batch(idx) if batch is None else batch
        plates = self.plates(idx)

        def prior(rows: Tensor) -> Distribution:
            return auxiliary_prior(self.likelihood_at(rows), self._values(rows), self.x.dtype)

        omega = None if self.local is None else self._sample_omega(plates, batch, prior)
        here = self.likelihood_at(batch.rows)
        observations = gaussian_observations(here, self._values(batch.rows), omega, self.x.dtype)
        loc, var = self._given_neighbors(self._inputs(idx), batch.rows, batch.neighbors, *observations, rows_of(idx))
        likelihood = self.likelihood_at(rows_of(idx))
        data, latents = plates
        drawn = loc if omega is None else omega[..., batch.targets]
        parts = torch.broadcast_tensors(loc, var, drawn)
        loc, var, drawn = (latents_first(likelihood, part) for part in parts)
        if omega is None or self.divergence == "prior":
            y = predictive(likelihood, loc, var, self.coupling)
        else:
            y = AugmentedMarginal(likelihood, loc, var, drawn, self.coupling)
        with latents if likelihood.num_latents is None else nullcontext(), data, self.weighted(idx):
            return pyro.sample(self.site("y"), y, obs=self._values(idx))

    @pyro_entry
    def guide(self, idx: Int[Tensor, " I"] | None = None, batch: Batch | None = None) -> Tensor | None:
        """q(omega) on the batch of :meth:`model` and its neighbors, and the hyperparameters' guide; returns omega."""
        self.start_guide(idx)
        if self.local is None:
            return None
        local = self.local
        batch, plates = self.graph.batch(idx) if batch is None else batch, self.plates(idx)

        def q(rows: Tensor) -> Distribution:
            return local.distribution(self.likelihood_at(rows), self._values(rows), rows)

        return self._sample_omega(plates, batch, q)

    def batch_args(self, idx: Int[Tensor, " I"] | None, generator: torch.Generator) -> tuple[Tensor | None, Batch]:
        """Arguments of model and guide for a minibatch: its rows, and the batch with neighbors, found once."""
        return idx, self.graph.batch(idx)

    @property
    def can_solve(self) -> bool:
        """Whether :meth:`solve` applies: there are auxiliary variables, or a mean function that it can solve for."""
        return self.local is not None or self.can_solve_mean

    @pyro_entry
    @torch.no_grad()
    def solve(self, num_sweeps: int = 2, batch_size: int = 1024) -> None:
        """Set each q(omega_n) to its posterior given its datum and neighbors; for Gaussian data solve for the mean.

        Coefficients of the mean with normal priors get their posterior, with any data.

        The leave-one-out densities are almost flat in the mean, which cancels where neighbors surround a point: the
        optimum of the objective depends on the few points on the edge. The mean is therefore the generalized least
        squares estimate, as in :class:`~pyro_nngp.models.Vecchia`.

        Coordinate ascent, all rows at once: q(omega_n) depends on :math:`E f_n^2` alone, and a log-normal guide takes
        the moments of the conjugate one. Its effect on the densities of neighbors is neglected.

        Args:
            num_sweeps: number of passes over the data.
            batch_size: number of rows at a time.

        Raises:
            ValueError: unless :attr:`can_solve`.

        Cost: O(N K^3) per sweep.
        """
        if self.local is None:
            self.solve_mean()
            return
        self._place_medians()
        likelihood, every = self.likelihood_at(), torch.arange(len(self.x), device=self.x.device)
        y = self._values()
        for _ in range(num_sweeps):
            omega = self.local.distribution(likelihood, y, every).mean
            parts = []
            for idx in every[: self.num_data].split(batch_size):
                batch = self.graph.batch(idx)
                near = batch.rows
                here = self.likelihood_at(near)
                observations = gaussian_observations(here, y[..., near], omega[..., near], self.x.dtype)
                loc, var = self._given_neighbors(self.x[idx], near, batch.neighbors, *observations, idx)
                parts.append(squared_latent(self.likelihood_at(idx), y[..., idx], omega[..., idx], loc, var))
            self.local.put(likelihood, y, self.complete(torch.cat(parts, -1).movedim(-1, 0)).movedim(0, -1))
            if self.can_solve_mean:
                self.solve_mean()
                self._place_medians()
        if self.shard is not None:
            cast(ShardedTable, self.graph).kept_trial = None

    def take_rows(self, first: bool = False) -> None:
        super().take_rows()
        if self.local is not None and first:
            self.local = self._start_omega(isinstance(self.local, LocalLogNormal), slice(None))
        elif self.local is not None:
            for table in self.local.parameters():
                table.data = self.complete(table.detach()[: self.num_data])

    @property
    def can_alternate(self) -> bool:
        """Whether only q(omega) is latent, so that quasi-Newton steps and :meth:`solve` can alternate."""
        return self.local is not None and not self.hyper_guide.has_sites

    @pyro_entry
    @torch.no_grad()
    def score(self, rows: Int[Tensor, " B"]) -> float:
        """Minus the mean leave-one-out log density of some rows given their K neighbors: the criterion of convergence.

        The loss also contains the divergences of q(omega), which may keep falling or rising while nothing else moves.
        """
        densities = super().leave_one_out(rows, self.graph.num_neighbors, False)
        self._place_medians()
        return -float(densities(None).sum()) / len(rows)

    @property
    def can_leak(self) -> bool:
        """Whether the objective sees auxiliary variables of neighbors that know the datum, at no cost to itself."""
        return self.local is not None and self.divergence == "prior" and self.shard is None and not self.is_part

    @torch.no_grad()
    def leak(self, rows: Int[Tensor, " B"]) -> float:
        """Mean log density of some rows in the objective, less that of :meth:`leave_one_out`; 0 where none can leak."""
        if not self.can_leak:
            return 0.0
        densities = self.leave_one_out(rows, self.graph.num_neighbors, False)
        self._place_medians()
        return -self.score(rows) - float(densities(None).sum()) / len(rows)

    def leave_one_out(self, rows: Tensor, num_neighbors: int | None, sampled: bool) -> Densities:
        r"""Given the observations of the nearest other points; O(I K^3), for labels in one process O(I K^4).

        The auxiliary variable :math:`\omega_m` of a neighbor with n among its own neighbors was found with the label
        :math:`y_n`. For labels it is found again without, given the other neighbors of m, whose variables are kept.
        Posterior draws of the auxiliary variables are taken as they are.
        """
        densities = super().leave_one_out(rows, num_neighbors, sampled)
        if not self.can_leak:
            return densities
        near = self.graph.others(num_neighbors, rows)
        pairs = torch.arange(near.numel(), device=near.device).view(near.shape)

        def without(draw: Draw | None) -> Tensor:
            if draw is not None:
                return densities(draw)
            omega = self._omega_without(rows, near)
            of_pairs = near.flatten()
            here = self.likelihood_at(of_pairs)
            observations = gaussian_observations(here, self._values(of_pairs), omega, self.x.dtype)
            return self._log_density(rows, of_pairs, pairs, *observations)

        return without

    def _omega_without(self, rows: Int[Tensor, " B"], near: Int[Tensor, "B K"]) -> Float[Tensor, "*L P"]:
        """Means of the auxiliary variables of the neighbors of some rows, (B K) pairs, each without its row's datum."""
        local, of_pairs = cast(LocalLogNormal | LocalConjugate, self.local), near.flatten()
        y = self._values(of_pairs)
        omega = local.distribution(self.likelihood_at(of_pairs), y, of_pairs).mean.clone()
        union, places = distinct_rows(near)
        theirs = self.graph.others(self.graph.num_neighbors, union)[places.flatten()]
        is_own = theirs == rows.repeat_interleave(near.shape[1])[:, None]
        told = is_own.any(-1).nonzero()[:, 0]  # pairs whose variable knows the datum
        for part in told.split(at_once(_PAIR_ENTRIES, near.shape[1] ** 2)):
            m = of_pairs[part]
            union, positions = distinct_rows(theirs[part])
            positions = torch.where(is_own[part], -1, positions)
            observations = self.observations(self.likelihood_at(union), union, None)
            loc, var = self._given_neighbors(self.x[m], union, positions, *observations, m)
            here, labels, found = self.likelihood_at(m), y[..., part], omega[..., part]
            for _ in range(_OWN_SWEEPS):
                square = squared_latent(here, labels, found, loc, var)
                found = conjugate_posterior(here, labels, square).mean
            omega[..., part] = found
        return omega

    @pyro_entry
    def append_rows(self, x: Tensor, y: Tensor | None, by_row: dict[str, Tensor]) -> None:
        super().append_rows(x, y, by_row)
        if self.local is not None and y is not None:
            rows = slice(self.num_data - len(x), None)
            self.local.append(self._start_omega(isinstance(self.local, LocalLogNormal), rows))
            self.solve()

    def coded(self, y: Tensor) -> Tensor:
        return coded_labels("LOO", cast(Likelihood, self.likelihood), y, self.x.dtype, every_class=False)

    @pyro_entry
    @torch.no_grad()
    def _start_omega(self, lognormal: bool, rows: slice) -> LocalLogNormal | LocalConjugate:
        """The start of q(omega) for some rows: the prior; for counts the optimum for the most likely f.

        Starting at the prior, 48 sweeps of coordinate ascent do not suffice for counts of many times r.
        """
        self._place_medians()
        likelihood, y = self.likelihood_at(rows), cast(Tensor, self.y)[rows].movedim(0, -1)
        prior = auxiliary_prior(likelihood, y, self.x.dtype)
        local = LocalLogNormal(prior) if lognormal else LocalConjugate(prior.batch_shape, self.x)
        if isinstance(likelihood, NegativeBinomial):
            level = None
            if self.shard is not None:  # the level of the data of all processes
                sample = self.coded(self.shard.sample["y"]).to(self.x.device)
                level = pseudo_observations(likelihood, sample.movedim(0, -1)).level
            found = pseudo_observations(likelihood, y, level)
            local.put(likelihood, y, (found.obs.square() + cast(Tensor, found.noise).clamp(max=4)).to(self.x))
        return local

    def solved_parameters(self) -> list[torch.nn.Parameter]:
        """The parameters that :meth:`solve` sets."""
        return self._solved_mean() if self.local is None else list(self.local.parameters())

    def observations(self, likelihood: Likelihood, rows: Int[Tensor, " U"], draw: Draw | None) -> tuple[Tensor, Tensor]:
        """Observations with auxiliary variables at their means under the guide, or as drawn."""
        y, omega = self._values(rows), None
        if self.local is not None:
            drawn = None if draw is None else self._drawn(draw, "omega", (*self.latent_shape, self.num_data))
            omega = self.local.distribution(likelihood, y, rows).mean if drawn is None else drawn[..., rows]
        return gaussian_observations(likelihood, y, omega, self.x.dtype)

    def _predictive_of_y(self, loc: Tensor, var: Tensor, by_row: ByRow) -> Distribution:
        return predictive(self._bound().for_rows(**by_row), loc, var, self.coupling)

    def _sample_omega(self, plates: Plates, batch: Batch, family: Callable[[Tensor], Any]) -> Float[Tensor, "*L U"]:
        """The sites ``omega`` and ``omega_halo``, and their values at the rows of the batch."""
        data, latents = plates
        with latents, data:
            own = pyro.sample(self.site("omega"), family(batch.rows[batch.targets]))
        omega = own.new_zeros(*own.shape[:-1], len(batch.rows)).index_copy(-1, batch.targets, own)
        outside = _others(batch.rows, batch.targets)
        if len(outside) == 0:
            return omega
        with latents, pyro.plate(self.site("halo"), len(outside), dim=-1):
            halo = pyro.sample(self.site("omega_halo"), family(batch.rows[outside]).mask(False))
        return omega.index_copy(-1, outside, halo)


@operation
def _others(rows: Tensor, targets: Tensor) -> Tensor:
    """Positions of the rows of a batch that are not its targets."""
    return torch.ones_like(rows, dtype=torch.bool).index_fill(0, targets, False).nonzero()[:, 0]
