"""Every name of torch that is private, in one place, so that a new torch is checked by one test file."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.distributed_c10d import _register_process_group as register_group
from torch.distributed.distributed_c10d import _resolve_process_group as group_named
from torch.distributed.distributed_c10d import _unregister_process_group as unregister_group
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode
from torch.utils._python_dispatch import _disable_current_modes as no_modes  # real numbers while a graph is traced

NoTorchFunction = torch._C.DisableTorchFunctionSubclass
NoDispatch = torch._C._DisableTorchDispatch
BelowAutograd = torch._C._AutoDispatchBelowAutograd
make_wrapper_subclass = torch.Tensor._make_wrapper_subclass
no_torch_function = torch._C._disabled_torch_function_impl
wire = torch.ops._c10d_functional
pad = torch._C._nn.pad  # what compiled code calls for F.pad
fused_attention = torch._native_multi_head_attention  # what modules call in inference
fused_encoder_layer = torch._transformer_encoder_layer_fwd
make_dual = torch._VF._make_dual  # a tensor with a tangent, for forward-mode differentiation
scoped_library = torch.library._scoped_library  # what it registers ends with the context
mask_is_left_aligned = torch._nested_tensor_from_mask_left_aligned


def compiling():
    """Whether code is read or traced by the compiler: torch before 2.13 says so only while it reads."""
    return torch.compiler.is_compiling() or TracingContext.try_get() is not None


def autocast_knows(name):
    """Whether CUDA's autocast does something about an operator of aten: RMS norm since torch 2.12 or so."""
    return "AutocastCUDA" in torch._C._dispatch_dump(f"aten::{name}")


def keeps_graph():
    """Whether the running backward pass was asked to retain its graph."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def unseen_by_checkpoints():
    """A context in which what autograd saves is kept as it is, if a checkpoint would otherwise take it."""
    top = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if top is None or top[0].__module__ != "torch.utils.checkpoint":
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)


def send(operator, *args):
    """Sends a message to the group that the last argument names. The ranks' graphs differ, their messages must not: the
    compiler may not take two messages for one because a rank without rows fills both with the same, nor put one of a
    backward pass into the forward pass because on this rank it does not depend on incoming gradients."""
    if traced := compiling():
        args = (*args[:-1], _another_name(args[-1]))
    meta = torch.fx.traceback.current_meta
    if meta.get("partitioner_tag") != "is_backward":
        with nullcontext() if traced else BelowAutograd():  # derivatives are ours; torch's would cost their Python
            return operator(*args)
    meta["partitioner_tag"] = "must_be_in_backward"
    try:
        return operator(*args)
    finally:
        meta["partitioner_tag"] = "is_backward"


_names: list[str] = []


def _another_name(name):
    _names.append(f"{name}#{len(_names)}")
    register_group(_names[-1], group_named(name))
    return _names[-1]


def transformed(tensor):
    """Whether a tensor is seen through a transform of torch.func (``vmap``, ``grad``, ``jvp``) or carries a tangent."""
    if torch._C._functorch.peek_interpreter_stack() is not None and torch._C._functorch.is_functorch_wrapped_tensor(
        tensor
    ):
        return True
    return (
        torch.autograd.forward_ad._current_level >= 0
        and torch.autograd.forward_ad.unpack_dual(tensor).tangent is not None
    )


def transforming():
    """Whether a transform of torch.func or forward-mode differentiation is at work."""
    return torch._C._functorch.peek_interpreter_stack() is not None or torch.autograd.forward_ad._current_level >= 0


def never_symbolic(tensor):
    """Tells the compiler to take the sizes of a tensor, or of all tensors of a class, as numbers."""
    tensor._dynamo_static_indices = _ALL_DIMS


_ALL_DIMS = set(range(64))


def ddp_ignores(module, names):
    """Tells DDP to leave some parameters of a module alone."""
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)


def tables_of(module):
    """The dicts in which a module and its submodules keep parameters, buffers and submodules."""
    return [t for m in module.modules() for t in (m._parameters, m._buffers, m._modules)]


def at_end_of_backward(function):
    """Calls ``function`` when the running backward pass is done."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def has_hooks(tensor):
    """Whether somebody wants to see the gradient of a leaf on its way to ``.grad``."""
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


def is_nothing(tensor):
    """Whether a gradient is one of torch's zeros without memory."""
    return tensor._is_zerotensor()


def group_name(group):
    """The registered name by which functional collectives find a process group."""
    return group.group_name


def join_fake_world(ranks, rank):
    """Makes a process group of so many ranks of which there is but this one: messages go nowhere."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # brings the backend "fake" along

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)


def release_groups(mesh):
    """Drops the process groups that a root mesh (and with it its submeshes) holds on to."""
    getattr(mesh, "_pg_registry", {}).clear()
    while _names:
        unregister_group(_names.pop())


def dtensor_from_local(local, mesh, placements, shape, stride):
    """A DTensor over ``local`` without communication or autograd, for splits that torch.chunk would give."""
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(stride))


def wait(tensor):
    """The plain tensor behind a functional collective's result."""
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


__all__ = [
    "AsyncCollectiveTensor",
    "BelowAutograd",
    "DispatchMode",
    "FakeTensor",
    "FakeTensorMode",
    "NoDispatch",
    "NoTorchFunction",
    "at_end_of_backward",
    "autocast_knows",
    "compiling",
    "ddp_ignores",
    "dtensor_from_local",
    "fused_attention",
    "fused_encoder_layer",
    "group_name",
    "group_named",
    "has_hooks",
    "is_nothing",
    "join_fake_world",
    "keeps_graph",
    "make_dual",
    "make_wrapper_subclass",
    "mask_is_left_aligned",
    "no_modes",
    "never_symbolic",
    "no_torch_function",
    "pad",
    "release_groups",
    "scoped_library",
    "send",
    "tables_of",
    "transformed",
    "transforming",
    "unseen_by_checkpoints",
    "wait",
    "wire",
]
