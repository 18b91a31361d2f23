r"""The full-scale prior: a low-rank part from M inducing points, and a nearest-neighbor residual.

With :math:`K_{zz} = L L^\top` at inducing points z and :math:`\varphi(x) = L^{-1} k_z(x)`,

.. math:: f(x) = \varphi(x)^\top \nu + r(x), \quad \nu \sim N(0, I), \qquad
   \mathrm{cov}\, r(x, x') = k(x, x') - \varphi(x)^\top \varphi(x'),

is the Gaussian process itself. The prior takes the residual r as a nearest-neighbor process, with weights A and
variances V, so that the values at the data have the covariance

.. math:: \Phi \Phi^\top + (I - A)^{-1} V (I - A)^{-\top} .

Inducing points carry what is smooth and long, neighbors what is near: either alone needs many more. Without inducing
points it is :class:`~pyro_nngp.distributions.nngp.NNGP`, without neighbors FITC (Snelson and Ghahramani 2006), and with
K = N-1 neighbors the exact process.

With :math:`W = V^{-1/2} (I - A) \Phi` and whitened values :math:`e = V^{-1/2} (I - A) f`, the matrix inversion lemma
gives density and posterior of :math:`\nu` by the M x M matrix :math:`G = I + W^\top W`:

.. math:: -2 \log p(f) = e^\top e - e^\top W G^{-1} W^\top e + \log|G| + \log|V| + N \log 2\pi, \qquad
   \nu \mid f \sim N(G^{-1} W^\top e,\, G^{-1}) .

Conditionals at new points follow as for a linear trend with a normal prior: with weights w and variance v of r
given its neighbors and :math:`b = \varphi(x) - \sum_k w_k \varphi(x_k)`,

.. math:: f(x) \mid f \sim N(w^\top f_n + b^\top G^{-1} W^\top e,\; v + b^\top G^{-1} b) .

Observations with Gaussian noise add its variance to the residual's, at targets and neighbors alike; f is then
integrated out, as in :class:`~pyro_nngp.models.vecchia.Vecchia`.

Cost: O(N (K^3 + K^2 M + M^2)) time and O(N K (K + M)) memory for a density with its gradient. Symbols: N points, K
neighbors, M inducing points, P new points.

References: Sang and Huang (2012), "A full scale approximation of covariance functions for large spatial data sets",
JRSS B; Gyger, Furrer, Sigrist (2025), "Vecchia-inducing-points full-scale approximations for Gaussian processes",
arXiv:2507.05064.
"""

import math
from functools import cached_property
from typing import Any

import pyro.distributions as dist
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.distributions import Distribution, constraints
from torch.nn.functional import pad

from pyro_nngp._checks import check_new_inputs, check_number, check_same_kind, check_tensor, fail
from pyro_nngp._indexing import values_at
from pyro_nngp._kinds import draws_shape
from pyro_nngp.conditionals import graph_conditional
from pyro_nngp.conditionals.low_rank import LowRank
from pyro_nngp.distributions.expandable import Expandable
from pyro_nngp.distributions.nngp import NNGP, check_prior, check_values, draw_appended
from pyro_nngp.kernels import Covariance, bind
from pyro_nngp.linalg import DEFAULT_JITTER, VecchiaFactor, cholesky, factor_solve, half_solve
from pyro_nngp.linalg.neighbor_products import combined
from pyro_nngp.neighbors import NeighborGraph


class FullScaleNNGP(Expandable):
    r"""Zero-mean full-scale Gaussian process over the values, or noisy observations, at the points of a graph.

    As a site of a program it is sampled by NUTS, and its hyperparameters are learned by SVI or any optimizer. With
    ``noise`` it is the density of Gaussian data: ``pyro.sample("y", FullScaleNNGP(kernel, graph, z, noise), obs=y)``.

    Args:
        kernel: a :class:`~pyro_nngp.kernels.Kernel` or a callable ``(..., n, D), (..., m, D) -> (..., n, m)``. Its
            hyperparameters are read (and its Pyro sites fire) when the distribution is built.
        graph: the points, their ordering and their neighbors.
        inducing: inducing points (M, D), constants or values that are learned; M may be 0. A part of the data is a good
            choice, such as the first M of a maximin ordering.
        noise: noise variance of the values, of all or of each point (N,); 0 takes the values as f itself.
        jitter: relative nugget of the process; None takes 1e-6.

    Raises:
        TypeError: if `graph` is not a NeighborGraph, `kernel` no covariance function, or a value no tensor of floats.
        ValueError: for other shapes, dtypes or devices than the points have, a noise below 0, or a kernel of other
            columns.
        NotImplementedError: for a kernel whose hyperparameters have batch dimensions.
    """

    support = constraints.real_vector
    has_rsample = True

    def __init__(
        self,
        kernel: Any,
        graph: NeighborGraph,
        inducing: Float[Tensor, "M D"],
        noise: float | Float[Tensor, "*N"] = 0.0,
        *,
        jitter: float | None = None,
        validate_args: bool | None = None,
    ) -> None:
        where = "FullScaleNNGP"
        check_prior(where, kernel, graph, jitter)
        check_tensor(where, "inducing", inducing)
        check_same_kind(where, x=graph.x, inducing=inducing)
        if inducing.dim() != 2 or inducing.shape[1] != graph.x.shape[1]:
            expectation, cure = f"of shape (M, {graph.x.shape[1]})", "Pass points with the columns of x."
            fail(where, "inducing", expectation, tuple(inducing.shape), cure)
        self.graph, self.inducing, self.noise = graph, inducing, _checked_noise(where, noise, graph.x)
        self._is_noisy = isinstance(noise, Tensor) or noise > 0
        self.jitter = DEFAULT_JITTER if jitter is None else jitter
        self.kernel: Covariance = bind(kernel)
        if self.kernel.batch_shape:
            cure = "Build one for each set."
            actual = f"a batch {tuple(self.kernel.batch_shape)}"
            fail(where, "hyperparameters", "of one set", actual, cure, NotImplementedError)
        super().__init__(torch.Size(), graph.x.shape[:1], validate_args=validate_args)

    def __repr__(self) -> str:
        return f"FullScaleNNGP({len(self.inducing)} inducing points, {self.graph!r})"

    @cached_property
    def features(self) -> Float[Tensor, "N M"]:
        r""":math:`\Phi`, the features :math:`\varphi` at the points of the graph."""
        return self._low_rank.features_of(self._points)

    @cached_property
    def residual_prior(self) -> NNGP:
        """The residual r as a nearest-neighbor process over the points, without the noise."""
        points, jitter = self._points, self.jitter
        return NNGP(self._low_rank.residual, self.graph, points=points, jitter=jitter, validate_args=False)

    @cached_property
    def residual(self) -> VecchiaFactor:
        """(I - A, V) of the residual, with the noise."""
        prior, graph = self.residual_prior, self.graph
        w, var = prior.response_conditionals(self._noise_of_each) if self._is_noisy else prior.conditionals
        return VecchiaFactor(w, var + self.noise, graph.neighbors, graph.levels())

    def split(self, value: Float[Tensor, "*S N"]) -> tuple[Float[Tensor, "*S M"], Float[Tensor, "*S N"]]:
        r"""The mean of :math:`\nu` given values at all points, and what is left of these for the residual."""
        low = self._low_mean(value)[..., 0].to(value)
        return low, value - low @ self.features.mT

    @cached_property
    def _white_features(self) -> Float[Tensor, "M N"]:
        r""":math:`W^\top`, in float64."""
        rest = self.features - combined(self.residual.w, self.features, self.graph.neighbors)
        return rest.mT.double() * self.residual.var.double().rsqrt()

    @cached_property
    def _tril(self) -> Float[Tensor, "M M"]:
        """Cholesky factor of G, the precision of the low-rank part given all values."""
        white = self._white_features
        return cholesky(white @ white.mT + torch.eye(len(white)).to(white), 0.0)

    @property
    def mean(self) -> Float[Tensor, "*S N"]:
        """Zero."""
        return self.graph.x.new_zeros(self._extended_shape())

    def _log_prob(self, value: Float[Tensor, "*S N"]) -> Float[Tensor, "*R"]:
        """Log density of values at all points, f integrated out if there is noise."""
        white = self.residual.whiten(value)
        quadratic = white.square().sum(-1) - half_solve(self._tril, self._linear(white)).square().sum((-2, -1)).to(
            value
        )
        log_det = self.residual.var.log().sum() + 2 * self._tril.diagonal().log().sum().to(value)
        log_prob = -0.5 * (quadratic + log_det + len(self.graph.x) * math.log(2 * math.pi))
        return log_prob.expand(torch.broadcast_shapes(log_prob.shape, self.batch_shape))

    def rsample(self, sample_shape: Any = torch.Size()) -> Float[Tensor, "*S N"]:
        """Exact joint draws, with noise if there is any."""
        shape, x = draws_shape("FullScaleNNGP.rsample", sample_shape) + self.batch_shape, self.graph.x
        low = torch.randn(*shape, len(self.inducing), dtype=x.dtype, device=x.device)
        white = torch.randn(*shape, len(x), dtype=x.dtype, device=x.device)
        return low @ self.features.mT + self.residual.color(white)

    def predict(
        self, x_new: Float[Tensor, "P D"], value: Float[Tensor, "*S N"], num_neighbors: int | None = None
    ) -> Distribution:
        """Marginal conditionals of f at new points given the values at all points of the graph.

        Args:
            x_new: new inputs.
            value: values at ``graph.x``, with noise if the distribution has any.
            num_neighbors: neighbors per new point; None takes the graph's.

        Returns:
            Normal of batch shape (..., P).

        Raises:
            ValueError, TypeError: for malformed arguments.

        Cost: O(N M^2) at the first call; then O(P (K^3 + K^2 M + M^2)), and one neighbor query per point.
        """
        check_values("FullScaleNNGP.predict", "value", value, self.graph.x)
        near = self.graph.query(x_new, num_neighbors)
        new = self._low_rank.inputs(x_new)
        w, var = self._conditional(new, near)
        rest = (self._low_rank.features_of(new) - combined(w, self.features, near)).double()
        spread = half_solve(self._tril, rest.mT).square().sum(0)
        low = self._low_mean(value)
        loc = (w * values_at(value, near)).sum(-1) + (rest @ low)[..., 0].to(value)
        return dist.Normal(loc, (var + spread.to(var)).sqrt())

    def sample_new(
        self, x_new: Float[Tensor, "P D"], value: Float[Tensor, "*S N"], num_neighbors: int | None = None, seed: int = 0
    ) -> Float[Tensor, "*S P"]:
        """Joint draws of f at new points given the values at all points of the graph.

        The low-rank part is drawn from its posterior; the residual at each new point is conditioned on its nearest
        points among the old and the earlier new ones.

        Args:
            x_new: new inputs.
            value: values at ``graph.x``, one draw per leading index, with noise if the distribution has any.
            num_neighbors: neighbors per new point; None takes the graph's.
            seed: of the order of the new points alone; draws follow the global random state.

        Raises:
            ValueError, TypeError: for malformed arguments.

        Cost: as of :meth:`predict`, and O(P (K + M) + N M) per draw.
        """
        check_new_inputs("FullScaleNNGP.sample_new", x_new, self.graph.x)
        check_values("FullScaleNNGP.sample_new", "value", value, self.graph.x)
        _, near = self.graph.extend(x_new, num_neighbors, seed)
        new, num_old = self._low_rank.inputs(x_new), len(self.graph.x)
        points, noise = torch.cat([self._points, new]), pad(self._noise_of_each, (0, len(new)))
        w, var = graph_conditional(self._low_rank.residual, new, points, near, noise, self.jitter)
        low = self._low_mean(value)
        low = (low + half_solve(self._tril, torch.randn_like(low), transposed=True)).to(value)[..., 0]
        old = near < num_old
        rest = value - low @ self.features.mT
        loc = ((w * old) * values_at(rest, torch.where(old, near, -1))).sum(-1)
        return low @ self._low_rank.features_of(new).mT + draw_appended(w, var, near, loc, num_old)

    def _linear(self, white: Float[Tensor, "*S N"]) -> Float[Tensor, "*S M 1"]:
        r""":math:`W^\top e`, in float64."""
        return (white.double() @ self._white_features.mT)[..., None]

    def _low_mean(self, value: Float[Tensor, "*S N"]) -> Float[Tensor, "*S M 1"]:
        r"""The posterior mean of :math:`\nu` given all values, in float64."""
        return factor_solve(self._tril, self._linear(self.residual.whiten(value)))

    def _conditional(
        self, at: Float[Tensor, "B C"], near: Int[Tensor, "B K"]
    ) -> tuple[Float[Tensor, "B K"], Float[Tensor, " B"]]:
        """Weights and variances of the residual at points with their features, given that of the graph with noise."""
        return graph_conditional(self._low_rank.residual, at, self._points, near, self._noise_of_each, self.jitter)

    @property
    def _noise_of_each(self) -> Float[Tensor, " N"]:
        return self.noise.expand(len(self.graph.x))

    @cached_property
    def _low_rank(self) -> LowRank:
        return LowRank(self.kernel, self.inducing, self.jitter)

    @cached_property
    def _points(self) -> Float[Tensor, "N C"]:
        """The points of the graph with their features."""
        return self._low_rank.inputs(self.graph.x)

    def _validate_sample(self, value: Any) -> None:
        check_values("FullScaleNNGP.log_prob", "value", value, self.graph.x)


def _checked_noise(where: str, noise: Any, x: Float[Tensor, "N D"]) -> Float[Tensor, "*N"]:
    """The noise variance as a tensor, () or (N,)."""
    if not isinstance(noise, Tensor):
        check_number(where, "noise", noise, cure="It is a variance.")
        return x.new_tensor(noise)
    if noise.shape not in ((), x.shape[:1]):
        cure = "Give one variance for all points, or one for each."
        fail(where, "noise", f"of shape () or ({len(x)},)", tuple(noise.shape), cure)
    if not bool((noise >= 0).all()):
        fail(where, "noise", "to be >= 0", float(noise.min()), "It is a variance.")
    return noise.to(x)


__all__ = ["FullScaleNNGP"]
