"""NumPyro's and PyMC's part of nuts.py, run by the interpreter of an environment that has one of them.

Usage: PYTHON nuts_other.py NAME FILE WARMUP DRAWS SHOWN [CAP]; FILE is written by nuts.py and overwritten by the draws.
After CAP processor seconds it ends with the status 75.
"""

import os
import sys
import threading
import time

os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}
os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"

import numpy as np


def numpyro(data, warmup, draws, dense):
    import jax
    import jax.numpy as jnp
    import numpyro
    import numpyro.distributions as dist
    from numpyro.infer import MCMC, NUTS, Predictive

    numpyro.enable_x64()
    x, y = jnp.asarray(data["x"]), jnp.asarray(data["y"])
    near, order = jnp.asarray(data["neighbors"]), jnp.asarray(data["order"])
    real = near >= 0
    points = jnp.where(real[..., None], x[near], x[:, None])

    def covariance(a, b, variance, lengthscale):
        square = ((a[..., :, None, :] - b[..., None, :, :]) ** 2).sum(-1)
        r = jnp.sqrt(3 * jnp.where(square > 0, square, 1.0)) / lengthscale
        return variance * jnp.where(square > 0, (1 + r) * jnp.exp(-r), 1.0)

    def color(white, variance, lengthscale):
        if dense:
            nugget = 1e-6 * variance * jnp.eye(len(x))
            return jnp.linalg.cholesky(covariance(x, x, variance, lengthscale) + nugget) @ white
        both = real[:, :, None] & real[:, None, :]
        eye = jnp.eye(near.shape[1])
        system = jnp.where(both, covariance(points, points, variance, lengthscale), 0.0)
        system += jnp.where(real[:, :, None], 1e-6 * variance, 1.0) * eye
        cross = jnp.where(real, covariance(x[:, None], points, variance, lengthscale)[:, 0], 0.0)
        factor = jnp.linalg.cholesky(system)
        w = jax.scipy.linalg.cho_solve((factor, True), cross[..., None])[..., 0]
        scale = jnp.sqrt(variance * (1 + 1e-6) - (w * cross).sum(-1))

        def step(f, row):
            return f.at[row].set((w[row] * f[near[row]]).sum() + scale[row] * white[row]), None

        return jax.lax.scan(step, jnp.zeros_like(white), order)[0]

    def model():
        variance = numpyro.sample("variance", dist.LogNormal(0.0, 1.0))
        lengthscale = numpyro.sample("lengthscale", dist.LogNormal(-1.5, 0.5))
        intercept = numpyro.sample("intercept", dist.Normal(0.0, 2.0))
        white = numpyro.sample("white", dist.Normal(0.0, 1.0).expand([len(x)]).to_event(1))
        f = numpyro.deterministic("f", color(white, variance, lengthscale))
        numpyro.sample("y", dist.Poisson(jnp.exp(intercept + f)).to_event(1), obs=y)

    if warmup == 0:
        return gradient(model, draws)
    mcmc = MCMC(NUTS(model), num_warmup=warmup, num_samples=draws, progress_bar=False)
    start = time.process_time()
    mcmc.warmup(jax.random.PRNGKey(0))
    mcmc.run(jax.random.PRNGKey(1))
    jax.block_until_ready(mcmc.get_samples())
    middle = time.process_time()
    mcmc.post_warmup_state = mcmc.last_state  # as many again, without compilation
    mcmc.run(jax.random.PRNGKey(1))
    samples = {name: np.asarray(value) for name, value in mcmc.get_samples().items()}
    end = time.process_time()
    samples.setdefault("f", np.asarray(Predictive(model, mcmc.get_samples())(jax.random.PRNGKey(2)).get("f")))
    return samples, middle - start, end - middle


def end_after(cap):
    while time.process_time() < cap:
        time.sleep(1.0)
    os._exit(75)


def gradient(model, repeats):
    """Processor milliseconds of the potential and its gradient, least of so many."""
    import jax
    from numpyro.infer.util import initialize_model

    info = initialize_model(jax.random.PRNGKey(0), model)
    both, z, found = jax.jit(jax.value_and_grad(info.potential_fn)), info.param_info.z, []
    jax.block_until_ready(both(z))
    for _ in range(repeats):
        start = time.process_time()
        jax.block_until_ready(both(z))
        found.append(time.process_time() - start)
    print(f"{sys.argv[1]}, {len(z['white']):,} points: {1e3 * min(found):.2f} ms", flush=True)
    raise SystemExit


def pymc(data, warmup, draws):
    import pymc as pm

    x, y = data["x"], data["y"]
    marks = []
    with pm.Model():
        variance = pm.LogNormal("variance", 0.0, 1.0)
        lengthscale = pm.LogNormal("lengthscale", -1.5, 0.5)
        intercept = pm.Normal("intercept", 0.0, 2.0)
        gp = pm.gp.HSGP(m=[25, 25], c=1.5, cov_func=variance * pm.gp.cov.Matern32(2, ls=lengthscale))
        f = gp.prior("f", X=x)
        pm.Poisson("y", mu=pm.math.exp(intercept + f), observed=y)
        start = time.process_time()
        idata = pm.sample(
            draws=draws,
            tune=warmup,
            chains=1,
            cores=1,
            random_seed=1,
            progressbar=False,
            compute_convergence_checks=False,
            callback=lambda **_: marks.append(time.process_time()),
        )
    posterior = idata.posterior
    samples = {name: posterior[name].values[0] for name in ("variance", "lengthscale", "intercept", "f")}
    return samples, marks[-1] - start, marks[-1] - marks[warmup - 1]


if __name__ == "__main__":
    name, place, *numbers = sys.argv[1:]
    warmup, draws, shown, *cap = map(int, numbers)
    if cap:
        threading.Thread(target=end_after, args=cap, daemon=True).start()
    with np.load(place) as found:
        data = dict(found)
    if name.startswith("PyMC"):
        samples, total, sampling = pymc(data, warmup, draws)
    else:
        samples, total, sampling = numpyro(data, warmup, draws, name.endswith("dense"))
    kept = {site: samples[site] for site in ("variance", "lengthscale", "intercept")}
    np.savez(place, f=samples["f"][:, :shown], total=total, sampling=sampling, **kept)
