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

Cost: a map takes O(N K) additions, and none of its parts K^3. Preparing it takes what the base class takes. Symbols:
h hyperparameters, N points, K neighbors.
"""

from typing import Any

import pyro
import torch
from jaxtyping import Float
from torch import Tensor

from pyro_nngp._wrappers import base_distribution
from pyro_nngp.inference.autoguide.conditional import ConditionalPosterior
from pyro_nngp.inference.autoguide.transport import At, Effects, Place, Transported, levels_of, prior_of
from pyro_nngp.linalg import solve_triangular


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


class _FixedEffects(Effects):
    """The values of a process as a linear function of white ones, see the module."""

    def __init__(self, q: ConditionalPosterior, name: str, like: Tensor) -> None:
        super().__init__(q, name, like)
        base, self._name, self._place = q.prior(name), name, q.sparse_place(name)
        w, self._var, self.neighbors = (part.detach() for part in prior_of(base, len(self)))
        s = 1 / (1 / self._var + self.information)
        self._weights = s[:, None] * (w / self._var[:, None] + self.pull)
        self._levels = levels_of(base)
        self._at_center = torch.from_numpy(q.precision.slope()[self._place])
        self._mean, self._slope = self._mean_of(q).to(like), self._at_center.to(like)
        self._mean_change = self._log_var = like.new_zeros(0, len(self))

    def follow(self, ahead: ConditionalPosterior, behind: ConditionalPosterior) -> None:
        """Append half the differences of the mean and of the log conditional variances of the prior."""
        mean = self._mean_of(ahead) - self._mean_of(behind)
        logs = [prior_of(q.prior(self._name), len(self))[1].detach().log() for q in (ahead, behind)]
        self._mean_change = torch.cat([self._mean_change, (mean / 2)[None].to(self._mean)])
        self._log_var = torch.cat([self._log_var, ((logs[0] - logs[1]) / 2)[None].to(self._mean)])

    def at(self, z: Float[Tensor, " n"], coefficients: Float[Tensor, " p"], epsilon: Float[Tensor, " h"]) -> _Process:
        s = 1 / ((-epsilon @ self._log_var).exp() / self._var + self.information)
        deviation = solve_triangular(self._weights, self.neighbors, s.sqrt() * z, self._levels)
        mean = self._mean + epsilon @ self._mean_change + self._slope @ coefficients
        return _Process(mean + deviation, s.log().sum() / 2)

    def _mean_of(self, q: ConditionalPosterior) -> Tensor:
        """Mean of the process where coefficients are 0, by the slope in them at the center."""
        coefficients = q.mean[len(q) - self._at_center.shape[1] :]
        return q.mean[self._place] - self._at_center @ coefficients


class FixedTransport(Transported):
    """A program in the coordinates of a guide, by a map that is linear in the values of processes.

    The priors of processes keep their distributions in traces, for densities on a minibatch of their conditionals. The
    log volume of the map is the factor ``_volume``.
    """

    _of_process = _FixedEffects

    def _run(self, places: dict[str, Place], args: tuple, kwargs: dict[str, Any]) -> Any:
        processes = {name: place for name, place in places.items() if isinstance(place, _Process)}
        with _AtProcesses(places, processes):
            result = self.original(*args, **kwargs)
        pyro.factor("_volume", sum(place.volume for place in processes.values()))
        return result


__all__ = ["FixedTransport"]
