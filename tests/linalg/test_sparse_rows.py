"""Rows with a fixed number of entries, beside dense matrices."""

import torch

from pyro_nngp.linalg.sparse_rows import SparseRows


def test_entries_of_a_row_in_one_column_are_added():
    rows = SparseRows(torch.tensor([[0, 2], [1, 1]]), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert rows.matrix(4).toarray().tolist() == [[1, 0, 2, 0], [0, 7, 0, 0]]
