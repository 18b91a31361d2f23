"""Unknown keyword arguments: the error names the argument of this package for a name that others use."""

import inspect
from collections.abc import Callable, Iterable
from difflib import get_close_matches

from pyro_nngp._checks import fail

OTHER_NAMES = {  # argument: its names in papers and in other packages
    "num_neighbors": "k K m n_neighbors neighbors num_nearest num_nn n_neighbours num_neighbours neighbours",
    "inducing": "M Z num_inducing n_inducing inducing_points inducing_variable inducing_inputs Xu",
    "likelihood": "noise noise_var noise_variance nugget alpha family",
    "kernel": "covar_module covariance cov_function covar cov",
    "mean": "mean_module mean_function mean_func trend",
    "guide": "encoder variational_distribution variational_family q_diag",
    "offset": "exposure log_exposure",
    "seed": "random_state rng",
    "x": "X train_x train_inputs",
    "y": "Y train_y train_targets",
}
_OF_FIT = {"num_steps", "steps", "epochs", "max_iter", "batch_size", "lr", "learning_rate", "optimizer", "device"}


def check_keywords(where: str, function: Callable, given: Iterable[str]) -> None:
    """Raise ``TypeError`` for a keyword that `function` does not take; the message names the likely one.

    Args:
        where: name of the caller.
        function: a function without ``**kwargs``.
        given: names of keyword arguments.
    """
    known = list(inspect.signature(function).parameters)[1:]
    for name in given:
        if name not in known:
            fail(where, "keyword arguments", f"among {', '.join(known)}", repr(name), _cure(name, known), TypeError)


def _cure(name: str, known: list[str]) -> str:
    for argument, others in OTHER_NAMES.items():
        if name in others.split() and argument in known:
            example = "guide=Amortized(encoder)" if name == "encoder" else f"{argument}=..."
            return f"Write {example} instead of {name}=..."
    if name in _OF_FIT:
        return f"Training has its own call: see the arguments of fit(gp, ...) for {name}."
    close = get_close_matches(name, known, 1)
    return f"Did you mean {close[0]}?" if close else "Leave it out."
