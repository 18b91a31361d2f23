"""Exact processes on 450 rows of sarcos: one kernel for all functions, one for each function, one process per output.

The first 450 sites and the 500 scored rows that ``outputs.py`` takes of sarcos. Covariances of all values are dense,
kernels are Matern-5/2 with 21 lengthscales; 50 steps of L-BFGS maximize the log marginal likelihood with a weak normal
prior (standard deviation 3) of logarithms of lengthscales. ``--neighbors`` adds `LMC` on the same rows with these K.

Usage: python benchmarks/accuracy/outputs_exact.py [--rows 450] [--neighbors 16 32 64]
The data come from the folder that PYRO_NNGP_DATA names; use one thread.
"""

import argparse
import math

import torch
from outputs import sarcos, scores  # beside this file

from pyro_nngp.inference import IntegratedELBO, fit
from pyro_nngp.models import LMC

F64 = torch.float64
MODELS = {"one kernel": 1, "a kernel for each function": 3, "a process per output": 3}


def matern(x, z, scale):
    x, z = x / scale, z / scale
    distance = (x.square().sum(1)[:, None] + z.square().sum(1) - 2 * x @ z.mT).clamp(min=1e-12).mul(5).sqrt()
    return (1 + distance + distance.square() / 3) * (-distance).exp()


class Exact:
    """A dense coregionalized process; values are (rows of x, outputs), both (n,)."""

    def __init__(self, x, z, number, shared, alone):
        seen = ~z.isnan()
        self.output, row = seen.mT.nonzero().unbind(-1)
        self.x, self.y, size = x[row], z[row, self.output], x.shape[1]
        known = z[seen.all(1)]
        start = torch.linalg.cholesky(known.mT.corrcoef() + 0.05 * torch.eye(3)) if shared else torch.eye(3, dtype=F64)
        spread = 0.0 if shared or alone else 0.1
        self.loading = (start + spread * torch.randn(3, 3, dtype=F64)).contiguous().requires_grad_()
        self.center, self.alone = math.log(size) / 2, alone
        self.log_scale = torch.full((number, size), self.center, dtype=F64, requires_grad=True)
        self.log_noise = torch.full((3,), math.log(0.1), dtype=F64, requires_grad=True)
        self.mean = torch.zeros(3, dtype=F64, requires_grad=True)

    def cov(self, x, p, z, q):
        loading = self.loading * torch.eye(3) if self.alone else self.loading
        if len(self.log_scale) == 1:
            return (loading @ loading.mT)[p][:, q] * matern(x, z, self.log_scale[0].exp())
        parts = zip(loading.mT, self.log_scale, strict=True)
        return sum(torch.outer(a[p], a[q]) * matern(x, z, s.exp()) for a, s in parts)

    def factor(self):
        cov = self.cov(self.x, self.output, self.x, self.output) + torch.diag(self.log_noise.exp()[self.output] + 1e-6)
        tril = torch.linalg.cholesky(cov)
        return tril, torch.linalg.solve_triangular(tril, (self.y - self.mean[self.output])[:, None], upper=False)

    def train(self, steps):
        values = [self.log_scale, self.loading, self.log_noise, self.mean]
        optimizer = torch.optim.LBFGS(values, 1, steps, line_search_fn="strong_wolfe", history_size=20)

        def closure():
            optimizer.zero_grad()
            tril, white = self.factor()
            prior = ((self.log_scale - self.center) / 3).square().sum() / 2
            loss = white.square().sum() / 2 + tril.diagonal().log().sum() + prior
            loss.backward()
            return loss

        optimizer.step(closure)
        return self

    @torch.no_grad()
    def predict(self, x, units):
        tril, white = self.factor()
        found = []
        for number, (center, spread) in enumerate(units):
            p = torch.full((len(x),), number)
            half = torch.linalg.solve_triangular(tril, self.cov(self.x, self.output, x, p), upper=False)
            own = self.cov(x[:1], p[:1], x[:1], p[:1])[0, 0] + self.log_noise[number].exp()
            sd = (own - half.square().sum(0)).sqrt()
            loc = (half.mT @ white)[:, 0] + self.mean[number]
            found.append(torch.distributions.Normal(center + spread * loc, spread * sd))
        return found


def show(name, predictions, data, note=""):
    found = scores(predictions, *data)
    print(f"| {name} | {' | '.join(f'{values[2]:.3f}' for values in found.values())} | {note} |", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=450)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--neighbors", type=int, nargs="*", default=[])
    args = parser.parse_args()
    x, y, held_out, _ = sarcos(0)
    data = x[: args.rows], y[: args.rows], held_out
    print("| | torque 1 | torque 2 | torque 3 | - ELBO |")
    print("|---|---|---|---|---|")
    for k in args.neighbors:
        torch.manual_seed(0)
        gp = LMC(*data[:2], num_neighbors=k)
        fit(gp, progress=False)
        loss = IntegratedELBO().loss(gp.model, gp.guide)
        show(f"LMC, K = {k}", lambda new, gp=gp: gp.predict(new).parts, data, f"{loss:.1f}")
    place, scale = x.mean(0), x.std(0)
    units = [(v.mean(), v.std()) for v in (column[~column.isnan()] for column in data[1].mT)]
    z = torch.stack([(column - a) / b for column, (a, b) in zip(data[1].mT, units, strict=True)], -1)
    for name, number in MODELS.items():
        torch.manual_seed(0)
        gp = Exact((data[0] - place) / scale, z, number, number == 1, name == "a process per output").train(args.steps)
        show(f"exact, {name}", lambda new, gp=gp: gp.predict((new - place) / scale, units), data)


if __name__ == "__main__":
    main()
