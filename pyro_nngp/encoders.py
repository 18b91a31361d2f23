r"""Networks that read a point's neighborhood and say its row of q(u): the recognition models of NPVI-NN.

Each point i is seen with n nodes: itself, its K parents in the graph and, for some encoders, further near points. All
layers are equivariant under permutations of the nodes beside i, so the outputs do not depend on how neighbors are
listed. Nothing has the size of the data: one trained encoder serves any number of points and any data set.

- :class:`GraphConvolutionEncoder` is that of Liu and Liu (2019, section 3.3, eq. 13).
- :class:`SiteEncoder` is ours. The network replaces each node's observation by a Gaussian one (a site); mean and row of
  R then follow from the exact posterior on the nodes given the sites. For a Gaussian likelihood the right sites are
  known (y and its noise variance) and the network has only to find them.
- :class:`ConditionalEncoder`, ours too, starts with the likelihood's own sites and makes the mean and the row by the
  compiled conditional of the prior. It takes about an eighth of the time of the other, and learns in fewer steps.

A step computes the rows of a batch and of its parents, up to (K + 1) times as many as a batch has points, where points
lie in many dimensions nearly that. Small batches, such as the 50 of the paper, therefore cost no more per epoch than
large ones and take many more steps.

All suit data whose lengthscales span few neighborhoods. Where the kernel is smooth at the distance between points, the
prior allows a point to differ from its parents' forecast by very little, and means that were found one neighborhood at
a time differ by more: the divergence is then large. A nugget (`jitter` of a percent or so) or a table of parameters (no
encoder) helps.

Cost: :math:`O(U n^2)` for the graph convolution, :math:`O(U n^3)` for the sites. Symbols: U points, n nodes each, K
parents, D inputs, L latent functions, F features.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.distributions import constraints

from pyro_nngp._checks import fail
from pyro_nngp.conditional import graph_conditional
from pyro_nngp.kernels import Covariance
from pyro_nngp.likelihoods import Bernoulli, Binomial, Categorical, Likelihood, Poisson

Row: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""Mean (L, U), diagonal (L, U) and off-diagonal entries (L, U, K) of rows of q(u); L may be absent."""

_FEATURES = 6  # of a node in the SiteEncoder, beside its D relative coordinates
_NODE_FEATURES = 7  # of one in the ConditionalEncoder


@dataclass(frozen=True)
class Neighborhood:
    """Some points and the nodes around them; node 0 is the point itself, nodes 1..K are its parents.

    Attributes:
        response: what ``encoder.response`` made of y, (L, U, n) or (U, n).
        mean: mean function, (U, n).
        x: inputs, (U, n, D).
        mask: which nodes exist.
        covariance: the kernel.
        rank: places of the nodes in the ordering, (U, n).
        w: weights of the prior's conditional of the point given its parents, (U, K).
        var: its variance, (U,).
        jitter: relative nugget of the prior.
        target: what the likelihood says of each node on its own, as a Gaussian observation of f at `response`: its
            value, (L, U, n) or (U, n).
        precision: its precision, positive.
    """

    response: Float[Tensor, "*L U n"]
    mean: Float[Tensor, "U n"]
    x: Float[Tensor, "U n D"]
    mask: Bool[Tensor, "U n"]
    covariance: Covariance
    rank: Int[Tensor, "U n"]
    w: Float[Tensor, "U K"]
    var: Float[Tensor, " U"]
    jitter: float
    target: Float[Tensor, "*L U n"]
    precision: Float[Tensor, "*L U n"]


class GraphConvolutionEncoder(nn.Module):
    r"""The two graph convolutional networks of the paper.

    With :math:`A_i = [k_{ii}, 0;\, k_{\alpha(i),i}, K_{\alpha(i),\alpha(i)}]` and D its row sums, both compute
    :math:`H^{l+1} = \mathrm{ReLU}(D^{-1/2} A_i D^{-1/2} H^l W^l)` from the observations :math:`H^0`, without ReLU in
    the last layer. The mean of q(u_i) is the average of the first network's last layer over the nodes; the nodes'
    values of the second one's are the row of R, the diagonal one made positive by softplus.

    Args:
        widths: of the hidden layers.
        response: what the nodes start with, ``(likelihood, y) -> (N,)`` or (L, N); None is y itself, as in the paper.

    Raises:
        TypeError: if `widths` are no positive ints.

    Reference: Liu, Liu (2019), "Amortized variational inference with graph convolutional networks for Gaussian
    processes", AISTATS.
    """

    num_context = 0

    def __init__(
        self, widths: tuple[int, ...] = (20, 10), response: Callable[[Likelihood, Tensor], Tensor] | None = None
    ) -> None:
        super().__init__()
        _check_widths("GraphConvolutionEncoder", widths)
        self.response = observed if response is None else response
        sizes = (1, *widths, 1)
        self.loc, self.row = (nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in pairwise(sizes)) for _ in range(2))

    def forward(self, near: Neighborhood) -> Row:
        cov = near.covariance(near.x, near.x) * (near.mask[:, :, None] & near.mask[:, None, :])
        away = torch.ones_like(cov)
        away[:, 0, 1:] = 0
        adjacency = _normalized(cov * away)
        loc, row = (_convolve(layers, adjacency, near.response[..., None])[..., 0] for layers in (self.loc, self.row))
        average = (loc * near.mask).sum(-1) / near.mask.sum(-1)
        return average, _positive(row[..., 0]), row[..., 1:]


class SiteEncoder(nn.Module):
    r"""Sites by a graph network, q(u_i) by conditioning on them.

    A node's features are its response (a rough inverse of the likelihood's link, less the mean function), its
    correlation with point i, its weight in the prior's conditional of :math:`u_i`, the relative standard deviation of
    that conditional, its place relative to i and which kind of node it is. Layers are
    :math:`H^{l+1} = \mathrm{ReLU}(H^l W^l + \tilde A H^l U^l + b^l)`, with the normalized correlations of all nodes for
    :math:`\tilde A`. The output of node j is a site of :math:`u_j`, target :math:`t_j` and precision
    :math:`\tau_j`, and two corrections :math:`s_j, g_j` that start at 0 and 1. With the kernel matrix :math:`G G^\top`
    of the nodes, parents first in their order, then i, then others, the posterior given the sites has

    .. math:: m = G M^{-1} G^\top \mathrm{diag}(\tau)\, t, \quad V = G M^{-1} G^\top = (G U^{-\top})(G U^{-\top})^\top,
       \quad M = I + G^\top \mathrm{diag}(\tau)\, G = U U^\top,

    U an upper triangle. The encoder gives :math:`m_i` and row i of the lower triangle :math:`G U^{-\top}`, its diagonal
    entry times :math:`e^{s_i}`, that of parent j times :math:`g_j`. With every point among the nodes and the right
    sites this is the exact posterior.

    Args:
        input_dim: D.
        widths: of the hidden layers.
        num_context: nearest other points that a point sees beside its parents. Points early in the ordering have no
            parent near them.
        response: rough values of f, ``(likelihood, y) -> (N,)`` or (L, N); None is :func:`rough_latent`.
    """

    def __init__(
        self,
        input_dim: int,
        widths: tuple[int, ...] = (20, 10),
        num_context: int = 10,
        response: Callable[[Likelihood, Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        if input_dim < 1 or num_context < 0:
            actual = f"{input_dim} and {num_context}"
            fail("SiteEncoder", "input_dim >= 1 and num_context", ">= 0", actual, "Give the number of columns of x.")
        _check_widths("SiteEncoder", widths)
        self.num_context, self.response = num_context, rough_latent if response is None else response
        sizes = (_FEATURES + input_dim, *widths)
        self.own, self.passed = (
            nn.ModuleList(nn.Linear(a, b, bias=bias) for a, b in pairwise(sizes)) for bias in (True, False)
        )
        self.head = nn.Linear(sizes[-1], 4)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, near: Neighborhood) -> Row:
        k, mask = near.w.shape[1], near.mask
        cov = near.covariance(near.x, near.x)
        scale = torch.where(mask, cov.diagonal(dim1=-2, dim2=-1), 1.0).sqrt()
        correlation = cov / (scale[:, :, None] * scale[:, None, :]) * (mask[:, :, None] & mask[:, None, :])
        target = (near.response - near.mean) / scale * mask
        moved, log_precision, shrink, gate = self._sites(near, scale, correlation, target).unbind(-1)

        precision = log_precision.exp() / scale.square() * mask
        loc, row = _posterior_row(near, cov, scale * (target + moved), precision)
        return loc, row[..., -1] * shrink[..., 0].exp(), row[..., :-1] * (1 + gate[..., 1 : 1 + k])

    def _sites(self, near: Neighborhood, scale: Tensor, correlation: Tensor, target: Tensor) -> Tensor:
        """Shift, log precision, correction of the diagonal and of the row, for each node, (..., U, n, 4)."""
        n, k = near.mask.shape[1], near.w.shape[1]
        node = torch.arange(n, device=near.x.device)
        offset = (near.x - near.x[:, :1]) * near.mask[..., None]
        radius = offset.square().sum(-1).mean(-1).sqrt().clamp(min=torch.finfo(offset.dtype).tiny)
        geometry = torch.stack(
            [
                correlation[:, 0],
                F.pad(near.w, (1, n - 1 - k)),
                (near.var.sqrt() / scale[:, 0])[:, None].expand(-1, n),
                (node == 0).to(scale).expand(len(scale), -1),
                ((node > 0) & (node <= k)).to(scale).expand(len(scale), -1),
            ],
            -1,
        )
        geometry = torch.cat([geometry, offset / radius[:, None, None]], -1)
        hidden = torch.cat([target[..., None], geometry.expand(*target.shape, -1)], -1)
        adjacency = _normalized(correlation)
        for own, passed in zip(self.own, self.passed, strict=True):
            hidden = F.relu(own(hidden) + adjacency @ passed(hidden))
        return 8 * (self.head(hidden) / 8).tanh()  # exponents that no precision overflows at


class ConditionalEncoder(nn.Module):
    r"""One nearest-neighbor regression on sites, corrected by a network: as quick as the prior's own conditional.

    Node j comes with the Gaussian observation :math:`N(t_j, 1 / \tau_j)` of :math:`f_j` that its likelihood is at a
    rough value of f; for Gaussian noise y and its precision, which are right at once. A network of the node alone
    shifts :math:`t_j` by some standard deviations :math:`\tau_j^{-1/2}` and scales :math:`\tau_j`. With weights
    :math:`a` and variance c of :math:`u_i` given the noisy :math:`u_j`, :math:`j \ne i`, and w, v those of the prior
    given its parents,

    .. math:: m_i = \frac{a^\top t / c + \tau_i t_i}{1 / c + \tau_i}, \qquad
       R_{ii} = \frac{e^{s_i}}{\sqrt{1 / v + \tau_i}}, \qquad
       R_{ij} = g_{j} \frac{w_j}{1 + v \tau_i} R_{ii} .

    :math:`m_i` is the posterior mean of :math:`u_i` on the nodes given the sites; :math:`R_{ii}`, for :math:`s_i = 0`,
    is the standard deviation of :math:`u_i` given its parents and its own site. :math:`s_i` and :math:`g_j` start at 0,
    as do the corrections of the sites, so that for Gaussian noise training begins near the optimum. A node's features
    are its target in units of the prior, the logarithm of its precision in them, its correlation with point i, its
    weight w, the relative standard deviation :math:`v^{1/2}`, and which kind of node it is.

    Args:
        widths: of the hidden layers.
        num_context: nearest other points that a point sees beside its parents.
        response: rough values of f, ``(likelihood, y) -> (N,)`` or (L, N); None is :func:`rough_latent`.
    """

    def __init__(
        self,
        widths: tuple[int, ...] = (20, 10),
        num_context: int = 10,
        response: Callable[[Likelihood, Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        if num_context < 0:
            fail("ConditionalEncoder", "num_context", ">= 0", num_context, "Give 0 for the parents alone.")
        _check_widths("ConditionalEncoder", widths)
        self.num_context, self.response = num_context, rough_latent if response is None else response
        sizes = (_NODE_FEATURES, *widths)
        layers = [part for a, b in pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())]
        head = nn.Linear(sizes[-1], 3)
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        self.network = nn.Sequential(*layers, head)

    def forward(self, near: Neighborhood) -> Row:
        k, mask, own = near.w.shape[1], near.mask, near.x[:, :1]
        moved, grown, shape = self._corrections(near, near.covariance(own, near.x)[:, 0]).unbind(-1)
        tau = near.precision * grown.exp()
        target = (near.target - near.mean + moved * near.precision.rsqrt()) * mask
        noise, points = tau.reciprocal()[..., 1:].flatten(-2), near.x[:, 1:].flatten(0, 1)
        rows = torch.where(mask[:, 1:], torch.arange(len(points), device=mask.device).view(mask[:, 1:].shape), -1)
        a, var = graph_conditional(near.covariance, own[:, 0], points, rows, noise, near.jitter)
        others, tau = (a * target[..., 1:]).sum(-1), tau[..., 0]
        loc = (others / var + tau * target[..., 0]) / (1 / var + tau)
        scale = shape[..., 0].exp() * (1 / near.var + tau).rsqrt()
        return loc, scale, shape[..., 1 : 1 + k] * near.w * (scale / (1 + near.var * tau))[..., None]

    def _corrections(self, near: Neighborhood, cov: Tensor) -> Tensor:
        """Shift, growth of the precision, shape of the row, for each node, (..., U, n, 3)."""
        n, k = near.mask.shape[1], near.w.shape[1]
        node, own = torch.arange(n, device=cov.device), cov[:, :1]
        of_row = [
            cov / own,
            F.pad(near.w, (1, n - 1 - k)),
            (near.var / own[:, 0]).sqrt()[:, None].expand(-1, n),
            (node == 0).to(cov).expand(len(cov), -1),
            ((node > 0) & (node <= k)).to(cov).expand(len(cov), -1),
        ]
        of_site = [(near.target - near.mean) / own.sqrt(), (near.precision * own).log() / 4]
        features = torch.stack([part.expand(near.target.shape) for part in (*of_site, *of_row)], -1)
        return 8 * (self.network(features * near.mask[..., None]) / 8).tanh()


def observed(likelihood: Likelihood, y: Tensor) -> Tensor:
    """y as it is, (N,) or (L, N); labels of C classes as C indicators."""
    if isinstance(likelihood, Categorical) and likelihood.num_latents is not None:
        return F.one_hot(y.long(), likelihood.num_latents).movedim(-1, 0)
    if likelihood.num_latents is not None:
        cure = "Give the encoder a `response` that maps (likelihood, y) to values of all latent functions."
        fail("encoder", "likelihood", "with one latent function per output", type(likelihood).__name__, cure)
    return y.movedim(0, -1)


def rough_latent(likelihood: Likelihood, y: Tensor) -> Tensor:
    """What y alone says of f: the inverse of the link, with half a count added to counts; labels become -1 and 1."""
    values = observed(likelihood, y).to(torch.get_default_dtype() if not y.is_floating_point() else y.dtype)
    if isinstance(likelihood, (Bernoulli, Categorical)):
        return 2 * values - 1
    if isinstance(likelihood, Binomial):
        return torch.logit((values + 0.5) / (likelihood.total_count + 1))
    if isinstance(likelihood, Poisson) and likelihood.link == "softplus":
        raised = values + 0.5
        return raised + torch.log(-torch.expm1(-raised))
    if likelihood.support is constraints.nonnegative_integer:
        return (values + 0.5).log()
    return values.log() if likelihood.support is constraints.positive else values


def _posterior_row(near: Neighborhood, cov: Tensor, site: Tensor, precision: Tensor) -> tuple[Tensor, Tensor]:
    """Mean at node 0 and its row of the posterior's factor, (..., U, K + 1), parents as listed, then the diagonal.

    In double precision, where the nugget keeps the kernel matrices of near duplicates positive definite.
    """
    n, k = near.mask.shape[1], near.w.shape[1]
    node = torch.arange(n, device=cov.device)
    last = int(near.rank.max()) + 1
    order = torch.where((node > 0) & (node <= k), near.rank, last + node).argsort(dim=-1)
    mask, rows = near.mask.gather(-1, order), torch.arange(len(order), device=order.device)[:, None]
    kernel = cov.double()[rows[..., None], order[:, :, None], order[:, None, :]] * (mask[:, :, None] & mask[:, None, :])
    own = kernel.diagonal(dim1=-2, dim2=-1)
    tril = torch.linalg.cholesky(kernel + torch.diag_embed(torch.where(mask, near.jitter * own, 1.0)))
    site, precision = (values.double()[..., rows, order] for values in (site, precision))
    system = tril.mT @ (precision[..., None] * tril) + torch.eye(n, dtype=tril.dtype, device=tril.device)
    triu = torch.linalg.cholesky(system.flip(-1, -2)).flip(-1, -2)
    right = torch.stack([tril[:, k].expand(precision.shape), ((precision * site)[..., None, :] @ tril)[..., 0, :]], -1)
    row, pulled = torch.linalg.solve_triangular(triu, right, upper=True).unbind(-1)
    loc = (row * pulled).sum(-1)
    row = torch.cat([row[..., rows, order[:, :k].argsort(dim=-1)], row[..., k, None]], -1)
    return loc.to(cov.dtype), row.to(cov.dtype)


def _check_widths(where: str, widths: Any) -> None:
    if not isinstance(widths, Sequence) or not all(isinstance(width, int) and width > 0 for width in widths):
        cure = "Give the widths of the hidden layers; only SiteEncoder takes the number of inputs, first."
        fail(where, "widths", "to be a sequence of ints >= 1", repr(widths), cure, TypeError)


def _normalized(adjacency: Float[Tensor, "U n n"]) -> Float[Tensor, "U n n"]:
    """D^-1/2 A D^-1/2 for the row sums D; of absolute values, for kernels with negative ones."""
    degree = adjacency.abs().sum(-1)
    root = torch.where(degree > 0, degree, 1.0).rsqrt()
    return root[:, :, None] * adjacency * root[:, None, :]


def _convolve(layers: nn.ModuleList, adjacency: Tensor, hidden: Tensor) -> Tensor:
    for i, layer in enumerate(layers):
        hidden = adjacency @ layer(hidden)
        hidden = F.relu(hidden) if i + 1 < len(layers) else hidden
    return hidden


def _positive(value: Tensor) -> Tensor:
    return F.softplus(value) + torch.finfo(value.dtype).eps
