r"""Non-parametric variational inference, NPVI and NPVI-NN (Liu and Liu 2019).

Nearest-neighbor prior on a graph with edges between near points in either direction (section 3.1), and a Gaussian guide
whose Cholesky factor is sparse on the same graph (eq. 4):

.. math:: \mathrm{ELBO} \approx \frac{N}{|I|} \sum_{i \in I} \Big( E_{q(f_i)} \log p(y_i \mid f_i) - KL_i \Big)
   \qquad\text{(eq. 12)}

.. math:: -KL_i = \underbrace{E_{q(f_i, f_{\alpha(i)})} \log p(f_i \mid f_{\alpha(i)})}_{\text{eq. 11}}
   + \underbrace{\tfrac12 \log 2 \pi e R_{ii}^2}_{\text{eq. 7}}
   = \log \frac{R_{ii}}{v_i^{1/2}} + \frac12 - \frac{Q_i Q_i^\top + (m_i - w_i^\top m_{\alpha(i)})^2}{2 v_i},
   \qquad Q_i = R_i - w_i^\top R_{\alpha(i)}

Places: :math:`\alpha(i)` is row i of ``graph``, a :class:`~pyro_nngp.neighbors.SymmetricGraph`. The paper's :math:`\mu`
and L (eq. 4) are m and R of ``q``; its b and :math:`\Sigma_{i \mid \alpha(i)}` (eq. 10) are w and v of the prior p(u)
in ``model``. The site ``y`` has eq. 6, integrated over :math:`q(f_i)`. The closed form above, with Q in it, is the
divergence of p(u) and q(u) in :mod:`pyro_nngp.distributions.sparse_cholesky`. The network of eq. 13 is
:class:`~pyro_nngp.variational.encoders.GraphConvolutionEncoder`.

The factor's rows are parameters of each point (NPVI), or come from networks that read the observations around the point
(NPVI-NN, section 3.3).

The prior is eq. 11, as in the paper's experiments; random pairs under a low-rank one (eq. 9) give estimates too
noisy to use (docs/mathematics.md).

Differs from the paper: the terms of the prior's log determinant are kept, so that the kernel can be learned;
likelihoods are integrated instead of sampled; without an encoder the optimal q(f) for the present hyperparameters is
also computed in closed form (:meth:`NPVI.solve`); a mean function; networks in units of the prior, and two more. The
theorem of section 3.1, that the posterior's covariances on all edges can be matched, holds only where the remainder for
the diagonal, :math:`V^*_{ii} - \| R_{i,\alpha(i)} \|^2`, is positive, which its proof assumes without saying so.

Cost per step: O(|I| K^3); an encoder also runs at the neighbors of the batch, at most O(|I| K^4).
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from pyro_nngp._checks import check_inputs, fail
from pyro_nngp.data.tables import Table, from_tables, read_rows
from pyro_nngp.likelihoods import Likelihood
from pyro_nngp.models.base.extension import check_names_by_row
from pyro_nngp.models.base.neighbor_choice import first_neighbors
from pyro_nngp.models.vnngp import VNNGP
from pyro_nngp.neighbors import SymmetricGraph
from pyro_nngp.variational import AmortizedGaussian
from pyro_nngp.variational.families import Amortized, MeanField, PseudoObservations, SparseCholesky


class NPVI(VNNGP):
    r"""Non-parametric variational inference; with an encoder, NPVI-NN.

    Generative model, with parents :math:`\alpha(i)` from a :class:`~pyro_nngp.neighbors.symmetric.SymmetricGraph`:

    .. math::
        u_i \mid u_{\alpha(i)} &\sim N(w_i^\top u_{\alpha(i)}, v_i), \quad f_i = \mu(x_i) + u_i, \\
        y_i \mid f_i &\sim p(y_i \mid f_i), \qquad i = 1..N.

    The guide is :math:`q(u) = N(m, R R^\top)` with row i of R supported on :math:`\alpha(i) \cup \{i\}`. Sites and
    methods are the same as in :class:`~pyro_nngp.models.VNNGP`. :meth:`solve` finds the best m and R for the present
    hyperparameters; :func:`~pyro_nngp.inference.fit` calls it, where the paper takes AdaGrad steps with learning rate
    0.2 (0.1 with networks) and batches of 50.

    Args:
        x: inputs (N, D).
        y: targets (N,), or (N, T) for T outputs of similar spread: independent functions of one kernel, and one noise.
            None where the model returns f for use in a larger program.
        kernel: a kernel, or any callable ``(..., n, D), (..., m, D) -> (..., n, m)``; None is Matern of a
            learned smoothness, for labels and below 100 rows Matern52, with one lengthscale per column. Unset
            hyperparameters start from the data (:mod:`pyro_nngp.starts.from_data`).
        likelihood: p(y | f); None is Gaussian, or without y makes ``model`` return f at the batch.
        num_neighbors: K, for prior and guide; None is 20, or all others where there are fewer.
        guide: None is the paper's sparse factor, :class:`~pyro_nngp.variational.SparseCholesky` on all neighbors
            (NPVI), whose variances are too small where the posterior reaches farther than K points. With
            :class:`~pyro_nngp.variational.Amortized` networks compute it:
            :class:`~pyro_nngp.variational.encoders.GraphConvolutionEncoder` is the paper's (NPVI-NN), which stays far
            behind the others, :class:`~pyro_nngp.variational.encoders.ConditionalEncoder` learns in a fraction of the
            time, :class:`~pyro_nngp.variational.encoders.SiteEncoder` is more expressive. Batches of about 64 suit all
            of them. :class:`~pyro_nngp.variational.PseudoObservations` is the family of
            :class:`~pyro_nngp.models.VNNGP`, on this graph.
        mean: mean function ``(B, D) -> (B,)`` or ``(B, 1)``; None is a learnable constant.
        ordering: "random", "maximin", "coordinate", "principal", "given" or a permutation.
        jitter: relative nugget; None takes 1e-6, with an encoder 0.01, since no network can follow a stiffer prior.
        metric: metric of neighbors: lengthscales, or a distance function; None takes the metric of the kernel.
        start: another trained method, whose kernel, likelihood and mean are copied where none is given here.
        offset, weights, trials, limits: of each row, as in :class:`~pyro_nngp.models.base.Method`.
        seed: seed of the ordering.

    Raises:
        ValueError, TypeError: for NaN or infinity, wrong shapes, mixed dtypes or devices, K out of range, targets
            outside the support of the likelihood, an encoder without a likelihood.

    Reference: Liu, Liu (2019), "Amortized variational inference with graph convolutional networks for Gaussian
    processes", AISTATS.
    """

    _graph_type = SymmetricGraph

    @from_tables
    def __init__(
        self,
        x: Float[Tensor, "N D"] | Table,
        y: Float[Tensor, "N *T"] | Int[Tensor, "N *T"] | Table | None,
        kernel: Any = None,
        likelihood: Likelihood | None = None,
        *,
        num_neighbors: int | None = None,
        guide: SparseCholesky | Amortized | PseudoObservations | MeanField | None = None,
        mean: Callable | None = None,
        ordering: str | Int[Tensor, " N"] = "random",
        jitter: float | None = None,
        metric: Float[Tensor, " *D"] | Callable | None = None,
        start: Any = None,
        offset: Float[Tensor, "N *L"] | Table | None = None,
        weights: Float[Tensor, " N"] | Int[Tensor, " N"] | Table | None = None,
        trials: Float[Tensor, " N"] | Int[Tensor, " N"] | Table | None = None,
        limits: Float[Tensor, " N"] | Table | None = None,
        seed: int = 0,
    ) -> None:
        check_inputs("NPVI", "x", x)
        num_neighbors = first_neighbors("NPVI", num_neighbors, x, 20)
        guide = SparseCholesky() if guide is None else guide
        if isinstance(guide, Amortized) and guide.num_columns is None:
            guide = replace(guide, num_columns=num_neighbors)
        super().__init__(
            x,
            y,
            kernel,
            likelihood,
            num_neighbors=num_neighbors,
            guide=guide,
            mean=mean,
            ordering=ordering,
            jitter=jitter,
            metric=metric,
            start=start,
            offset=offset,
            weights=weights,
            trials=trials,
            limits=limits,
            seed=seed,
        )

    def amortize(
        self,
        x: Float[Tensor, "N D"] | Table,
        y: Float[Tensor, "N *T"] | Int[Tensor, "N *T"] | Table,
        ordering: str | Int[Tensor, " N"] = "random",
        seed: int = 0,
        *,
        offset: Float[Tensor, "N *L"] | Table | None = None,
        weights: Float[Tensor, " N"] | Int[Tensor, " N"] | Table | None = None,
        trials: Float[Tensor, " N"] | Int[Tensor, " N"] | Table | None = None,
        limits: Float[Tensor, " N"] | Table | None = None,
    ) -> "NPVI":
        """The same model on other data, with q(u) from the trained encoder, without any training.

        Args:
            x: other inputs, any number of them; may include the old ones.
            y: their targets.
            ordering: as for the model.
            seed: seed of the ordering.
            offset: of each row, if the model has one; so are the next three.
            weights: of each row.
            trials: of each row.
            limits: of each row.

        Returns:
            A model with copies of kernel, likelihood, mean, encoder and the guide of their hyperparameters, so that
            training one model does not change the other.

        Raises:
            ValueError, TypeError: if the model has no encoder, for malformed data, x of other columns, or values by row
                that are missing or too many.
        """
        where = "NPVI.amortize"
        if not isinstance(self.q, AmortizedGaussian):
            fail(where, "encoder", "in the model", None, "Build it with one, or fit a model to the new data.")
        by_row: dict[str, Any] = {"offset": offset, "weights": weights, "trials": trials, "limits": limits}
        check_names_by_row(where, self, by_row)
        x, y, by_row = read_rows(where, self, x, y, by_row)
        check_inputs(where, "x", x)
        if x.shape[1] != self.x.shape[1]:
            cure = "Give the same input dimensions."
            fail(where, "x", f"with {self.x.shape[1]} columns, as the model has", x.shape[1], cure)
        return NPVI(
            x,
            y,
            num_neighbors=min(self.graph.num_neighbors, len(x) - 1),
            guide=Amortized(copy.deepcopy(self.q.network), self.q.num_columns),
            start=self,
            ordering=ordering,
            jitter=self.jitter,
            metric=self.metric,
            seed=seed,
            **by_row,
        )
