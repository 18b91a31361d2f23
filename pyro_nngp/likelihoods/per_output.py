"""One likelihood per output, such as a count beside a measurement, at the same locations or at others.

Cost: the sum over outputs. Symbols: T outputs, B points.
"""

from typing import Any

import torch
from jaxtyping import Float
from pyro.nn import PyroModule, pyro_method
from torch import Tensor, nn
from torch.distributions import Distribution

from pyro_nngp._checks import fail
from pyro_nngp.distributions.outputs import Outputs, missing_values, of_each_output
from pyro_nngp.likelihoods.base import Likelihood, check_likelihood


class PerOutput(Likelihood):
    r""":math:`y_t \sim p_t(y_t \mid f_t)`, independently for outputs t = 1..T, given their latent values.

    Latent values are (\*S, T, B), outputs in the last dimension but one, and so are the data; NaN are missing values.

    Args:
        outputs: a likelihood for each output, such as ``PerOutput(Poisson(), Gaussian())``.

    Raises:
        TypeError: if one is no likelihood, or one of several latent functions per output.
        ValueError: if there is none.
    """

    takes_missing = True
    outputs: Any

    def __init__(self, *outputs: Likelihood) -> None:
        super().__init__()
        if not outputs:
            fail("PerOutput", "outputs", "to be one likelihood per output", "none", "Pass PerOutput(Poisson(), ...).")
        for part in outputs:
            check_likelihood("PerOutput", part)
            if part.num_latents is not None or part.takes_missing:
                cure = "Pass others, such as Poisson() and Gaussian()."
                expectation = "to be likelihoods of one latent function each"
                fail("PerOutput", "outputs", expectation, type(part).__name__, cure, TypeError)
        self.outputs = PyroModule[nn.ModuleList](outputs)
        self.takes_trials = any(part.takes_trials for part in outputs)
        self.takes_limits = any(part.takes_limits for part in outputs)

    @property
    def is_gaussian(self) -> bool:  # type: ignore[override]
        """Whether all outputs have Gaussian noise."""
        return all(part.is_gaussian for part in self.outputs)

    @pyro_method
    def bind(self) -> "PerOutput":
        bound = super().bind()
        bound.__dict__["outputs"] = [_without_outputs(part.bind()) for part in self.outputs]
        return bound

    def _set_rows(self, trials: Tensor | None, limits: Tensor | None) -> None:
        """Trials and limits may be (T, B), one set for each output, as weights may."""
        outputs = enumerate(self.outputs)
        self.__dict__["outputs"] = [part.for_rows(None, _row(trials, t), _row(limits, t)) for t, part in outputs]

    def forward(self, f: Float[Tensor, "..."]) -> Distribution:
        return Outputs([part(f[..., t, :]) for t, part in enumerate(self.outputs)])

    @pyro_method
    def expected_log_prob(self, y: Tensor, loc: Float[Tensor, "..."], var: Float[Tensor, "..."]) -> Tensor:
        def expected(t: int, known: Tensor) -> Tensor:
            return self.outputs[t].expected_log_prob(known, loc[..., t, :], var[..., t, :])

        return of_each_output(y, [part.support for part in self.outputs], expected)

    @pyro_method
    def marginal(self, loc: Float[Tensor, "..."], var: Float[Tensor, "..."]) -> Distribution:
        return Outputs([part.marginal(loc[..., t, :], var[..., t, :]) for t, part in enumerate(self.outputs)])

    def check(self, y: Tensor) -> None:
        """Raise unless the values of each output that are there, y (T, N), are within its support."""
        if len(y) != len(self.outputs):
            cure = "Give one likelihood per output."
            fail("PerOutput", "y", f"with {len(self.outputs)} outputs", len(y), cure)
        for part, values in zip(self.outputs, y, strict=True):
            missing = missing_values(values)
            if part.differs_by_row:
                part.check(torch.where(missing, part.admissible(values), values))
            elif not bool(missing.all()):
                part.check(values[~missing])


def _row(values: Tensor | None, output: int) -> Tensor | None:
    return values if values is None or values.dim() == 1 else values[output]


def _without_outputs(part: Any) -> Any:
    """Drop the dimension of outputs from batches (*S, 1, 1) of hyperparameters of a bound likelihood."""
    for name, value in list(part.__dict__.items()):
        if isinstance(value, Likelihood):
            part.__dict__[name] = _without_outputs(value)
        elif name in part._pyro_samples and value.dim() > 1:
            part.__dict__[name] = value.squeeze(-2)
    return part
