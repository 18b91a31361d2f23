"""Versions of tensors: equal as long as nothing has changed."""

import copy
import pickle

import torch
from torch import nn

from pyro_nngp._versions import Versions


def layer():
    module = nn.Linear(100, 2).double()
    module.register_buffer("data", torch.zeros(1000))
    return module


def test_states_are_equal_until_a_tensor_changes():
    module = layer()
    before = Versions.of(module, 1e-6)
    assert before == Versions.of(module, 1e-6)
    assert before != Versions.of(module, 1e-5)
    with torch.no_grad():
        module.weight[0, 3] = 2.0  # of 200 numbers: by its version
    assert before != Versions.of(module, 1e-6)
    before = Versions.of(module)
    module.bias.data[0] += 1  # past the version: by its values
    assert before != Versions.of(module)


def test_another_tensor_in_the_place_of_one_is_a_change():
    module = layer()
    before = Versions.of(module)
    module.data = torch.zeros(1000)  # of the same size, perhaps at the same address
    assert before != Versions.of(module)
    with torch.inference_mode():
        module.data = torch.zeros(1000)  # has no version
    assert Versions.of(module) != Versions.of(module)


def test_copies_are_states_of_other_tensors():
    versions = Versions.of(layer())
    for again in (copy.deepcopy(versions), pickle.loads(pickle.dumps(versions))):
        assert again != versions
