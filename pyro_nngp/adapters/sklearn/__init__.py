"""scikit-learn estimators: regression, classification and counts by nearest-neighbor Gaussian processes.

They take arrays and frames (NumPy, pandas, polars) in raw units, return NumPy arrays, and train until convergence. The
trained method is the attribute ``gp_``. Computation is in float64.

Cost: the method, and O(N) copies of the data.
"""

from pyro_nngp.adapters.sklearn.classification import NNGPClassifier
from pyro_nngp.adapters.sklearn.regression import NNGPCountRegressor, NNGPRegressor

__all__ = ["NNGPClassifier", "NNGPCountRegressor", "NNGPRegressor"]
