"""A BoTorch model around a method: acquisition functions, fantasies and Thompson sampling on nearest neighbors.

Posteriors of up to 64 points at once are exact given the observations nearest to any of them
(:meth:`~pyro_nngp.models.base.Method.joint`), and differentiable in the points. Larger sets are drawn point
by point, each given its nearest observations and earlier points, in O(P K^3) for P of them: Thompson sampling over
100,000 candidates takes seconds.

Needs the extra ``botorch``. Cost: ``joint`` or ``sample`` of the method. Symbols: B batch dimensions, q points,
d inputs, S fantasies.

Reference: Balandat et al. (2020), "BoTorch: a framework for efficient Monte-Carlo Bayesian optimization", NeurIPS.
"""

from typing import Any

import torch
from torch import Tensor

from pyro_nngp._checks import check_int, check_tensor, fail, import_extra
from pyro_nngp._kinds import check_callable, draws_shape
from pyro_nngp.likelihoods import Gaussian
from pyro_nngp.models.base import Fantasies, Method

import_extra("pyro_nngp.adapters.botorch", "botorch", "botorch")

from botorch.models.model import FantasizeMixin, Model  # noqa: E402
from botorch.posteriors import GPyTorchPosterior, Posterior  # noqa: E402
from gpytorch.distributions import MultivariateNormal  # noqa: E402

_LARGEST = 64  # points of a posterior with a covariance matrix
_MANY = 64  # neighbors of each of many points that are drawn


class NearestNeighborModel(Model, FantasizeMixin):
    """A method of one output as a model of BoTorch.

    The method is trained before, by :func:`pyro_nngp.fit`, and new observations are appended to it by its ``extend``;
    this model follows it.

    Args:
        gp: :class:`~pyro_nngp.models.Vecchia`, :class:`~pyro_nngp.models.LOO` or :class:`~pyro_nngp.models.MLLk`, or
            :class:`~pyro_nngp.models.VNNGP` with its default q(u), whose posterior is about the latent function.
        num_neighbors: neighbors per point in predictions; None is the method's choice when the model is built, and for
            draws at more than 64 points at most 64.

    Raises:
        TypeError: for other methods.
        ValueError: for several outputs, or a number of neighbors out of range.
    """

    def __init__(self, gp: Method, *, num_neighbors: int | None = None) -> None:
        super().__init__()
        where = type(self).__name__
        if not hasattr(gp, "joint"):
            fail(where, "gp", "to be a method", type(gp).__name__, "Pass one such as a trained Vecchia.", TypeError)
        if num_neighbors is not None:
            check_int(where, "num_neighbors", num_neighbors, 1)
        self.gp = gp
        with torch.no_grad():  # raises for methods without observations of f
            gp.joint(gp.x[:1], num_neighbors=1)
        self.num_neighbors = gp.prediction_neighbors() if num_neighbors is None else num_neighbors
        self._most_drawn = _MANY if num_neighbors is None else num_neighbors
        self._fantasies: Fantasies | None = None

    @property
    def num_outputs(self) -> int:
        """Number of outputs, 1."""
        return 1

    @property
    def batch_shape(self) -> torch.Size:
        """Batch shape of the fantasies, () without any."""
        return torch.Size() if self._fantasies is None else self._fantasies.y.shape[:-1]

    @property
    def likelihood(self) -> Any:
        """The likelihood of the method."""
        return self.gp.likelihood

    def posterior(  # type: ignore[override] # of the mixin, whose arguments are fewer
        self,
        X: Tensor,
        output_indices: list[int] | None = None,
        observation_noise: bool | float | Tensor = False,
        posterior_transform: Any = None,
    ) -> Posterior:
        r"""Joint posterior at sets of points.

        Args:
            X: points, (\*B, q, d).
            output_indices: None or [0].
            observation_noise: whether to add the noise of the likelihood; or variances to add, one for all points or
                (\*B, q, 1).
            posterior_transform: a transform of BoTorch.

        Returns:
            A posterior with a covariance matrix for q up to 64; beyond, one that draws (:class:`DrawnPosterior`).

        Raises:
            ValueError, TypeError: for malformed points, another output, or noise of a likelihood that is not Gaussian.
        """
        where = f"{type(self).__name__}.posterior"
        if output_indices is not None and not (isinstance(output_indices, list) and output_indices == [0]):
            fail(where, "output_indices", "to be None or [0]", output_indices, "There is one output.")
        check_tensor(where, "X", X)
        if X.dim() < 2:
            fail(where, "X", "of shape (..., q, d)", tuple(X.shape), "Use X[None] for a single point.")
        if posterior_transform is not None:
            check_callable(where, "posterior_transform", posterior_transform, "Pass a PosteriorTransform.")
        noise = self._noise_of(where, observation_noise, X)
        k = min(self.num_neighbors, self.gp.num_data)
        if X.shape[-2] > _LARGEST:
            if X.dim() > 2 or self._fantasies is not None:
                expectation = f"of at most {_LARGEST} points per set, beyond which one set is drawn without fantasies"
                fail(where, "X", expectation, tuple(X.shape), "Split it, or condition on one observation at a time.")
            posterior: Posterior = DrawnPosterior(
                self.gp, X, min(k, self._most_drawn), None if noise is None else noise.expand(len(X))
            )
        else:
            loc, cov = self.gp.joint(X, num_neighbors=k, fantasies=self._fantasies)
            if noise is not None:
                cov = cov + torch.diag_embed(noise.expand(cov.shape[:-1]))
            posterior = GPyTorchPosterior(MultivariateNormal(loc, cov.expand(*loc.shape, -1)))
        return posterior if posterior_transform is None else posterior_transform(posterior=posterior, X=X)

    def condition_on_observations(  # type: ignore[override] # whose arguments are any
        self, X: Tensor, Y: Tensor, noise: Any = None
    ) -> "NearestNeighborModel":
        r"""The model given further observations, at the same hyperparameters.

        One set of observations is appended to a light copy of the method
        (:meth:`~pyro_nngp.models.base.Method.condition_on`). Batches are kept as fantasies, all of which each
        prediction is conditioned on, with gradients in X and Y.

        Args:
            X: points, (\*B, p, d).
            Y: their values, (\*S, \*B, p, 1).
            noise: None; the noise variance is the likelihood's.

        Raises:
            ValueError, TypeError: for malformed values, given noise variances, or batches of a likelihood that is not
                Gaussian.
        """
        where = f"{type(self).__name__}.condition_on_observations"
        if noise is not None:
            fail(where, "noise", "to be that of the likelihood", "other variances", "Leave it out.")
        check_tensor(where, "X", X)
        check_tensor(where, "Y", Y)
        if X.dim() < 2:
            fail(where, "X", "of shape (..., p, d)", tuple(X.shape), "Use X[None] for a single point.")
        if Y.shape[-1:] != (1,) or Y.shape[-2:-1] != X.shape[-2:-1]:
            fail(where, "Y", f"of shape (..., {X.shape[-2]}, 1)", tuple(Y.shape), "Give one value per point.")
        y = Y[..., 0]
        if X.dim() == 2 and y.dim() == 1 and self._fantasies is None and not (X.requires_grad or Y.requires_grad):
            grown = self.gp.condition_on(X, y)
            k = self.num_neighbors if self.num_neighbors < self.gp.num_data else grown.num_data
            return self._around(grown, k)
        self._noise(where)
        model, old = self._around(self.gp, self.num_neighbors), self._fantasies
        model._fantasies = Fantasies(X, y)
        if old is not None:
            model._fantasies = Fantasies(_joined(old.x, X, 2), _joined(old.y, y, 1))
        return model

    def _around(self, gp: Method, num_neighbors: int) -> "NearestNeighborModel":
        model = type(self)(gp, num_neighbors=num_neighbors)
        model._most_drawn = self._most_drawn
        return model

    def _noise_of(self, where: str, observation_noise: Any, X: Tensor) -> Tensor | None:
        """Variances of noise that a posterior includes, a scalar or one per point; None is no noise."""
        if isinstance(observation_noise, bool):
            return self._noise(where).to(X) if observation_noise else None
        if isinstance(observation_noise, int | float):
            observation_noise = torch.tensor(observation_noise)
        check_tensor(where, "observation_noise", observation_noise)
        noise = observation_noise.to(X)
        noise = noise.squeeze(-1) if noise.dim() else noise  # of the outputs
        if noise.dim() and noise.shape != X.shape[:-1][-noise.dim() :]:
            cure = "Give one variance, or one per point."
            fail(where, "observation_noise", f"of shape {(*X.shape[:-1], 1)}", tuple(observation_noise.shape), cure)
        if not bool((noise >= 0).all()):
            fail(where, "observation_noise", ">= 0", float(noise.min()), "It holds variances.")
        return noise

    def _noise(self, where: str) -> Tensor:
        if not isinstance(self.likelihood, Gaussian):
            actual = type(self.likelihood).__name__
            fail(where, "likelihood", "to be Gaussian for noisy values", actual, "Take the posterior of f.", TypeError)
        return self.gp.bound().likelihood.variance


class DrawnPosterior(Posterior):
    """Posterior at many points, by its moments and by joint draws without a covariance matrix or gradients.

    Args:
        gp: the method.
        x: points, (P, d).
        num_neighbors: neighbors per point.
        noise: variances of noise to add, (P,); None is no noise.
    """

    def __init__(self, gp: Method, x: Tensor, num_neighbors: int, noise: Tensor | None = None) -> None:
        self.gp, self.x, self.num_neighbors, self.noise = gp, x, num_neighbors, noise

    @property
    def device(self) -> torch.device:
        return self.x.device

    @property
    def dtype(self) -> torch.dtype:
        return self.x.dtype

    @property
    def mean(self) -> Tensor:
        """Means, (P, 1)."""
        return self.gp(self.x, num_neighbors=self.num_neighbors)[0][:, None]

    @property
    def variance(self) -> Tensor:
        """Variances, (P, 1)."""
        variance = self.gp(self.x, num_neighbors=self.num_neighbors)[1]
        return (variance if self.noise is None else variance + self.noise)[:, None]

    def rsample(self, sample_shape: torch.Size | None = None) -> Tensor:
        """Joint draws of shape sample_shape + (P, 1), without gradients."""
        shape = torch.Size([1]) if sample_shape is None else draws_shape("DrawnPosterior.rsample", sample_shape)
        draws = self.gp.sample(self.x, shape.numel(), num_neighbors=self.num_neighbors)
        if self.noise is not None:
            draws = draws + self.noise.sqrt() * torch.randn_like(draws)
        return draws.reshape(*shape, len(self.x), 1)

    def _extended_shape(self, sample_shape: torch.Size = torch.Size()) -> torch.Size:
        return torch.Size([*sample_shape, len(self.x), 1])


def _joined(old: Tensor, new: Tensor, event_dims: int) -> Tensor:
    """Concatenate two sets of fantasies, whose batch dimensions broadcast."""
    batch = torch.broadcast_shapes(old.shape[:-event_dims], new.shape[:-event_dims])
    return torch.cat([each.expand(*batch, *each.shape[-event_dims:]) for each in (old, new)], -event_dims)


__all__ = ["DrawnPosterior", "NearestNeighborModel"]
