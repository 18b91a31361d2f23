"""Each test starts with an empty parameter store and the same random state; annotations of shapes are checked."""

import random
from collections.abc import Iterator

from session import pytest_collection, pytest_collection_finish  # isort: skip # before torch

import numpy as np
import pyro
import pytest
import torch

__all__ = ["fresh_pyro", "pytest_collection", "pytest_collection_finish"]

# As pyro.set_rng_seed, without torch.manual_seed, which takes .3 ms for the accelerators that are absent.
SEEDS = [random.seed, np.random.seed, torch.default_generator.manual_seed]
if torch.cuda.is_available():
    SEEDS.append(torch.cuda.manual_seed_all)


@pytest.fixture(autouse=True)
def fresh_pyro() -> Iterator[None]:
    """Give each test an empty parameter store and the same random state."""
    pyro.clear_param_store()
    for seed in SEEDS:
        seed(0)
    yield
    pyro.clear_param_store()
