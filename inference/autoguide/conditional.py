r"""The Gaussian posterior of the Gaussian sites of a program at one value of its hyperparameters.

.. math:: q(z \mid \theta) \propto p(z \mid \theta) \prod_i
   \exp\!\big( g_i^\top \phi_i - \tfrac12 (\phi_i - \bar\phi_i)^\top H_i (\phi_i - \bar\phi_i) \big),
   \qquad \phi = \phi_0 + J z .

Values are vectors of leaves (:mod:`pyro_nngp.inference.autoguide.linear_predictor`): those with sparse columns of J
first, then the dense ones. The root of the precision is that of the prior above :math:`H^{1/2} J`.

Cost: see :mod:`pyro_nngp.linalg.factored_precision`.
"""

import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float
from pyro.distributions.util import scale_and_mask
from pyro.poutine import Trace
from scipy.sparse import block_diag, bsr_array, csr_array, eye_array, hstack, vstack
from torch import Tensor

from pyro_nngp.distributions import NNGP
from pyro_nngp.inference.autoguide.linear_predictor import Blocks, Jacobian, gaussian_base, log_det_root
from pyro_nngp.inference.autoguide.observations import ObservedSite, Quadratic
from pyro_nngp.linalg.factored_precision import FactoredPrecision


class ConditionalPosterior:
    """The posterior q(z | theta).

    Args:
        trace: trace of the program at the hyperparameters, with leaves of zero or, if it is not linear, of the center.
        observed: the observed sites that depend on the leaves.
        jacobian: J at these leaves.
        blocks: the structure of J.
        moments: for each observed site the mean of phi (n, k), and deviations of particles from it (S, n, k), at
            which the log likelihood is replaced by a quadratic function; without particles it is Laplace's method.

    Attributes:
        mean: mean of the leaves, (d,).
        precision: precision matrix of the leaves.
        sparse_names, dense_names: names of the sites, in the order of the leaves.
    """

    def __init__(
        self,
        trace: Trace,
        observed: list[ObservedSite],
        jacobian: Jacobian,
        blocks: Blocks,
        moments: Sequence[tuple[Tensor, Tensor]],
    ) -> None:
        self.trace, self.observed = trace, observed
        self.sparse_names, self.dense_names = [*blocks.entries], [*blocks.dense]
        self._names = [*self.sparse_names, *self.dense_names]
        self._shapes = [jacobian.leaves[name].shape for name in self._names]
        sparse, self._dense = blocks.of(jacobian)
        self._sparse = csr_array(hstack(list(sparse.values())))
        self._prior = csr_array(block_diag([_prior_root(trace, name, jacobian) for name in sparse]))
        quadratics = [each.quadratic(_particles(each, *moment)) for each, moment in zip(observed, moments, strict=True)]
        root = csr_array(block_diag([_block_matrix(each.root()) for each in quadratics]))
        rows, p = self._prior.shape[0], self._dense.shape[1]
        self.precision = FactoredPrecision(
            csr_array(vstack([self._prior, root @ self._sparse, csr_array((p, self._sparse.shape[1]))])),
            np.concatenate([np.zeros((rows, p)), root @ self._dense, np.eye(p)]),
        )
        at = torch.cat([jacobian.leaves[name].detach().flatten() for name in self._names]).double().cpu()
        here = torch.cat([each.phi.detach().double().cpu().flatten() for each in observed])
        self._phi_at_zero = here - self._product(at)
        force = [
            _force(each, mean - start)
            for each, (mean, _), start in zip(quadratics, moments, self._split(self._phi_at_zero), strict=True)
        ]
        self.mean = self.precision.solve(self._transposed_product(torch.cat(force)))

    def __len__(self) -> int:
        return len(self.precision)

    @property
    def is_flat(self) -> bool:
        """Whether the prior of no site depends on the values of other sites."""
        bases = [gaussian_base(self.trace.nodes[name]["fn"]) for name in self._names]
        return not any(
            base.mean.requires_grad or base.variance.requires_grad for base in bases if not isinstance(base, NNGP)
        )

    @property
    def dense_shapes(self) -> list[torch.Size]:
        """Shapes of the dense leaves."""
        return self._shapes[len(self.sparse_names) :]

    def sparse_place(self, name: str) -> slice:
        """Position of the values of a sparse leaf in the vector of leaves."""
        i = self.sparse_names.index(name)
        start = sum(shape.numel() for shape in self._shapes[:i])
        return slice(start, start + self._shapes[i].numel())

    def phi(self, leaves: Float[Tensor, "*S d"]) -> list[Float[Tensor, "*S n k"]]:
        """Parameters of each observed site at leaves, by the linear approximation."""
        return self._split(self._phi_at_zero + self._product(leaves))

    def by_name(self, leaves: Float[Tensor, "*S d"]) -> dict[str, Tensor]:
        """Leaves by name, in their shapes."""
        parts = leaves.split([shape.numel() for shape in self._shapes], -1)
        shaped = [part.reshape(leaves.shape[:-1] + shape) for part, shape in zip(parts, self._shapes, strict=True)]
        return dict(zip(self._names, shaped, strict=True))

    def draw(self, count: int) -> Float[Tensor, "S d"]:
        """Draws of the leaves."""
        return self.mean + self.precision.draw(count)

    def log_joint(self, leaves: Float[Tensor, " d"], phi: list[Tensor]) -> float:
        """Log density of the data at phi and of the leaves, up to a constant."""
        data = sum(float(e.log_prob(part.to(e.phi)).sum()) for e, part in zip(self.observed, phi, strict=True))
        m = self._sparse.shape[1]
        prior = np.square(self._prior @ leaves[:m].numpy()).sum() + np.square(leaves[m:].numpy()).sum()
        return data - float(prior) / 2

    def log_white_prob(self, leaves: Float[Tensor, "*S d"]) -> Float[Tensor, "*S"]:
        """Log density of the independent standard normal values from which the sites are computed."""
        return self.precision.log_prob(leaves - self.mean) + self._log_det_processes

    def log_evidence(self) -> float:
        """Log density of data and hyperparameters: the joint log density minus the one of q, at the mean of q."""
        density = self.log_joint(self.mean, self.phi(self.mean)) - len(self) * math.log(2 * math.pi) / 2
        names = {each.name for each in self.observed} | set(self._names)
        for name, site in self.trace.nodes.items():
            if site["type"] == "sample" and name not in names:
                log_prob = site["fn"].log_prob(site["value"])
                density += float(torch.as_tensor(scale_and_mask(log_prob, site["scale"], site["mask"])).sum())
        return density - float(self.log_white_prob(self.mean))

    @cached_property
    def _log_det_processes(self) -> float:
        every = [self.trace.nodes[name]["fn"] for name in self._names]
        return sum(float(log_det_root(fn).detach().sum()) for fn in every if isinstance(gaussian_base(fn), NNGP))

    def _product(self, leaves: Float[Tensor, "*S d"]) -> Float[Tensor, "*S r"]:
        m, flat = self._sparse.shape[1], leaves.reshape(-1, leaves.shape[-1]).numpy()
        product = (self._sparse @ flat[:, :m].T).T + flat[:, m:] @ self._dense.T
        return torch.from_numpy(product).reshape(*leaves.shape[:-1], -1)

    def _transposed_product(self, rows: Float[Tensor, " r"]) -> Float[Tensor, " d"]:
        return torch.from_numpy(np.concatenate([self._sparse.T @ rows.numpy(), self._dense.T @ rows.numpy()]))

    def _split(self, phi: Float[Tensor, "*S r"]) -> list[Tensor]:
        parts = phi.split([each.phi.numel() for each in self.observed], -1)
        return [part.reshape(*phi.shape[:-1], *e.phi.shape) for part, e in zip(parts, self.observed, strict=True)]


def _particles(site: ObservedSite, mean: Tensor, spread: Tensor) -> Float[Tensor, "S n k"]:
    """Particles in pairs around the mean; the mean alone if there are none."""
    return (torch.cat([mean + spread, mean - spread]) if len(spread) else mean[None]).to(site.phi)


def _force(quadratic: Quadratic, distance: Float[Tensor, "n k"]) -> Float[Tensor, " r"]:
    """Gradient of the quadratic function at phi_0, given the distance of its center from there."""
    curvature, gradient = quadratic.curvature.double().cpu(), quadratic.gradient.double().cpu()
    return ((curvature @ distance.cpu()[..., None])[..., 0] + gradient).flatten()


def _prior_root(trace: Trace, name: str, jacobian: Jacobian) -> csr_array:
    """Root of the prior precision of a leaf."""
    base = gaussian_base(trace.nodes[name]["fn"])
    if isinstance(base, NNGP):
        return csr_array(block_diag([factor.root() for factor in base.factor.sets(base.batch_shape)]))
    return csr_array(eye_array(jacobian.leaves[name].numel()))


def _block_matrix(blocks: Float[Tensor, "n k k"]) -> csr_array:
    n, k, _ = blocks.shape
    table = blocks.double().cpu().contiguous().numpy(), np.arange(n), np.arange(n + 1)
    return csr_array(bsr_array(table, shape=(n * k, n * k)))
