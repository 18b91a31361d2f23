r"""Linear predictor: the Gaussian latent sites of a Pyro program, and the dependence of its data on them.

Given the hyperparameters, a generalized linear mixed model is linear in its Gaussian values: values u of
nearest-neighbor Gaussian processes, and white values w of coefficients and group effects, :math:`c = \mu + \sigma w`.
Together they are the leaves. The parameters of the data are then :math:`\phi = \phi_0 + J\, \mathrm{leaves}`. J is read
from the program by automatic differentiation, so it does not matter how the program is written. A row of J has one
entry for each nearest-neighbor site and for each set of group effects, and a dense part for coefficients. The position
of this entry is computed once, from products with the row numbers.

A program whose data are not linear in the leaves is linearized at the center of the guide.

Cost: one run of the program and a product with J for each coefficient and each sparse block. Symbols: r rows of J.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from pyro import poutine
from pyro.distributions import MultivariateNormal, Normal
from pyro.poutine import Trace
from pyro.poutine.messenger import Messenger
from torch import Tensor

from pyro_nngp._checks import fail
from pyro_nngp._wrappers import base_distribution
from pyro_nngp.distributions import NNGP
from pyro_nngp.inference.autoguide.elimination import EliminationOrder
from pyro_nngp.inference.autoguide.quadratics import OpaqueSiteError

_FEW, _MOST = 8, 1000  # entries of a site that are dense columns at once, or if they must be
_LINEAR = 1e-3  # largest second difference of parameters that count as linear, relative to the first


def gaussian_base(fn: Any) -> Any:
    """The base of a distribution, if it is an NNGP over all points, normal or multivariate normal; else None."""
    base = base_distribution(fn, unmask=False)
    if isinstance(base, NNGP):
        return base if base.event_shape[0] == base.graph.num_points else None
    return base if isinstance(base, Normal | MultivariateNormal) else None


def leaf_shape(fn: Any) -> torch.Size:
    """Shape of the leaf of a site."""
    base = gaussian_base(fn)
    return base.batch_shape + base.event_shape


def irregular(number: int, shape: torch.Size) -> Tensor:
    """Values of a leaf at which nothing vanishes by chance; leaves of different numbers differ."""
    return torch.sin(1.0 + number + torch.arange(shape.numel())).reshape(shape)


def value_at(fn: Any, leaf: Tensor) -> Tensor:
    """The value of a site at its leaf."""
    base = gaussian_base(fn)
    if isinstance(base, NNGP):
        return leaf.to(base.graph.x)
    if isinstance(base, Normal):
        return base.loc + base.scale * leaf.to(base.loc)
    return base.loc + (base.scale_tril @ leaf.to(base.loc)[..., None])[..., 0]


def colored(fn: Any, leaf: Tensor) -> Tensor:
    """The value of a site as a function of hyperparameters, with the white values behind it held fixed."""
    base = gaussian_base(fn)
    return base.color(base.whiten(leaf.to(base.graph.x)).detach()) if isinstance(base, NNGP) else value_at(fn, leaf)


def log_det_root(fn: Any) -> Tensor:
    """Log determinant of the map from independent standard normal values to the value of a site, per event."""
    base = gaussian_base(fn)
    if isinstance(base, NNGP):
        log_det = 0.5 * base.conditionals[1].log().sum(-1)
        log_det = log_det.expand(torch.broadcast_shapes(log_det.shape, base.batch_shape))
    elif isinstance(base, Normal):
        log_det = base.scale.log().expand(base.batch_shape)
    else:
        log_det = base.scale_tril.diagonal(dim1=-2, dim2=-1).log().sum(-1).expand(base.batch_shape)
    extra = fn.event_dim - base.event_dim
    return log_det.sum(tuple(range(-extra, 0))) if extra else log_det


class AtLeaves(Messenger):
    """Set hyperparameters to values, and Gaussian sites to their values at leaves."""

    def __init__(self, values: Mapping[str, Tensor], leaves: Mapping[str, Tensor], place: Callable = value_at) -> None:
        super().__init__()
        self._values, self._leaves, self._place = values, leaves, place

    def _pyro_sample(self, msg: Any) -> None:
        if msg["is_observed"]:
            return
        if msg["name"] in self._values:
            msg["value"] = self._values[msg["name"]]
        elif msg["name"] in self._leaves:
            msg["value"] = self._place(msg["fn"], self._leaves[msg["name"]])


def run_at_leaves(
    model: Callable,
    args: tuple,
    kwargs: Mapping[str, Any],
    values: Mapping[str, Tensor],
    leaves: Mapping[str, Tensor],
    place: Callable = value_at,
) -> Trace:
    """Trace of a program at values and leaves; handlers around it do not see it."""
    with poutine.block():
        return poutine.trace(AtLeaves(values, leaves, place)(model)).get_trace(*args, **kwargs)


class Jacobian:
    """Products with the derivative of parameters phi in leaves.

    Args:
        phi: (r,), with gradients in the leaves.
        leaves: the leaves by name.
    """

    def __init__(self, phi: Float[Tensor, " r"], leaves: Mapping[str, Tensor]) -> None:
        self.leaves = leaves
        self._right = torch.zeros_like(phi).requires_grad_()
        settings: dict[str, Any] = {"create_graph": True, "allow_unused": True}
        self._transposed = torch.autograd.grad(phi, list(leaves.values()), self._right, **settings)

    def __len__(self) -> int:
        return len(self._right)

    def __call__(self, name: str, direction: Tensor) -> Float[Tensor, " r"]:
        """J times a direction in one leaf."""
        image = self._transposed[list(self.leaves).index(name)]
        if image is None or not image.requires_grad:
            return torch.zeros_like(self._right, requires_grad=False)
        (product,) = torch.autograd.grad(image, self._right, direction.to(image), retain_graph=True, allow_unused=True)
        return torch.zeros_like(self._right, requires_grad=False) if product is None else product.detach()


class Blocks:
    """The structure of J: the entries of each leaf that rows read, and the leaves with dense columns.

    Args:
        jacobian: J at some hyperparameters and leaves at which no entry vanishes by chance.
        processes: {name: N} for leaves that are values of processes, (*L, N).

    Attributes:
        entries: {name: (L, r)} for sparse leaves, the entry that each row reads of each of the L vectors of a leaf; -1
            where it reads none.
        dense: names of other leaves.
        order: the order of elimination of the sparse leaves.

    Raises:
        ValueError: if a row reads several entries of a process, or of another leaf of more than 1,000.
    """

    def __init__(self, jacobian: Jacobian, processes: Mapping[str, int]) -> None:
        self.entries: dict[str, Tensor] = {}
        self.dense: list[str] = []
        self.order = EliminationOrder()
        for name, leaf in jacobian.leaves.items():
            small = leaf.numel() <= _FEW and name not in processes
            entries = None if small else _entries(jacobian, name, processes.get(name, leaf.numel()))
            if entries is not None:
                self.entries[name] = entries
            elif name in processes or leaf.numel() > _MOST:
                cure = "Let each observation read one of its values, or take another guide after NNGPReparam."
                fail("AutoNNGP", f"site {name!r}", "read at one point by each observation", "several points", cure)
            else:
                self.dense.append(name)

    def of(
        self, jacobian: Jacobian
    ) -> tuple[Int[np.ndarray, "r E"], Float[np.ndarray, "r E"], Float[np.ndarray, "r p"]]:
        """Positions of the entries that each row reads among all sparse leaves, J there, and the dense columns of J.

        Positions are -1, and J is 0, where a row reads no entry.
        """
        positions, scales, columns, first = [], [], [], 0
        for name, entries in self.entries.items():
            leaf, number = jacobian.leaves[name], len(entries)
            size = leaf.numel() // number
            for i, (part, ones) in enumerate(zip(entries.numpy(), _ones(leaf, number), strict=True)):
                positions.append(np.where(part < 0, -1, first + i * size + part))
                scales.append(np.where(part < 0, 0.0, jacobian(name, ones).double().cpu().numpy()))
            first += leaf.numel()
        for name in self.dense:
            leaf = jacobian.leaves[name]
            each = torch.eye(leaf.numel(), dtype=leaf.dtype, device=leaf.device).reshape(-1, *leaf.shape)
            columns += [jacobian(name, direction).double().cpu().numpy() for direction in each]
        dense = np.stack(columns, -1) if columns else np.zeros((len(jacobian), 0))
        return np.stack(positions, -1), np.stack(scales, -1), dense


def linear_sites(
    sites: Mapping[str, Any], phi_at: Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], Tensor]
) -> list[str]:
    """Names of the processes, and of the normal sites in which the data are linear, jointly with the processes.

    Args:
        sites: the latent sites of a trace.
        phi_at: parameters of the data, (r,), at values of some sites and leaves of the other ones.
    """
    waiting = [
        name for name, site in sites.items() if isinstance(gaussian_base(site["fn"]), Normal | MultivariateNormal)
    ]
    chosen = [name for name, site in sites.items() if isinstance(gaussian_base(site["fn"]), NNGP)]
    steps = {}
    for i, name in enumerate([*chosen, *waiting]):
        steps[name] = irregular(i, leaf_shape(sites[name]["fn"])).to(sites[name]["value"])

    def at(length: float, names: list[str], new: str | None) -> Tensor:
        values = {name: site["value"].detach() for name, site in sites.items() if name not in names}
        return phi_at(values, {name: steps[name] * (length if name != new else 0.0) for name in names})

    def is_linear(names: list[str], new: str | None = None) -> bool:
        try:
            zero, one, two = (at(length, names, None) for length in (0.0, 1.0, 2.0))
        except OpaqueSiteError:
            if new is None:
                raise
            return False
        if new is not None and torch.equal(at(1.0, names, new), one):
            return False  # it has no effect while sites that depend on it are fixed
        return bool((two - 2 * one + zero).abs().max() <= _LINEAR * (two - zero).abs().max())

    if not is_linear(chosen):
        steps |= {name: torch.zeros_like(steps[name]) for name in chosen}
    while True:
        added = next((name for name in waiting if is_linear([*chosen, name], name)), None)
        if added is None:
            break
        chosen.append(added)
        waiting.remove(added)
    return [name for name in sites if name in chosen]


def _ones(leaf: Tensor, number: int) -> list[Tensor]:
    """Directions that are 1 in all entries of one vector of a leaf, for each vector."""
    each = torch.eye(number, dtype=leaf.dtype, device=leaf.device)
    return list(each[..., None].expand(number, number, leaf.numel() // number).reshape(number, *leaf.shape))


def _entries(jacobian: Jacobian, name: str, size: int) -> Tensor | None:
    """Entries that the rows read of each vector of a leaf, (L, r); None if a row reads several of one vector."""
    leaf, entries = jacobian.leaves[name], []
    numbers = torch.arange(size, dtype=leaf.dtype, device=leaf.device)
    numbers = numbers.expand(leaf.numel() // size, size).reshape(leaf.shape)
    for ones in _ones(leaf, leaf.numel() // size):
        scale = jacobian(name, ones)
        largest = scale.abs().max()
        read = scale.abs() > 1e-12 * largest
        entry = torch.where(read, jacobian(name, ones * numbers) / torch.where(read, scale, 1.0), 0.0)
        entry = entry.round().long().clamp(0, size - 1)
        image, want = jacobian(name, ones * torch.sin(1.0 + numbers)), scale * torch.sin(1.0 + entry.to(scale))
        if not bool(((image - want).abs() <= 1e-3 * largest).all()):
            return None
        entries.append(torch.where(read, entry, -1).cpu())
    return torch.stack(entries)
