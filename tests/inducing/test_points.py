"""k-means finds the clusters that are there."""

import pytest
import torch

from pyro_nngp.inducing.points import kmeans

F64 = torch.float64


def test_kmeans_finds_clusters_that_are_there():
    centers = 10 * torch.cartesian_prod(torch.arange(6.0), torch.arange(5.0)).double()
    x = centers.repeat(40, 1) + 0.1 * torch.randn(1200, 2, dtype=F64)
    before = x.clone()
    found = kmeans(x, 30, seed=3)
    assert torch.equal(x, before)
    nearest = torch.cdist(centers, found).min(1)
    assert nearest.values.max() < 0.1
    assert len(nearest.indices.unique()) == 30
    assert torch.equal(found, kmeans(x, 30, seed=3))


def test_kmeans_of_fewer_places_than_centers():
    x = torch.tensor([[0.0], [1.0]]).repeat(10, 1)
    with pytest.warns(UserWarning, match="clusters is empty"):
        found = kmeans(x, 5)
    assert set(found.flatten().tolist()) <= {0.0, 1.0}
