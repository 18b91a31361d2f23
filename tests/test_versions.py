"""Versions of tensors: equal as long as nothing has changed."""

import copy
import pickle

import torch
from torch import nn

from pyro_nngp._versions import Attributes, Kept, Versions


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


def test_a_result_is_kept_until_the_versions_differ():
    module, calls = layer(), []
    kept = Kept()

    def find():
        calls.append(len(calls))
        return calls[-1]

    for _ in range(2):
        assert kept.get(Versions.of(module), find) == 0
    with torch.no_grad():
        module.weight.add_(1)
    assert kept.get(Versions.of(module), find) == 1
    assert kept.get(None, find) == 2
    assert copy.deepcopy(kept).get(Versions.of(module), find) == 3


def test_attributes_are_compared_by_object_and_tensors_by_their_state():
    module = layer()
    module.smoothness, module.scale = 2.5, torch.ones(1)
    before = Attributes([module])
    assert before == Attributes([module])
    module.smoothness = 1.5
    assert before != Attributes([module])
    module.smoothness, before = 2.5, Attributes([module])
    module.scale.add_(1)
    assert before != Attributes([module])
