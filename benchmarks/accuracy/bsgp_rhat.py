"""R-hat of the function beside R-hat of the sites: four BSGP chains on a set of UCI or on flights, fold 0.

Inducing points can trade places, and u means nothing without its z, so that entries of z and nu may disagree between
chains whose functions agree. "plain" is SGHMC with its defaults, `init_strategy=gp.init_strategy` and nothing trained:
the noise variance stays at its start, of which it warns; "SVI" starts at the median of a mean-field guide after 400
steps and learns the noise variance during burn-in, `optim={"lr": 0.01}`, as the docstring of BSGP has it; "draws"
starts each chain at a draw of its own from that guide, whose noise variance stays; "cyclical" does so with the step
sizes of `Cyclical`, the first half of each cycle without noise, and a draw at the end of each; "fixed z" is "draws"
with inducing inputs that stay where SVI left them, as parameters. RBF with log-normal priors, float64; R-hat is
ArviZ's, rank-normalized; f at up to 2,000 test points. Flights is the binary task "arrives late" with a probit link.

Usage: python benchmarks/accuracy/bsgp_rhat.py [yacht] [--starts plain SVI draws cyclical] [--inducing 30]
           [--burn-in 1000] [--draws 60] [--updates 40] [--rows N] [--batch-size B] [--noise V] [--control-variates]
           [--svi 400]
The data come from `pyro_nngp.data.datasets`, or from the folder that PYRO_NNGP_DATA names.
"""

import argparse
import time

import arviz as az
import numpy as np
import pyro
import torch
from pyro.infer import Trace_ELBO
from pyro.infer.autoguide import AutoNormal, init_to_generated, init_to_value

from pyro_nngp.data import Standardizer, coverage, flights, gaussian_interval, nll, random_split, rmse, uci
from pyro_nngp.hyperparameters import lognormal_priors
from pyro_nngp.inference import SGHMC, SGMCMC, Cyclical, Minibatch, fit
from pyro_nngp.kernels import RBF
from pyro_nngp.likelihoods import Bernoulli, Gaussian
from pyro_nngp.models import BSGP

CHAINS = 4
STARTS = ["plain", "SVI", "draws", "cyclical", "fixed z"]


def build(options, start):
    binary = options.data == "flights"
    data = flights(torch.float64) if binary else uci(options.data, torch.float64)
    train, test = random_split(len(data.x), (0.8, 0.2), 0)
    train, test = train[: options.rows], test[:2_000]
    y = (data.y if data.y.dim() == 2 else data.y[:, None])[:, :1]
    y = (y > 0).double() if binary else Standardizer(y[train]).transform(y)
    to_x = Standardizer(data.x[train])
    x = to_x.transform(data.x[train])
    kernel = RBF(x.shape[1], torch.tensor(0.05) if binary else None, torch.ones(x.shape[1], dtype=x.dtype))
    prior = None if start == "fixed z" else "normal"
    gp = BSGP(
        x,
        y[train, 0],
        lognormal_priors(kernel, like=x),
        Bernoulli("probit") if binary else Gaussian(torch.tensor(options.noise)) if options.noise else Gaussian(),
        inducing=options.inducing,
        inducing_prior=prior,
    )
    if options.noise:
        gp.likelihood.requires_grad_(False)
    return gp, to_x.transform(data.x[test]), y[test, 0]


def run(gp, start, options):
    batch_size = min(options.batch_size or gp.num_data, gp.num_data)
    if start == "plain":
        kernel = SGHMC(gp.model, init_strategy=gp.init_strategy)
    else:
        guide = AutoNormal(gp.model, init_loc_fn=gp.init_strategy, init_scale=0.05)
        recipe = {"lr": 0.02, "elbo": Trace_ELBO(), "num_data": gp.num_data, "progress": False}
        fit((gp.model, guide), options.svi, batch_size=batch_size, **recipe)
        if start == "SVI":
            median = init_to_value(values={name: value.detach() for name, value in guide.median().items()})
            kernel = SGHMC(gp.model, num_steps=options.updates, optim={"lr": 0.01}, init_strategy=median)
        else:
            own = init_to_generated(generate=lambda: init_to_value(values=drawn(guide)))
            cycle = Cyclical(0.1, options.updates, 0.5)
            schedule = {"step_size": cycle, "temperature": cycle.temperature, "adapt": True}
            steps = schedule if start == "cyclical" else {}
            steps["control_variates"] = options.control_variates
            kernel = SGHMC(gp.model, num_steps=options.updates, init_strategy=own, **steps)
    mcmc = SGMCMC(kernel, options.draws, options.burn_in, CHAINS, disable_progbar=True)
    mcmc.run(Minibatch(gp.num_data, batch_size))
    return mcmc


def drawn(guide):
    with torch.no_grad(), pyro.poutine.block():  # its sites are not those of the chain
        return guide()


def interval(predictive):
    """Central 95 % intervals."""
    return gaussian_interval(predictive.mean, predictive.stddev)


def rhat(values):
    """Median and largest R-hat of draws (chains, draws, ...)."""
    if values is None:
        return "-"
    found = az.rhat(az.convert_to_dataset({"value": values.numpy()}))["value"].values
    return f"{np.median(found):.2f}, {found.max():.2f}"


def main(options):
    torch.set_num_threads(1)
    print("R-hat, median and largest.\n")
    print("| start | f | z | nu | lengthscales | variance | temperature | NLL | RMSE | coverage | noise | CPU s |")
    print("|---" * 12 + "|")
    for start in options.starts:
        pyro.set_rng_seed(0)
        gp, x_test, y_test = build(options, start)
        begin = time.process_time()
        mcmc = run(gp, start, options)
        seconds = time.process_time() - begin
        f = gp.moments_by_draw(x_test, samples=mcmc.get_samples())[0].unflatten(0, (CHAINS, -1))
        sites = mcmc.get_samples(group_by_chain=True)
        names = ("z", "nu", "kernel.lengthscale", "kernel.variance")
        predictive = gp.predict(x_test, samples=mcmc.get_samples())
        temperatures = mcmc.diagnostics()["configurational temperature"].values()
        cells = [start, rhat(f), *(rhat(sites.get(f"layers.0.{name}")) for name in names)]
        cells += [f"{np.mean(list(temperatures)):.2f}", f"{float(nll(y_test, predictive)):.2f}"]
        noise = f"{gp.likelihood.variance.item():.4f}" if options.data != "flights" else "-"
        covered = "-" if options.data == "flights" else f"{100 * float(coverage(y_test, *interval(predictive))):.0f} %"
        cells += [f"{float(rmse(y_test, predictive.mean)):.3f}", covered, noise, f"{seconds:.0f}"]
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", nargs="?", default="yacht")
    parser.add_argument("--starts", nargs="+", choices=STARTS, default=["plain", "SVI"])
    parser.add_argument("--inducing", type=int, default=30)
    parser.add_argument("--rows", type=int, help="of the training rows; all by default")
    parser.add_argument("--batch-size", type=int, help="all rows by default")
    parser.add_argument("--svi", type=int, default=400, help="steps before the chains")
    parser.add_argument("--noise", type=float, help="noise variance, kept; learned from the data by default")
    parser.add_argument("--control-variates", action="store_true", help='with "draws", "cyclical" and "fixed z"')
    parser.add_argument("--burn-in", type=int, default=1_000)
    parser.add_argument("--draws", type=int, default=60)
    parser.add_argument("--updates", type=int, default=40, help="per draw after SVI; plain finds them")
    main(parser.parse_args())
