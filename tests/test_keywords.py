"""Unknown keyword arguments."""

import pytest
import torch

import pyro_nngp as nngp
from pyro_nngp._keywords import OTHER_NAMES

METHODS = [getattr(nngp, name) for name in ("BSGP", "LMC", "LOO", "MLLk", "NPVI", "SVGP", "SWSGP", "Vecchia", "VNNGP")]


@pytest.mark.parametrize(
    ("method", "keyword", "cure"),
    [
        (nngp.SVGP, "M", r"Write inducing=\.\.\. instead of M="),
        (nngp.VNNGP, "num_inducing", r"Write inducing=\.\.\. instead of num_inducing="),
        (nngp.Vecchia, "n_neighbors", r"Write num_neighbors=\.\.\. instead of n_neighbors="),
        (nngp.NPVI, "encoder", r"Write guide=Amortized\(encoder\) instead of encoder="),
        (nngp.LOO, "noise", r"Write likelihood=\.\.\. instead"),
        (nngp.Vecchia, "lr", r"Training has its own call: see the arguments of fit\(gp, \.\.\.\) for lr\."),
        (nngp.Vecchia, "orderings", r"Did you mean ordering\?"),
        (nngp.LOO, "M", r"Leave it out\."),  # it has no inducing points
    ],
)
def test_an_unknown_keyword_names_the_argument(method, keyword, cure):
    expected = rf"{method.__name__}: expected keyword arguments among x, y, .*, got '{keyword}'\. {cure}"
    with pytest.raises(TypeError, match=expected):
        method(torch.rand(8, 2), torch.rand(8), **{keyword: 4})


@pytest.mark.parametrize("method", METHODS)
def test_each_method_refuses_what_it_does_not_know(method):
    with pytest.raises(TypeError, match=r"expected keyword arguments among x, y.*, got 'unheard_of'"):
        method(torch.rand(8, 2), torch.rand(8), unheard_of=1)


def test_no_argument_is_another_name_of_an_argument():
    others = {name for names in OTHER_NAMES.values() for name in names.split()}
    assert not others & set(OTHER_NAMES)
