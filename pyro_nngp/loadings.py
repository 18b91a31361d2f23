r"""Loadings of T outputs on F factors, with a prior that shrinks each factor more than the one before it.

The multiplicative gamma process, with heavy tails for single loadings:

.. math:: \delta_1 \sim \mathrm{Gamma}(a_1, 1), \quad \delta_h \sim \mathrm{Gamma}(a_2, 1), \quad
   \tau_f = \prod_{h \le f} \delta_h, \qquad A_{pf} \mid \tau_f \sim s_p\, t_\nu(0, \tau_f^{-1/2}),

with the spread :math:`s_p` of output p. The t distribution is a normal one whose precision has a Gamma(nu / 2, nu / 2)
factor for each loading, integrated out. So factors that the data do not need have loadings near 0.

A method sets the posterior: the mode of the loadings with all latent values integrated out, and the normal distribution
of their curvature there (:mod:`pyro_nngp.variational.loadings_information`). The prior acts through the expected
precisions of its normal distributions, which take squares of loadings with their posterior variances: with squares of
the mode alone, factors would shrink to 0 that the data need.

The mode is that of directions and logarithms of the lengths of the columns of A. Of the loadings themselves it would
lie too near to 0: T loadings share the length r of their column, so that the density of :math:`\log r` has a factor
:math:`r^T` more than theirs, which cancels the prior's :math:`r^{-T}`. A smooth factor has few independent values and
does not outweigh the prior (:meth:`FactorLoadings.radial_precision`).

Cost: O(T F) per read. Symbols: T outputs, F factors.

Reference: Bhattacharya, Dunson (2011), "Sparse Bayesian infinite factor models", Biometrika.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import pyro.distributions as dist
import torch
from jaxtyping import Float
from pyro.nn import PyroSample
from torch import Tensor
from torch.distributions.transforms import ReshapeTransform

from pyro_nngp._checks import check_int, check_positive
from pyro_nngp.hyperparameters import GPModule
from pyro_nngp.linalg import cholesky, factor_inverse

_NUGGET = 1e-9  # relative, of the posterior covariance
_STEPS = 20  # of the fixed point of the shrinkage at given loadings
_DRAWS = 2000  # of loadings, for quantiles of correlations


class Correlations(NamedTuple):
    """Correlations of outputs, (T, T) each; 1 on the diagonal.

    Attributes:
        estimate: posterior medians.
        lower, upper: ends of central intervals.
    """

    estimate: Tensor
    lower: Tensor
    upper: Tensor

    @classmethod
    def of_loadings(cls, draws: Float[Tensor, "S T F"], probability: float) -> "Correlations":
        """Quantiles over draws of loadings on factors of one variance."""
        unit = torch.nn.functional.normalize(draws, dim=-1)
        levels = torch.tensor([0.5, (1 - probability) / 2, (1 + probability) / 2]).to(unit)
        rows = [torch.quantile(unit @ row[..., None], levels, dim=0)[..., 0] for row in unit.unbind(1)]
        return cls(*torch.stack(rows, 1))


class FactorLoadings(GPModule):
    """Loadings as the `mixing` of :class:`~pyro_nngp.models.LMC`; sites ``mixing.shrinkage`` and ``mixing.weights``.

    Args:
        num_outputs: T.
        num_factors: F; loadings of factors that are not needed shrink to 0.
        degrees: degrees of freedom of the t distribution of a loading.
        first: shape of the gamma prior of the first factor's precision.
        further: shape of the gamma prior of the ratios of the precisions of successive factors.

    Attributes:
        unit: spreads of the outputs, (T,), which the method sets.
        mode: posterior mode of the loadings, (T, F).
        variance: their posterior variances, (T, F), as far as they are known.
        shrinkage_mean: posterior means of the ratios, (F,).
        tril: Cholesky factor of the posterior covariance of the loadings, flattened, (T F, T F).
        has_intervals: whether `tril` belongs to `mode`; without it the guide is a point.

    Raises:
        ValueError, TypeError: unless the numbers are positive.
    """

    trained_buffers = frozenset({"mode", "variance", "shrinkage_mean", "tril", "has_intervals"})
    has_posterior = True
    event_dims = {"shrinkage": 1, "weights": 2}

    unit: Tensor
    mode: Tensor
    variance: Tensor
    shrinkage_mean: Tensor
    tril: Tensor
    has_intervals: Tensor

    def __init__(
        self, num_outputs: int, num_factors: int, *, degrees: float = 3.0, first: float = 1.0, further: float = 2.0
    ) -> None:
        super().__init__()
        check_int("FactorLoadings", "num_outputs", num_outputs, 1, "It is the number of columns of y.")
        check_int("FactorLoadings", "num_factors", num_factors, 1, "Take 5 to 10; what is not needed shrinks to 0.")
        for name, value in {"degrees": degrees, "first": first, "further": further}.items():
            check_positive("FactorLoadings", name, value)
        self.degrees = float(degrees)
        self.register_buffer("shapes", torch.tensor([float(first), *[float(further)] * (num_factors - 1)]))
        self.register_buffer("unit", torch.ones(num_outputs))
        self.register_buffer("mode", torch.zeros(num_outputs, num_factors))
        self.register_buffer("variance", torch.zeros(num_outputs, num_factors))
        self.register_buffer("shrinkage_mean", self.shapes.clone())
        self.register_buffer("tril", torch.eye(num_outputs * num_factors))
        self.register_buffer("has_intervals", torch.tensor(False))
        self.shrinkage = PyroSample(_ShrinkagePrior())
        self.weights = PyroSample(_WeightsPrior())

    def forward(self, x: Float[Tensor, "B D"]) -> Float[Tensor, "B T F"]:
        """The loadings, which are the same at all points."""
        return self.weights.to(x.dtype).expand(len(x), *self.mode.shape)

    @torch.no_grad()
    def start(self, mode: Float[Tensor, "T F"], unit: Float[Tensor, " T"]) -> None:
        """Set the units of the outputs, and the mode to start from."""
        self.to(mode)
        self.unit = unit.to(mode).clone()
        self.set_mode(mode)

    @torch.no_grad()
    def set_mode(self, mode: Float[Tensor, "T F"], variance: Float[Tensor, "T F"] | None = None) -> None:
        """Set mode and variances, and the posterior of the shrinkage; the guide is a point until the next intervals."""
        self.variance = self.variance if variance is None else variance.to(self.mode).clone()
        self.mode, self.has_intervals = mode.to(self.mode).clone(), torch.zeros_like(self.has_intervals)
        for _ in range(_STEPS):
            shape, rate = self._gamma()
            self.shrinkage_mean = shape / rate

    @torch.no_grad()
    def set_information(self, information: Float[Tensor, "TPF TPF"], shares_kernel: bool) -> None:
        """Set the posterior covariance from the information on P coefficients and F loadings, output by output.

        Args:
            information: with the prior, and all latent values integrated out.
            shares_kernel: whether the factors have one kernel. Loadings that are rotated are then as good, and
                deviations along rotations, which say nothing of the outputs, are left out.
        """
        count, size = self.mode.shape
        width = len(information) // count
        if shares_kernel:
            along = information.new_zeros(count, width, size, size)
            each = torch.arange(size)
            along[:, width - size + each, :, each] += self.mode.double()
            along = (along - along.mT)[:, :, *torch.triu_indices(size, size, 1)].flatten(0, 1)
            axes = torch.linalg.qr(along)[0]
            information = information + float(information.diagonal().max()) * axes @ axes.mT
        cov = factor_inverse(cholesky(information, 0.0)).view(count, width, count, width)
        cov = cov[:, width - size :, :, width - size :].reshape(count * size, -1)
        self.tril, self.has_intervals = cholesky(cov, _NUGGET).to(self.mode), torch.ones_like(self.has_intervals)

    @torch.no_grad()
    def correlations(self, probability: float = 0.95) -> Correlations:
        r"""Residual correlations of the outputs, :math:`A A^\top` scaled to a diagonal of ones, with intervals.

        They are quantiles over 2,000 draws from the posterior of the loadings, of a generator with a fixed seed. All
        variance of an output that is not in its mean is in the factors.

        Args:
            probability: of the intervals.
        """
        mode, tril = self.mode.double(), self.tril.double()
        generator = torch.Generator().manual_seed(0)
        white = torch.randn(_DRAWS, len(tril), generator=generator, device="cpu", dtype=mode.dtype).to(mode)
        draws = (mode.flatten() + white @ tril.mT).view(-1, *mode.shape)
        return Correlations.of_loadings(draws.to(self.mode), probability)

    def precision(self, mode: Float[Tensor, "T F"]) -> Float[Tensor, "T F"]:
        """Expected precisions of the normal distributions whose mixture the prior is."""
        tau = self.shrinkage_mean.cumprod(0).to(mode)
        unit, square = self.unit.to(mode).square()[:, None], mode.square() + self.variance.to(mode)
        return (self.degrees + 1) * tau / (self.degrees * unit + tau * square)

    def radial_precision(self, mode: Float[Tensor, "T F"]) -> Float[Tensor, "F T T"]:
        r"""Part of the prior's precision along the loadings of each factor, as far as these are known.

        With weights W of :meth:`precision` and posterior variances s it is :math:`W a a^\top W / (a^\top W a +
        \sum_p W_p s_p)`. Without it the prior's gradient at the mode a is W a times the share of the variances.
        """
        weights = self.precision(mode)
        drawn, square = weights * mode, weights * (mode.square() + self.variance.to(mode))
        return torch.einsum("pf,qf->fpq", drawn, drawn / square.sum(0))

    def _gamma(self) -> tuple[Float[Tensor, " F"], Float[Tensor, " F"]]:
        """Shapes and rates of the posterior of the shrinkage given the mode and the means of the other entries."""
        ratio, tau = self.shrinkage_mean, self.shrinkage_mean.cumprod(0)
        count, size = self.mode.shape
        square = self.mode.square() + self.variance
        spread = (self.precision(self.mode) * square).sum(0)  # tau_f times sums of squares
        later = spread.flip(0).cumsum(0).flip(0)
        number = torch.arange(size, 0, -1).to(tau)
        return self.shapes + number * count / 2, 1 + later / ratio / 2

    # The guide of the sites.

    def own_guide(self, name: str, before: Mapping[str, Tensor]) -> Any:
        """The posterior of a site; a point as long as there are no intervals."""
        known = bool(self.has_intervals)
        if name == "shrinkage":
            return dist.Gamma(*self._gamma()).to_event(1) if known else dist.Delta(self.shrinkage_mean, event_dim=1)
        if not known:
            return dist.Delta(self.mode, event_dim=2)
        flat = dist.MultivariateNormal(self.mode.flatten(), scale_tril=self.tril)
        return dist.TransformedDistribution(flat, [ReshapeTransform(flat.event_shape, self.mode.shape)])

    def own_quantiles(self, name: str, shift: Tensor) -> Tensor:
        """Quantiles of each entry of a site, `shift` standard deviations from the mean."""
        known = bool(self.has_intervals)
        if name == "shrinkage":
            shape, rate = self._gamma()
            return self.shrinkage_mean + (shift.to(shape) * shape.sqrt() / rate if known else 0.0)
        width = self.tril.norm(dim=-1).view_as(self.mode) if known else torch.zeros_like(self.mode)
        return self.mode + shift.to(width) * width


class _ShrinkagePrior:
    """The prior of the ratios; an object, since files hold no functions that Pyro has renamed."""

    def __call__(self, loadings: FactorLoadings) -> Any:
        return dist.Gamma(loadings.shapes, torch.ones_like(loadings.shapes)).to_event(1)


class _WeightsPrior:
    """The prior of the loadings given the ratios."""

    def __call__(self, loadings: FactorLoadings) -> Any:
        scale = loadings.shrinkage.cumprod(-1).rsqrt()[..., None, :] * loadings.unit[:, None]
        return dist.StudentT(loadings.degrees, torch.zeros_like(scale), scale).to_event(2)


__all__ = ["Correlations", "FactorLoadings"]
