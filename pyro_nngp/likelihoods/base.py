r"""The base class of likelihoods: a Pyro conditional :math:`p(y \mid f)` and two integrals over a normal f.

The author of a likelihood writes ``forward(f) -> Distribution``. The base class adds the expected log-density (for
lower bounds) and the marginal distribution of y (for prediction), both numerically; a subclass overrides them where
there is a closed form.

Differs from the usual treatment: log-densities of the marginal place their nodes at the peak of the integrand, not
around the mean of f as Gauss-Hermite quadrature does, whose error is several nats where y determines f better than the
prior does. Cost: Q log-densities per expectation, 160 per marginal log-density. Symbols: f latent values, loc and var
their means and variances, Q nodes, L latent functions per output.
"""

import copy
import math
from typing import Any

import torch
from jaxtyping import Float
from pyro.nn import pyro_method
from torch import Tensor
from torch.distributions import Distribution, constraints

from pyro_nngp._checks import check_int, check_tensor, fail, undefined
from pyro_nngp._kinds import check_broadcast
from pyro_nngp.distributions.expandable import Expandable
from pyro_nngp.hyperparameters import GPModule, bound_copy
from pyro_nngp.hyperparameters.batches import batch_shape_of, placed
from pyro_nngp.likelihoods.observations import PseudoObservations
from pyro_nngp.likelihoods.quadrature import Focus, expectation, gauss_hermite, log_expectation, normal_nodes


class Likelihood(GPModule):
    r"""Base class; a subclass defines :meth:`forward` and sets the class attributes that differ.

    Hyperparameters are attributes: ``PyroParam`` by default, replaceable by ``PyroSample`` or tensors. Everything is
    elementwise over the batch, so several outputs are simply a longer batch shape such as (T, B).

    Attributes:
        num_latents: None if each y depends on one latent value; L if it depends on L of them. Then ``f``, ``loc`` and
            ``var`` have the shape (L, \*batch), the latent dimension first.
        elementwise: whether hyperparameters broadcast against the batch.
        support: constraint that :meth:`check` demands of the data.
        expectation: the constraint in words, as in "expected y {expectation}".
        cure: advice for other data.
        takes_trials: whether each datum has its number of trials, which the method gets as ``trials``.
        takes_limits: whether each datum has its limit of detection, which the method gets as ``limits``.
        takes_missing: whether NaN among the data is a missing value; such a likelihood gets its data outputs first.
        is_gaussian: whether all data are f with Gaussian noise.
        shares_rows: whether the outputs of a row are one datum, such as counts of kinds.
        weights: in a bound copy for some rows of the data, their weights, which multiply log densities.
        sd_per_scale: a robust standard deviation of the noise, in multiples of the attribute `scale`.

    Args:
        num_quadrature: number Q of nodes of expectations, quasi-random ones for several latents; also an attribute of
            every likelihood, as in ``likelihood.num_quadrature = 100``.

    Raises:
        ValueError, TypeError: if ``num_quadrature`` is not an integer >= 2.
    """

    num_latents: int | None = None
    elementwise: bool = True
    support: constraints.Constraint = constraints.real
    expectation: str = "to be finite"
    cure: str = "Drop or impute such values first."
    takes_trials: bool = False
    takes_limits: bool = False
    takes_missing: bool = False
    is_gaussian: bool = False
    shares_rows: bool = False
    weights: Tensor | None = None
    sd_per_scale: float = 1.0

    def __init__(self, num_quadrature: int = 48) -> None:
        super().__init__()
        check_int(type(self).__name__, "num_quadrature", num_quadrature, 2, "The default is 48.")
        self.num_quadrature = num_quadrature

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Check the shapes of the hyperparameters, and call :meth:`forward`."""
        f = args[0] if args else None
        if self.elementwise and self.num_latents is None and isinstance(f, Tensor):
            for name, value in self._parameters.items():
                where, arg = type(self).__name__, name.removesuffix("_unconstrained")
                check_broadcast(where, **{arg: value, "f": f})
        return super().__call__(*args, **kwargs)

    def forward(self, f: Float[Tensor, "..."]) -> Distribution:
        """The distribution of y given f, of the batch shape of f (without the latent dimension, if there is one)."""
        undefined(self, "forward", "likelihood")

    @pyro_method
    def bind(self) -> "Likelihood":
        """Read the hyperparameters once and return a copy that holds their values, whose methods have no Pyro effects.

        A model passes the copy to code that evaluates the likelihood later, outside the model's Pyro context. Where a
        vector with a prior has batch dimensions of vectorized plates, its last dimension replaces the ones of the
        data's plates, which have size one in it; if the likelihood is not `elementwise`, it stays behind them.
        """
        bound = bound_copy(self)
        for name in self._pyro_samples:
            value = bound.__dict__[name]
            batch = batch_shape_of(self, name, value)
            own, batch = value.shape[len(batch) :], placed(batch)
            outer = max(0, len(batch) - len(own))
            if self.elementwise and batch[outer:].numel() == 1:
                batch = batch[:outer]
            bound.__dict__[name] = value.reshape((*batch, *own))
        for name, part in self.named_children():
            if isinstance(part, Likelihood):
                bound.__dict__[name] = part.bind()
        return bound

    @property
    def differs_by_row(self) -> bool:
        """Whether rows differ in their numbers of trials or limits."""
        return self.takes_trials or self.takes_limits

    def for_rows(
        self, weights: Tensor | None = None, trials: Tensor | None = None, limits: Tensor | None = None
    ) -> "Likelihood":
        """Copy a bound likelihood for some rows of the data; its expected log densities do not include the weights.

        Args:
            weights: weights of these rows, which broadcast against the batch; None is 1.
            trials: numbers of trials of these rows, for a likelihood that takes them.
            limits: limits of detection of these rows, for a likelihood that takes them.
        """
        if weights is None and trials is None and limits is None:
            return self
        copied = copy.copy(self)
        if weights is not None:
            copied.__dict__["weights"] = weights
        copied._set_rows(trials, limits)
        return copied

    def _set_rows(self, trials: Tensor | None, limits: Tensor | None) -> None:
        """Set the trials and limits of a copy for some rows; a hook for likelihoods that take one of these."""

    @pyro_method
    def expected_log_prob(
        self, y: Tensor, loc: Float[Tensor, "..."], var: Float[Tensor, "..."]
    ) -> Float[Tensor, "..."]:
        r"""The expectation of :math:`\log p(y \mid f)` over :math:`f \sim N(loc, var)`, elementwise.

        Args:
            y: data, of the batch shape.
            loc: means of f, of the batch shape; (L, \*batch) for L latents.
            var: variances of f, of the same shape.

        Returns:
            Tensor of the batch shape.
        """
        if self.num_latents is None:
            y, loc, var = torch.broadcast_tensors(y, loc, var)

            def log_prob(t: Tensor) -> Tensor:
                return self.forward(self._latent(loc, var, t)).log_prob(y)

            focus = self._standardized_focus(y, loc, var)
            return expectation(log_prob, loc.shape, loc.dtype, loc.device, self.num_quadrature, focus)
        nodes, weights = self._nodes(loc)
        return torch.tensordot(weights, self.forward(self._latent(loc, var, nodes)).log_prob(y), 1)

    @pyro_method
    def marginal(self, loc: Float[Tensor, "..."], var: Float[Tensor, "..."]) -> Distribution:
        r"""The distribution of y for :math:`f \sim N(loc, var)`; shapes as in :meth:`expected_log_prob`."""
        return Marginal(self.bind(), loc, var)

    def focus(self, y: Tensor) -> Focus | None:
        r"""The place where :math:`\log p(y \mid f)` bends most sharply as a function of f, and the width of the bend.

        Quadrature concentrates its nodes there. None (the default) finds the place by evaluating the density at 85 more
        points, which a likelihood that knows the place avoids.

        Args:
            y: data, of the batch shape.

        Returns:
            Center and scale, each broadcastable to the batch shape, or None.
        """
        return None

    def admissible(self, y: Tensor) -> Tensor:
        """Values within the support of each row, of the shape of y, to replace missing ones in checks."""
        return torch.zeros_like(y)

    def observations(self, y: Tensor) -> PseudoObservations | None:
        """Gaussian observations of f that the data are, or are by a transform; methods start from them.

        The default takes all real data of one latent function to be f with noise of constant scale, the attribute
        `variance` or `scale`.

        Args:
            y: data in float64, outputs first.

        Returns:
            None for data that are related to f by a link; those are observed by a Laplace approximation, see
            :mod:`pyro_nngp.likelihoods.pseudo_observations`.
        """
        return PseudoObservations.of(y) if self.num_latents is None and self.support is constraints.real else None

    def start(self, name: str, y: Tensor, near: Tensor) -> Tensor | None:
        """First value of an unset hyperparameter, estimated as if neighbors had the same f.

        Args:
            name: name of the hyperparameter.
            y: some of the data in float64, shape (n,).
            near: data at the K nearest other points, nearest first, shape (n, K).

        Returns:
            A scalar, or None for the default.
        """
        return None

    def check(self, y: Tensor) -> None:
        """Raise ``ValueError`` unless all of y can occur under this likelihood; ``TypeError`` unless y is a tensor."""
        where = type(self).__name__
        check_tensor(where, "y", y)
        if y.dtype == torch.bool and not self.support.is_discrete:
            fail(where, "y", "of a numeric dtype", y.dtype, "Use Bernoulli() for labels, or y.float().", TypeError)
        bad = y[~(self.support.check(y) & torch.isfinite(y))]
        if len(bad):
            examples = ", ".join(str(v) for v in bad[:3].tolist())
            fail(where, "y", self.expectation, f"{len(bad)} of {y.numel()} values such as {examples}", self.cure)

    def _standardized_focus(self, y: Tensor, loc: Tensor, var: Tensor) -> Focus | None:
        """The focus in units of t, where f = loc + sqrt(var) t."""
        with torch.no_grad():
            focus, scale = self.focus(y), var.sqrt()
            return None if focus is None else ((focus[0] - loc) / scale, focus[1] / scale)

    def _nodes(self, loc: Tensor) -> tuple[Tensor, Tensor]:
        """Standard normal nodes (Q, 1, ..) or (L, Q, 1, ..) that broadcast against the batch, and weights (Q,)."""
        if self.num_latents is None:
            nodes, weights = gauss_hermite(self.num_quadrature, loc.dtype, loc.device)
            return nodes.reshape(-1, *[1] * loc.dim()), weights
        nodes = normal_nodes(self.num_latents, self.num_quadrature, loc.dtype, loc.device)
        q = nodes.shape[1]
        return nodes.reshape(-1, q, *[1] * (loc.dim() - 1)), nodes.new_full((q,), 1 / q)

    def _latent(self, loc: Tensor, var: Tensor, t: Tensor) -> Tensor:
        """f = loc + sqrt(var) t, where t has further dimensions in front of the batch (and behind the latent one)."""
        latent = 0 if self.num_latents is None else 1
        shape = (*loc.shape[:latent], *[1] * (t.dim() - loc.dim()), *loc.shape[latent:])
        return loc.reshape(shape) + var.sqrt().reshape(shape) * t


class Marginal(Expandable):
    r"""The distribution of y for :math:`f \sim N(loc, var)`, :math:`y \sim p(y \mid f)`, where no closed form is known.

    Draws are exact. Log-densities move their nodes to the data (one latent) or average over quasi-random nodes
    (several); moments are expectations of the conditional ones.

    Args:
        likelihood: a likelihood, as :meth:`Likelihood.bind` returns it.
        loc: means of f, of the batch shape; (L, \*batch) for L latents.
        var: variances of f, of the same shape.
    """

    def __init__(
        self,
        likelihood: Likelihood,
        loc: Float[Tensor, "..."],
        var: Float[Tensor, "..."],
        validate_args: bool | None = None,
    ) -> None:
        conditional = likelihood.forward(loc)
        self.likelihood, self._support = likelihood, conditional.support
        self._latents = () if likelihood.num_latents is None else loc.shape[:1]
        self.loc, self.var = (v.expand((*self._latents, *conditional.batch_shape)) for v in (loc, var))
        super().__init__(conditional.batch_shape, conditional.event_shape, validate_args=validate_args)

    @constraints.dependent_property
    def support(self) -> constraints.Constraint | None:
        return self._support

    def expand(self, batch_shape: Any, _instance: Any = None) -> "Marginal":
        new = super().expand(batch_shape, _instance)
        old = (*self._latents, *[1] * (len(batch_shape) - len(self.batch_shape)), *self.batch_shape)
        new.loc, new.var = (v.reshape(old).expand((*self._latents, *batch_shape)) for v in (self.loc, self.var))
        return new

    def sample(self, sample_shape: Any = torch.Size()) -> Tensor:
        with torch.no_grad():
            shape = (*self._latents, *sample_shape, *self.batch_shape)
            noise = torch.randn(shape, dtype=self.loc.dtype, device=self.loc.device)
            return self._conditional(noise).sample()

    def _log_prob(self, value: Tensor) -> Tensor:
        whole = self.expand(torch.broadcast_shapes(value.shape, self.batch_shape))
        if self._latents:
            nodes, weights = self.likelihood._nodes(whole.loc)
            return torch.logsumexp(whole._conditional(nodes).log_prob(value), 0) - math.log(len(weights))
        loc, focus = whole.loc, self.likelihood._standardized_focus(value, whole.loc, whole.var)
        return log_expectation(lambda f: self.likelihood.forward(f).log_prob(value), loc, whole.var.sqrt(), focus)

    @property
    def mean(self) -> Tensor:
        return self._moments()[0]

    @property
    def variance(self) -> Tensor:
        return self._moments()[1]

    def _moments(self) -> tuple[Tensor, Tensor]:
        nodes, weights = self.likelihood._nodes(self.loc)
        conditional = self._conditional(nodes)
        mean = torch.tensordot(weights, conditional.mean, 1)
        return mean, torch.tensordot(weights, conditional.variance + (conditional.mean - mean).square(), 1)

    def _conditional(self, t: Tensor) -> Distribution:
        """p(y | f) at f = loc + sqrt(var) t."""
        return self.likelihood.forward(self.likelihood._latent(self.loc, self.var, t))


def check_likelihood(where: str, likelihood: Any) -> None:
    """Raise ``TypeError`` unless `likelihood` is a :class:`Likelihood`."""
    if isinstance(likelihood, Likelihood):
        return
    is_class = isinstance(likelihood, type)
    actual = f"the class {likelihood.__name__}" if is_class else f"{likelihood!r:.40}"
    example = likelihood.__name__ if is_class and issubclass(likelihood, Likelihood) else "Gaussian"
    cure = f"Pass an instance such as {example}()."
    fail(where, "likelihood", "to be a Likelihood", actual, cure, TypeError)


def bounded(exponent: Tensor) -> Tensor:
    """An exponent clamped to [-80, 80], where exp is positive and finite even in float32."""
    return exponent.clamp(-80, 80)
