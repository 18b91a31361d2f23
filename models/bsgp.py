r"""Bayesian sparse Gaussian process, shallow or deep (Rossi, Heinonen, Bonilla, Shen, Filippone 2021).

Everything is sampled, :math:`\Psi = \{\theta, u, z\}`: hyperparameters, inducing values and inducing inputs.

.. math:: \log p(\Psi \mid y) = \sum_n \ell_n(\Psi) + \log p(u \mid z, \theta) + \log p(z) + \log p(\theta) + const

.. math::
   \text{FITC (eq. 4):}\ \ell_n = \log \int p(y_n \mid f_n)\, N(f_n \mid w_n^\top u, v_n)\, df_n, \qquad
   \text{VFE (eq. 3):}\ \ell_n = \int \log p(y_n \mid f_n)\, N(f_n \mid w_n^\top u, v_n)\, df_n

A deep process draws new values of its hidden layers whenever its density is evaluated (equation 24).

Differs from the paper: several hidden draws, by their log-mean-exp. The paper calls the estimate of the log expectation
from one draw unbiased; by Jensen's inequality it is a lower bound in expectation, which more draws tighten.

Cost per step: O(M^3 + S B M^2) per layer, S = 1 for one layer; independent of N.
Symbols: L layers, H width of hidden layers, S hidden draws, the rest as in :mod:`pyro_nngp.models.base.method`.
"""

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, Literal, cast

import pyro
import torch
from jaxtyping import Float, Int
from pyro.infer.autoguide.initialization import init_to_median, init_to_value
from pyro.nn import PyroModule
from torch import Tensor, nn

from pyro_nngp._checks import check_choice, check_int, check_memory, fail
from pyro_nngp._memory import at_once
from pyro_nngp.conditionals import whitened_conditional
from pyro_nngp.data.tables import Table, from_tables
from pyro_nngp.hyperparameters import each_set, pyro_entry, release, stacked
from pyro_nngp.inducing import InducingPrior, inducing_points, leading_axes, stacked_layers
from pyro_nngp.kernels import Matern52, bind, column_scale
from pyro_nngp.likelihoods import Gaussian, Likelihood
from pyro_nngp.likelihoods.integrated import OBJECTIVES
from pyro_nngp.means import BasisMean
from pyro_nngp.models.base import Densities, Draw, rows_of
from pyro_nngp.models.base.arguments import check_unshared
from pyro_nngp.models.base.leave_one_out import is_ours
from pyro_nngp.models.base.sampled import Moments, SampledMethod
from pyro_nngp.models.base.starts import Start, start_from_data, start_without_targets
from pyro_nngp.variational import InducingLeaveOneOut

_USUAL = 100  # inducing points
_BLOCK_BUDGET = 2**22  # whitened weights held at once while test points are streamed


class BSGP(SampledMethod):
    r"""Bayesian sparse Gaussian process; with several layers, a deep one.

    Generative model of one layer (``layers.0``), with :math:`K_{zz} = L L^\top`:

    .. math::
        \theta \sim p(\theta), \quad z \sim p(z), \quad \nu \sim N(0, I), \quad u = L \nu, \\
        f_n \mid u, z, \theta \sim N(\mu(x_n) + w_n^\top u, v_n), \qquad y_n \mid f_n \sim p(y_n \mid f_n),

    independently over n given u (the FITC approximation), with f integrated out. Layers before the last have H outputs
    that share z and the kernel; their values :math:`h W + f` are the next layer's inputs, W being the identity, or the
    principal axes of x where H < D. Sites: ``layers.<l>.nu``, ``layers.<l>.z``, ``y``, and one for each hyperparameter
    with a prior. There is no guide: sample the model, or fit one of Pyro's guides. The choice of sites, parameters and
    objective gives the members of the family (table 1 of the paper):

    =========  ==================  ===============  =========  =============================================
    method     ``inducing_prior``  hyperparameters  objective  inference
    =========  ==================  ===============  =========  =============================================
    BSGP       "normal", ..        ``PyroSample``   "fitc"     ``SGHMC(model)``
    SGHMC-DGP  None                ``PyroParam``    "fitc"     ``SGHMC(model, optim={"lr": 0.01})``
    MCMC-SVGP  None                ``PyroSample``   "vfe"      ``NUTS(model)``, started at the z of an SVGP
    SVGP       None                ``PyroParam``    "vfe"      ``SVI`` with ``AutoMultivariateNormal(model)``
    FITC-SVGP  None                ``PyroParam``    "fitc"     ``SVI`` with ``AutoMultivariateNormal(model)``
    =========  ==================  ===============  =========  =============================================

    Example::

        kernel = lognormal_priors(RBF(D, lengthscale=torch.ones(D)), like=x)
        gp = BSGP(x, y, kernel, Gaussian(0.05), inducing=100)
        guide = AutoNormal(gp.model, init_loc_fn=gp.init_strategy, init_scale=0.05)
        fit((gp.model, guide), 2_000, lr=0.02, elbo=Trace_ELBO(), num_data=gp.num_data)
        start = init_to_value(values={name: value.detach() for name, value in guide.median().items()})
        mcmc = MCMC(SGHMC(gp.model, num_steps=50, optim={"lr": 0.01}, init_strategy=start), 256, warmup_steps=10_000)
        mcmc.run(Minibatch(gp.num_data, 1_000))
        predictive = gp.predict(x_new, mcmc.get_samples())

    The start matters: from u = 0, an optimized noise variance grows to explain all of y before u has moved, and burn-in
    takes many times as long. If an update uses all rows (N up to 1,000, say), the gradient has no noise, and a step
    size of 0.05 moves 25 times as fast as the default. Minibatches of 1,000 from 200,000 rows allow 0.0025; several
    thousand updates are then far too few. Check R-hat of f.

    The values of hidden layers are not sites: under stochastic-gradient MCMC their noise is part of the gradient noise.
    NUTS needs a density that is the same at each call, so for L > 1 it needs `fixed_draws`; with a prior over z that
    has no draws, it needs ``max_plate_nesting=2`` and :attr:`init_strategy`. Use double precision: a chain ends with an
    error when inducing points come too close for a Cholesky factor of their covariance.

    Args:
        x: inputs (N, D); priors over z expect them standardized.
        y: targets (N,), or (N, T) for T outputs of similar spread: independent inducing values at shared inducing
            inputs, one kernel, one noise.
        kernel: a kernel, or any callable ``(..., n, D), (..., m, D) -> (..., n, m)``; for several layers a list
            with one each, or one to copy for every layer. None is Matern52 with one lengthscale per column. Unset
            hyperparameters start from the data (:mod:`pyro_nngp.models.base.starts`).
        likelihood: p(y | f); None is Gaussian.
        inducing: M for k-means centers, or the initial z (M, D); None is min(100, N) centers.
        objective: "fitc" or "vfe".
        inducing_prior: "normal", "uniform", "determinantal" or "strauss"; a distribution over (M, D); a function of
            kernel and z that returns one; None makes z a parameter. See :mod:`pyro_nngp.inducing.priors`.
        num_layers: L.
        hidden_dim: H; None is D.
        hidden_mean: "linear" adds h W to hidden layers, "zero" does not.
        num_draws: S, draws of the hidden layers per evaluation and posterior draw.
        fixed_draws: draw the noise of the hidden layers once for all data, with O(N L S H) memory; predictions use new
            draws.
        mean: mean function of x for the last layer, ``(B, D) -> (B,)`` or ``(B, 1)``; None is a learnable constant.
        jitter: relative nugget; None takes 1e-6.
        offset, weights, trials, limits: of each row, as in :class:`~pyro_nngp.models.base.GPMethod`.
        seed: seed of k-means and of the fixed draws.

    Raises:
        ValueError, TypeError: for NaN or infinity, wrong shapes, mixed dtypes or devices, an int M > N, unknown names,
            targets outside the support of the likelihood.

    Reference: Rossi, Heinonen, Bonilla, Shen, Filippone (2021), "Sparse Gaussian processes revisited", AISTATS.
    """

    likelihood: Likelihood
    noise: Any
    has_own_kernels = vectorizes = maps_draws = True
    latents = ("nu", "z")

    @from_tables
    def __init__(
        self,
        x: Float[Tensor, "N D"] | Table,
        y: Float[Tensor, "N *T"] | Int[Tensor, "N *T"] | Table,
        kernel: Any = None,
        likelihood: Likelihood | None = None,
        *,
        inducing: int | Float[Tensor, "M D"] | None = None,
        objective: Literal["fitc", "vfe"] = "fitc",
        inducing_prior: InducingPrior | None = "normal",
        num_layers: int = 1,
        hidden_dim: int | None = None,
        hidden_mean: Literal["linear", "zero"] = "linear",
        num_draws: int = 1,
        fixed_draws: bool = False,
        mean: Callable | None = None,
        jitter: float | None = None,
        offset: Float[Tensor, "N *L"] | Table | None = None,
        weights: Float[Tensor, " N"] | Int[Tensor, " N"] | Table | None = None,
        trials: Float[Tensor, " N"] | Int[Tensor, " N"] | Table | None = None,
        limits: Float[Tensor, " N"] | Table | None = None,
        seed: int = 0,
    ) -> None:
        if likelihood is None:
            likelihood = Gaussian()
        super().__init__(
            x, y, None, likelihood, mean, jitter, offset=offset, weights=weights, trials=trials, limits=limits
        )  # each layer has a kernel
        check_choice("BSGP", "objective", objective, OBJECTIVES)
        check_choice("BSGP", "hidden_mean", hidden_mean, ("linear", "zero"))
        hidden_dim = x.shape[1] if hidden_dim is None else hidden_dim
        for arg, count in (("num_layers", num_layers), ("num_draws", num_draws), ("hidden_dim", hidden_dim)):
            check_int("BSGP", arg, count, 1)
        check_memory("BSGP", "hidden layers", num_layers * num_draws * hidden_dim * len(x), x.dtype)
        kernel = Matern52(x.shape[1]) if kernel is None else kernel
        kernels = [kernel, *(copy.deepcopy(kernel) for _ in range(num_layers - 1))]
        if isinstance(kernel, Sequence):
            kernels = list(kernel)
        if len(kernels) != num_layers:
            cure = "Give one per layer, or one for all."
            fail("BSGP", "kernel", f"to be a list of num_layers = {num_layers}", f"{len(kernels)} kernels", cure)
        for each in kernels:
            check_unshared("BSGP", "kernel", each, x)
        self.objective, self.num_draws = objective, num_draws if num_layers > 1 else 1
        axes, z = leading_axes(x, hidden_dim), inducing_points("BSGP", x, inducing, seed, _USUAL)
        layers = stacked_layers(kernels, z, axes, hidden_mean, self.latent_shape, inducing_prior, self.jitter)
        if num_layers > 1:
            self.loo_kind = "given the inducing values of each draw"
        self.layers = PyroModule[nn.ModuleList](layers).to(x)
        noise = None
        if fixed_draws and num_layers > 1:
            generator = torch.Generator().manual_seed(seed)
            shape = (num_layers - 1, num_draws, len(x), hidden_dim)
            noise = torch.randn(shape, generator=generator, dtype=x.dtype).to(x)
        self.register_buffer("noise", noise)
        self.begin()
        release(self)  # parts that ran in the constructors
        if inducing_prior is not None:
            _warn_unless_standardized(x)

    @pyro_entry
    @torch.no_grad()
    def start_hyperparameters(self) -> Start:
        """Start the kernel of each layer from the data, as if the layers before it were absent.

        Hidden layers add functions with a tenth of the spread of their inputs.
        """
        self.hyper_guide.median()
        h, trend = self.x, None if isinstance(self.mean, BasisMean) and not self.mean.is_set else self._mean_at
        for layer in self.layers[:-1]:
            start_without_targets(layer.kernel, h, 0.1)
            h = h @ (layer.skip if bool(layer.skip.any()) else leading_axes(h, layer.skip.shape[1]))
        trend_at = None if trend is None else lambda rows: trend(self.x[rows])
        y, by_row = self._targets(None), (self.offset, self.trials)
        return start_from_data(self.layers[-1].kernel, self.likelihood, h, y, trend_at, self.jitter, *by_row)

    @property
    @pyro_entry
    def init_strategy(self) -> Callable:
        """The start of chains and automatic guides: z at `inducing`, u at zero, hyperparameters near prior medians.

        It uses the present names of sites: call :meth:`named`, or put the model into a larger module, before.
        """
        values = {}
        for index, layer in enumerate(self.layers):
            values[self.site(f"layers.{index}.nu")] = layer.white().mean
            if "z" in layer._pyro_samples:
                values[self.site(f"layers.{index}.z")] = layer.start.clone()
        return init_to_value(values=values, fallback=init_to_median)

    @pyro_entry
    def model(self, idx: Int[Tensor, " B"] | None = None) -> Tensor:
        """The generative model with f integrated out, on a batch of rows (None: all); returns y, outputs first."""
        self.start_model(idx)
        noise = None if self.noise is None else self.noise if idx is None else self.noise[:, :, idx]
        found, sets = each_set(self, lambda: self._propagate(self._inputs(idx), noise, rows_of(idx)))
        likelihood = self.likelihood_at(rows_of(idx))
        loc, var = (self._draws_first(stacked(list(values), sets), likelihood) for values in zip(*found, strict=True))
        data, latents = self.plates(idx)
        target = OBJECTIVES[self.objective](likelihood, loc, var)
        with latents if likelihood.num_latents is None else nullcontext(), data, self.weighted(idx):
            return pyro.sample(self.site("y"), target, obs=self._targets(idx))

    def leave_one_out(self, rows: Tensor, num_neighbors: int | None, sampled: bool) -> Densities:
        """Densities with inducing values integrated out: draws matter for hyperparameters and inducing inputs only.

        With several layers, densities are given the inducing values of the draw, which make the data independent.
        """
        self.refuse_neighbors(num_neighbors)
        if not sampled:
            fail("BSGP.loo", "samples", "of all sites", None, "Pass samples=mcmc.get_samples().")
        leave_one_out = InducingLeaveOneOut(fitc=self.objective == "fitc")

        def moments(likelihood: Likelihood, y: Tensor, mean: Tensor) -> Moments:
            cov, z = bind(self.layers[0].kernel), self.layers[0].z

            def blocks() -> Iterator[tuple[slice, Tensor, Tensor]]:
                a, var, _ = whitened_conditional(cov, self.x, z, self.jitter)
                yield slice(None), a, var

            return leave_one_out(likelihood, y, mean, blocks, torch.eye(len(z)).to(z), cov.diag(self.x))

        def given_values(draw: Draw | None) -> Tensor:
            y = cast(Tensor, self._targets(rows))
            f = self._propagate(self.x[rows], rows=rows)
            return OBJECTIVES["fitc"](self.likelihood_at(rows), *f).log_prob(y)

        return self.scores(rows, moments) if len(self.layers) == 1 else given_values

    @property
    def takes_draws_mapped(self) -> bool:
        """Whether several posterior draws go through ``torch.vmap``; kernels, too, must be of this package."""
        return super().takes_draws_mapped and all(is_ours(layer.kernel) for layer in self.layers)

    def moment_entries(self, x_new: Tensor) -> int:
        """Those of the weights of a block of points."""
        m = len(self.layers[0].start)
        return m * (m + min(self.num_draws * len(x_new), at_once(_BLOCK_BUDGET, m)))

    def joint_entries(self, x_new: Tensor) -> int:
        """Those of the covariances of inducing and new points."""
        return (len(self.layers[0].start) + len(x_new)) ** 2

    def loo_entries(self, rows: Tensor | None, num_neighbors: int | None) -> int | None:
        """Those of the weights of all data; data that are not Gaussian take steps from the last solution."""
        if len(self.layers) == 1 and not isinstance(self.likelihood, Gaussian):
            return None
        m = len(self.layers[0].start)
        return m * (m + self.num_draws * self.num_data)

    def append_rows(self, x: Tensor, y: Tensor | None, by_row: dict[str, Tensor]) -> None:
        super().append_rows(x, y, by_row)
        if self.noise is not None:
            generator = torch.Generator().manual_seed(self.num_data)
            shape = (*self.noise.shape[:2], len(x), self.noise.shape[3])
            self.noise = torch.cat([self.noise, torch.randn(shape, generator=generator, dtype=x.dtype).to(x)], 2)

    def joint_draws(self, x_new: Tensor) -> Tensor:
        """One joint draw at the present hyperparameters and inducing values."""
        h = x_new
        for layer in self.layers[:-1]:
            h = h @ layer.skip + layer.joint(h).mT
        return self._mean_at(x_new) + self.layers[-1].joint(h)

    def _draws_first(self, value: Tensor, likelihood: Likelihood) -> Tensor:
        """Moments (*R, S, *T, B) at sets R of sites as the likelihood takes them for each draw, (S, *R, *T, B).

        For classes those of a point come before the sets, (S, C, *R, 1, B).
        """
        own = 2 + len(self.latent_shape)
        value = self.outside(value, own)
        sets = value.dim() - own
        value = value.movedim(sets, 0)
        if likelihood.num_latents is None or not sets:
            return value
        return value.movedim(1 + sets, 1)[..., None, :]

    def _propagate(self, x: Tensor, noise: Tensor | None = None, rows: Tensor | slice | None = None) -> Moments:
        """Moments of f at x (B, D), rows of the data if given, for each draw of the hidden layers, (S, *T, B)."""
        h = x.expand(self.num_draws, *x.shape)
        for index, layer in enumerate(self.layers[:-1]):
            h = layer.hidden(h, None if noise is None else noise[index])
        loc, var = self.layers[-1](h)
        return self._mean_at(x, rows) + loc, var

    def moments_given(self, x_new: Tensor) -> Moments:
        """Moments of f at new points given each draw of the hidden layers, (S, *T, P), in blocks of points."""
        block = at_once(_BLOCK_BUDGET, self.num_draws * len(self.layers[0].start))
        parts = [self._propagate(part) for part in x_new.split(block)]
        loc, var = (torch.cat(values, -1) for values in zip(*parts, strict=True))
        return loc, var


def _warn_unless_standardized(x: Tensor) -> None:
    """Warn if priors over inducing inputs, whose scale is one, do not fit the inputs."""
    scale, center = column_scale(x), x.double().median(0).values.abs()
    if bool(((scale < 0.05) | (scale > 20) | (center > 20)).any()):
        warnings.warn(
            f"BSGP: the prior of the inducing inputs has units of one, columns of x have spreads of "
            f"{float(scale.min()):.3g} to {float(scale.max()):.3g} around {float(center.max()):.3g}. Standardize x "
            "(pyro_nngp.data.Standardizer), or pass inducing_prior=None or a distribution.",
            UserWarning,
            stacklevel=3,
        )
