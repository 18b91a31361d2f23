r"""The Pólya-Gamma distribution PG(b, c), which makes logistic likelihoods conditionally Gaussian.

Its Laplace transform is :math:`E\, e^{-t\omega} = \cosh^b(c/2) / \cosh^b \sqrt{c^2/4 + t/2}` (Polson, Scott and Windle
2013, eq. 4), so that :math:`p(\omega \mid b, c) = \cosh^b(c/2)\, e^{-c^2 \omega / 2}\, p(\omega \mid b, 0)`, and

.. math:: \frac{(e^\psi)^a}{(1 + e^\psi)^b} = 2^{-b} e^{(a - b/2) \psi}
   \int e^{-\omega \psi^2 / 2}\, p(\omega \mid b, 0)\, d\omega .

Density. b = 1: the two theta series of Devroye (2009), which are one series in :math:`z = \max(1 / 2\omega,
2 \pi^2 \omega) \ge \pi`. Any other b: the Laplace transform inverted along the parabola :math:`2 r^2 - \pi^2 / 2`,
:math:`r = a + i y`, with a at the saddle point,

.. math:: p(\omega \mid b, 0) = \frac{4}{\pi} e^{-\pi^2 \omega / 2}\, \Re \int_0^\infty r\,
   \cosh^{-b}\!\big(\sqrt{r^2 - \pi^2/4}\big)\, e^{2 \omega r^2}\, dy .

All singularities lie at Re r = 0, so the trapezoidal rule converges exponentially, for every b and omega at once.

Draws. The density of log omega is log-concave, so three tangents enclose it, and rejection below them is exact.
Compiled code (``native/polya_gamma.cpp``) has Devroye's sampler for b = 1, and for b >= 1/4 encloses the density
between the saddle-point approximation and that times :math:`e^{-1 / 12 b}`, so that few draws need the integral.

Differs from the papers: for b other than 1 one sampler, exact and at a cost that does not grow with b, instead of sums
of PG(1, c) draws or draws from an approximation. The log-concavity follows for b >= 1 from the likelihood-ratio order
of log-concave summands (Shaked and Shanthikumar 2007, theorem 1.C.9); for b < 1 it is a numerical finding, which the
tests repeat.

Cost: four terms per density for b = 1, else 16 nodes in double precision; some 1.2 densities per draw, and three per
parameter. Compiled: 0.1 to 1 microsecond per draw.

Symbols: b concentration, c tilt.
"""

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributions import constraints, register_kl

from pyro_nngp._kinds import broadcast, draws_shape
from pyro_nngp._memory import at_once
from pyro_nngp.distributions.expandable import Expandable
from pyro_nngp.native import polya_gamma as compiled

# The trapezoidal rule; step and least a in units of 1 / sqrt(4 omega), the width of exp(2 omega r^2).
_STEP, _NODES, _OFFSET = 0.5, 16, 3.0
_TOUCH = (-1.4, -0.1, 1.2)  # points of tangency, in relative standard deviations from the mean
_CHUNK = 2**15  # draws at a time, so that the nodes of their densities stay in cache
# Taylor coefficients of tanh(u) / u in u^2
_TANHC = (1, -1 / 3, 2 / 15, -17 / 315, 62 / 2835, -1382 / 155925, 21844 / 6081075, -929569 / 638512875)


class PolyaGamma(Expandable):
    r"""PG(b, c) on the positive half-line, elementwise over the batch.

    Args:
        concentration: b > 0, any real number.
        tilt: c, any real number; its sign does not matter.

    Draws are exact for all b and are not reparameterized. Log densities have the relative error of the floating-point
    arithmetic (1e-9 or better in double precision) and are differentiable in omega, b and c.

    Reference: Polson, Scott, Windle (2013), "Bayesian inference for logistic models using Polya-Gamma latent
    variables".
    """

    arg_constraints = {"concentration": constraints.positive, "tilt": constraints.real}
    support = constraints.positive
    batched = ("concentration", "tilt")

    def __init__(
        self,
        concentration: Float[Tensor, "..."] | float,
        tilt: Float[Tensor, "..."] | float = 0.0,
        validate_args: bool | None = None,
    ) -> None:
        self.concentration, self.tilt = broadcast("PolyaGamma", concentration=concentration, tilt=tilt)
        self._unit = _is_one(concentration)
        super().__init__(self.concentration.shape, validate_args=validate_args)

    @property
    def mean(self) -> Float[Tensor, "..."]:
        """b tanh(c / 2) / (2 c)."""
        return self.concentration / 4 * _tanhc(self.tilt / 2)

    @property
    def variance(self) -> Float[Tensor, "..."]:
        """b (sinh c - c) / (4 c^3 cosh^2(c / 2))."""
        return self.concentration / 16 * _tanhc_slope(self.tilt / 2)

    def _log_prob(self, value: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        b, c = self.concentration, self.tilt
        start = log_density_of_one(value) if self._unit else log_density(value.double(), b.double()).to(value.dtype)
        return start + b * log_cosh(c / 2) - c.square() * value / 2

    def sample(self, sample_shape: Any = torch.Size()) -> Float[Tensor, "..."]:
        with torch.no_grad():
            shape = draws_shape("PolyaGamma.sample", sample_shape)
            shape, num_draws = self._extended_shape(shape), shape.numel()
            b, c = self.concentration.double().flatten(), self.tilt.double().flatten()
            draws = self._compiled(b, c, num_draws) if compiled.supported(c) else self._below_tangents(b, c, num_draws)
            draws = draws.reshape(shape).to(self.tilt.dtype)
            return draws.clamp_min(torch.finfo(draws.dtype).tiny)

    def _compiled(self, b: Tensor, c: Tensor, num_draws: int) -> Float[Tensor, "S B"]:
        draws = compiled.draw(b, c, num_draws, int(torch.randint(2**63 - 1, ())))
        small = (b < compiled.LEAST_CONCENTRATION).nonzero()[:, 0]
        if len(small):
            draws[:, small] = self._below_tangents(b[small], c[small], num_draws)
        return draws

    def _below_tangents(self, b: Tensor, c: Tensor, num_draws: int) -> Float[Tensor, "S B"]:
        parts = zip(b.split(at_once(_CHUNK, 1)), c.split(at_once(_CHUNK, 1)), strict=True)
        distributions = [PolyaGamma(1.0 if self._unit else b, c, validate_args=False) for b, c in parts]
        return torch.cat([Tangents(pg).draw(num_draws) for pg in distributions], -1).exp()


@register_kl(PolyaGamma, PolyaGamma)
def _kl_polya_gamma(q: PolyaGamma, p: PolyaGamma) -> Tensor:
    """KL of two tilts of one PG(b, 0); b log cosh(c/2) - (b c / 4) tanh(c/2) for p without tilt."""
    if q.concentration is not p.concentration and not bool((q.concentration == p.concentration).all()):
        raise NotImplementedError("no closed form: KL(PolyaGamma || PolyaGamma) is known for one concentration only")
    u, v = q.tilt / 2, p.tilt / 2
    return q.concentration * (log_cosh(u) - log_cosh(v) - (u - v) * (u + v) * _tanhc(u) / 2)


def log_cosh(u: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """log cosh(u) without overflow, and without cancellation at 0."""
    small = u.abs() < 1
    near = -0.5 * torch.log1p(-torch.where(small, u, 0.0).tanh().square())
    far = u.abs() + torch.log1p(torch.exp(-2 * u.abs())) - math.log(2)
    return torch.where(small, near, far)


def _tanhc(u: Tensor) -> Tensor:
    """tanh(u) / u."""
    small, safe = _split(u)
    return torch.where(small, _polynomial(_TANHC, u), safe.tanh() / safe)


def _tanhc_slope(u: Tensor) -> Tensor:
    """(tanh u - u / cosh^2 u) / u^3: minus twice the derivative of tanh(u) / u with respect to u^2."""
    small, safe = _split(u)
    t = safe.tanh()
    series = _polynomial([-2 * k * a for k, a in enumerate(_TANHC)][1:], u)
    return torch.where(small, series, (t - safe * (1 - t) * (1 + t)) / safe**3)


def _split(u: Tensor) -> tuple[Tensor, Tensor]:
    small = u.abs() < 0.25
    return small, torch.where(small, 1.0, u)


def _polynomial(coefficients: Any, u: Tensor) -> Tensor:
    square, value = u.clamp(-0.25, 0.25).square(), torch.zeros_like(u)
    for a in reversed(coefficients):
        value = value * square + a
    return value


def _is_one(concentration: Tensor | float) -> bool:
    """Whether b is fixed at 1, where density and draws are cheapest."""
    if isinstance(concentration, Tensor):
        return not concentration.requires_grad and bool((concentration == 1).all())
    return concentration == 1


def log_density_of_one(omega: Tensor) -> Tensor:
    """log p(omega | 1, 0)."""
    left, right = 1 / (2 * omega), 2 * math.pi**2 * omega
    start = torch.where(
        left > right, -left / 4 - 1.5 * omega.log() - 0.5 * math.log(2 * math.pi), math.log(2 * math.pi) - right / 4
    )
    z = torch.maximum(left, right)
    return start + torch.log1p(-3 * torch.exp(-2 * z) + 5 * torch.exp(-6 * z) - 7 * torch.exp(-12 * z))


def log_density(omega: Tensor, b: Tensor) -> Tensor:
    """log p(omega | b, 0) in double precision, by the integral of the module's docstring."""
    omega, b = torch.broadcast_tensors(omega, b)
    with torch.no_grad():  # the integral does not depend on where its nodes are
        width = (4 * omega).rsqrt()
        a = torch.maximum(_saddle(4 * omega / b), _OFFSET * width)
        steps = _STEP * torch.arange(_NODES, dtype=omega.dtype, device=omega.device)
        y = steps.reshape(-1, *[1] * omega.dim()) * width
        root = (torch.complex(a.expand_as(y), y).square() - math.pi**2 / 4).sqrt()
        log_cosh_root = root + (1 + torch.exp(-2 * root)).log() - math.log(2)
        weight = torch.ones_like(steps).reshape(-1, *[1] * omega.dim())
        weight[0] = 0.5
    size = 2 * omega * (a.square() - y.square()) - b * log_cosh_root.real
    phase = 4 * omega * a * y - b * log_cosh_root.imag
    terms = weight * torch.exp(size - size[0]) * (a * phase.cos() - y * phase.sin())
    return math.log(4 * _STEP / math.pi) + width.log() - math.pi**2 / 2 * omega + size[0] + terms.sum(0).log()


def _saddle(x: Tensor) -> Tensor:
    r"""The saddle point a > 0: :math:`\tanh(v) / v = x` at :math:`v^2 = a^2 - \pi^2/4`, by Newton's method."""
    square = 1 / x.square() + 2 / (x + 8 / math.pi**2)  # correct as x goes to 0 and to infinity; refined in logarithms
    for _ in range(4):
        v2 = square - math.pi**2 / 4
        v2 = torch.where(v2.abs() < 1e-6, 1e-6, v2)
        v = v2.abs().sqrt()
        t = torch.where(v2 > 0, v.tanh(), v.tan()) / v
        slope = square * (1 - t.square() * v2 - t) / (2 * v2 * t)
        square = square * torch.exp((x / t).log() / slope)
    return square.sqrt()


class Tangents:
    """Three tangents of the log density of y = log omega, for each entry of a batch, and exact draws below them."""

    def __init__(self, pg: PolyaGamma) -> None:
        self._pg = pg
        b, c = pg.concentration, pg.tilt
        spread = (pg.variance.sqrt() / pg.mean).clamp(max=1.0)
        points = pg.mean.log() + spread * spread.new_tensor(_TOUCH)[:, None]
        rising = b.square() / 4 / (1 + (1 + b * c * b * c / 4).sqrt())  # for small b, where omega p still has slope 1/2
        points[0] = torch.minimum(points[0], rising.log())
        with torch.enable_grad():
            y = points.requires_grad_()
            height = pg.log_prob(y.exp()) + y
            (slope,) = torch.autograd.grad(height.sum(), y)
        rise = (height - slope * y).detach()  # a tangent is rise + slope * y
        corner = -rise.diff(dim=0) / slope.diff(dim=0)
        left, right = rise[[0, 2]] + slope[[0, 2]] * corner
        middle = _log_integral(slope[1], corner[1] - corner[0])
        log_area = torch.stack([left - slope[0].log(), left + middle, right - (-slope[2]).log()])
        self.rise, self.slope, self._corner, self._share = rise, slope, corner, log_area.softmax(0).cumsum(0)

    def draw(self, num_draws: int) -> Float[Tensor, "S B"]:
        """Independent draws of log omega, `num_draws` for each entry of the batch."""
        size = len(self._pg.tilt)
        entries = torch.arange(size, device=self._pg.tilt.device).expand(num_draws, size).flatten()
        parts = [self._draw_entries(part) for part in entries.split(at_once(_CHUNK, 1))]
        return torch.cat(parts).reshape(num_draws, size)

    def _draw_entries(self, entries: Tensor) -> Tensor:
        y, left = self.slope.new_empty(entries.shape), torch.arange(len(entries), device=entries.device)
        while len(left):
            entry = entries[left]
            proposal, log_hat = self._propose(entry)
            pg = PolyaGamma(1.0 if self._pg._unit else self._pg.concentration[entry], self._pg.tilt[entry], False)
            rejected = torch.rand_like(proposal).log() + log_hat >= pg.log_prob(proposal.exp()) + proposal
            y[left[~rejected]] = proposal[~rejected]  # NaN parameters give NaN, not an endless loop
            left = left[rejected]
        return y

    def _propose(self, entry: Tensor) -> tuple[Tensor, Tensor]:
        """A draw from the density proportional to the lowest tangent, and the log of that tangent there."""
        pick, u = torch.rand(2, len(entry), dtype=self.slope.dtype, device=entry.device)
        u = 1 - u  # in (0, 1]
        piece = (pick > self._share[:2, entry]).sum(0)
        slope, rise = self.slope[piece, entry], self.rise[piece, entry]
        low, high = self._corner[:, entry]
        length = high - low
        flat = (slope * length).abs() < 1e-6
        steep = torch.where(flat, 1.0, slope)
        across = torch.where(flat, u * length, torch.log1p(u * torch.expm1(steep * length)) / steep)
        y = torch.where(piece == 1, low + across, torch.where(piece == 0, low, high) + u.log() / slope)
        return y, rise + slope * y


def _log_integral(slope: Tensor, length: Tensor) -> Tensor:
    """log of the integral of exp(slope * t) over 0 < t < length."""
    flat = (slope * length).abs() < 1e-6
    steep = torch.where(flat, 1.0, slope)
    return torch.where(flat, length, torch.expm1(steep * length) / steep).log()
