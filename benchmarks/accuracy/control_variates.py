"""SGHMC with tiny noise, plain and with control variates, beside the exact posterior of a linear model.

40,000 rows, 20 inputs whose scales span two decades, noise of 1e-3 where the function has a spread of about 4;
minibatches of 40, N / B = 1,000. Four chains start 3 posterior standard deviations from the mode, with the defaults.

Usage: python benchmarks/accuracy/control_variates.py [--draws 100] [--burn-in 1000] [--batch 40]
"""

import argparse
import time
import warnings

import arviz as az
import pyro
import pyro.distributions as dist
import torch
from pyro.infer.autoguide import init_to_generated, init_to_value

from pyro_nngp.inference import SGHMC, SGMCMC, Minibatch

N, D, NOISE, F64 = 40_000, 20, 1e-3, torch.float64


def problem():
    torch.manual_seed(0)
    scale = torch.logspace(0, 2, D, dtype=F64)
    x, w = torch.randn(N, D, dtype=F64) * scale, torch.randn(D, dtype=F64) / scale
    y = x @ w + NOISE * torch.randn(N, dtype=F64)

    def model(idx):
        slopes = pyro.sample("slopes", dist.Normal(torch.zeros(D, dtype=F64), 3.0).to_event(1))
        with pyro.plate("data", N, subsample=idx):
            pyro.sample("y", dist.Normal(x[idx] @ slopes, NOISE), obs=y[idx])

    precision = x.mT @ x / NOISE**2 + torch.eye(D) / 9
    return model, torch.linalg.solve(precision, x.mT @ y / NOISE**2), precision.inverse().diagonal().sqrt()


def interval(values):
    values = [float(value) for value in values]
    return f"{min(values):.2f} to {max(values):.2f}"


def main(draws, burn_in, batch):
    torch.set_num_threads(1)
    model, mean, spread = problem()
    print("| gradients | R-hat, largest | means: largest error / sd | sd / exact | temperature | updates | CPU s |")
    print("|---" * 7 + "|")
    for name, reduced in (("minibatches", False), ("with control variates", True)):
        torch.manual_seed(1)
        start = init_to_generated(
            generate=lambda: init_to_value(values={"slopes": mean + 3 * spread * torch.randn(D, dtype=F64)})
        )
        kernel = SGHMC(model, control_variates=reduced, init_strategy=start)
        mcmc = SGMCMC(kernel, draws, burn_in, 4, disable_progbar=True)
        begin = time.process_time()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of chains that have not settled, which the table shows
            mcmc.run(Minibatch(N, batch))
        seconds = time.process_time() - begin
        found, by_chain = mcmc.get_samples()["slopes"], mcmc.get_samples(group_by_chain=True)["slopes"]
        rhat = float(az.rhat(az.convert_to_dataset({"slopes": by_chain.numpy()}))["slopes"].max())
        diagnostics = mcmc.diagnostics()
        each = diagnostics["updates per draw"]
        each = int(next(iter(each.values())) if isinstance(each, dict) else each)
        error = float(((found.mean(0) - mean) / spread).abs().max())
        cells = [name, f"{rhat:.2f}", f"{error:.2f}", interval(found.std(0) / spread)]
        cells += [interval(diagnostics["configurational temperature"].values())]
        cells += [f"{burn_in + draws * each:,}", f"{seconds:.0f}"]
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=100)
    parser.add_argument("--burn-in", type=int, default=1_000)
    parser.add_argument("--batch", type=int, default=40)
    main(**vars(parser.parse_args()))
