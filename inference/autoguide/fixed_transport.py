r"""Transport of a program by a guide at a cost that does not grow with the data: a map that is fixed.

As :mod:`pyro_nngp.inference.autoguide.transport`, but values of processes are linear in the white ones at fixed
hyperparameters, by weights computed once:

.. math:: f = \bar f + \Delta \epsilon + T c + (I - W)^{-1} S(\epsilon)^{1/2} z, \qquad
   s_j(\epsilon)^{-1} = v_j^{-1} e^{-d_j^\top \epsilon} + \tau_j .

W and S are the factor of the guide's posterior at its center; :math:`\Delta` and :math:`d_j` are the changes of its
mean and of the log of the prior's conditional variances along each hyperparameter. So the prior is not evaluated to
find f, and its density may be a minibatch of conditionals. What data do not determine scales with the prior as
hyperparameters change: their distribution given z is nearly as wide as their posterior, where given f it is narrower
by the square root of the number of points.

The posterior of the program is kept exactly, whatever the map.

Cost: a map takes O(N K) additions, and none of its parts K^3. Preparing it takes what the base class takes, and 2 h
factorizations more. Symbols: h hyperparameters, N points, K neighbors.
"""

from typing import Any

import pyro
import torch
from jaxtyping import Float
from torch import Tensor

from pyro_nngp._wrappers import base_distribution
from pyro_nngp.inference.autoguide.auto_nngp import AutoNNGP
from pyro_nngp.inference.autoguide.conditional import ConditionalPosterior
from pyro_nngp.inference.autoguide.transport import At, Effects, Map, Place, Transported, levels_of, prior_of
from pyro_nngp.linalg import solve_triangular


class FixedTransport(Transported):
    """A program in the coordinates of a guide, by a map that is linear in the values of processes.

    The priors of processes keep their distributions in traces, for densities on a minibatch of their conditionals. The
    log volume of the map is the factor ``_volume``.
    """

    def _map_of(self, guide: AutoNNGP) -> Map:
        return _FixedMap(guide)

    def _run(self, places: dict[str, Place], args: tuple, kwargs: dict[str, Any]) -> Any:
        processes = {name: place for name, place in places.items() if isinstance(place, _Process)}
        with _AtProcesses(places, processes):
            result = self.original(*args, **kwargs)
        pyro.factor("_volume", sum(place.volume for place in processes.values()))
        return result


class _Process:
    """Values of a process at all points, and the log volume of their map."""

    def __init__(self, value: Tensor, volume: Tensor) -> None:
        self.value, self.volume = value, volume

    def __call__(self, fn: Any) -> tuple[Tensor, Tensor]:
        return self.value, self.volume


class _AtProcesses(At):
    """Set sites of processes to values, with their distributions, and other sites as the base class does."""

    def __init__(self, places: dict[str, Place], processes: dict[str, _Process]) -> None:
        super().__init__({name: place for name, place in places.items() if name not in processes})
        self._processes = processes

    def _pyro_sample(self, msg: Any) -> None:
        if msg["is_observed"] or msg["name"] not in self._processes:
            super()._pyro_sample(msg)
            return
        base, value = base_distribution(msg["fn"]), self._processes[msg["name"]].value
        value = value.reshape((*base.batch_shape, base.graph.num_points))
        msg["value"] = value if base.is_whole else value.index_select(-1, base.batch.rows)
        msg["is_observed"] = True


class _FixedMap(Map):
    """Map from standard normal values to a value of each site."""

    def __init__(self, guide: AutoNNGP) -> None:
        super().__init__(guide)
        center = self.posterior(torch.zeros(self._h))
        rows = {sign: [self.posterior(sign * row) for row in torch.eye(self._h)] for sign in (1, -1)}
        for name in center.processes:
            changes = [_change(a, b, center, name) for a, b in zip(rows[1], rows[-1], strict=True)]
            self._effects[name] = _FixedEffects(self._effects[name], center, name, changes, self.zero)


class _FixedEffects:
    """The values of a process as a linear function of white ones, see the module."""

    def __init__(
        self,
        effects: Effects,
        q: ConditionalPosterior,
        name: str,
        changes: list[tuple[Tensor, Tensor]],
        like: Tensor,
    ) -> None:
        base, self._information = q.prior(name), effects.information
        w, self._var, self._neighbors = (part.detach() for part in prior_of(base, len(effects)))
        s = 1 / (1 / self._var + self._information)
        self._weights = s[:, None] * (w / self._var[:, None] + effects.pull)
        self._levels = levels_of(base)
        self._mean, self._slope = (part.to(like) for part in _mean(q, q, name))
        self._mean_change = (
            torch.stack([mean for mean, _ in changes]).to(like) if changes else like.new_zeros(0, len(s))
        )
        self._log_var = torch.stack([log_var for _, log_var in changes]).to(like) if changes else self._mean_change

    def __len__(self) -> int:
        return len(self._mean)

    def at(self, z: Float[Tensor, " n"], coefficients: Float[Tensor, " p"], epsilon: Float[Tensor, " h"]) -> _Process:
        s = 1 / ((-epsilon @ self._log_var).exp() / self._var + self._information)
        deviation = solve_triangular(self._weights, self._neighbors, s.sqrt() * z, self._levels)
        mean = self._mean + epsilon @ self._mean_change + self._slope @ coefficients
        return _Process(mean + deviation, s.log().sum() / 2)


def _mean(q: ConditionalPosterior, center: ConditionalPosterior, name: str) -> tuple[Tensor, Tensor]:
    """Mean of a process where coefficients are 0, and its slope in them, at the center."""
    slopes = torch.from_numpy(center.precision.slope())
    coefficients = q.mean[len(q) - slopes.shape[1] :]
    slope = slopes[q.sparse_place(name)]
    return q.mean[q.sparse_place(name)] - slope @ coefficients, slope


def _change(
    ahead: ConditionalPosterior, behind: ConditionalPosterior, center: ConditionalPosterior, name: str
) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    """Half the differences of the mean and of the log conditional variances of the prior."""
    means = [_mean(q, center, name)[0] for q in (ahead, behind)]
    logs = [prior_of(q.prior(name), len(means[0]))[1].detach().log() for q in (ahead, behind)]
    return (means[0] - means[1]) / 2, (logs[0] - logs[1]) / 2


__all__ = ["FixedTransport"]
