"""Sparse rows with a fixed number of entries each: the form in which factors of a Gaussian density arrive."""

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from scipy.sparse import csr_array
from torch import Tensor


class SparseRows(NamedTuple):
    """Rows of a sparse matrix with k entries each; entries of a row in one column are added.

    Attributes:
        columns: columns of the entries, (r, k).
        values: their values, (r, k).
    """

    columns: Int[Tensor, "r k"]
    values: Float[Tensor, "r k"]

    def matrix(self, num_columns: int) -> csr_array:
        """The rows in SciPy's format, with entries of one column still apart."""
        rows, width = self.values.shape
        ends = np.arange(0, rows * width + 1, width)
        entries = self.values.cpu().numpy().ravel(), self.columns.cpu().numpy().ravel(), ends
        return csr_array(entries, shape=(rows, num_columns))


def root_entries(w: Float[Tensor, "n K"], var: Float[Tensor, " n"]) -> Float[Tensor, "n k"]:
    """Entries of V^-1/2 (I - A) at each point and its neighbors, from weights and variances of conditionals."""
    return torch.cat([torch.ones_like(w[:, :1]), -w], -1) / var.sqrt()[:, None]


__all__ = ["SparseRows", "root_entries"]
