"""The parameters of model and guide that a run trains, and the optimizers that train them."""

from collections.abc import Callable

import torch
from pyro import poutine
from torch import Tensor, nn

from pyro_nngp._checks import fail
from pyro_nngp._random import RandomStream
from pyro_nngp.inference.protocols import Trainable
from pyro_nngp.inference.svi.row_adam import RowAdam
from pyro_nngp.variational import LocalTables

_LOG_RATE = 0.1  # learning rate of positive parameters, which are trained as logarithms
_RATE = 0.01  # learning rate of others


def modules_of(method: Trainable) -> list[nn.Module]:
    """The modules whose methods model and guide are, or which are model or guide themselves."""
    owners = [getattr(part, "__self__", part) for part in (method.model, method.guide)]
    return list({id(owner): owner for owner in owners if isinstance(owner, nn.Module)}.values())


def local_modules(modules: list[nn.Module]) -> list[LocalTables]:
    """The submodules that hold a row of parameters per datum."""
    return [part for module in modules for part in module.modules() if isinstance(part, LocalTables)]


def find_parameters(
    modules: list[nn.Module], evaluate: Callable[[torch.device | None], object], seed: int
) -> tuple[dict[str, Tensor], set[int]]:
    """Parameters that model and guide use, by Pyro name, and identities of the ones that are trained as logarithms.

    Args:
        modules: the modules that own model and guide.
        evaluate: computes the loss on some rows, whose index is on the given device.
        seed: seed of the draws in the loss.

    Raises:
        ValueError: if there are none.
    """
    known = next((param for module in modules for param in module.parameters()), None)
    device = None if known is None else known.device  # an AutoGuide has no parameters before its first call
    cuda = [known.device.index] if known is not None and known.is_cuda else []
    with torch.no_grad(), RandomStream(seed, cuda), poutine.trace(param_only=True) as capture:
        evaluate(device)
    sites = {name: site["value"] for name, site in capture.trace.nodes.items() if site["type"] == "param"}
    leaves = {id(value.unconstrained()): (name, value.unconstrained()) for name, value in reversed(sites.items())}
    params = {name: leaf for name, leaf in reversed(leaves.values()) if leaf.requires_grad}  # each under one name only
    pairs = {name: (value, value.unconstrained()) for name, value in sites.items()}
    logs = [n for n, (v, free) in pairs.items() if (v is not free and v.equal(free.exp())) or "hyper_guide." in n]
    logarithms = {id(sites[name].unconstrained()) for name in logs}
    if not params:
        cure = "Use pyro.param, PyroParam or nn.Parameter; a method whose parameters are held needs solve() alone."
        fail("fit", "method", "to have parameters to train", "none", cure)
    return params, logarithms


def make_optimizers(
    free: list[Tensor], local: set[int], logarithms: set[int], lr: float | None, local_lr: float | None
) -> list[torch.optim.Optimizer]:
    """Adam for most parameters, and its sparse form for rows of local parameters.

    Args:
        free: the parameters.
        local: identities of parameters with sparse gradients.
        logarithms: identities of parameters that are logarithms.
        lr: learning rate; None takes 0.1 for logarithms and 0.01 for others.
        local_lr: learning rate of local parameters; None is `lr`.
    """
    dense, sparse = [p for p in free if id(p) not in local], [p for p in free if id(p) in local]
    made: list[torch.optim.Optimizer] = []
    if dense and lr is not None:
        made.append(torch.optim.Adam(dense, lr=lr))
    elif dense:
        logs = [p for p in dense if id(p) in logarithms]
        rest = [p for p in dense if id(p) not in logarithms]
        groups = [{"params": logs, "lr": _LOG_RATE}, {"params": rest, "lr": _RATE}]
        made.append(torch.optim.Adam([group for group in groups if group["params"]]))
    if sparse:
        made.append(RowAdam(sparse, lr=local_lr or lr or _RATE))
    return made


def set_rates(schedule: torch.optim.lr_scheduler.MultiStepLR) -> None:
    """Set the rates of the optimizer as the schedule prescribes at its present step."""
    passed = sum(count for step, count in schedule.milestones.items() if step <= schedule.last_epoch)
    for group, rate in zip(schedule.optimizer.param_groups, schedule.base_lrs, strict=True):
        group["lr"] = rate * schedule.gamma**passed


def refuse_others(loss: Tensor, params: dict[str, Tensor]) -> None:
    """Raise if the loss depends on parameters of modules that the run does not train.

    Raises:
        ValueError: names their shapes, and the cure.
    """
    known = {id(param) for param in params.values()}
    nodes, seen, shapes = [loss.grad_fn], set(), []
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += [inner for inner, _ in node.next_functions]
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, nn.Parameter) and id(leaf) not in known:
            shapes.append(tuple(leaf.shape))
    if shapes:
        cure = "Pass the network itself, such as mean=net, or call pyro.module('net', net) in the function. "
        cure += "Use net.requires_grad_(False) to keep it as it is, and pyro.clear_param_store() if an earlier module "
        cure += "used the same names."
        actual = f"others of shapes {sorted(shapes)}, which would be neither trained nor saved"
        fail("fit", "all torch parameters", "to be parameters of model or guide", actual, cure)
