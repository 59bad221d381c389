"""Gradients of plain weights: summed over the mesh while the backward pass goes on.

A node of the graph sends the terms of its weights at once, in one message, and hands out a :class:`Promise` for each
sum: a tensor whose value is under way. Whoever computes with a promise sees the finished sum, because the first
operation on it waits; nobody does while torch merely stores it in ``.grad``, and at the end of the backward pass each
promise is replaced by the plain tensor. So only the time of a sum changes, never what is read.

Promises are made in ``loss.backward()`` of a ShardTensor, for leaves without hooks that have no gradient yet. Weights
that :func:`gather_in_buckets` has marked share few large messages; a hook that computes with their gradients must then
do so on every rank of the mesh, for a bucket that is read early is sent early.
"""

import torch

from core import collectives as c
from core._torch import at_end_of_backward, compiling, has_hooks, make_wrapper_subclass, no_torch_function
from core.strides import contiguous_stride

_BUCKET = 2**25  # bytes; large enough to use the wire well, small enough to be sent early


class _Bucket:
    """Local terms that travel together."""

    def __init__(self, mesh):
        self.mesh, self.terms, self.nbytes = mesh, [], 0
        self.pending, self.total = None, None

    def add(self, term):
        self.terms.append(term)
        self.nbytes += term.numel() * term.element_size()
        return len(self.terms) - 1

    def send(self):
        """Starts the sum; over several axes all but the last are waited for here."""
        if self.pending is None:
            flat = torch.cat([t.reshape(-1) for t in self.terms]) if len(self.terms) > 1 else self.terms[0].reshape(-1)
            groups = [c.axis_group(self.mesh, axis) for axis in range(self.mesh.ndim)]
            groups = [g for g in groups if g.size > 1]
            for group in groups[:-1]:
                flat = c.send_all_reduce(flat, group)
            self.pending = c.start_all_reduce(flat, groups[-1])

    def values(self):
        if self.total is None:
            self.send()
            parts = self.pending().split([t.numel() for t in self.terms])
            self.total = [p.view(t.shape) for p, t in zip(parts, self.terms)]
            self.terms = None
        return self.total


class Promise(torch.Tensor):
    """A gradient whose sum is under way."""

    __torch_function__ = no_torch_function  # type: ignore[assignment]  # torch's way to switch it off

    @staticmethod
    def __new__(cls, like, bucket, index):
        stride = contiguous_stride(like.shape)
        self = make_wrapper_subclass(cls, like.shape, stride, dtype=like.dtype, device=like.device)
        self._bucket, self._index = bucket, index
        return self

    def value(self):
        return self._bucket.values()[self._index]

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in _STORES:
            return Promise(args[0], args[0]._bucket, args[0]._index)
        values = [_kept(a) for a in args]
        return func(*values, **{k: _kept(v) for k, v in (kwargs or {}).items()})


_STORES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)  # what torch does to keep it in .grad


def _kept(a):
    if isinstance(a, Promise):
        return a.value()
    return [_kept(x) for x in a] if isinstance(a, (list, tuple)) else a


class _Pass:
    """One backward pass that stores its gradients: its open buckets, and the leaves that were promised a sum."""

    def __init__(self):
        self.buckets, self.leaves = {}, []

    def open_bucket(self, mesh, term):
        key = c.groups_of(mesh), term.dtype, term.device
        bucket = self.buckets.get(key)
        if bucket is None or bucket.pending is not None:
            bucket = self.buckets[key] = _Bucket(mesh)
        return bucket

    def promise(self, term, leaf, bucket, index):
        if not self.leaves:
            at_end_of_backward(self.keep)
        self.leaves.append(leaf)
        return Promise(term, bucket, index)

    def keep(self):
        for bucket in self.buckets.values():
            bucket.send()
        for leaf in self.leaves:
            if isinstance(leaf.grad, Promise):
                leaf.grad = leaf.grad.value()

    def drop(self):
        """After an error: the sums may never have been sent."""
        for leaf in self.leaves:
            if isinstance(leaf.grad, Promise):
                leaf.grad = None


_running: _Pass | None = None


class running:
    """A backward pass. Each has its own promises, also one inside another; one whose gradients go elsewhere than to
    ``.grad`` makes none."""

    def __init__(self, stores):
        self.it = _Pass() if stores else None

    def __enter__(self):
        global _running
        self.outer, _running = _running, self.it

    def __exit__(self, *error):
        global _running
        _running = self.outer
        if error[0] is not None and self.it:
            self.it.drop()


def gather_in_buckets(module):
    """Marks the parameters of ``module``, alike on all ranks: their gradients travel together."""
    for p in module.parameters():
        p._in_bucket = True


def summed(terms, weights, mesh):
    """The sums over ``mesh`` of the local ``terms`` of the gradients of plain ``weights``."""
    if mesh.size() == 1:
        return terms
    later = None if compiling() else _running
    own, places = {}, []
    for term, w in zip(terms, weights):
        marked = later and getattr(w, "_in_bucket", False)
        bucket = later.open_bucket(mesh, term) if marked else own.setdefault(term.dtype, _Bucket(mesh))
        places.append((bucket, bucket.add(term)))
    for bucket, _ in places:
        if bucket in own.values() or bucket.nbytes >= _BUCKET:
            bucket.send()
    return [
        later.promise(term, w, bucket, i) if later and _only_stored(w) else bucket.values()[i]
        for term, w, (bucket, i) in zip(terms, weights, places)
    ]


def _only_stored(w):
    return w.is_leaf and w.grad is None and not has_hooks(w)
