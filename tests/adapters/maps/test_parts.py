"""Maps that are interrupted and continued."""

import copy

import pytest
import xarray as xr

from pyro_nngp.adapters.maps import predict_grid


def test_an_interrupted_map_is_continued(gp, axes, tmp_path, small_tiles, monkeypatch):
    whole = predict_grid(gp, axes, thresholds=[0.0])
    path, calls = tmp_path / "map.nc", []
    predict = type(gp).predict

    def interrupted(self, x_new, **options):
        calls.append(len(x_new))
        if len(calls) == 4:
            raise KeyboardInterrupt
        return predict(self, x_new, **options)

    monkeypatch.setattr(type(gp), "predict", interrupted)
    with pytest.raises(KeyboardInterrupt):
        predict_grid(gp, axes, thresholds=[0.0], path=path)
    assert not path.exists()
    found = predict_grid(gp, axes, thresholds=[0.0], path=path)
    assert sum(calls) == 7 * 5 + calls[3]  # each other tile once
    xr.testing.assert_identical(found.load(), whole)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["map.nc"]


def test_parts_of_another_map_are_refused(gp, axes, tmp_path, monkeypatch):
    def fails(self, x_new, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(gp), "predict", fails)
        with pytest.raises(KeyboardInterrupt):
            predict_grid(gp, axes, path=tmp_path / "map.nc")
    for change in ({"thresholds": [1.0]}, {"seed": 1}, {"of": "f"}):
        with pytest.raises(ValueError, match="to hold parts of the same map, got those of another one"):
            predict_grid(gp, axes, path=tmp_path / "map.nc", **change)
    other = copy.deepcopy(gp)
    other.kernel.lengthscale = 0.31
    with pytest.raises(ValueError, match="to hold parts of the same map, got those of another one"):
        predict_grid(other, axes, path=tmp_path / "map.nc")
    assert predict_grid(gp, axes, path=tmp_path / "map.nc")["mean"].notnull().all()
