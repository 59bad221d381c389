"""Compare a module on shards with the same module on one process: values and every gradient.

Every rank of the mesh calls :func:`check_sharded`; it runs the module twice, on the whole inputs and on the shards,
with the same random cotangent. It gives the same verdict on every rank.
"""

import copy

import torch
from torch.distributed.tensor import DTensor

from core import collectives as c
from core.errors import ShardingError
from core.shard_tensor import ShardTensor


def check_sharded(module, inputs, *, kwargs=None, grads=True, atol=None, rtol=None):
    """Raises where the sharded run differs from the whole one.

    Args:
        module: a callable of tensors, or an ``nn.Module`` with plain parameters, equal on all ranks.
        inputs: its arguments; ShardTensors among them are cut, everything else is plain.
        kwargs: keyword arguments, likewise.
        grads: compare the gradients of all inputs and parameters too.
        atol, rtol: tolerances; by default 1e-10 in fp64, 1e-5 in fp32, 2e-2 in half precision.

    Returns:
        dict of name -> largest absolute difference over all ranks.

    Raises:
        ShardingError: on every rank alike, with a table of the differences.
    """
    kwargs = kwargs or {}
    mesh = next(x._spec.mesh for x in [*inputs, *kwargs.values()] if isinstance(x, ShardTensor))
    with _without_tf32():
        whole = _run(
            copy.deepcopy(module), [_whole(x) for x in inputs], {k: _whole(v) for k, v in kwargs.items()}, grads
        )
        parts = _run(module, [_fresh(x) for x in inputs], {k: _fresh(v) for k, v in kwargs.items()}, grads)
    report, failed = {}, False
    for name, expected in whole.items():
        report[name], wrong = _difference(parts.get(name), expected, atol, rtol)
        failed |= wrong
    failed = _anywhere(failed, mesh)
    if failed:
        rows = "\n".join(f"  {name:<40} {value:.3e}" for name, value in report.items())
        raise ShardingError(f"the sharded module differs from the whole one; largest differences:\n{rows}")
    return report


def numerical_shard_tensor_check(mesh, module, input_args, input_kwargs=None, check_grads=False, **tolerances):
    """:func:`check_sharded` by another name and order of arguments; returns True or raises."""
    check_sharded(module, list(input_args), kwargs=input_kwargs, grads=check_grads, **tolerances)
    return True


class _without_tf32:
    def __enter__(self):
        self.before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False

    def __exit__(self, *error):
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = self.before


def _whole(x):
    """A plain leaf with the whole value."""
    if isinstance(x, (ShardTensor, DTensor)):
        wants = x.requires_grad
        x = x.detach().full_tensor()
        return x.clone().requires_grad_(wants)
    return _fresh(x)


def _fresh(x):
    return x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x


def _run(module, inputs, kwargs, grads):
    """Named outputs, and gradients under a fixed cotangent."""
    outs = module(*inputs, **kwargs)
    outs = [o for o in (outs if isinstance(outs, (tuple, list)) else (outs,)) if isinstance(o, torch.Tensor)]
    found = {f"output {i}": o.detach() for i, o in enumerate(outs)}
    if not grads:
        return found
    leaves = {f"input {i}": x for i, x in enumerate([*inputs, *kwargs.values()]) if _wants_grad(x)}
    if isinstance(module, torch.nn.Module):
        leaves |= {n: p for n, p in module.named_parameters() if p.requires_grad}
    total = 0.0
    for i, o in enumerate(o for o in outs if o.requires_grad):
        g = torch.Generator().manual_seed(i)
        total = total + (o * torch.randn(o.shape, generator=g).to(o.device, o.dtype)).sum()
    values = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    return found | {f"gradient of {n}": v for n, v in zip(leaves, values)}


def _wants_grad(x):
    return isinstance(x, torch.Tensor) and x.requires_grad


def _difference(got, expected, atol, rtol):
    if expected is None or got is None:
        return (0.0 if expected is got else float("inf")), expected is not got
    got = got.full_tensor() if isinstance(got, (ShardTensor, DTensor)) else got
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return float("inf"), True
    if not expected.dtype.is_floating_point:
        return float((got != expected).sum()), not torch.equal(got, expected)
    tolerance = {torch.float64: 1e-10, torch.float32: 1e-5}.get(expected.dtype, 2e-2)
    atol, rtol = tolerance if atol is None else atol, tolerance if rtol is None else rtol
    apart = (got - expected).abs()
    return apart.max().item() if apart.numel() else 0.0, not torch.allclose(got, expected, atol=atol, rtol=rtol)


def _anywhere(flag, mesh):
    value = torch.tensor([int(flag)], device=mesh.device_type)
    for axis in range(mesh.ndim):
        value = c.send_all_reduce(value, c.axis_group(mesh, axis), "max")
    return bool(value.item())
