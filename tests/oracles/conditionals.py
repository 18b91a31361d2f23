"""A conditional with everything in it that can go wrong, and the general code as its oracle."""

import torch

from pyro_nngp.conditionals.nearest_neighbor import graph_conditional
from pyro_nngp.native import conditional as compiled

F64 = torch.float64


class Case:
    """Targets among points with duplicates, padded neighbors, noise, and one unused point."""

    def __init__(self, kernel, b=21, k=7, d=3, dtype=F64, n=40, smoothness=None):
        self.x, self.points = torch.randn(b, d, dtype=dtype), torch.randn(n, d, dtype=dtype)
        self.points[1] = self.points[0]
        self.x[2] = self.points[3]
        self.neighbors = torch.rand(b, n).argsort(-1)[:, :k]
        self.neighbors[0, : min(2, k)] = torch.arange(min(2, k))
        self.neighbors[2, 0] = 3
        self.neighbors[min(4, b - 1)] = -1
        self.neighbors[torch.rand(b, k) < 0.2] = -1
        self.noise = torch.rand(n, dtype=dtype)
        self.smoothness = None if smoothness is None else torch.tensor(smoothness, dtype=dtype)
        self.lengthscale, self.variance = torch.rand(d, dtype=dtype) + 0.5, torch.tensor(1.7, dtype=dtype)
        self.kernel, self.grad_w, self.grad_v = kernel, torch.randn(b, k, dtype=dtype), torch.randn(b, dtype=dtype)

    def inputs(self):
        every = [self.x, self.points, self.lengthscale, self.variance, self.noise, self.smoothness]
        return [t.clone().requires_grad_() for t in every if t is not None]

    def bound(self, lengthscale, variance, smoothness=None):
        kernel = self.kernel(lengthscale.shape[-1])
        del kernel.lengthscale, kernel.variance
        kernel.lengthscale, kernel.variance = lengthscale, variance
        if smoothness is not None:
            del kernel.smoothness
            kernel.smoothness = smoothness
        return kernel

    def problem(self, dtype=F64, jitter=1e-3):
        rows = self.neighbors.clamp(min=0)
        tensors = [self.x, self.points, self.lengthscale, self.variance, self.noise[rows]]
        tensors = [t.to(dtype) for t in tensors]
        return compiled.Problem(*tensors, self.neighbors, self.kernel.profile, jitter, self.smoothness)

    def values(self, x, points, lengthscale, variance, noise, smoothness=None, kernel=None, jitter=1e-3):
        """w and v; `kernel` maps the kernel to another form of it."""
        made = self.bound(lengthscale, variance, smoothness)
        return graph_conditional(kernel(made) if kernel else made, x, points, self.neighbors, noise, jitter=jitter)

    def run(self, **options):
        """w, v and the gradients of x, points, lengthscale, variance, noise and, if there is one, smoothness."""
        inputs = self.inputs()
        w, v = self.values(*inputs, **options)
        return [w.detach(), v.detach(), *torch.autograd.grad((w, v), inputs, (self.grad_w, self.grad_v))]


def general(kernel):
    """The same kernel as a plain function, which takes the general way."""
    return lambda a, b: kernel(a, b)
