import pytest
import torch

from pyro_nngp.data import union_of_sites


def test_equal_sites_are_merged_and_repeats_are_kept():
    x, z = torch.tensor([[1.0, 0.0], [0.0, 2.0], [1.0, 0.0]]), torch.tensor([[3.0, 3.0], [1.0, 0.0]])
    sites, values = union_of_sites((x, torch.tensor([5.0, 6.0, 7.0])), (z, torch.tensor([8.0, 9.0])))
    assert sites.tolist() == [[0.0, 2.0], [1.0, 0.0], [1.0, 0.0], [3.0, 3.0]]
    assert values[:, 0].tolist()[:3] == [6.0, 5.0, 7.0]
    assert values[1].tolist() == [5.0, 9.0]
    assert values[3, 1] == 8.0
    assert values.isnan().tolist() == [[False, True], [False, False], [False, True], [True, False]]


def test_malformed_outputs_are_refused():
    x, y = torch.rand(3, 2), torch.rand(3)
    with pytest.raises(ValueError, match=r"union_of_sites: expected outputs to be pairs of sites and values"):
        union_of_sites()
    with pytest.raises(ValueError, match=r"expected output 1 of shapes \(n, D\) and \(n,\), D of all, got"):
        union_of_sites((x, y), (x[:, :1], y))
    with pytest.raises(ValueError, match=r"expected output 0 of shapes"):
        union_of_sites((x, y[:2]))
    with pytest.raises(TypeError, match=r"values of output 0 to be a torch.Tensor"):
        union_of_sites((x, [1.0, 2.0, 3.0]))
    with pytest.raises(TypeError, match=r"expected output 1 of the dtype of x"):
        union_of_sites((x, y), (x.double(), y.double()))
