# %% [markdown]
# # From a table of stations to a raster
#
# Heights at 4,000 places in a DataFrame become a raster of 138,632 cells: mean, standard deviation, the probability of
# more than a threshold, and joint draws that say how sure an area is. The raster goes to a NetCDF file, tile by tile,
# in bounded memory. All other heights are known here, so that the map can be checked.
#
#     python tutorials/raster_map.py [--out tutorial_output/raster_map] [--smoke]

# %% tags=["hide-input"]
import argparse
import os
import time
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import xarray as xr

import pyro_nngp as nngp
from pyro_nngp.adapters import plots
from pyro_nngp.data import terrain

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, default=Path("tutorial_output/raster_map"), help="for the map and the picture")
parser.add_argument("--smoke", action="store_true", help="fewer stations and cells, to see that it runs")
args, _ = parser.parse_known_args()  # a notebook's kernel has other arguments
args.smoke |= "SMOKE" in os.environ
args.out.mkdir(parents=True, exist_ok=True)

# %% [markdown]
# ## Data
# A raster of elevations, of which a few cells become the rows of a table: kilometers and meters, as they come.

# %%
cells = terrain()
truth = pd.DataFrame({"east": cells.x[:, 0], "north": cells.x[:, 1], "height": cells.y})
truth = truth.set_index(["north", "east"])["height"].to_xarray()
if args.smoke:
    truth = truth[::6, ::6]
stations = truth.to_dataframe().reset_index().sample(400 if args.smoke else 4_000, random_state=0)
print(stations.head(3))

# %% [markdown]
# ## Fit, and predict at every cell
# The method takes columns of the DataFrame. `predict_grid` takes anything that has coordinates of these names: here
# another raster. With a path it writes a file, and an interrupted call continues where it was.

# %%
gp = nngp.Vecchia(stations[["east", "north"]], stations["height"])
print(nngp.fit(gp))
print(gp.kernel, gp.likelihood, sep="\n")

start = time.perf_counter()
high = float(stations["height"].quantile(0.9))
found = nngp.predict_grid(gp, truth, quantile_levels=[0.05, 0.95], thresholds=[high], path=args.out / "map.nc")
print(f"{truth.size:,} cells in {time.perf_counter() - start:.1f} s")
print(found)

# %% [markdown]
# ## What was learned?
# Half the squared difference of pairs of stations, and what the model says it is; the neighbors that three stations are
# conditioned on; and the height along a line to the east, averaged over the stations. The curve of the model lies above
# the data, since half of the map is rugged and half is a plain: one process with the same variance everywhere is only a
# compromise here, and yet its intervals are right on average, as the next section shows.

# %%
panels = plt.subplots(1, 3, figsize=(14, 3.8), layout="constrained")[1]
plots.plot_variogram(gp, max_distance=4, ax=panels[0])
plots.plot_neighbors(gp.graph, ax=panels[1])
plots.plot_dependence(gp, "east", ax=panels[2])
panels[0].figure.savefig(args.out / "learned.png", dpi=90)

# %% [markdown]
# ## Is it right?
# All cells but the stations are new to the model.

# %%
rmse = float(((found["mean"] - truth) ** 2).mean()) ** 0.5
low, top = found["quantiles"]
inside = float(((low < truth) & (truth < top)).mean())
above = found["exceedance"].squeeze("threshold")
share = float((truth > high).where(above > 0.9).mean())
print(f"RMSE {rmse:.1f} m of {float(truth.std()):.0f} m; 90 % intervals hold {100 * inside:.1f} %")
print(f"where the probability of more than {high:.0f} m is above 0.9, {100 * share:.0f} % of the cells are higher")

# %% [markdown]
# ## How much land is higher than the threshold?
# Cells err together, so the uncertainty of an area needs joint draws. They are made on a coarser grid, since they are
# joint over all cells at once.

# %%
coarse = truth[::4, ::4]
draws = nngp.predict_grid(gp, coarse, of="f", num_draws=200)["draws"]
areas = 100 * (draws > high).mean(["north", "east"])
alone = 100 * (above[::4, ::4] * (1 - above[::4, ::4])).sum() ** 0.5 / coarse.size
known = 100 * float((coarse > high).mean())
print(
    f"land above {high:.0f} m: {float(areas.mean()):.1f} % ± {2 * float(areas.std()):.2f} (2 sd), truth {known:.1f} %"
)
print(f"were the cells independent, 2 sd would be {2 * float(alone):.2f}")

# %%
axes = plots.plot_map(found, stations[["east", "north"]].to_numpy())
for axis in axes:
    axis.set_aspect("equal")
axes[0].figure.savefig(args.out / "map.png", dpi=110)

# %% [markdown]
# The file is there for any other program, and so is the model:

# %%
found.close()
gp.save(args.out / "model.safetensors")
again = xr.open_dataset(args.out / "map.nc", engine="h5netcdf")
assert float(abs(again["mean"] - truth).mean()) < 0.5 * float(abs(truth - truth.mean()).mean())
assert 0.8 < inside < 0.97, inside
assert rmse < (110 if args.smoke else 35), rmse
assert abs(float(areas.mean()) - known) < 4 * float(areas.std()) + 0.5, (float(areas.mean()), known)
again.close()
