"""Data sets, hold-out splits, standardization, places on the globe, and scores."""

from pyro_nngp.data.datasets import Dataset, bathymetry, breast_cancer, diabetes, digits, flights, load, terrain, uci
from pyro_nngp.data.globe import lon_lat
from pyro_nngp.data.metrics import (
    auc,
    brier,
    coverage,
    crps_gaussian,
    crps_sample,
    error_rate,
    gaussian_interval,
    interval_score,
    nll,
    rmse,
)
from pyro_nngp.data.preprocessing import Standardizer, block_split, random_split
from pyro_nngp.data.sites import union_of_sites

__all__ = [
    "Dataset",
    "Standardizer",
    "auc",
    "bathymetry",
    "block_split",
    "breast_cancer",
    "brier",
    "coverage",
    "crps_gaussian",
    "crps_sample",
    "diabetes",
    "digits",
    "error_rate",
    "flights",
    "gaussian_interval",
    "interval_score",
    "load",
    "lon_lat",
    "nll",
    "random_split",
    "rmse",
    "terrain",
    "uci",
    "union_of_sites",
]
