"""Files of models: the same bits in another process, and an error for anything damaged or unknown."""

import json
import random
import subprocess
import sys

import numpy as np
import pyro.distributions as dist
import pytest
import torch
from builders import slow_except
from pyro.nn import PyroModule, PyroSample
from safetensors.torch import load_file, save_file
from torch import nn

import pyro_nngp as nngp
from pyro_nngp.kernels import RBF, Kernel, Matern32, Matern52
from pyro_nngp.likelihoods import Bernoulli, Gaussian, NegativeBinomial, Poisson
from pyro_nngp.means import LinearMean
from pyro_nngp.storage import ModelFileError, load, save
from pyro_nngp.variational import MeanField

X = torch.rand(70, 2, generator=torch.Generator().manual_seed(1)).double()
NEW = torch.rand(9, 2, generator=torch.Generator().manual_seed(2)).double()
Y = torch.sin(5 * X[:, 0]) + 0.1 * torch.randn(70, generator=torch.Generator().manual_seed(3)).double()


class Periodic(Kernel):
    """A kernel of the user's own."""

    def __init__(self, period):
        super().__init__(2)
        self.declare("period", period)

    def forward(self, x, z):
        wave = torch.sin((x[..., :, None, 0] - z[..., None, :, 0]) / self.period)
        return torch.exp(-wave.square() - (x[..., :, None, 1] - z[..., None, :, 1]).square())


class Deep(nn.Module):
    """A deep kernel."""

    def __init__(self):
        super().__init__()
        self.net, self.kernel = nn.Linear(2, 3).double(), RBF(3).double()

    def forward(self, x, z):
        return self.kernel(self.net(x), self.net(z))


class Squared(nn.Module):
    """A mean function of the user's own."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.3).double())

    def forward(self, x):
        return self.scale * x[:, 0].square()


def trend(x):
    return 0.1 * x[:, 0]


def lognormal(kernel):
    kernel.variance = PyroSample(dist.LogNormal(torch.tensor(0.0).double(), 1.0))
    return kernel


def near(method, y=Y, **settings):
    """A method with a start, which most cases need not search for."""
    given = {"kernel": Matern52(2, 1.0, 0.4), "likelihood": Gaussian(0.01), "num_neighbors": 8}
    return method(X, y, **(given | settings))


METHODS = {
    "Vecchia": lambda: nngp.Vecchia(X, Y, num_neighbors=8),
    "two outputs": lambda: near(nngp.Vecchia, torch.stack([Y, -Y], 1)),
    "VNNGP with a prior": lambda: nngp.VNNGP(X, Y, lognormal(Matern52(2)), num_neighbors=8),
    "VNNGP of counts": lambda: nngp.VNNGP(X, (4 * Y.abs()).round(), likelihood=Poisson(), num_neighbors=8),
    "mean-field": lambda: near(nngp.VNNGP, guide=MeanField()),
    "LOO of classes": lambda: near(nngp.LOO, (Y > 0).double(), likelihood=Bernoulli()),
    "LOO of counts": lambda: nngp.LOO(X, (4 * Y.abs()).round(), likelihood=NegativeBinomial(), num_neighbors=8),
    "NPVI": lambda: near(nngp.NPVI),
    "SVGP": lambda: nngp.SVGP(X, Y, inducing=10),
    "SWSGP": lambda: near(nngp.SWSGP, inducing=20),
    "MLLk": lambda: near(nngp.MLLk),
    "sum of kernels": lambda: near(nngp.Vecchia, kernel=RBF(2, 1.0, 0.4) + Matern32(1, 1.0, 0.4, active_dims=[1])),
    "linear mean": lambda: near(nngp.Vecchia, mean=LinearMean(2)),
    "network as the mean": lambda: near(nngp.Vecchia, mean=PyroModule[nn.Linear](2, 1)),
    "lengthscales as the metric": lambda: near(nngp.Vecchia, metric=torch.tensor([1.0, 9.0]).double()),
}


QUICK = ("Vecchia", "two outputs", "VNNGP with a prior", "LOO of classes", "SVGP", "network as the mean")


@pytest.mark.parametrize("case", slow_except(METHODS, *QUICK))
def test_predictions_have_the_same_bits(case, tmp_path):
    gp = METHODS[case]()
    nngp.fit(gp, num_steps=2, progress=False)
    gp.save(tmp_path / "gp")
    again = load(tmp_path / "gp")
    assert repr(again) == repr(gp)
    for one, other in zip(
        (*gp(NEW), gp.sample(NEW, 2, seed=4)), (*again(NEW), again.sample(NEW, 2, seed=4)), strict=True
    ):
        assert torch.equal(one, other)
    assert torch.equal(gp.predict(NEW).mean, again.predict(NEW).mean)


def test_a_loaded_model_trains_on_as_the_original_does(tmp_path):
    gp = nngp.VNNGP(X, Y, lognormal(Matern52(2)), num_neighbors=8)
    gp.save(tmp_path / "gp")
    again = load(tmp_path / "gp")
    for each in (gp, again):
        torch.manual_seed(0)
        nngp.fit(each, num_steps=5, progress=False)
    assert all(torch.equal(one, other) for one, other in zip(gp.parameters(), again.parameters(), strict=True))


def test_sampled_models_keep_their_priors(tmp_path):
    gp = nngp.BSGP(X, Y, inducing=10, num_layers=2)
    gp.save(tmp_path / "gp")
    again = load(tmp_path / "gp")
    sites = []
    for each in (gp, again):
        torch.manual_seed(0)
        sites.append(each.model())
    assert torch.equal(*sites)


def test_parts_can_be_saved_alone(tmp_path):
    kernel = lognormal(Matern52(2, lengthscale=torch.tensor([0.1, 0.4])))
    save(kernel, tmp_path / "kernel")
    assert repr(load(tmp_path / "kernel")) == repr(kernel)


@pytest.mark.slow
def test_another_process_reads_it(tmp_path):
    gp = nngp.Vecchia(X, Y, num_neighbors=8)
    gp.save(tmp_path / "gp")
    torch.save(NEW, tmp_path / "new")
    code = (
        "import sys, torch, pyro_nngp as nngp; folder = sys.argv[1] + '/';"
        "torch.save(nngp.load(folder + 'gp')(torch.load(folder + 'new')), folder + 'out')"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    for one, other in zip(gp(NEW), torch.load(tmp_path / "out"), strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
def test_own_kernels_means_and_functions_are_named_by_the_caller(tmp_path):
    for own, gp in [
        ([Periodic], nngp.Vecchia(X, Y, Periodic(0.7), Gaussian(0.1), num_neighbors=8)),
        ([Deep], nngp.Vecchia(X, Y, Deep(), num_neighbors=8)),
        ([Squared], nngp.Vecchia(X, Y, mean=Squared(), num_neighbors=8)),
        ([trend], nngp.Vecchia(X, Y, mean=trend, num_neighbors=8)),
    ]:
        gp.save(tmp_path / "gp")
        assert torch.equal(load(tmp_path / "gp", custom=own)(NEW)[0], gp(NEW)[0])
        name = own[0].__name__
        with pytest.raises(
            ModelFileError, match=rf"got .*\.{name}. Import it and pass load\(path, custom=\[{name}\]\)"
        ):
            load(tmp_path / "gp")


def test_what_has_no_name_is_refused_when_it_is_saved(tmp_path):
    gp = nngp.Vecchia(X, Y, mean=lambda x: x[:, 0], num_neighbors=8)
    with pytest.raises(ModelFileError, match=r"Vecchia.save: expected Vecchia.mean to be .*<lambda>.*custom="):
        gp.save(tmp_path / "gp")
    assert not list(tmp_path.iterdir())
    gp = nngp.Vecchia(X, Y, num_neighbors=8)
    gp.file = open(__file__, encoding="utf-8")  # noqa: SIM115
    with gp.file, pytest.raises(ModelFileError, match=r"Vecchia.file to be .*TextIOWrapper"):
        gp.save(tmp_path / "gp")
    gp.file = torch.empty(3, device="meta")
    with pytest.raises(ModelFileError, match=r"Vecchia.save: expected Vecchia.file to have values, got a meta tensor"):
        gp.save(tmp_path / "gp")


def test_the_folder_of_a_file_must_exist(tmp_path):
    gp = nngp.Vecchia(X[:20], Y[:20], num_neighbors=3)
    with pytest.raises(FileNotFoundError, match=r"Vecchia.save: expected path in a folder that exists, got .*none/gp"):
        gp.save(tmp_path / "none" / "gp")


def test_paths_are_checked():
    with pytest.raises(TypeError, match=r"Vecchia.save: expected path to be a path, got NoneType"):
        nngp.Vecchia(X[:20], Y[:20], num_neighbors=3).save(None)
    with pytest.raises(TypeError, match=r"load: expected path to be a path, got int"):
        load(3)


def test_any_damage_is_an_error(tmp_path):
    path = tmp_path / "gp"
    nngp.Vecchia(X[:20], Y[:20], num_neighbors=3).save(path)
    good, rng = path.read_bytes(), random.Random(0)
    for _ in range(150):
        bad = bytearray(good)
        bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
        path.write_bytes(bad)
        with pytest.raises(ModelFileError):
            load(path)
    for end in (0, 7, 100, len(good) // 2, len(good) - 1):
        path.write_bytes(good[:end])
        with pytest.raises(ModelFileError):
            load(path)


def rewritten(path, change):
    """Write the file anew with other metadata, and the digest that belongs to them."""
    from safetensors import safe_open

    from pyro_nngp import storage

    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    del metadata["digest"]
    change(metadata)
    tensors = load_file(path)
    save_file(tensors, path, metadata | {"digest": storage.digest(metadata, tensors)})


@pytest.mark.parametrize(
    ("make", "args"),
    [
        (["os", "system"], ["touch owned"]),
        (["posix", "system"], ["touch owned"]),
        (["builtins", "eval"], ["1"]),
        (["torch.serialization", "load"], ["owned"]),
        (["torch.nn.functional", "torch.load"], ["owned"]),
        (["pyro_nngp.inference.checkpoint", "save_checkpoint"], ["owned", 0]),
        (["pyro_nngp.storage", "save"], [0, "owned"]),
        (["subprocess", "Popen"], ["touch owned"]),
        (["builtins", "getattr"], [1, "__class__"]),
    ],
)
def test_nothing_in_a_file_is_run(make, args, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save(Matern52(2), "kernel")

    def change(metadata):
        structure = json.loads(metadata["structure"])
        structure["objects"].append({"make": make, "args": args})
        structure["root"] = {"object": len(structure["objects"]) - 1}
        metadata["structure"] = json.dumps(structure)

    rewritten("kernel", change)
    with pytest.raises(ModelFileError, match=f"got {'.'.join(make)}"):
        load("kernel")
    assert [path.name for path in tmp_path.iterdir()] == ["kernel"]


def test_files_of_other_versions_and_formats_are_refused(tmp_path):
    path = tmp_path / "kernel"
    save(Matern52(2), path)
    rewritten(path, lambda metadata: metadata.update(version="0.7.3"))
    with pytest.raises(ModelFileError, match=r"of version .*, got 0.7.3. Install that version"):
        load(path)
    save_file({"a": torch.ones(2)}, path)
    with pytest.raises(ModelFileError, match="to be a file of the format 'pyro_nngp model 3', got None"):
        load(path)
    save_file({"a": torch.ones(2)}, path, {"format": "pyro_nngp model 1", "version": "0.1.0"})
    with pytest.raises(ModelFileError, match=r"got 'pyro_nngp model 1', of pyro_nngp 0.1.0.*with 'q.' for 'local.'"):
        load(path)
    for part in (Matern52(2), NegativeBinomial()):
        save(part, path)
        rewritten(path, lambda metadata: metadata.update(format="pyro_nngp model 2"))
        if isinstance(part, Matern52):
            assert repr(load(path)) == repr(part)
            continue
        with pytest.raises(
            ModelFileError, match=r"got 'pyro_nngp model 2', with a NegativeBinomial of mean total_count"
        ):
            load(path)
    with pytest.raises(ValueError, match=r"load: expected device to be a device of torch, got 'gpu'"):
        load(tmp_path / "none", device="gpu")
    with pytest.raises(FileNotFoundError, match="does not exist"):
        load(tmp_path / "nothing")


def test_loading_reaches_another_device(tmp_path):
    from oracles.pretended_device import DEVICE, pretended_device

    gp = nngp.Vecchia(X, Y, num_neighbors=8)
    gp.save(tmp_path / "gp")
    with pretended_device():
        there = load(tmp_path / "gp", device=DEVICE)
        assert there.x.device == DEVICE
        torch.testing.assert_close(there(NEW.to(DEVICE))[0].cpu(), gp(NEW)[0])


def test_settings_may_be_scalars_of_numpy(tmp_path):
    gp = nngp.Vecchia(X, Y, Matern52(2, 1.0, 0.5), Gaussian(0.1), num_neighbors=5, jitter=np.float64(1e-5))
    gp.kernel.note = [np.int64(3), np.float32("inf"), np.bool_(True)]
    gp.save(tmp_path / "gp")
    again = load(tmp_path / "gp")
    assert (type(again.jitter), again.jitter) == (float, 1e-5)
    assert again.kernel.note == [3, float("inf"), True]
