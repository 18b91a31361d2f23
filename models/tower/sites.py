"""Data, sites and plates of a method: the building blocks of model and guide.

Symbols as in :mod:`pyro_nngp.models.tower.method`.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias, cast

import pyro
import pyro.distributions as dist
from pyro import poutine
from pyro.infer.autoguide.initialization import InitMessenger
from pyro.infer.util import is_validation_enabled
from pyro.poutine import runtime
from pyro.poutine.enum_messenger import EnumMessenger
from pyro.poutine.runtime import get_plates
from torch import Tensor

from pyro_nngp._checks import check_batch, fail, warn
from pyro_nngp.distributed import ShardedData
from pyro_nngp.hyperparameters import (
    GPModule,
    HyperparameterGuide,
    check_same_sites,
    pyro_entry,
    read_hyperparameters,
)
from pyro_nngp.hyperparameters.batches import batch_shape_of, placed
from pyro_nngp.hyperparameters.reading import sampled_value
from pyro_nngp.kernels import Covariance, bind
from pyro_nngp.likelihoods import Likelihood
from pyro_nngp.means import ConstantMean

Plates: TypeAlias = tuple[AbstractContextManager, AbstractContextManager]


_EVERY = slice(None)


def rows_of(idx: Tensor | None) -> Tensor | slice:
    """Rows of a batch: None is all."""
    return _EVERY if idx is None else idx


ByRow = Mapping[str, Tensor]
"""Numbers of trials and limits of some rows, outputs first, as arguments of :meth:`Likelihood.for_rows`."""


class DataSites(GPModule):
    """Sites of hyperparameters, f and y on rows of the data; base of :class:`~pyro_nngp.models.tower.GPMethod`."""

    x: Tensor
    y: Tensor | None
    offset: Tensor | None
    weights: Tensor | None
    trials: Tensor | None
    limits: Tensor | None
    latent_shape: tuple[int, ...]
    likelihood: Likelihood | None
    mean: Callable
    kernel: Any
    takes_missing = False  # whether some outputs of a row may be NaN
    vectorizes = False  # whether model and guide run within vectorized plates
    hyper_guide: HyperparameterGuide
    shard: ShardedData | None = None  # the rows of all processes, if these are not all
    is_part: bool = False  # whether these are rows of a method on several processes

    _takes_missing = property(lambda self: self.takes_missing)
    _can_distribute = property(lambda self: self.can_distribute)

    @property
    def num_data(self) -> int:
        """N; on several processes the number of own rows, which come first in x and y."""
        return len(self.x) if self.shard is None else self.shard.num_own

    @property
    def num_rows(self) -> int:
        """N, on all processes."""
        return len(self.x) if self.shard is None else self.shard.num_rows

    @property
    def share(self) -> float:
        """n / N: the part of all rows that this process has."""
        return self.num_data / self.num_rows

    def total(self, part: Tensor) -> Tensor:
        """The sum over all rows, from that over the own ones; all processes must call it at the same time."""
        return part if self.shard is None else self.shard.world.sum(part)

    def shared_sites(self) -> AbstractContextManager:
        """A context for sites that do not belong to rows: each process counts them with its share."""
        return nullcontext() if self.shard is None else poutine.scale(scale=self.share)

    @property
    def num_latents(self) -> int | None:
        """L; None for one latent function, without an extra dimension."""
        return self.latent_shape[0] if self.latent_shape else None

    @property
    def num_plates(self) -> int:
        """Dimensions of the plates of the model: that of the data, and that of latent functions."""
        return 1 + len(self.latent_shape)

    def start_model(self, idx: Tensor | None) -> None:
        """The start of every model: check the rows, then sample the hyperparameters."""
        self._check_start("model", idx)
        if self.shard is not None and self.shard.world.size > 1 and _starts_hmc():
            cure = "Take SGLD, SGHMC or SGNHT, which sum gradients over the processes, or one process."
            fail(f"{type(self).__name__}.model", "HMC and NUTS", "to run on one process", "several", cure, TypeError)
        if idx is not None and len(idx) < self.num_data and _starts_hmc():
            warn(
                f"{type(self).__name__}.model: HMC and NUTS on {len(idx)} of {self.num_data} rows draw from the "
                f"posterior of these rows, each counted {self.num_data / max(len(idx), 1):.3g} times: intervals are "
                "too narrow. "
                "Run without idx, or build the method on these rows alone."
            )
        with self.shared_sites():
            read_hyperparameters(self)

    def start_guide(self, idx: Tensor | None) -> None:
        """The start of every guide: check the rows, then sample the hyperparameters' guide."""
        self._check_start("guide", idx)
        check_same_sites(f"{type(self).__name__}.guide", self, self.hyper_guide)
        with self.shared_sites():
            self.hyper_guide()

    def _place_medians(self) -> None:
        """Set hyperparameters that have priors to the median of their guide, within the present Pyro context."""
        check_same_sites(type(self).__name__, self, self.hyper_guide)
        self.hyper_guide.median()

    def _check_start(self, method: str, idx: Tensor | None) -> None:
        where = f"{type(self).__name__}.{method}"
        plates = [frame for frame in get_plates() if frame.vectorized]
        if plates and not self.vectorizes:
            cure = "Take parallel=False, vectorize_particles=False, or a loop over a sequential plate."
            fail(where, "to run", "outside vectorized plates", [frame.name for frame in plates], cure)
        own = self.num_plates
        if any(frame.dim >= -own for frame in plates):
            cure = f"Give the plate a dim of {-own - 1} or less: the plates of the model come to its right."
            inside = [f"{frame.name} (dim={frame.dim})" for frame in plates if frame.dim >= -own]
            fail(where, "vectorized plates", f"to the left of dimension {-own}", inside, cure)
        if idx is None and self.shard is not None:
            cure = "Pass idx=torch.arange(gp.num_data), or train by fit."
            fail(where, "idx", "with own rows on several processes", None, cure)
        if idx is not None and is_validation_enabled():
            check_batch(where, "idx", idx, self.num_data)

    def covariance(self) -> Covariance:
        """The kernel with its hyperparameters read; batch dimensions as those of values in the data's plate."""
        return bind(self.kernel).shifted(-1)

    def outside(self, value: Tensor, own: int) -> Tensor:
        """A value of `own` event dimensions from outside of the plates, (S, 1.., ...), where it is used in them."""
        batch, plates = value.shape[: value.dim() - own], self.num_plates
        return value.reshape(*batch[:-plates], *value.shape[len(batch) :]) if len(batch) > plates else value

    def site(self, name: str) -> str:
        """Full name of a site or plate: with the name of the method, if any, as prefix."""
        return self._pyro_get_fullname(name)

    @pyro_entry
    def _mean_at(self, x: Tensor, rows: Tensor | slice | None = None) -> Tensor:
        """Values of the mean function at x, (B,), or (L, B) where it has one column per latent function.

        Where x are `rows` of the data, plus their offset.
        """
        if rows is not None and self.offset is not None:
            return self._mean_at(x) + self.offset[rows].movedim(0, -1)
        count = len(x)
        if isinstance(self.mean, ConstantMean) and "value" in self.mean._pyro_samples:
            value = self.mean.value.to(x.dtype)
            batch = batch_shape_of(self.mean, "value", value)
            own, batch = value.shape[len(batch) :], placed(batch)
            shape = *batch[: max(0, len(batch) - 1 - len(own))], *own
            return value.reshape(*shape, 1).expand(*shape, count)
        mean = self.mean(x)
        if not isinstance(mean, Tensor) or tuple(mean.shape) not in ((count,), (count, 1), (count, *self.latent_shape)):
            where, actual = type(self).__name__, tuple(mean.shape) if isinstance(mean, Tensor) else type(mean).__name__
            columns = f", or ({count}, {self.num_latents})" if self.latent_shape else ""
            cure = "One value per row of x, such as torch.nn.Linear(D, 1) gives."
            fail(where, "mean(x)", f"of shape ({count},) or ({count}, 1){columns}", actual, cure)
        if mean.dim() == 1:
            return mean
        return mean.squeeze(-1) if mean.shape[-1] == 1 else mean.mT

    def likelihood_at(self, rows: Tensor | slice = _EVERY) -> Likelihood:
        """The likelihood with its hyperparameters read, for some rows of the data (all by default)."""
        weights = None if self.weights is None else self.weights.movedim(0, -1)[..., rows]
        return cast(Likelihood, self.likelihood).bind().for_rows(weights, **self.by_row(rows))

    def by_row(self, rows: Tensor | slice = _EVERY) -> ByRow:
        """Numbers of trials and limits of some rows of the data, if there are any, outputs first."""
        given = {"trials": self.trials, "limits": self.limits}
        return {name: value.movedim(0, -1)[..., rows] for name, value in given.items() if value is not None}

    @property
    def differs_by_row(self) -> bool:
        """Whether rows have weights, trials or limits."""
        return any(value is not None for value in (self.weights, self.trials, self.limits))

    def _inputs(self, idx: Tensor | None) -> Tensor:
        return self.x if idx is None else self.x.index_select(0, idx.to(self.x.device))

    def _targets(self, idx: Tensor | None) -> Tensor | None:
        """y at the batch, outputs first."""
        if self.y is None or idx is None:
            return None if self.y is None else self.y.movedim(0, -1)
        return self.y.index_select(0, idx.to(self.y.device)).movedim(0, -1)

    def plates(self, idx: Tensor | None) -> Plates:
        """The plate of the data, and to its left that of latent functions; made once per call of model or guide."""
        data = sampled_value(
            self, "data", lambda _: pyro.plate(self.site("data"), self.num_data, subsample=idx, dim=-1)
        )
        if not self.latent_shape:
            return data, nullcontext()
        return data, pyro.plate(self.site("latents"), *self.latent_shape, dim=-2)

    def sample_f(self, plates: Plates, loc: Tensor, var: Tensor, marginal: tuple | None = None) -> Tensor:
        """The site f ~ N(loc, var) given the inducing values.

        The guide gives `marginal`, mean and variance with the inducing values integrated out, which the integrating
        ELBO reads; given the inducing values it draws f as the model does.
        """
        infer: dict[str, Any] = {}
        if marginal is not None:
            infer = {"marginal": dist.Normal(marginal[0], marginal[1].sqrt()), "as_model": True}
        data, latents = plates
        with latents, data:
            return pyro.sample(self.site("f"), dist.Normal(loc, var.sqrt().expand(loc.shape)), infer=infer)

    def record_f(self, plates: Plates, f: Tensor, marginal: tuple | None = None) -> Tensor:
        """Record f as a deterministic function of other sites; `marginal` as in :meth:`sample_f`."""
        data, latents = plates
        with latents, data:
            if marginal is None:
                return pyro.deterministic(self.site("f"), f, event_dim=0)
            infer = {"marginal": dist.Normal(marginal[0], marginal[1].sqrt()), "is_auxiliary": True}
            return pyro.sample(self.site("f"), dist.Delta(f, event_dim=0).mask(False), infer=infer)

    def observe(self, plates: Plates, f: Tensor, idx: Tensor | None, likelihood: Likelihood | None = None) -> Tensor:
        """The site y given f at the batch; returns f if there is no likelihood. `likelihood` replaces the model's."""
        if self.likelihood is None:
            return f
        likelihood, (data, latents) = self.likelihood_at(rows_of(idx)) if likelihood is None else likelihood, plates
        f = latents_first(likelihood, f)
        with latents if likelihood.num_latents is None else nullcontext(), data, self.weighted(idx):
            infer = {"integrate": (self.site("f"), likelihood)}
            return pyro.sample(self.site("y"), likelihood(f), obs=self._targets(idx), infer=infer)

    def weighted(self, idx: Tensor | None) -> AbstractContextManager:
        """A context in which the log densities of data at the batch have their weights."""
        return nullcontext() if self.weights is None else poutine.scale(scale=self.weights[rows_of(idx)].movedim(0, -1))


def latents_first(likelihood: Likelihood, value: Tensor) -> Tensor:
    r"""Values (\*S, L, B) as a likelihood of L latent functions per datum takes them, (L, \*S, 1, B)."""
    if likelihood.num_latents is None or value.dim() == 2:
        return value
    return value.movedim(-2, 0)[..., None, :]


def _starts_hmc() -> bool:
    """Whether the program runs in the setup of HMC or NUTS: no other algorithm both initializes and enumerates it."""
    handlers = {type(handler) for handler in runtime._PYRO_STACK}
    return {InitMessenger, EnumMessenger} <= handlers
