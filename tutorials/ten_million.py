# %% [markdown]
# # Ten million points
#
# What changes when there are a hundred times as many points? The neighbors of each have to be found, the data have to
# fit into memory, and that is all: a training step works on a batch and its neighbors, and hyperparameters are learned
# from a subsample that is large enough. Here the plain call runs on up to a million points, in a minute; the
# row of ten million was measured by the same script.
#
#     python tutorials/ten_million.py [--points 10000 100000 1000000] [--out tutorial_output/ten_million] [--smoke]

# %% tags=["hide-input"]
import argparse
import math
import os
import resource
import time
from pathlib import Path

import matplotlib.pyplot as plt
import torch

import pyro_nngp as nngp
from pyro_nngp.data import coverage, rmse

parser = argparse.ArgumentParser()
parser.add_argument("--points", type=int, nargs="+", default=[10_000, 100_000, 1_000_000], help="numbers of points")
parser.add_argument("--out", type=Path, default=Path("tutorial_output/ten_million"), help="folder for the figure")
parser.add_argument("--smoke", action="store_true", help="few points, to see that it runs")
args, _ = parser.parse_known_args()  # a notebook's kernel has other arguments
args.smoke |= "SMOKE" in os.environ
args.out.mkdir(parents=True, exist_ok=True)
numbers = [1_000, 4_000] if args.smoke else args.points


# %% [markdown]
# ## A surface of any size
# No data set of ten million points comes with a Python package, so this surface is simulated, and its truth is known: a
# draw from a Matérn-5/2 process of lengthscale 1 and variance 1, made of 300 cosines with random frequencies. The area
# grows with the number of points, a hundred per unit square, so neighborhoods look the same at every size. The noise
# has a standard deviation of 0.3.

# %%
NOISE = 0.3
generator = torch.Generator().manual_seed(0)
frequencies = torch.randn(300, 2, generator=generator)
frequencies *= (5 / torch.randn(300, 5, generator=generator).square().sum(-1, keepdim=True)).sqrt()
phases = 2 * math.pi * torch.rand(300, generator=generator)


def surface(x):
    """Values at x (N, 2), 100,000 rows at a time."""
    blocks = ((block @ frequencies.mT + phases).cos_().sum(-1) for block in x.split(100_000))
    return (2 / len(phases)) ** 0.5 * torch.cat(list(blocks))


# %% [markdown]
# ## The plain call
# `Vecchia` with nothing set, then `fit`, then the mean and the variance of f at 10,000 new places. Columns are
# processor seconds for data and neighbors, for training and for those predictions; milliseconds for a step with a batch
# of 1,024 points; the largest memory so far; and the errors at the new places beside the predicted standard deviations.


# %%
def run(num_points):
    side = (num_points / 100) ** 0.5
    x = side * torch.rand(num_points, 2, generator=generator)
    y = surface(x) + NOISE * torch.randn(num_points, generator=generator)
    clock = [time.process_time()]
    gp = nngp.Vecchia(x, y)
    clock.append(time.process_time())
    nngp.fit(gp, progress=False)
    clock.append(time.process_time())
    x_new = side * torch.rand(10_000, 2, generator=generator)
    with torch.no_grad():
        mean, variance = gp(x_new)
    clock.append(time.process_time())
    steps = []
    nngp.fit(
        gp, 40, batch_size=min(1_024, num_points), progress=False, callback=lambda *_: steps.append(time.process_time())
    )
    built, trained, predicted = torch.tensor(clock, dtype=torch.float64).diff().tolist()
    truth, sd = surface(x_new), variance.sqrt()
    row = {
        "neighbors [s]": built,
        "training [s]": trained,
        "prediction [s]": predicted,
        "step [ms]": 1e3 * torch.tensor(steps, dtype=torch.float64).diff()[5:].median().item(),
        "memory [GiB]": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "error of f": float(rmse(truth, mean)),
        "sd of f": sd.square().mean().sqrt().item(),
        "coverage": float(coverage(truth, mean - 1.96 * sd, mean + 1.96 * sd)),
    }
    return gp, row


run(1_000)  # the first call loads libraries
rows = {}
for num_points in numbers:
    gp, rows[num_points] = run(num_points)
    if len(rows) == 1:
        print(f"{'points':>11}" + "".join(f"  {name}" for name in rows[num_points]))
    print(f"{num_points:11,}" + "".join(f"{value:{len(name) + 2}.3f}" for name, value in rows[num_points].items()))

# %% [markdown]
# ## Ten million
# `python tutorials/ten_million.py --points 100000 1000000 10000000` on one core of two, the other busy, gave:
#
# | points | neighbors [s] | training [s] | prediction [s] | step [ms] | memory [GiB] | error | sd | coverage |
# |---|---|---|---|---|---|---|---|---|
# | 100,000 | 0.6 | 1.6 | 0.06 | 13 | 0.7 | 0.080 | 0.083 | 0.955 |
# | 1,000,000 | 5.2 | 17.7 | 0.12 | 16 | 1.7 | 0.081 | 0.082 | 0.958 |
# | 10,000,000 | 70.0 | 149.4 | 0.24 | 21 | 11.6 | 0.079 | 0.080 | 0.955 |
#
# Seconds are processor seconds. What grows with the number of points, and a little more than in proportion, is the
# search for neighbors: once when the method is built, and again in training, each time the kernel has moved. All else
# in training works on subsamples of up to 20,000 points. From 10⁵ to 10⁷ points a step takes 1.6 times as long, since
# the rows that it gathers no longer lie in the processor's cache, and the predictions four times, since they search a
# larger tree.

# %%
MEASURED = {10_000_000: {"neighbors [s]": 70.0, "training [s]": 149.4, "step [ms]": 20.7}}

big = max(numbers)
center = (big / 100) ** 0.5 / 2
line = torch.linspace(center - 3, center + 3, 120)
window = torch.cartesian_prod(line, line)
with torch.no_grad():
    mean, variance = gp(window)
panels = {
    "truth": surface(window),
    f"mean given {big:,} points": mean,
    "standard deviation": variance.sqrt(),
}
figure, axes = plt.subplots(1, 4, figsize=(15, 3.4), constrained_layout=True)
for axis, (title, values) in zip(axes, panels.items(), strict=False):
    shown = {"cmap": "magma"} if title == "standard deviation" else {"vmin": -3, "vmax": 3}
    ends = (center - 3, center + 3) * 2
    image = axis.imshow(values.reshape(120, 120).T, origin="lower", extent=ends, **shown)
    figure.colorbar(image, ax=axis, shrink=0.8)
    axis.set(title=title)
for name, color in (("neighbors [s]", "tab:blue"), ("training [s]", "tab:orange"), ("step [ms]", "tab:green")):
    axes[3].loglog(list(rows), [row[name] for row in rows.values()], "o-", color=color, label=name)
    axes[3].loglog(list(MEASURED), [row[name] for row in MEASURED.values()], "o", color=color, fillstyle="none")
axes[3].set(xlabel="points (open: measured elsewhere)", title="what it costs")
axes[3].legend()
figure.savefig(args.out / "points.png", dpi=110)

# %% [markdown]
# ## Did it work?
# Intervals cover, the predicted standard deviation is the error, and a hundred times as many points do not make a step
# three times as slow.

# %%
for num_points, row in rows.items():
    if num_points >= 10_000:
        assert 0.93 < row["coverage"] < 0.97, (num_points, row)
        assert 0.9 < row["error of f"] / row["sd of f"] < 1.1, (num_points, row)
if not args.smoke:
    assert rows[max(rows)]["step [ms]"] < 3 * rows[min(rows)]["step [ms]"], rows
