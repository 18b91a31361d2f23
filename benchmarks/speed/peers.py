"""GPyTorch's VNNGP beside ours: set-up with the neighbor graph, training step, prediction at 10,000 points.

Both see the same uniform inputs, Matern-5/2 with one lengthscale per input, a Gaussian likelihood, mean-field q(u) with
inducing points at the data, batches of 1,024, Adam. A step is everything that a user's loop does: batch, loss,
gradients, optimizer. Each system runs in a process of its own, and they take turns: while one works the others wait for
their next line on standard input. The table shows medians, and their ratios to GPyTorch's before and after "tuned",
which sets glibc's allocator to keep freed memory and spares it the page faults of its large temporaries. Memory is the
highest during one step beyond what is held between steps. On a busy machine, `--clock process_time` with one thread
leaves out the time that others had.

Usage: python benchmarks/speed/peers.py [--neighbors 32 64 128 256] [--threads 2] [--out FILE]; needs the `bench` extra.
"""

import argparse
import ctypes
import importlib
import itertools
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

TUNED = {"MALLOC_TRIM_THRESHOLD_": str(2**32), "MALLOC_MMAP_THRESHOLD_": str(2**32), "MALLOC_TOP_PAD_": str(2**28)}
SYSTEMS = {
    "gpytorch": ("GPyTorch", {}),
    "gpytorch tuned": ("GPyTorch", TUNED),
    "ours": ("Ours", {}),
    "ours tuned": ("Ours", TUNED),
    "ours, not compiled": ("Ours", {"PYRO_NNGP_NATIVE": "0"}),
}
BATCH, NEW, START = 1024, 10_000, {"lengthscale": 0.5, "noise": 0.1}
clock = time.perf_counter  # or time.process_time, see --clock


def data(args):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(args.points, args.dims, generator=generator, dtype=getattr(torch, args.dtype))
    y = torch.sin(6 * x[:, 0]) + 0.1 * torch.randn(len(x), generator=generator, dtype=x.dtype)
    return x, y, torch.rand(NEW, args.dims, generator=generator, dtype=x.dtype)


class Ours:
    def __init__(self, x, y, k):
        from pyro_nngp.kernels import Matern52
        from pyro_nngp.likelihoods import Gaussian
        from pyro_nngp.models import VNNGP

        dims = x.shape[1]
        kernel = Matern52(dims, lengthscale=torch.full((dims,), START["lengthscale"])).to(x.dtype)
        self.gp = VNNGP(x, y, kernel, Gaussian(START["noise"]).to(x.dtype), num_neighbors=k, jitter=1e-3)

    def steps(self, count):
        from pyro_nngp.inference import fit

        ticks = [clock()]
        follow = lambda *_: ticks.append(clock())  # noqa: E731
        fit(self.gp, count + 2, batch_size=BATCH, solve_every=0, progress=False, callback=follow)
        return [b - a for a, b in itertools.pairwise(ticks[2:])]  # the first ones set up optimizer and caches

    @torch.no_grad()
    def predict(self, x_new):
        self.gp.predict(x_new)


class GPyTorch:
    """GPyTorch's VNNGP on data x (N, D), y (N,), with K neighbors."""

    def __init__(self, x, y, k, start=START):
        import gpytorch
        from gpytorch.variational import MeanFieldVariationalDistribution, NNVariationalStrategy

        self.y = y
        torch.set_default_dtype(x.dtype)

        class Model(gpytorch.models.ApproximateGP):
            def __init__(self):
                q = MeanFieldVariationalDistribution(len(x))
                super().__init__(NNVariationalStrategy(self, x, q, k=k, training_batch_size=BATCH))
                self.mean_module = gpytorch.means.ConstantMean()
                self.covar_module = gpytorch.kernels.MaternKernel(2.5, ard_num_dims=x.shape[1])
                self.covar_module.lengthscale = start["lengthscale"]

            def forward(self, x):
                return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

            def __call__(self, x, prior=False, **kwargs):
                return self.variational_strategy(x=x, prior=prior, **kwargs)

        self.model, self.likelihood = Model(), gpytorch.likelihoods.GaussianLikelihood()
        self.likelihood.noise = start["noise"]
        self.loss = gpytorch.mlls.VariationalELBO(self.likelihood, self.model, num_data=len(x))
        # Start q(u) by hand: the first call would otherwise build the prior over all points.
        self.model.variational_strategy.variational_params_initialized.fill_(1)
        self.optimizer = torch.optim.Adam([*self.model.parameters(), *self.likelihood.parameters()], lr=0.01)

    def steps(self, count):
        self.model.train()
        strategy, times = self.model.variational_strategy, []
        while len(times) < count:
            start = clock()
            self.optimizer.zero_grad()
            output = self.model(x=None)
            rows = strategy.current_training_indices
            (-self.loss(output, self.y[rows])).backward()
            self.optimizer.step()
            if len(rows) == BATCH:
                times.append(clock() - start)
        return times

    @torch.no_grad()
    def predict(self, x_new):
        """Predictive mean and standard deviation of y."""
        self.model.eval()
        found = [self.likelihood(self.model(rows)) for rows in x_new.split(1000)]
        return torch.cat([each.mean for each in found]), torch.cat([each.stddev for each in found])


def peak_memory(work):
    """Highest resident memory, in MB, while `work` runs, beyond what is held afterwards (Linux with glibc)."""

    def status(field):
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
        return int(line.split()[1]) / 1024

    work()  # once, so that what is imported and set up at the first time does not count
    ctypes.CDLL(None).malloc_trim(0)  # nor does freed memory that the allocator has kept
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the highest so far is forgotten
    work()
    return status("VmHWM") - before


def serve(args):
    """Do what standard input asks for, one answer a line."""
    global clock
    clock = getattr(time, args.clock)
    torch.set_num_threads(args.threads)
    x, y, x_new = data(args)
    importlib.import_module({"Ours": "pyro_nngp.models", "GPyTorch": "gpytorch.variational"}[args.serve])
    start = clock()
    system = globals()[args.serve](x, y, args.neighbors[0])
    print("setup", clock() - start, flush=True)
    for line in sys.stdin:
        kind, count = line.split()
        if kind == "predict":
            start = clock()
            system.predict(x_new)
            answer = [clock() - start]
        elif kind == "memory":
            answer = [peak_memory(lambda: system.steps(int(count)))]  # noqa: B023
        else:
            answer = system.steps(int(count))
        print("answer", *answer, flush=True)


class Peer:
    """A system in a process of its own; `times` collects the seconds of each kind of work, or the megabytes."""

    def __init__(self, name, args, k):
        system, environment = SYSTEMS[name]
        options = [f"--{key}={getattr(args, key)}" for key in ("points", "dims", "threads", "dtype", "clock")]
        self.process = subprocess.Popen(
            [sys.executable, __file__, *options, f"--neighbors={k}", f"--serve={system}"],
            env=os.environ | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.times = {"setup": self._answer(), "memory": [], "step": [], "predict": []}

    def work(self, kind, count):
        self.process.stdin.write(f"{kind} {count}\n")
        self.process.stdin.flush()
        self.times[kind] += self._answer()

    def _answer(self):
        for line in self.process.stdout:
            word, *values = line.split()
            if word in ("setup", "answer"):
                return [float(value) for value in values]
        raise RuntimeError("a system stopped; see its error above")

    def stop(self):
        self.process.stdin.close()
        self.process.wait()


def compare(args, k):
    """Median seconds, or megabytes, of each kind of work, by system."""
    peers = {}
    for name in args.systems:
        peers[name] = Peer(name, args, k)
    steps, rounds = (args.steps, args.rounds) if k < 200 else (1, 3)
    for peer in peers.values():
        peer.work("memory", 1)
    for _ in range(rounds):
        for peer in peers.values():
            peer.work("step", steps)
    for _ in range(min(rounds, 3)):
        for peer in peers.values():
            peer.work("predict", 1)
    for peer in peers.values():
        peer.stop()
    return {name: {kind: statistics.median(t) for kind, t in peer.times.items()} for name, peer in peers.items()}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--points", type=int, default=20_000)
    parser.add_argument("--neighbors", type=int, nargs="+", default=[32, 64, 128, 256])
    parser.add_argument("--dims", type=int, default=8)
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clock", choices=["perf_counter", "process_time"], default="perf_counter")
    parser.add_argument("--steps", type=int, default=4, help="of one turn")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=list(SYSTEMS))
    parser.add_argument("--serve", choices=["Ours", "GPyTorch"], help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.serve:
        serve(args)
        return
    sizes = f"N = {args.points:,}, D = {args.dims}, B = {BATCH}, {args.dtype}, {args.threads} threads, {args.clock}"
    lines = [f"VNNGP, {sizes}, medians of alternating runs; torch {torch.__version__}.", ""]
    names = ["K", "system", "set-up [s]", "step [ms]", "memory [MB]", "predict 10k [s]"]
    lines += [f"| {' | '.join([*names, 'step: GPyTorch, tuned / this', 'predict: the same'])} |"]
    lines += ["|---" * 8 + "|"]
    print("\n".join(lines), flush=True)
    for k in args.neighbors:
        for name, found in (results := compare(args, k)).items():
            peers = [results[peer] for peer in ("gpytorch", "gpytorch tuned") if peer in results]
            ratios = [", ".join(f"{p[kind] / found[kind]:.1f}" for p in peers) for kind in ("step", "predict")]
            times = f"{found['setup']:.1f} | {1e3 * found['step']:.1f} | {found['memory']:.0f} | {found['predict']:.2f}"
            lines.append(f"| {k} | {name} | {times} | {' | '.join(ratios)} |")
            print(lines[-1], flush=True)
    if args.out:
        args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
