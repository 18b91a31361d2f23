"""Pyro's NUTS with whitened NNGP sites, on a potential whose torch operations are recorded once.

Hamiltonian Monte Carlo runs the model at every leapfrog step. With a few hundred points most of that time goes into
Pyro's handlers, distributions and autograd's graph, which are the same at each step: :class:`RecordedPotential` keeps
the operations below them (:mod:`pyro_nngp._tape`). Values and gradients are as in ``pyro.infer.NUTS``, rounding
included, and so are the chains.

Reference: Hoffman and Gelman (2014), "The No-U-Turn sampler: adaptively setting path lengths in Hamiltonian Monte
Carlo"; Betancourt (2017), "A conceptual introduction to Hamiltonian Monte Carlo", as implemented by Pyro.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from pyro import poutine
from pyro.infer import NUTS
from pyro.infer.autoguide import init_to_median, init_to_sample
from pyro.infer.reparam.reparam import Reparam
from torch import Tensor
from torch.autograd.function import once_differentiable

from pyro_nngp._checks import fail, warn
from pyro_nngp._tape import AnotherBranch, Tape
from pyro_nngp.distributions import NNGP, NNGPReparam
from pyro_nngp.inference._traces import check_program
from pyro_nngp.inference.autoguide.auto_nngp import AutoNNGP
from pyro_nngp.inference.autoguide.linear_predictor import gaussian_base
from pyro_nngp.inference.autoguide.transport import Transported
from pyro_nngp.inference.mcmc.parameters import warn_of_starts


class QuickNUTS(NUTS):
    """``pyro.infer.NUTS`` for programs with NNGP sites: whitened, and several times as fast for up to 10,000 points.

    Use::

        kernel = QuickNUTS(model)
        mcmc = MCMC(kernel, num_samples=500, warmup_steps=500)
        mcmc.run(x, y)
        f = Predictive(kernel.model, mcmc.get_samples())(x, y)["f"]

    Every latent NNGP site over all points of its graph, say ``f``, is sampled by way of the white values ``f_white``
    (:class:`~pyro_nngp.distributions.NNGPReparam`). Other sites keep their names and supports. ``to_arviz(mcmc)`` has
    ``f`` as well.

    With a guide the trajectories are many times as short, and a warm-up of 100 - 200 steps is enough::

        kernel = QuickNUTS(model, guide=AutoNNGP(model))
        mcmc = MCMC(kernel, num_samples=500, warmup_steps=150)
        mcmc.run(x, y)
        draws = Predictive(kernel.model, mcmc.get_samples())(x, y)  # of all sites; (x, None) predicts y

    All latent sites are then functions of one site of nearly independent standard normal values, ``_white``
    (:mod:`~pyro_nngp.inference.autoguide.transport`), and chains start from draws of the guide. The posterior is that
    of the program, however good the guide is, and ``to_arviz(mcmc)`` has the program's sites. The guide need not be
    trained, unless it has more than 200 hyperparameters.

    The program is run as usual, with a warning that names the reason, on other devices than the CPU and where one run
    does not determine its operations; and, without one, at values where it would take another branch. It must not
    depend on anything that changes during a run, such as a counter: that is checked at the start and at every 1000th
    gradient.

    Args:
        model: a Pyro program. It need not have NNGP sites, without a guide.
        guide: None, or an ``AutoNNGP`` for the program.
        options: options of ``pyro.infer.NUTS``, except ``potential_fn`` and ``jit_compile``. ``init_strategy`` is
            ``init_to_median`` here, the median of 15 draws of the prior: from Pyro's uniform start, a warm-up of 100
            steps may end at steps a hundredth as long.

    Attributes:
        model: the program with whitened sites, or with ``_white`` in place of all.

    Warns:
        UserWarning: if hyperparameters of a method have neither a prior nor a trained value.

    Raises:
        TypeError: if `model` is not a program, `guide` is no AutoNNGP, or for other options.
        RuntimeError: during a run, if the program has changed.
    """

    potential_fn: Any

    def __init__(self, model: Callable, guide: AutoNNGP | None = None, **options: Any) -> None:
        check_program("QuickNUTS", model)
        excess = sorted({"potential_fn", "jit_compile", "jit_options"} & options.keys())
        if excess:
            cure = "The potential belongs to the model, and is compiled in any case."
            fail("QuickNUTS", "options", "without a potential and its compilation", excess, cure, TypeError)
        warn_of_starts("QuickNUTS", model, "")
        self._transported = None if guide is None else Transported("QuickNUTS", model, guide)
        program = poutine.reparam(model, config=_whitening) if guide is None else self._transported
        options = {"init_strategy": init_to_median if guide is None else init_to_sample} | options
        super().__init__(program, **options)

    def setup(self, warmup_steps: int, *args: Any, **kwargs: Any) -> None:
        """Prepare a chain; called by ``MCMC``."""
        if self._transported is not None:
            self._transported.prepare(*args, **kwargs)
        super().setup(warmup_steps, *args, **kwargs)
        if self.initial_params:
            self.potential_fn = RecordedPotential(self.potential_fn, self.initial_params)

    def cleanup(self) -> None:
        """End a chain; called by ``MCMC``."""
        if isinstance(self.potential_fn, RecordedPotential):
            self.potential_fn = self.potential_fn.original
        super().cleanup()


class RecordedPotential:
    """A potential whose operations, with the operations of its gradient, are recorded once and replayed.

    Args:
        potential: maps {site: unconstrained values} to a number, as the ``potential_fn`` of
            ``pyro.infer.mcmc.util.initialize_model``.
        example: values to record it at.
        check_every: number of evaluations between two comparisons of the recording with the program.

    Attributes:
        original: `potential`.
        tape: the recorded operations; None, with a warning, if one run does not determine them.
    """

    def __init__(
        self,
        potential: Callable[[dict[str, Tensor]], Tensor],
        example: Mapping[str, Tensor],
        check_every: int = 1000,
    ) -> None:
        self.original, self._names = potential, list(example)
        self._check_every, self._count = check_every, 0
        self.tape: Tape | None = None
        start = [value.detach() for value in example.values()]
        try:
            self.tape = Tape("QuickNUTS", self._run, *start)
            self._check(start, self.tape(*start))
            generator = torch.Generator().manual_seed(0)
            for _ in range(2):
                near = [z + 0.1 * torch.randn(z.shape, generator=generator, device="cpu").to(z) for z in start]
                self._check(near, self.evaluate(near))
        except (ValueError, RuntimeError) as error:
            self.tape = None
            warn(f"{error} The program is run at every step, as by NUTS.")

    def __call__(self, values: Mapping[str, Tensor]) -> Tensor:
        """The potential at {site: unconstrained values}; differentiable once."""
        return _Potential.apply(self, *(values[name] for name in self._names))

    def evaluate(self, values: list[Tensor]) -> tuple[Tensor, ...]:
        """The potential and its gradient by each site.

        Raises:
            RuntimeError: if the program is no longer the recorded one.
        """
        if self.tape is None:
            return self._run(*values)
        try:
            result = self.tape(*values)
        except AnotherBranch:
            return self._run(*values)
        self._count += 1
        if self._count % self._check_every == 0:
            self._check(values, result)
        return result

    def _run(self, *values: Tensor) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            leaves = [value.detach().requires_grad_() for value in values]
            potential = self.original(dict(zip(self._names, leaves, strict=True)))
            return (potential.detach(), *torch.autograd.grad(potential, leaves))

    def _check(self, values: list[Tensor], result: tuple[Tensor, ...]) -> None:
        for now, recorded in zip(self._run(*values), result, strict=True):
            size = torch.finfo(now.dtype).eps ** 0.5 * now.abs().max().clamp(min=1)
            if now.isfinite().all() and not ((now - recorded).abs() <= size).all():
                actual = "another potential in a second run at the same values"
                cure = "Let it read nothing that changes, or take pyro.infer.NUTS."
                fail("QuickNUTS", "a program", "that is the same in each run", actual, cure, RuntimeError)


class _Potential(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, potential: RecordedPotential, *values: Tensor) -> Tensor:
        value, *gradients = potential.evaluate(list(values))
        ctx.save_for_backward(*gradients)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(grad * gradient for gradient in ctx.saved_tensors)


def _whitening(site: dict[str, Any]) -> Reparam | None:
    """The reparameterization of a latent site: whitening where it is an NNGP over all points."""
    is_process = isinstance(gaussian_base(site["fn"]), NNGP)
    return NNGPReparam() if is_process and not site["is_observed"] else None
