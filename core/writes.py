"""Operations that write into an argument: which, what they would lose, and what must be finished before."""

from functools import cache

import torch
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from core._torch import NoTorchFunction, compiling
from core.arguments import collect, name_of, shards
from core.errors import MissingShardPatch
from core.redistribute import move
from core.shard_tensor import ShardTensor


@cache
def writes_by_name(func):
    name = name_of(func)
    return (
        name == "__setitem__"
        or (name.endswith("_") and not name.endswith("__"))
        or name.startswith("__i")
        and (name[3:-2] in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor"))
    )


def is_plain(target):
    return isinstance(target, torch.Tensor) and not isinstance(target, (ShardTensor, DTensor))


@cache
def writes(func):
    """Position and name of the arguments that an aten overload writes into; reading a schema is slow."""
    schema = enumerate(func._schema.arguments)
    return tuple((i, a.name) for i, a in schema if a.alias_info is not None and a.alias_info.is_write)


def written_in(func, args, kwargs):
    found = []
    for i, name in writes(func):
        collect([args[i] if i < len(args) else kwargs.get(name)], found)
    return found


def mutates(func):
    """Whether an aten overload writes into its first argument."""
    return any(i == 0 for i, _ in writes(func))


def make_writable(func, written):
    """Finishes pending sums, and refuses what would be lost: a view whose rows had to be fetched is a copy here, and a
    new shape is not ours to give."""
    for t in shards(written):
        if torch.Tag.inplace_view in func.tags:
            raise MissingShardPatch(
                "changes the shape in place", op=str(func), operands=[t._spec], remedy="Use the form that returns it."
            )
        if t._is_copy:
            raise MissingShardPatch(
                "writes into rows that lie on other ranks, through a view that is a copy",
                op=str(func),
                operands=[t._spec],
                remedy="Write through a slice (x[i:i+1] instead of x[i]), or use torch.where.",
            )
        if t._spec.is_partial():
            with NoTorchFunction():
                view = t._is_view()
            if view:
                raise MissingShardPatch("writes into a view of a pending sum", op=str(func), operands=[t._spec])
            spec = t._spec.cut_once().finished()
            t._local_tensor, t._spec = move(t._local_tensor, t._spec, spec), spec


def note_written(written):
    """Torch counts the writes into a wrapper. Local graphs save parts: their writes are counted here, also those into
    what a part is a view of, so that a saved result that was changed is an error and no wrong gradient."""
    for t in shards(written):
        with NoTorchFunction():
            if compiling() or t.is_inference():
                continue
            for part in (t, *([t._base] if t._is_view() else [])):
                if type(part._local_tensor) is torch.Tensor:
                    increment_version(part._local_tensor)


def write_out(func, args, kwargs, written):
    """``out=``: the result is computed as usual and copied."""
    names = {a.name for a in func._schema.arguments if a.is_out}
    results = func.overloadpacket(*args, **{k: v for k, v in kwargs.items() if k not in names})
    for target, result in zip(written, results if isinstance(results, (tuple, list)) else [results]):
        target.copy_(result)
    return tuple(written) if len(written) > 1 else written[0]
