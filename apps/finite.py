"""A loss or gradient that is not finite ends the run on every rank, with the step, the ranks and where it began.

Watching costs one small message a step. Where it began is looked for only then, by computing the loss once more.
"""

import math

import torch
import torch.distributed as dist

from core import InputError
from core.capture import release
from core.parallelize import reshard, unwrapped


def checked_loss(loss, norm, step, model, again):
    """Mean of the loss over the ranks, the same number on all of them.

    Args:
        loss: of this rank's samples, a scalar; the same on the ranks that share samples.
        norm: of the gradients, a scalar.
        again: computes the loss once more from an unwrapped model.

    Raises:
        InputError: a loss or a gradient that is not finite; on every rank, whoever met it.
    """
    value = loss.detach().full_tensor() if hasattr(loss, "full_tensor") else loss.detach()
    mine = torch.stack([value.double(), _local(norm).detach().double()])
    table = mine.new_zeros(dist.get_world_size(), 2)
    table[dist.get_rank()] = mine
    dist.all_reduce(table)
    losses, norms = table.T.tolist()
    mean = sum(losses) / len(losses)
    if math.isfinite(mean) and all(map(math.isfinite, norms)):
        return mean
    if math.isfinite(mean):
        what, ranks, where = "a gradient is not finite", _broken(norms), _first_gradient(model)
    else:
        what, ranks, where = f"the loss is {mean}", _broken(losses), _first_output(unwrapped(model), again)
    raise InputError(
        f"{what} at step {step} on {ranks}{where}",
        remedy="Lower --lr or train in fp32; the last checkpoint before it is intact.",
    )


def _broken(numbers):
    return _named([rank for rank, number in enumerate(numbers) if not math.isfinite(number)])


def _named(ranks):
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _finite(tensor):
    return bool(_local(tensor.detach()).isfinite().all())


def _first_gradient(model):
    """The last parameter of the model that has one, which is the first that backward reaches."""
    named = [n for n, p in unwrapped(model).named_parameters() if p.grad is not None and not _finite(p.grad)]
    return _where(named[-1] if named else None, -len(named), "gradient")


@torch.no_grad()
def _first_output(model, again):
    release(model)  # what is replayed calls no hooks
    seen, hooks = [], []

    def look(name, value):
        for tensor in value if isinstance(value, (tuple, list)) else [value]:
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                seen.append((name, _finite(tensor)))

    hooks.append(model.register_forward_pre_hook(lambda module, args: look("the data", args)))
    for name, module in model.named_modules():
        hooks.append(module.register_forward_hook(lambda module, args, out, name=name: look(name or "the model", out)))
    again(model)
    reshard(model)
    for hook in hooks:
        hook.remove()
    first = next((i for i, (_, finite) in enumerate(seen) if not finite), None)
    return _where(None if first is None else seen[first][0], first, "output")


def _where(name, order, kind):
    """What the ranks found, each its own, in words: the first of all, by ``order``."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, None if name is None else (order, name))
    if not any(found):
        return ""
    first = min(each for each in found if each)
    ranks = _named([rank for rank, each in enumerate(found) if each == first])
    return f"; the first {kind} that is not finite is that of {first[1]} on {ranks}"
