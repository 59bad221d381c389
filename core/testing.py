"""Compare a module on shards with the same module on one process: values, every gradient, sizes and messages.

:func:`check_sharded` is called by every rank of a mesh; it runs the module twice, on the whole inputs and on shards,
with the same random cotangent, and gives the same verdict on every rank. :func:`run_on_ranks` starts the ranks where no
launcher has, so that such a check is an ordinary test::

    def check():
        mesh = DistributedManager().initialize_mesh((-1,), ("domain",))
        torch.manual_seed(0)  # every rank makes the same model and input
        check_sharded(MyModel(), [torch.randn(1, 3, 65, 64)], [[Shard(2)]], mesh)

    def test_my_model():
        run_on_ranks(2, check)  # under ``torchrun -m pytest`` the ranks that are there
"""

import copy
import os
import socket
import tempfile
import traceback
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.tensor import DTensor

from core import collectives as c
from core.claims import all_agree
from core.debug import Trace, trace
from core.errors import ShardingError
from core.mesh import DistributedManager
from core.parallelize import tensors_of, unequal
from core.scatter import scatter_tensor
from core.shard_tensor import ShardTensor


@dataclass
class Report:
    """What was compared. ``differences`` holds the largest absolute difference of each value over all ranks."""

    differences: dict[str, float] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)
    forward: Trace = field(default_factory=Trace)
    backward: Trace = field(default_factory=Trace)

    def __str__(self):
        rows = [f"  {n:<44}{d:>12.3e}  {self.wrong.get(n, 'ok')}" for n, d in self.differences.items()]
        sent = [f"{name} pass:\n{wire}" for name, wire in (("forward", self.forward), ("backward", self.backward))]
        return "\n".join(["largest differences from one process:", *rows, *sent])


def check_sharded(
    module, inputs, placements=None, mesh=None, *, kwargs=None, sizes=None, grads=True, atol=None, rtol=None
):
    """Raises where the sharded run differs from the whole one.

    Args:
        module: a callable of tensors, or an ``nn.Module`` with plain parameters, equal on all ranks. Of checkpoints
            inside only non-reentrant ones let themselves be asked for chosen gradients, as is done here.
        inputs: its arguments: whole tensors, equal on all ranks, or ShardTensors; all else goes as it is.
        placements: for each input the placements under which it is cut over ``mesh``, None for what stays plain; not
            needed for ShardTensors.
        kwargs: keyword arguments, ShardTensors among them are cut.
        sizes: for each input a dict axis -> extents, or None for torch.chunk's.
        grads: compare the gradients of all floating-point inputs and parameters too.
        atol, rtol: tolerances; by default 1e-10 in fp64, 1e-5 in fp32, 2e-2 in half precision. The absolute one is
            for values of about one; of larger ones it is a part of the largest.

    Returns:
        :class:`Report`; print it to see differences and messages.

    Raises:
        ShardingError: on every rank alike, with the report, or with what is not equal on all ranks to begin with.
    """
    kwargs, given = kwargs or {}, inputs
    if placements is not None:
        inputs = [
            _scattered(x, mesh, p, s, grads) for x, p, s in zip(inputs, placements, sizes or [None] * len(inputs))
        ]
    mesh = next(x._spec.mesh for x in [*inputs, *kwargs.values()] if isinstance(x, ShardTensor))
    _must_be_equal(module, [*given, *kwargs.values()], mesh)
    report, state = Report(), _random_state(mesh)
    with _without_tf32():
        args = [_whole(x) for x in inputs], {k: _whole(v) for k, v in kwargs.items()}
        whole = _run(copy.deepcopy(module) if isinstance(module, nn.Module) else module, *args, grads, Report())
        draws = any(not torch.equal(a, b) for a, b in zip(state, _random_state(mesh)))
        parts = _run(module, [_fresh(x) for x in inputs], {k: _fresh(v) for k, v in kwargs.items()}, grads, report)
    for name, expected in whole.items():
        _compare(report, name, parts.get(name), expected, atol, rtol, mesh)
    if report.wrong:
        hint = _RANDOM if draws else _rounding(whole)
        raise ShardingError(f"the sharded module differs from the whole one; {hint}{report}")
    return report


def numerical_shard_tensor_check(mesh, module, input_args, input_kwargs=None, check_grads=False, **tolerances):
    """:func:`check_sharded` by another name and order of arguments; returns True or raises."""
    check_sharded(module, list(input_args), None, mesh, kwargs=input_kwargs, grads=check_grads, **tolerances)
    return True


# -- what both runs begin with ----------------------------------------------------------------------------------------
_RANDOM = (
    "it draws random numbers, as Dropout does in training, and on shards they are others than on one process: call "
    "model.eval(), or give them as an input; "
)


def _must_be_equal(module, inputs, mesh):
    """Ranks that drew their own weights or inputs would be found out by values alone, which say nothing of it."""
    tensors = {f"input {i}": x for i, x in enumerate(inputs) if isinstance(x, torch.Tensor)}
    tensors |= tensors_of(module) if isinstance(module, nn.Module) else {}
    tensors = {name: t for name, t in tensors.items() if t.layout == torch.strided}
    for axis in range(mesh.ndim):
        if names := unequal(tensors, mesh, axis):
            raise ShardingError(
                f"not equal on all ranks: {', '.join(names[:5])}{f' and {len(names) - 5} more' * (len(names) > 5)}",
                op="check_sharded",
                remedy="Every rank makes the same module and whole inputs: torch.manual_seed(0) on each before they "
                "are drawn, no seed by rank; core.sync_module_over_mesh(module, mesh) for weights.",
            )


def _random_state(mesh):
    return [torch.get_rng_state()] + ([torch.cuda.get_rng_state()] if mesh.device_type == "cuda" else [])


# -- both runs ------------------------------------------------------------------------------------------------------
class _without_tf32:
    def __enter__(self):
        self.before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False

    def __exit__(self, *error):
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = self.before


def _scattered(x, mesh, placements, sizes, grads):
    if not isinstance(x, torch.Tensor):
        return x
    wants = x.requires_grad or (grads and x.is_floating_point())
    if placements is None:
        return x.detach().clone().requires_grad_(wants)
    return scatter_tensor(x.detach(), None, mesh, placements, requires_grad=wants, sizes=sizes)


def _whole(x):
    """A plain leaf with the whole value."""
    if isinstance(x, (ShardTensor, DTensor)):
        wants = x.requires_grad
        x = x.detach().full_tensor()
        return x.clone().requires_grad_(wants)
    return _fresh(x)


def _fresh(x):
    return x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x


def _run(module, inputs, kwargs, grads, report):
    """Named outputs, and gradients under a fixed cotangent."""
    with trace() as report.forward:
        outs = list(_tensors(module(*inputs, **kwargs)))
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
    values = [None] * len(leaves)  # nothing differentiable came out
    if isinstance(total, torch.Tensor):
        with trace() as report.backward:
            values = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    return found | {f"gradient of {n}": v for n, v in zip(leaves, values)}


def _rounding(whole):
    """What to try before searching, where a sum that cancels (a bias before a norm) may be all rounding."""
    inexact = (torch.float32, torch.complex64, torch.float16, torch.bfloat16)
    rounded = any(v is not None and v.dtype in inexact for v in whole.values())
    return "if by little, it may be rounding: repeat with module and inputs in double(); " if rounded else ""


def _tensors(outs):
    if isinstance(outs, torch.Tensor):
        yield outs
    elif isinstance(outs, (tuple, list, dict)):
        for o in outs.values() if isinstance(outs, dict) else outs:
            yield from _tensors(o)


def _wants_grad(x):
    return isinstance(x, torch.Tensor) and x.requires_grad


# -- the verdict ------------------------------------------------------------------------------------------------------
def _compare(report, name, got, expected, atol, rtol, mesh):
    difference, problem = _difference(got, expected, atol, rtol)
    if isinstance(got, ShardTensor) and not all_agree(got._local_tensor, got._spec, mesh):
        difference, problem = float("inf"), "recorded sizes are not those of the parts"
    verdict = torch.tensor([difference, float(bool(problem))], dtype=torch.float64, device=mesh.device_type)
    for axis in range(mesh.ndim):
        verdict = c.send_all_reduce(verdict, c.axis_group(mesh, axis), "max")
    report.differences[name] = verdict[0].item()
    if verdict[1]:
        report.wrong[name] = problem or "wrong on another rank"


def _difference(got, expected, atol, rtol):
    """Largest difference, and what is wrong."""
    if expected is None or got is None:
        same = expected is got
        return (0.0 if same else float("inf")), "" if same else "missing" if got is None else "not there on one process"
    got = got.full_tensor() if isinstance(got, (ShardTensor, DTensor)) else got
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return float("inf"), f"{tuple(got.shape)} {got.dtype} instead of {tuple(expected.shape)} {expected.dtype}"
    if not (expected.is_floating_point() or expected.is_complex()):
        return float((got != expected).sum()), "" if torch.equal(got, expected) else "other values"
    tolerance = {torch.float64: 1e-10, torch.complex128: 1e-10, torch.float32: 1e-5, torch.complex64: 1e-5}
    atol, rtol = (tolerance.get(expected.dtype, 2e-2) if t is None else t for t in (atol, rtol))
    scale = max(1.0, expected.abs().nan_to_num(0.0, 0.0).max().item()) if expected.numel() else 1.0
    right = torch.allclose(got, expected, atol=atol * scale, rtol=rtol, equal_nan=True)
    apart = (got - expected).abs().nan_to_num(nan=0.0 if right else float("inf"))
    return apart.max().item() if apart.numel() else 0.0, "" if right else "other values"


# -- ranks ---------------------------------------------------------------------------------------------------------
def run_on_ranks(ranks, function, *args, timeout=timedelta(minutes=2)):
    """Calls ``function(*args)`` in ``ranks`` processes that form a group (gloo); under a launcher in the present ones.

    Args:
        function: importable by name, as ``multiprocessing`` needs it.
        timeout: how long a rank waits for another.

    Raises:
        ShardingError: with who ended without a word, and the traceback of each rank that failed, the first one first.
    """
    __tracebackhide__ = True  # pytest shows the traceback of the rank that failed, not this function
    if "RANK" in os.environ:
        DistributedManager.initialize()
        return function(*args)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        notes = [Path(folder, f"rank {r}") for r in range(ranks)]
        processes = [
            context.Process(target=_rank, args=(r, ranks, port, timeout, note, function, args), daemon=True)
            for r, note in enumerate(notes)
        ]
        for p in processes:
            p.start()
        for p in processes:
            p.join()
        left = sorted((n for n in notes if n.exists()), key=lambda n: n.stat().st_mtime_ns)
        told = [f"{note.name}:\n{note.read_text()}" for note in left]
    silent = [
        f"{note.name} ended with exit status {p.exitcode}"
        for note, p in zip(notes, processes)
        if p.exitcode and note not in left
    ]
    if silent or told:
        raise ShardingError("\n".join(silent + told))


def _rank(rank, ranks, port, timeout, note, function, args):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(max(1, torch.get_num_threads() // ranks))
    DistributedManager.initialize(backend="gloo", timeout=timeout)
    try:
        function(*args)
    except BaseException:
        note.write_text(traceback.format_exc())
        dist.destroy_process_group()
        os._exit(1)  # the others must not wait for this one's threads
    DistributedManager.cleanup()
