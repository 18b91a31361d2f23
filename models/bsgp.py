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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from pyro.infer.autoguide.initialization import init_to_median, init_to_value
from pyro.nn import PyroModule, pyro_method
from torch import Tensor, nn
from torch.distributions import Distribution

from pyro_nngp._checks import check_choice, check_int, check_memory, fail, warn
from pyro_nngp._kinds import check_flags
from pyro_nngp._memory import at_once
from pyro_nngp.bound import Bound
from pyro_nngp.conditionals import whitened_conditional
from pyro_nngp.data.tables import Table, from_tables
from pyro_nngp.distributions.mixture import mixture_moments
from pyro_nngp.hyperparameters import release
from pyro_nngp.hyperparameters.values import Values, stacked_sets
from pyro_nngp.inducing import InducingPrior
from pyro_nngp.inducing.layer import SparseLayer, leading_axes, stacked_layers
from pyro_nngp.inducing.points import inducing_points
from pyro_nngp.kernels import Matern52, bind
from pyro_nngp.kernels.metric import column_scale
from pyro_nngp.likelihoods import Likelihood
from pyro_nngp.likelihoods.integrated import OBJECTIVES, fitc
from pyro_nngp.models.base import Draw, Method, Posterior, Program, Samples, predictions
from pyro_nngp.models.base.arguments import check_unshared
from pyro_nngp.models.base.draws import can_be_mapped
from pyro_nngp.models.base.program import latents_first
from pyro_nngp.rows import EVERY, At, Part
from pyro_nngp.starts.from_data import Start, start_from_data, start_without_targets
from pyro_nngp.variational import InducingLeaveOneOut

_USUAL = 100  # inducing points
_BLOCK_BUDGET = 2**22  # whitened weights held at once while test points are streamed


class BSGP(Method):
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
        predictive = gp.predict(x_new, samples=mcmc.get_samples())

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
            hyperparameters start from the data (:mod:`pyro_nngp.starts.from_data`).
        likelihood: p(y | f); None is Gaussian.
        inducing: M for k-means centers, or the initial z (M, D); None is min(100, N) centers.
        objective: "fitc" or "vfe".
        inducing_prior: "normal", "uniform", "determinantal" or "strauss"; a distribution over (M, D); a function of
            kernel and z that returns one; None makes z a parameter. See :mod:`pyro_nngp.inducing.priors`.
        num_layers: L.
        hidden_dim: H; None is D.
        num_draws: S, draws of the hidden layers per evaluation and posterior draw.
        fixed_draws: draw the noise of the hidden layers once for all data, with O(N L S H) memory; predictions use new
            draws.
        mean: mean function of x for the last layer, ``(B, D) -> (B,)`` or ``(B, 1)``; None is a learnable constant.
        jitter: relative nugget; None takes 1e-6.
        offset, weights, trials, limits: of each row, as in :class:`~pyro_nngp.models.base.Method`.
        seed: seed of k-means and of the fixed draws.

    Raises:
        ValueError, TypeError: for NaN or infinity, wrong shapes, mixed dtypes or devices, an int M > N, unknown names,
            targets outside the support of the likelihood.

    Reference: Rossi, Heinonen, Bonilla, Shen, Filippone (2021), "Sparse Gaussian processes revisited", AISTATS.
    """

    noise: Any  # of the hidden layers, where draws are fixed
    _hyperparameters = ("layers",)
    _latents = ("nu", "z")
    _default_kernel = staticmethod(lambda x, likelihood: None)  # each layer has one

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
        by_row = {"offset": offset, "weights": weights, "trials": trials, "limits": limits}
        super().__init__(x, y, None, likelihood, mean, jitter, **by_row)
        check_choice("BSGP", "objective", objective, OBJECTIVES)
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
        layers = stacked_layers(kernels, z, axes, self.latent_shape, inducing_prior, self.jitter)
        self.layers = PyroModule[nn.ModuleList](layers).to(x)
        noise = None
        check_flags("BSGP", fixed_draws=fixed_draws)
        if fixed_draws and num_layers > 1:
            noise = _fixed_noise((num_layers - 1, num_draws, len(x), hidden_dim), seed, x)
        self.register_buffer("noise", noise)
        self._start(self._start_layers)
        release(self)  # parts that ran in the constructors
        if inducing_prior is not None:
            _warn_unless_standardized(x)

    def _start_layers(self, at: Values, trend: Callable[[Tensor], Tensor] | None) -> Start:
        """Start the kernel of each layer as if the layers before it were absent.

        Hidden layers add functions with a tenth of the spread of their inputs.
        """
        h, (*hidden, last) = self.x, self.layers
        for layer in hidden:
            start_without_targets(layer.kernel, h, 0.1, at)
            h = h @ (layer.skip if bool(layer.skip.any()) else leading_axes(h, layer.skip.shape[1]))
        rest = self.jitter, self.offset, self.trials, at
        return start_from_data(last.kernel, self.likelihood, h, self.rows.targets(), trend, *rest)

    @property
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

    @pyro_method
    def model(self, idx: Int[Tensor, " I"] | None = None) -> Tensor:
        """The joint density log p(Psi | y) at a batch of rows (None: all), f integrated out; returns their y.

        The layers are read with the hyperparameters: log p(theta), log p(nu) in place of log p(u | z, theta), log p(z).
        """
        program = Program.model(self, idx)
        noise = None if self.noise is None else self.noise[:, :, program.at]
        sets, batch = program.sets()
        moments = [self.posterior(bound).given_inducing(program.x, program.at, noise) for bound in sets]  # w_n' u, v_n
        loc, var = (_draws_first(program, stacked_sets(list(each), batch)) for each in zip(*moments, strict=True))
        y_given_u = OBJECTIVES[self.objective](program.likelihood(), loc, var)  # l_n: FITC (eq. 4), VFE (eq. 3)
        return program.sample_y(program.likelihood(), y_given_u)

    def posterior(self, bound: Bound, draw: Draw | None = None, part: Part | None = None) -> "SampledLayers":
        """f given the inducing values of a posterior draw, which are among the hyperparameters."""
        return SampledLayers(self.rows, None, bound, self.num_draws, self.objective)

    @torch.no_grad()
    def moments_by_draw(
        self, x_new: Float[Tensor, "P D"], *, samples: Samples | None = None
    ) -> tuple[Float[Tensor, "S *T P"], Float[Tensor, "S *T P"]]:
        """Mean and variance of f at new points given each posterior draw, for example to compare chains.

        Args:
            x_new: new inputs.
            samples: posterior draws of all sites.

        Raises:
            ValueError, TypeError: as in :meth:`forward`.

        Cost: as of :meth:`forward`.
        """
        moments = predictions.moments(self, "moments_by_draw", x_new, None, samples, "moments")
        pairs = [pair for _, *pair in moments]
        loc, var = (torch.stack(values) for values in zip(*pairs, strict=True))
        return loc, var

    @property
    def _maps_draws(self) -> bool:
        """Whether several posterior draws go through ``torch.vmap``; kernels, too, must be of this package."""
        return super()._maps_draws and can_be_mapped(layer.kernel for layer in self.layers)

    def _append_rows(self, x: Tensor, y: Tensor | None, by_row: dict[str, Tensor]) -> None:
        super()._append_rows(x, y, by_row)
        if self.noise is not None:
            shape = (*self.noise.shape[:2], len(x), self.noise.shape[3])
            self.noise = torch.cat([self.noise, _fixed_noise(shape, self.num_data, x)], 2)

    follows_rows = False

    def _keep_rows(self, rows: Int[Tensor, " S"]) -> None:
        super()._keep_rows(rows)
        if self.noise is not None:
            self.noise = self.noise[:, :, rows]


@dataclass(frozen=True)
class SampledLayers(Posterior):
    """f given the inducing values of one posterior draw: a mixture over draws of the hidden layers.

    Cost: O(M^3 + P M^2) per layer and hidden draw.

    Attributes:
        num_draws: S.
        objective: "fitc" or "vfe".
    """

    num_draws: int
    objective: str

    @property
    def layers(self) -> list[SparseLayer]:
        """The layers at the draw."""
        return list(self.bound.others["layers"])

    @property
    def loo_kind(self) -> str:
        return "given the inducing values of each draw" if len(self.layers) > 1 else super().loo_kind

    def given_inducing(
        self, x: Float[Tensor, "B D"], rows: At | None = None, noise: Float[Tensor, "_ S B H"] | None = None
    ) -> tuple[Float[Tensor, "S *T B"], Float[Tensor, "S *T B"]]:
        r"""Moments of f, :math:`w^\top u` and v, for each draw of the hidden layers (equation 24).

        Args:
            x: points.
            rows: the rows of x among the data, whose offset counts; None for new points.
            noise: standard normal noise of the hidden layers; None draws it.
        """
        *hidden, last = self.layers
        h = x.expand(self.num_draws, *x.shape)
        for index, layer in enumerate(hidden):
            h = layer.hidden(h, None if noise is None else noise[index])
        loc, var = last(h)
        return loc + (self.bound.mean(x) if rows is None else self.rows.mean(self.bound, rows, x)), var

    def neighbors(self, x_new: Float[Tensor, "P D"], num_neighbors: int | None) -> tuple[Tensor, ...]:
        """The points in blocks."""
        self._refuse_neighbors(num_neighbors)
        return x_new.split(at_once(_BLOCK_BUDGET, self.num_draws * self._num_inducing))

    def joint_neighbors(self, x_new: Float[Tensor, "P D"], num_neighbors: int | None, seed: int) -> None:
        self._refuse_neighbors(num_neighbors)

    def response_moments(self, x_new: Float[Tensor, "P D"], near: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Moments of f for each draw of the hidden layers, (S, *T, P)."""
        self._check_given()
        loc, var = zip(*(self.given_inducing(block) for block in near), strict=True)
        return torch.cat(loc, -1), torch.cat(var, -1)

    def moments(self, x_new: Float[Tensor, "P D"], near: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        return mixture_moments(*self.response_moments(x_new, near))

    def response(self, loc: Tensor, spread: Tensor, by_row: Mapping[str, Tensor]) -> Distribution:
        return fitc(self.bound.likelihood.for_rows(**by_row), loc, spread)

    def given_f(self, f: Tensor, by_row: Mapping[str, Tensor]) -> Distribution:
        return super().response(f, torch.zeros_like(f), by_row)

    def joint(self, x_new: Float[Tensor, "P D"], near: None, count: int) -> Float[Tensor, "S *T P"]:
        """From the exact process given the inducing values; O(P^3) for each layer, for a deep one times the draws."""
        self._check_given()
        *hidden, last = self.layers

        def draws(layer: SparseLayer, inputs: Tensor) -> Tensor:
            return torch.cat([layer.joint(h, count // len(inputs)) for h in inputs])

        h = x_new[None]  # one set of inputs for all draws; after a hidden layer one for each
        for layer in hidden:
            h = h @ layer.skip + draws(layer, h).mT
        return self.bound.mean(x_new) + draws(last, h)

    def others(self, rows: Int[Tensor, " I"], num_neighbors: int | None) -> Int[Tensor, " I"]:
        self._refuse_neighbors(num_neighbors, ".loo")
        return rows

    def leave_one_out(self, others: Int[Tensor, " I"]) -> Float[Tensor, "*T I"]:
        """One layer integrates the inducing values out; drawn values of several layers make the data independent."""
        rows, (*hidden, last), bound = others, self.layers, self.bound
        if last.nu is None:
            fail(f"{bound.where}.loo", "samples", "of all sites", None, "Pass samples=mcmc.get_samples().")
        if hidden:
            loc, var = self.given_inducing(self.rows.x[rows], rows)
            return fitc(self.rows.likelihood(bound, rows), loc, var).log_prob(self.rows.targets(rows))
        x, cov = self.rows.x, bind(last.kernel)

        def blocks() -> Iterator[tuple[slice, Tensor, Tensor]]:
            a, var, _ = whitened_conditional(cov, x, last.z, bound.jitter)
            yield EVERY, a, var

        def moments(likelihood: Likelihood, y: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
            eye = torch.eye(len(last.z)).to(x)
            return InducingLeaveOneOut()(likelihood, y, mean, blocks, eye, cov.diag(x), self.objective == "fitc")

        return self.densities(rows, moments)

    @property
    def _num_inducing(self) -> int:
        return len(self.layers[0].start)

    def entries(self, x_new: Float[Tensor, "P D"], near: tuple[Tensor, ...] | None) -> int:
        """Entries of the weights of a block of points, or of the covariances of inducing and new points."""
        m = self._num_inducing
        return (m + len(x_new)) ** 2 if near is None else m * (m + self.num_draws * len(near[0]))

    def loo_entries(self, others: Any) -> int | None:
        """Entries of the weights of all data; data that are not Gaussian take steps, which look at values."""
        if len(self.layers) == 1 and not self.bound.likelihood.is_gaussian:
            return None
        return self._num_inducing * (self._num_inducing + self.num_draws * self.rows.num_data)

    def _check_given(self) -> None:
        """Raise unless the inducing values come from a posterior draw."""
        if self.layers[0].nu is None:
            cure = "Sample its model, as by MCMC(SGHMC(gp.model), ...), and pass mcmc.get_samples() as samples."
            fail(self.bound.where, "samples", "posterior draws of all sites", None, cure, TypeError)


def _draws_first(program: Program, value: Float[Tensor, "... B"]) -> Tensor:
    r"""Moments (\*R, S, \*T, B) at sets R of sites, as the likelihood takes them for each of S hidden draws."""
    event_dim = 1 + program.num_plates
    draws = program.outside(value, event_dim).movedim(-event_dim, 0)
    return torch.stack([latents_first(program.bound.likelihood, each) for each in draws])


def _fixed_noise(shape: tuple[int, ...], seed: int, like: Tensor) -> Float[Tensor, "_ S N H"]:
    """Standard normal noise of the hidden layers at rows of the data."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), device="cpu", dtype=like.dtype).to(like)


def _warn_unless_standardized(x: Tensor) -> None:
    """Warn if priors over inducing inputs, whose scale is one, do not fit the inputs."""
    scale, center = column_scale(x), x.double().median(0).values.abs()
    if bool(((scale < 0.05) | (scale > 20) | (center > 20)).any()):
        warn(
            f"BSGP: the prior of the inducing inputs has units of one, columns of x have spreads of "
            f"{float(scale.min()):.3g} to {float(scale.max()):.3g} around {float(center.max()):.3g}. Standardize x "
            "(pyro_nngp.data.Standardizer), or pass inducing_prior=None or a distribution."
        )


__all__ = ["BSGP"]
