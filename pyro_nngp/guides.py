"""Gaussian variational families with one row of parameters per point, read and updated a batch at a time.

Cost: a batch touches its own rows alone. With ``sparse_grad`` the gradients are sparse too, so that an optimiser for
sparse gradients (``torch.optim.SparseAdam``) spends O(batch) per step whatever the number of points.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from pyro_nngp._checks import fail
from pyro_nngp.distributions import SparseCholeskyNormal
from pyro_nngp.module import GPModule, pyro_entry


class LocalGaussian(GPModule):
    r"""q(u) = N(m, R R^T) for L independent latent functions at M points; R diagonal, or sparse on a pattern.

    Args:
        num_points: M.
        pattern: columns of R beside the diagonal, (M, K), -1 padded; None for a mean-field family.
        num_latents: L; None is one function, without a batch dimension of its own.
        loc: initial mean, (M, L); None is zero.
        scale: initial standard deviation, positive.
        like: tensor whose dtype and device the parameters take.

    Raises:
        ValueError: if `scale` is not positive or a shape is wrong.
    """

    def __init__(
        self,
        num_points: int,
        pattern: Int[Tensor, "M K"] | None = None,
        num_latents: int | None = None,
        loc: Float[Tensor, "M L"] | None = None,
        scale: float = 0.1,
        like: Tensor | None = None,
    ) -> None:
        super().__init__()
        if scale <= 0:
            fail("LocalGaussian", "scale", "> 0", scale, "It is the initial standard deviation.")
        like = torch.empty(0) if like is None else like
        shape = (num_points, num_latents or 1)
        if loc is not None and loc.shape != shape:
            fail(
                "LocalGaussian", "loc", f"of shape {shape}", tuple(loc.shape), "One initial mean per point and latent."
            )
        self.num_latents, self.sparse_grad = num_latents, False
        self.loc = nn.Parameter(like.new_zeros(shape) if loc is None else loc.detach().clone().to(like))
        self.log_scale = nn.Parameter(like.new_full(shape, scale).log())
        self.register_buffer("pattern", pattern)
        if pattern is not None:
            self.weights = nn.Parameter(like.new_zeros(num_points, shape[1] * pattern.shape[1]))

    @pyro_entry
    def distribution(
        self, rows: Int[Tensor, " U"] | None = None, targets: Int[Tensor, " B"] | None = None
    ) -> SparseCholeskyNormal:
        """q at some points (None: all), batch shape (L,) or (), event shape (U,); its log density counts `targets`."""
        loc, scale = self._read(self.loc, rows).mT, self._read(self.log_scale, rows).mT.exp()
        weights, pattern = None, None
        if self.pattern is not None:
            weights = self._read(self.weights, rows).unflatten(-1, (loc.shape[0], -1)).movedim(0, -2)
            pattern = self.pattern if rows is None else self.pattern[rows]
        if self.num_latents is None:
            loc, scale, weights = loc[0], scale[0], None if weights is None else weights[0]
        return SparseCholeskyNormal(loc, scale, weights, pattern, rows, targets)

    @torch.no_grad()
    def change_pattern(self, pattern: Int[Tensor, "M K"]) -> None:
        """Move to another pattern of the same width: columns in both keep their entries, new ones start at 0."""
        old = self.weights.unflatten(-1, (self.loc.shape[1], -1))
        new = torch.zeros_like(old)
        for part in torch.arange(len(pattern), device=pattern.device).split(max(1, 2**24 // pattern.shape[1] ** 2)):
            same = (pattern[part][:, :, None] == self.pattern[part][:, None, :]) & (pattern[part] >= 0)[:, :, None]
            new[part] = torch.einsum("mij,mlj->mli", same.to(old.dtype), old[part])
        self.weights.copy_(new.flatten(-2))
        self.pattern.copy_(pattern)

    def _read(self, table: Tensor, rows: Tensor | None) -> Tensor:
        return table if rows is None else F.embedding(rows, table, sparse=self.sparse_grad)
