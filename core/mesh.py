"""Start-up and device meshes with named axes; works with and without a launcher."""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from core._torch import release_groups
from core.errors import InputError
from core.watch import Watch

_made: list[DeviceMesh] = []


class DistributedManager:
    """The one process group of a run: rank, world size, device. ``initialize`` once, construct anywhere.

    Under torchrun (or with RANK, WORLD_SIZE, MASTER_ADDR set) it joins that group; otherwise it makes a group of one,
    so that the same script runs on a laptop.
    """

    _device = None
    _watch = None

    @classmethod
    def initialize(cls, backend=None, timeout=timedelta(minutes=10)):
        """Joins the process group: NCCL where every local rank has a GPU, else gloo. From here to :meth:`cleanup` a
        rank that dies ends the others (:mod:`core.watch`)."""
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
        on_gpu = torch.cuda.is_available() and torch.cuda.device_count() > local_rank and backend != "gloo"
        cls._device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
        if on_gpu:
            torch.cuda.set_device(cls._device)
        if dist.is_initialized():
            return
        backend = backend or ("nccl" if on_gpu else "gloo")
        # NCCL's kernels start between those of a computation, not after all that were launched before them
        os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")
        if "RANK" in os.environ:
            facts = dict(rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]), timeout=timeout)
            device = cls._device if on_gpu else None
            dist.init_process_group(backend, store=_store_of_attempt(timeout), device_id=device, **facts)
            cls._watch = Watch() if dist.get_world_size() > 1 else None
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)

    @classmethod
    def is_initialized(cls):
        return cls._device is not None and dist.is_initialized()

    @property
    def rank(self):
        return dist.get_rank()

    @property
    def local_rank(self):
        return int(os.environ.get("LOCAL_RANK", 0))

    @property
    def world_size(self):
        return dist.get_world_size()

    @property
    def device(self):
        return self._device

    @property
    def distributed(self):
        return self.world_size > 1

    def initialize_mesh(self, mesh_shape, mesh_dim_names):
        """A named device mesh; one entry of ``mesh_shape`` may be -1 and takes what is left of the world."""
        return make_mesh(self.device.type, mesh_shape, mesh_dim_names)

    @classmethod
    def cleanup(cls):
        """Leaves the process group, and tells the other ranks if it is for an exception that is on its way. Meshes must
        let go of the group too: a thread of gloo that outlives the interpreter's end aborts the process, whatever its
        exit status was to be."""
        if cls._watch:
            cls._watch.leave(sys.exception())
            cls._watch = None
        for mesh in _made:
            release_groups(mesh)
        _made.clear()
        if dist.is_initialized():
            dist.destroy_process_group()


def _store_of_attempt(timeout):
    """A part of torchrun's store for this attempt alone, None (torch's own choice) without torchrun.

    torchrun keeps one store over its restarts, and in it the addresses of the processes that died, which new ones may
    find before those of their peers. On several nodes attempts have no common number: start the agents with
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 there, which gives each attempt its own store.
    """
    facts = os.environ
    if facts.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or facts.get("GROUP_WORLD_SIZE") != "1":
        return None
    store = dist.TCPStore(facts["MASTER_ADDR"], int(facts["MASTER_PORT"]), is_master=False, timeout=timeout)
    return dist.PrefixStore(f"attempt {facts['TORCHELASTIC_RESTART_COUNT']}", store)


def make_mesh(device_type, shape, names) -> DeviceMesh:
    """``init_device_mesh`` that fills one -1 and says what does not divide."""
    shape, world = list(shape), dist.get_world_size()
    known = 1
    for n in shape:
        known *= n if n != -1 else 1
    if shape.count(-1) > 1 or known < 1 or world % known or (-1 not in shape and known != world):
        raise InputError(
            f"a mesh of {dict(zip(names, shape))} does not fit {world} processes",
            remedy="The axes must multiply to the number of processes started (torchrun --nproc-per-node).",
        )
    shape = [world // known if n == -1 else n for n in shape]
    _made.append(init_device_mesh(device_type, tuple(shape), mesh_dim_names=tuple(names)))
    return _made[-1]
