"""Malformed calls of the compiled code, drawn at random: each gives what torch gives, or an error of the package.

`run` is called by the tests on a few hundred cases, and by `.ci/sanitize` on many more with a library that is built
with AddressSanitizer and UndefinedBehaviorSanitizer.
"""

import argparse
import os
from collections import Counter
from pathlib import Path

import numpy as np
import torch

from pyro_nngp import native
from pyro_nngp.conditionals import graph_conditional
from pyro_nngp.distributions import NNGP
from pyro_nngp.kernels import RBF, Matern, Matern12, Matern32, Matern52
from pyro_nngp.kernels.radial import Combination
from pyro_nngp.linalg import NotPositiveDefiniteError
from pyro_nngp.native import blocks, conditional, polya_gamma, rows, search, triangular
from pyro_nngp.neighbors import NeighborGraph

KERNELS = [RBF, Matern12, Matern32, Matern52, Matern]
NUMBERS = [-1, -2, -(2**40), 0, 2**31, 2**40, 2**62]


class Fuzzer:
    """Draws cases from a seed and counts their outcomes."""

    def __init__(self, seed):
        self.rng, self.outcomes = np.random.default_rng(seed), Counter()
        self.levels = native.library().nn_levels()
        torch.manual_seed(seed)

    def chance(self, share):
        return self.rng.random() < share

    def spoil(self, value, share=0.15):
        """Mostly the tensor itself, else one of another shape, dtype, layout or with other numbers."""
        if not isinstance(value, torch.Tensor) or not self.chance(share):
            return value
        ways = [
            lambda t: t[:-1],
            lambda t: torch.cat([t, t[:1]]) if t.dim() else t,
            lambda t: t[..., :-1] if t.dim() else t,
            lambda t: t[None],
            lambda t: t.flatten(),
            lambda t: t[:0],
            lambda t: t.mT.contiguous().mT if t.dim() > 1 else t,
            lambda t: t[:1].expand(t.shape) if t.dim() else t,
            lambda t: torch.stack([t, t], -1)[..., 0],
            lambda t: t.to(torch.float32 if t.dtype == torch.float64 else torch.float64),
            lambda t: t.to(torch.int32),
            lambda t: t.to("meta"),
            lambda t: t.to_sparse(),
            self.renumber,
        ]
        try:
            return ways[self.rng.integers(len(ways))](value)
        except (IndexError, RuntimeError):
            return value

    def renumber(self, value):
        """One entry that is no row, or not finite."""
        value = value.clone().contiguous()
        if value.numel():
            numbers = NUMBERS if not value.is_floating_point() else [np.nan, np.inf, -np.inf, 1e300, -1.0]
            value.view(-1)[self.rng.integers(value.numel())] = self.rng.choice(numbers)
        return value

    def one_of_ours(self, call):
        """The result of a call, or None where it raised an error in the package's format."""
        try:
            result = call()
        except NotPositiveDefiniteError:
            self.outcomes["no factor"] += 1
            return None
        except (ValueError, TypeError, IndexError) as error:
            if ": expected " not in str(error) and type(error).__name__ != "TypeCheckError":  # of tests
                raise AssertionError(f"not an error of the package: {error!r}") from error
            self.outcomes["refused"] += 1
            return None
        self.outcomes["computed"] += 1
        return result

    def problem(self):
        b, k, d, n = (int(size) for size in self.rng.integers(1, [20, 12, 4, 30]))
        dtype = torch.float32 if self.chance(0.5) else torch.float64
        neighbors = torch.from_numpy(self.rng.integers(-1, n, (b, k)))
        kernel = KERNELS[self.rng.integers(5)]
        sets = (int(self.rng.integers(1, 5)),) if self.chance(0.5) else ()
        tensors = (
            torch.randn(b, d, dtype=dtype),
            torch.randn(n, d, dtype=dtype),
            torch.rand(*sets, d, dtype=dtype) + 0.1,
        )
        noise = torch.rand(*(sets if self.chance(0.5) else ()), b, k, dtype=dtype) if self.chance(0.5) else None
        variance = torch.full(sets, 1.3, dtype=dtype)
        smoothness = torch.full(sets, 1.4) if kernel is Matern else None
        if self.chance(0.3):  # both parts take part of the columns, or all of them and none
            dims = int(self.rng.integers(d + 1))
            parts = Combination((kernel.profile, RBF.profile), (dims, d - dims), ((0,), (0, 1)))
            variance = torch.full((*sets, 2), 1.3, dtype=dtype)
            smoothness = None if smoothness is None else smoothness[..., None]
            return conditional.Problem(*tensors, variance, noise, neighbors, parts, 1e-3, smoothness)
        return conditional.Problem(*tensors, variance, noise, neighbors, kernel.profile, 1e-3, smoothness)

    def compiled_conditional(self):
        """The compiled conditional itself, both passes, with anything spoiled."""
        problem = self.problem()
        spoiled = problem._replace(
            x=self.spoil(problem.x),
            points=self.spoil(problem.points),
            lengthscale=self.spoil(problem.lengthscale),
            variance=self.spoil(problem.variance),
            noise=self.spoil(problem.noise),
            neighbors=self.spoil(problem.neighbors),
        )
        level = int(self.rng.integers(-1, self.levels + 1)) if self.chance(0.2) else int(self.rng.integers(self.levels))
        wanted = conditional.Wanted(inputs=self.chance(0.5), smoothness=problem.smoothness is not None)
        found = self.one_of_ours(lambda: conditional.forward(spoiled, wanted, level))
        if found is None:
            return
        w, var, _, kept = found
        grads = self.spoil(torch.randn_like(w)), self.spoil(torch.randn_like(var))
        kept = tuple(self.spoil(part, 0.1) for part in kept)
        wanted = conditional.Wanted(*(self.chance(0.5) for _ in range(3)))
        self.one_of_ours(lambda: conditional.backward(spoiled, kept, *grads, wanted, level))

    def public_conditional(self):
        """The same through the public function, beside torch operations."""
        problem = self.problem()
        kernel = RBF(problem.x.shape[1]).to(problem.x.dtype)
        noise = torch.rand(len(problem.points), dtype=problem.x.dtype) if self.chance(0.5) else None
        given = [self.spoil(each) for each in (problem.x, problem.points, problem.neighbors, noise)]
        results = []
        for way in ("1", "0"):
            os.environ["PYRO_NNGP_NATIVE"] = way
            results.append(self.one_of_ours(lambda: graph_conditional(kernel, *given, jitter=1e-3)))
        os.environ["PYRO_NNGP_NATIVE"] = "1"
        compiled, plain = results
        if not all(bool(each.to_dense().isfinite().all()) for each in given if each is not None and not each.is_meta):
            return  # an indefinite covariance, or not, as rounding has it
        assert (compiled is None) == (plain is None), "compiled code and torch disagree about what is an error"
        if compiled is not None:
            torch.testing.assert_close(compiled, plain, rtol=1e-2, atol=1e-2, equal_nan=True)

    def new_values(self):
        """Draws at new points with neighbors of the caller's."""
        x, new = torch.rand(12, 2), torch.rand(5, 2)
        prior = NNGP(Matern32(2), NeighborGraph(x, 4))
        neighbors, f = prior.graph.extend(new)[1], torch.randn(12)
        new, f, neighbors = self.spoil(new), self.spoil(f), self.spoil(neighbors, 0.5)
        self.one_of_ours(lambda: prior.sample_new(new, f, neighbors=neighbors))

    def compiled_triangle(self):
        """The compiled substitution, with anything spoiled."""
        n, k, s, sets = (int(size) for size in self.rng.integers(1, [30, 8, 5, 4]))
        dtype = torch.float32 if self.chance(0.5) else torch.float64
        neighbors = torch.minimum(torch.from_numpy(self.rng.integers(-1, n, (n, k))), torch.arange(n)[:, None] - 1)
        w, right = torch.randn(sets, n, k, dtype=dtype) / k, torch.randn(sets, n, s, dtype=dtype)
        given = w, neighbors, right, torch.arange(n)
        spoiled = [self.spoil(each, 0.2) for each in given]
        self.one_of_ours(lambda: triangular.solve(*spoiled, self.chance(0.5)))

    def compiled_blocks(self):
        """Blocks of a matrix, with anything spoiled."""
        m, count, k = (int(size) for size in self.rng.integers(1, [20, 6, 8]))
        given = torch.zeros(m, m).double(), torch.randint(m, (count, k)), torch.ones(count, k, k).double()
        matrix, places, values = (self.spoil(each, 0.2) for each in given)
        self.one_of_ours(lambda: blocks.add(matrix, places, values))
        self.one_of_ours(lambda: blocks.take(matrix, places))

    def compiled_rows(self):
        """Distinct rows, beside torch's, and a step of Adam, with anything spoiled."""
        n, count, columns = (int(size) for size in self.rng.integers(1, [200, 100, 4]))
        dtype = torch.float32 if self.chance(0.5) else torch.float64
        numbers = self.spoil(torch.from_numpy(self.rng.integers(-1, n, count)), 0.3)
        found = self.one_of_ours(lambda: rows.distinct(numbers, self.chance(0.5)))
        if found is not None:
            assert torch.equal(found[0], numbers[numbers >= 0].unique())
            assert torch.equal(found[0][found[1][numbers >= 0]], numbers[numbers >= 0])
        own = torch.randperm(n)[:count]
        tables = [torch.zeros(n, columns, dtype=dtype) for _ in range(3)]
        given = [self.spoil(each) for each in (*tables, own, torch.ones(len(own), columns, dtype=dtype))]
        self.one_of_ours(lambda: rows.adam_step(*given, 0.1, (0.9, 0.999), 1e-8))

    def compiled_draws(self):
        """Polya-Gamma draws, with anything spoiled."""
        size, count = (int(size) for size in self.rng.integers(0, [30, 4]))
        b = torch.from_numpy(10.0 ** self.rng.uniform(-2, 4, size)).where(torch.rand(size) < 0.7, torch.tensor(2.0))
        c = torch.from_numpy(self.rng.normal(size=size) * 10.0 ** self.rng.uniform(-3, 3, size))
        given = [self.spoil(each, 0.3) for each in (b, c)]
        draws = self.one_of_ours(lambda: polya_gamma.draw(*given, count, int(self.rng.integers(2**62))))
        if draws is not None:
            known = (given[0] >= 0.25) & given[0].isfinite() & given[1].isfinite()
            assert (draws[:, known] > 0).all()
            assert draws[:, ~known].isnan().all()

    def array(self, value, share=0.15):
        spoiled = self.spoil(torch.from_numpy(value), share)
        return spoiled.numpy() if spoiled.layout == torch.strided and spoiled.device.type == "cpu" else value

    def compiled_search(self):
        """The compiled tree, with anything spoiled."""
        points, dim, queries, k = (int(size) for size in self.rng.integers(1, [200, 9, 40, 30]))
        tree = self.one_of_ours(lambda: search.Tree(self.array(self.rng.random((points, dim)))))
        if tree is None:
            return
        places = self.rng.random((queries, dim))
        rows = self.one_of_ours(lambda: search.spatial_order(self.array(places)))
        rows = np.arange(queries) if rows is None else rows
        limit, exclude = self.rng.integers(0, points + 1, queries), self.rng.integers(-1, points, queries)
        index, value = np.full((queries, k), -7), np.full((queries, k), np.nan)
        given = [self.array(each) for each in (rows, places, limit, exclude, index, value)]
        self.one_of_ours(lambda: tree.nearest(*given, level=int(self.rng.integers(self.levels))))
        if given[4] is index and index.min() >= 0:
            assert index.max() < points


def run(seed, cases):
    """Outcomes of that many cases, by kind."""
    fuzzer = Fuzzer(seed)
    kinds = [
        fuzzer.compiled_conditional,
        fuzzer.public_conditional,
        fuzzer.compiled_search,
        fuzzer.compiled_triangle,
        fuzzer.new_values,
        fuzzer.compiled_rows,
        fuzzer.compiled_draws,
        fuzzer.compiled_blocks,
    ]
    for case in range(cases):
        kinds[case % len(kinds)]()
    return fuzzer.outcomes


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--library", type=Path, help="another build of the compiled library")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=10_000)
    options = parser.parse_args()
    if options.library is not None:
        other = native.load(options.library)
        native.library = lambda: other
    print(dict(run(options.seed, options.cases)))
