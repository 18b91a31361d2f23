"""A run of a model or a guide on a batch of rows: hyperparameters, plates, and the sites f and y.

Symbols: N data, B rows of the batch, L latent functions, T outputs.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.infer.autoguide.initialization import InitMessenger
from pyro.infer.util import is_validation_enabled
from pyro.nn.module import _make_name
from pyro.poutine import runtime
from pyro.poutine.enum_messenger import EnumMessenger
from pyro.poutine.runtime import get_plates
from torch import Tensor

from pyro_nngp._checks import check_batch, fail, warn
from pyro_nngp.bound import Bound, read, read_program
from pyro_nngp.hyperparameters import check_same_sites
from pyro_nngp.hyperparameters.values import Values, program_values, split_sets
from pyro_nngp.likelihoods import Likelihood
from pyro_nngp.rows import At, Rows, at


class Program:
    """One run of a method's model or guide.

    Attributes:
        idx: rows of the batch; None is all.
        at: the same as an index.
        rows: the data.
        values: values of the hyperparameters with priors.
        num_plates: dimensions of the plates: the data, and the latent functions, if they have one.
        bound: the hyperparameters.
    """

    def __init__(self, method: Any, idx: Tensor | None, values: Values) -> None:
        self.name: str = method._pyro_name
        self.num_plates: int = method.num_plates
        self.rows: Rows = method.rows
        self.idx, self.at, self.values = idx, at(idx), values
        self.bound, self._method = read_program(method, values), method
        self._plates: tuple[AbstractContextManager, AbstractContextManager] | None = None

    @classmethod
    def model(cls, method: Any, idx: Tensor | None) -> "Program":
        """The start of every model: check the batch, and read the hyperparameters as sites."""
        where, rows = f"{type(method).__name__}.model", method.rows
        _check_start(where, rows, idx, method.num_plates)
        if _starts_hmc():
            _check_hmc(where, rows, idx)
        with rows.shared():
            return cls(method, idx, program_values(method))

    @classmethod
    def guide(cls, method: Any, idx: Tensor | None) -> "Program":
        """The start of every guide: check the batch, and sample the hyperparameters from their guide."""
        where, rows = f"{type(method).__name__}.guide", method.rows
        _check_start(where, rows, idx, method.num_plates)
        check_same_sites(where, method, method.hyper_guide)
        with rows.shared():
            return cls(method, idx, method.hyper_guide.sample())

    def sets(self) -> tuple[list[Bound], torch.Size]:
        """The hyperparameters one set after the other, for code that takes one at a time.

        Returns:
            The sets, and the batch shape that they have in row-major order: :attr:`bound` and () where there is one.
        """
        sets, batch = split_sets(self.values)
        return ([read(self._method, one) for one in sets] if batch else [self.bound]), batch

    def site(self, name: str) -> str:
        """Full name of a site or plate: with the name of the method, if any, as prefix."""
        return _make_name(self.name, name)

    @property
    def plates(self) -> tuple[AbstractContextManager, AbstractContextManager]:
        """The plate of the data, and to its left the plate of latent functions, if any; made once per run."""
        if self._plates is None:
            data = pyro.plate(self.site("data"), self.rows.num_data, subsample=self.idx, dim=-1)
            shape = self.bound.latent_shape if self.num_plates > 1 else ()
            self._plates = data, pyro.plate(self.site("latents"), *shape, dim=-2) if shape else nullcontext()
        return self._plates

    @property
    def x(self) -> Tensor:
        """Inputs of the batch."""
        return self.rows.inputs(self.idx)

    @property
    def y(self) -> Tensor:
        """Targets of the batch, outputs first."""
        return self.rows.targets(self.idx)

    def mean(self) -> Tensor:
        """The mean function at the batch plus the offset."""
        return self.rows.mean(self.bound, self.at, self.x)

    def likelihood(self, rows: At | None = None) -> Likelihood:
        """The likelihood of the batch, or of some rows."""
        return self.rows.likelihood(self.bound, self.at if rows is None else rows)

    def outside(self, value: Tensor, event_dim: int) -> Tensor:
        """A value (S, 1.., *event) from outside of the plates as it is used within them."""
        batch, plates = value.shape[: value.dim() - event_dim], self.num_plates
        return value.reshape(*batch[:-plates], *value.shape[len(batch) :]) if len(batch) > plates else value

    def sample_f(self, loc: Tensor, var: Tensor, marginal: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """The site f ~ N(loc, var) given the inducing values.

        The guide gives `marginal`, mean and variance with the inducing values integrated out, which the integrating
        ELBO reads; given the inducing values it draws f as the model does.
        """
        infer: dict[str, Any] = {}
        if marginal is not None:
            infer = {"marginal": dist.Normal(marginal[0], marginal[1].sqrt()), "as_model": True}
        data, latents = self.plates
        with latents, data:
            return pyro.sample(self.site("f"), dist.Normal(loc, var.sqrt().expand(loc.shape)), infer=infer)

    def record_f(self, f: Tensor, marginal: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Record f as a deterministic function of other sites; `marginal` as in :meth:`sample_f`."""
        data, latents = self.plates
        with latents, data:
            if marginal is None:
                return pyro.deterministic(self.site("f"), f, event_dim=0)
            infer = {"marginal": dist.Normal(marginal[0], marginal[1].sqrt()), "is_auxiliary": True}
            return pyro.sample(self.site("f"), dist.Delta(f, event_dim=0).mask(False), infer=infer)

    def observe(self, f: Tensor, likelihood: Likelihood | None = None) -> Tensor:
        """The site y given f at the batch; returns f if there is no likelihood. `likelihood` replaces the model's."""
        if self.bound.likelihood is None:
            return f
        likelihood = self.likelihood() if likelihood is None else likelihood
        infer = {"integrate": (self.site("f"), likelihood)}
        return self.sample_y(likelihood, likelihood(latents_first(likelihood, f)), infer)

    def sample_y(self, likelihood: Likelihood, y: Any, infer: dict[str, Any] | None = None) -> Tensor:
        """The observed site y with the weights of the rows."""
        data, latents = self.plates
        with latents if likelihood.num_latents is None else nullcontext(), data, self.weighted():
            return pyro.sample(self.site("y"), y, obs=self.y, infer=infer)

    def weighted(self) -> AbstractContextManager:
        """A context in which the log densities of the batch have their weights."""
        weights = self.rows.weights
        return nullcontext() if weights is None else poutine.scale(scale=weights[self.at].movedim(0, -1))


def latents_first(likelihood: Likelihood, value: Tensor) -> Tensor:
    r"""Values (\*S, L, B) as a likelihood of L latent functions per datum takes them, (L, \*S, 1, B)."""
    if likelihood.num_latents is None or value.dim() == 2:
        return value
    return value.movedim(-2, 0)[..., None, :]


def _check_start(where: str, rows: Rows, idx: Tensor | None, num_plates: int) -> None:
    plates = [frame for frame in get_plates() if frame.vectorized]
    if any(frame.dim >= -num_plates for frame in plates):
        cure = f"Give the plate a dim of {-num_plates - 1} or less: the plates of the model come to its right."
        inside = [f"{frame.name} (dim={frame.dim})" for frame in plates if frame.dim >= -num_plates]
        fail(where, "vectorized plates", f"to the left of dimension {-num_plates}", inside, cure)
    if idx is None and not rows.is_whole:
        cure = "Pass idx=torch.arange(gp.num_data), or train by fit."
        fail(where, "idx", "with own rows on several processes", None, cure)
    if idx is not None and is_validation_enabled():
        check_batch(where, "idx", idx, rows.num_data)


def _check_hmc(where: str, rows: Rows, idx: Tensor | None) -> None:
    if not rows.is_whole and rows.num_data < rows.num_rows:
        cure = "Take SGLD, SGHMC or SGNHT, which sum gradients over the processes, or one process."
        fail(where, "HMC and NUTS", "to run on one process", "several", cure, TypeError)
    if idx is not None and len(idx) < rows.num_data:
        warn(
            f"{where}: HMC and NUTS on {len(idx)} of {rows.num_data} rows draw from the posterior of these rows, each "
            f"counted {rows.num_data / max(len(idx), 1):.3g} times: intervals are too narrow. "
            "Run without idx, or build the method on these rows alone."
        )


def _starts_hmc() -> bool:
    """Whether the program runs in the setup of HMC or NUTS: no other algorithm both initializes and enumerates it."""
    return {InitMessenger, EnumMessenger} <= {type(handler) for handler in runtime._PYRO_STACK}


__all__ = ["Program", "latents_first"]
