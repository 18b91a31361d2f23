# %% [markdown]
# # From a DataFrame to a map, the scikit-learn way
#
# Sea floor and mountains of Washington: heights at some places in a DataFrame, a map with its uncertainty, intervals
# that are checked, and a choice between kernels by cross-validation, all by NumPy and the estimators of
# `pyro_nngp.adapters.sklearn`. Columns stay in their units.
#
#     python tutorials/scikit_learn.py [--out tutorial_output/scikit_learn] [--smoke]

# %% tags=["hide-input"]
import argparse
import os
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from sklearn.model_selection import GridSearchCV, train_test_split

from pyro_nngp.adapters.sklearn import NNGPRegressor
from pyro_nngp.data import bathymetry
from pyro_nngp.kernels import Matern12, Matern32

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, default=Path("tutorial_output/scikit_learn"), help="for the figure")
parser.add_argument("--smoke", action="store_true", help="fewer heights, to see that it runs")
args, _ = parser.parse_known_args()  # a notebook's kernel has other arguments
args.smoke |= "SMOKE" in os.environ
args.out.mkdir(parents=True, exist_ok=True)

# %% [markdown]
# ## Data
# Kilometers and meters. Four fifths of the heights are kept back, to see whether the map is right.

# %%
grid = bathymetry()
frame = pd.DataFrame({"east": grid.x[:, 0], "north": grid.x[:, 1], "height": grid.y})
frame = frame.sample(1_500 if args.smoke else len(frame), random_state=0)
known, rest = train_test_split(frame, train_size=0.2, random_state=0)
places = ["east", "north"]
print(f"{len(known):,} heights to learn from, {len(rest):,} kept back")
print(known.head(3))

# %% [markdown]
# ## Fit and predict

# %%
model = NNGPRegressor().fit(known[places], known["height"])
mean, std = model.predict(rest[places], return_std=True)
low, high = model.predict_interval(rest[places], coverage=0.9).T
inside = float(((low < rest["height"]) & (rest["height"] < high)).mean())
score = model.score(rest[places], rest["height"])
print(model.kernel_, model.noise_)
print(f"R² {score:.3f}; 90 % intervals hold {100 * inside:.1f} %, their median width is {np.median(high - low):.0f} m")

# %% [markdown]
# ## Which kernel?
# Cross-validation by scikit-learn. A kernel that is passed is copied; its hyperparameters start from the data.

# %%
search = GridSearchCV(NNGPRegressor(), {"kernel": [Matern12(2), Matern32(2)]}, cv=2 if args.smoke else 4)
search.fit(known[places], known["height"])
for kernel, value in zip(search.cv_results_["param_kernel"], search.cv_results_["mean_test_score"], strict=True):
    print(f"{type(kernel).__name__:10} R² {value:.4f}")

# %%
figure, axes = plt.subplots(1, 3, figsize=(14, 3.6), constrained_layout=True)
panels = (
    (known, known["height"], "heights given [m]", "viridis"),
    (rest, mean, "predicted elsewhere [m]", "viridis"),
    (rest, std, "standard deviation [m]", "magma"),
)
for axis, (where, values, title, colors) in zip(axes, panels, strict=True):
    figure.colorbar(axis.scatter(where["east"], where["north"], c=values, s=5, cmap=colors), ax=axis)
    axis.set(title=title, xlabel="east [km]", ylabel="north [km]", aspect="equal")
figure.savefig(args.out / "map.png", dpi=110)

# %%
assert score > (0.6 if args.smoke else 0.85), score
assert 0.8 < inside < 0.97, inside
