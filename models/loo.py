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

What is left is a leak: :math:`q(\omega_m)` of a neighbor m of n was computed with :math:`y_n`. On few or clustered
labels training exploits it by a variance in the hundreds. :meth:`LOO.loo` finds the variables of neighbors again
without :math:`y_n`, and ``fit`` warns where that changes the densities much; ``divergence="posterior"`` has no leak,
and separates classes less well.

Predictions and leave-one-out densities (:meth:`LOO.loo`) come from the Gaussian process, not from the
pseudo-likelihood, which is almost flat in the level: coefficients of a mean that is learned and linear in them have
their posterior under a flat prior given all (pseudo-)observations, by Vecchia's approximation
(:mod:`pyro_nngp.models.base.trend`), and are integrated over: universal kriging. :meth:`LOO.loo` takes the
datum's observation out of that posterior; the objective, in training, holds the coefficients fixed.

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
from typing import Any, Literal

import pyro
import torch
from jaxtyping import Float, Int
from pyro.nn import pyro_method
from torch import Tensor, nn
from torch.distributions import Distribution

from pyro_nngp._checks import check_choice, check_inputs, check_int, check_rows, check_tensor, fail
from pyro_nngp._tape import operation
from pyro_nngp.bound import Bound
from pyro_nngp.data.tables import Table, from_tables
from pyro_nngp.hyperparameters.priors import has_unsolved_priors
from pyro_nngp.hyperparameters.values import as_sites, as_values, plain
from pyro_nngp.likelihoods import Gaussian, Likelihood, NegativeBinomial, StudentT
from pyro_nngp.likelihoods.augmentation import (
    AugmentedMarginal,
    Coupling,
    auxiliary_prior,
    check_augmentable,
    coded_labels,
    gaussian_observations,
    predictive,
)
from pyro_nngp.models.base.arguments import check_family
from pyro_nngp.models.base.augmented import Augmented
from pyro_nngp.models.base.draws import Draw, drawn_values
from pyro_nngp.models.base.information import Information, of_leave_one_out
from pyro_nngp.models.base.neighbor_choice import first_neighbors
from pyro_nngp.models.base.program import Program, latents_first
from pyro_nngp.models.base.response import ResponseMethod
from pyro_nngp.models.base.trend import can_solve_mean, solve_mean, solved_mean
from pyro_nngp.neighbors import Batch, NearestOthers
from pyro_nngp.rows import Part, at
from pyro_nngp.variational import Conjugate, LocalConjugate, LocalLogNormal, LogNormal


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
    NegativeBinomial       :math:`PG(y + r, 0)`                         :math:`\log r + (y - r)/(2\omega),\ 1/\omega`
    Categorical            :math:`PG(1, 0)`, one per class              as Bernoulli, one class against all
    =====================  ===========================================  ========================================

    Class probabilities are computed from the C one-against-all probabilities (`coupling`). Sites: ``y``, and where
    there are auxiliary variables ``omega`` at the batch and ``omega_halo`` at its neighbors outside (without a density:
    each variable counts when its row is in the batch).

    Args:
        x: inputs (N, D).
        y: targets (N,), or (N, T) for T outputs of similar spread: independent functions of one kernel, and one noise;
            binary labels as 0 and 1, -1 and 1, or booleans.
        kernel: a kernel, or any callable ``(..., n, D), (..., m, D) -> (..., n, m)``; None is Matern of a
            learned smoothness, for labels and below 100 rows Matern52, with one lengthscale per column. Unset
            hyperparameters start from the data (:mod:`pyro_nngp.starts.from_data`).
        likelihood: one of the table; None is :class:`~pyro_nngp.likelihoods.Gaussian`.
        num_neighbors: K; None is 32, doubled up to 128 where that lowers predictive variances by more than 10 %,
            of y or, for Gaussian data in a few thousand rows at most, of f
            (:func:`~pyro_nngp.models.base.neighbor_choice.choose_neighbors`).
        guide: family of q(omega): :class:`~pyro_nngp.variational.LogNormal` as in the paper, or
            :class:`~pyro_nngp.variational.Conjugate` for PG(b, c), or a Gamma, with a free parameter each. None is
            ``Conjugate()`` for NegativeBinomial, whose divergence is then a closed form instead of a sum of Polya-Gamma
            densities that each step has to differentiate, and ``LogNormal()`` for others.
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
        metric: metric of neighbors: lengthscales, or a distance function; None takes the metric of the kernel.
        start: another trained method, whose kernel, likelihood and mean are copied where none is given here.
        offset, weights, trials: of each row, as in :class:`~pyro_nngp.models.base.Method`.
        seed: seed of the order that breaks ties between neighbors at one distance.

    Raises:
        ValueError, TypeError: for NaN or infinity, wrong shapes, mixed dtypes or devices, K out of range, targets
            outside the support of the likelihood, a class that does not occur, a likelihood that is not in the table.

    Reference: Jankowiak, Pleiss (2021), "Scalable cross validation losses for Gaussian process models".
    """

    q: LocalLogNormal | LocalConjugate | None

    @from_tables
    def __init__(
        self,
        x: Float[Tensor, "N D"] | Table,
        y: Any,
        kernel: Any = None,
        likelihood: Likelihood | None = None,
        *,
        num_neighbors: int | None = None,
        guide: LogNormal | Conjugate | None = None,
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
            likelihood = copy.deepcopy(getattr(start, "likelihood", None) or Gaussian()).to(x)
        check_augmentable("LOO", likelihood)
        if guide is None:
            guide = Conjugate() if isinstance(likelihood, NegativeBinomial) else LogNormal()
        check_family("LOO", guide, LogNormal, Conjugate)
        if divergence is None:
            divergence = "posterior" if isinstance(likelihood, StudentT | NegativeBinomial) else "prior"
        check_choice("LOO", "divergence", divergence, ("posterior", "prior"))
        check_choice("LOO", "coupling", coupling, ("odds", "probabilities"))
        check_tensor("LOO", "y", y)
        coded = coded_labels("LOO", likelihood, y, x.dtype)
        by_row = {"offset": offset, "weights": weights, "trials": trials}
        super().__init__(x, coded, kernel, likelihood, mean, jitter, metric, start, **by_row)
        if weights is not None and not self.likelihood.is_gaussian:
            cure = "Use VNNGP for other weighted data."
            fail("LOO", "weights", "None unless noise is Gaussian", type(likelihood).__name__, cure)
        self.divergence, self.coupling, self._family = divergence, coupling, guide
        self._start(solves_coefficients=True)
        k = first_neighbors("LOO", num_neighbors, x)
        self.graph = NearestOthers(x, k, seed=seed, metric=self._neighbor_metric())
        self.q = None if self.likelihood.is_gaussian else self._build_q()
        if num_neighbors is None:
            self._choose_neighbors()

    @pyro_method
    def model(self, idx: Int[Tensor, " I"] | None = None, batch: Batch | None = None) -> Tensor:
        r"""The auxiliary variables and the leave-one-out densities of a batch of data; returns its y.

        .. math:: \omega_n \sim p(\omega), \qquad
           y_n \sim \int p(y_n \mid f_n)\, N(f_n \mid \mu_n, \sigma_n^2)\, df_n

        Args:
            idx: rows of the data; None is all.
            batch: `idx` and their neighbors, from :meth:`batch_args`; None finds them.
        """
        program, batch = Program.model(self, idx), self.graph.batch(idx) if batch is None else batch
        rows, likelihood, dtype = program.rows, program.likelihood(), self.x.dtype

        def prior(some: Tensor) -> Distribution:
            return auxiliary_prior(program.likelihood(some), rows.targets(some), dtype)

        omega = None if self.q is None else _sample_omega(program, batch, prior)  # the second sum of eq. 12
        # Given omega, targets are observations of f with normal noise (eq. 24 and 25 as functions of f). f_n given
        # those of n(n) is normal, and the density of y_n is the summand of eq. 9, or of the first sum of eq. 12.
        observed = gaussian_observations(program.likelihood(batch.rows), rows.targets(batch.rows), omega, dtype)
        near = batch.rows, batch.neighbors
        loc, var = self.posterior(program.bound).given_neighbors(program.x, *near, program.at, observed)
        own = loc if omega is None else omega[..., batch.targets]
        loc, var, own = (latents_first(likelihood, value) for value in torch.broadcast_tensors(loc, var, own))
        if omega is None or self.divergence == "prior":
            y = predictive(likelihood, loc, var, self.coupling)  # for classes eq. 33
        else:
            y = AugmentedMarginal(likelihood, loc, var, own, self.coupling)  # with the factors of eq. 24 and 25
        return program.sample_y(likelihood, y, {"given_data": True})

    @pyro_method
    def guide(self, idx: Int[Tensor, " I"] | None = None, batch: Batch | None = None) -> Tensor | None:
        """q(omega) on the batch of :meth:`model` and its neighbors, and the hyperparameters' guide; returns omega."""
        program = Program.guide(self, idx)
        if self.q is None:
            return None
        q, rows = plain(self.q, self.q._pyro_name, as_sites({})), program.rows
        batch = self.graph.batch(idx) if batch is None else batch
        return _sample_omega(
            program, batch, lambda some: q.distribution(program.likelihood(some), rows.targets(some), some)
        )

    def posterior(self, bound: Bound, draw: Draw | None = None, part: Part | None = None) -> Augmented:
        """f given the targets of its neighbors and their auxiliary variables, at q(omega)'s means or a draw's."""
        if self.q is None:
            augmented = Augmented(self.rows, self.graph, bound, self.coupling)
        elif draw is None:
            q = plain(self.q, self.q._pyro_name, as_values({}))
            augmented = Augmented(self.rows, self.graph, bound, self.coupling, q, knows_labels=self._can_leak)
        else:
            shape = *self.latent_shape, (self.rows if part is None else part.rows).num_data
            omega = drawn_values(type(self).__name__, draw, self.site("omega"), shape)
            augmented = Augmented(self.rows, self.graph, bound, self.coupling, omega=omega)
        return augmented if part is None else augmented.on(part)

    def batch_args(self, idx: Int[Tensor, " I"] | None, generator: torch.Generator) -> tuple[Tensor | None, Batch]:
        """Arguments of model and guide for a minibatch: its rows, and the batch with neighbors, searched once."""
        return idx, self.graph.batch(idx)

    # What `fit` asks.

    @property
    def can_solve(self) -> bool:
        """Whether :meth:`solve` applies: there are auxiliary variables, or a mean function that it can solve for."""
        return self.q is not None or can_solve_mean(self)

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
        check_int("LOO.solve", "num_sweeps", num_sweeps, 1)
        check_int("LOO.solve", "batch_size", batch_size, 1)
        if self.q is None:
            solve_mean(self)
            return
        rows = self.rows
        for _ in range(num_sweeps):
            posterior = self.posterior(self.bound())
            squares = [posterior.squared_latent(self.graph.batch(idx), idx) for idx in rows.every.split(batch_size)]
            square = rows.complete(self.graph, torch.cat(squares, -1).movedim(-1, 0)).movedim(0, -1)
            self.q.put(rows.likelihood(posterior.bound), rows.targets(), square)
            if can_solve_mean(self):
                solve_mean(self)

    def solved_parameters(self) -> list[nn.Parameter]:
        """The parameters that :meth:`solve` sets."""
        return solved_mean(self) if self.q is None else list(self.q.parameters())

    @property
    def can_alternate(self) -> bool:
        """Whether steps and :meth:`solve` can alternate: only q(omega) and solved coefficients are latent."""
        return self.q is not None and not has_unsolved_priors(self)

    @torch.no_grad()
    def score(self, rows: Int[Tensor, " B"]) -> float:
        """Minus the mean leave-one-out log density of some rows given their K neighbors: the criterion of convergence.

        The loss also contains the divergences of q(omega), which may keep falling or rising while nothing else moves.
        """
        check_rows("LOO.score", "rows", rows, self.num_data)
        posterior = self.posterior(self.bound())
        return -float(posterior.log_density(*posterior.others(rows, None)).sum()) / len(rows)

    @property
    def _can_leak(self) -> bool:
        """Whether the objective sees auxiliary variables of neighbors that know the datum, at no cost to itself."""
        return self.q is not None and self.divergence == "prior" and self.rows.is_whole

    @torch.no_grad()
    def leak(self, rows: Int[Tensor, " B"]) -> float:
        """Mean log density of some rows in the objective, less the density by :meth:`loo`; 0 where none can leak."""
        if not self._can_leak:
            return 0.0
        posterior = self.posterior(self.bound())
        return -self.score(rows) - float(posterior.leave_one_out(posterior.others(rows, None)).sum()) / len(rows)

    def _information(self) -> Information | str:
        """Covariance of the estimates of hyperparameters of Gaussian data: Godambe's sandwich."""
        return super()._information() if self.q is not None else of_leave_one_out(self)

    # Data.

    def _coded(self, y: Tensor) -> Tensor:
        return coded_labels("LOO", self.likelihood, y, self.x.dtype, every_class=False)

    @torch.no_grad()
    def _build_q(self, idx: Tensor | None = None, sample: Tensor | None = None) -> LocalLogNormal | LocalConjugate:
        """q(omega) at its start for some rows, None is all; `sample` as in the family's ``build``."""
        likelihood = self.rows.likelihood(self.bound(), at(idx))
        return self._family.build(likelihood, self.rows.targets(idx), self.x.dtype, sample)

    def _append_rows(self, x: Tensor, y: Tensor | None, by_row: dict[str, Tensor]) -> None:
        super()._append_rows(x, y, by_row)
        if self.q is not None:
            self.q.append_tables(self._build_q(self.rows.every[-len(x) :]))
            self.solve()

    def _keep_rows(self, rows: Int[Tensor, " S"]) -> None:
        super()._keep_rows(rows)
        if self.q is not None:
            self.q = self._build_q()
            self.solve()

    def _distributed(self, choose: bool) -> None:
        if self.q is not None:
            self.q = self._build_q(sample=self._coded(self.shard.sample["y"]).to(self.x.device).movedim(0, -1))
        super()._distributed(choose)

    def _row_tables(self) -> dict[str, Tensor]:
        """Tables of q with a row per datum, by their names in q."""
        return {} if self.q is None else self.q.row_tables()

    def _neighbors_changed(self) -> None:
        super()._neighbors_changed()
        for table in () if self.q is None else self.q.parameters():
            table.data = self.rows.complete(self.graph, table.detach()[: self.num_data])


def _sample_omega(program: Program, batch: Batch, family: Callable[[Tensor], Any]) -> Float[Tensor, "*L U"]:
    """The sites ``omega`` and ``omega_halo``, and their values at the rows of the batch."""
    data, latents = program.plates
    with latents, data:
        own = pyro.sample(program.site("omega"), family(batch.rows[batch.targets]))
    omega = own.new_zeros(*own.shape[:-1], len(batch.rows)).index_copy(-1, batch.targets, own)
    outside = _others(batch.rows, batch.targets)
    if len(outside) == 0:
        return omega
    with latents, pyro.plate(program.site("halo"), len(outside), dim=-1):
        halo = pyro.sample(program.site("omega_halo"), family(batch.rows[outside]).mask(False))
    return omega.index_copy(-1, outside, halo)


@operation
def _others(rows: Tensor, targets: Tensor) -> Tensor:
    """Positions of the rows of a batch that are not its targets."""
    return torch.ones_like(rows, dtype=torch.bool).index_fill(0, targets, False).nonzero()[:, 0]


__all__ = ["LOO"]
