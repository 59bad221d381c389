"""Four worker processes, started once a session, on which every distributed case runs.

Each worker holds the meshes that the cases need. A case is an importable function ``case(meshes, *args)`` that every
worker calls; it asserts in place, and its random numbers start at the seed of the pool. A case in which a worker dies
or does not answer poisons the pool: the workers are killed and the next case starts new ones, so that a hang is a
failure of one case and not of the session.
"""

import faulthandler
import gc
import multiprocessing as mp
import os
import tempfile
import time
import traceback
import warnings
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import wait

WORLD = 4
TIMEOUT = 180  # seconds of a case, which takes one or two where the machine has nothing else to do


def copies():
    """Context whose processes are copies of one that has loaded the libraries, which takes seconds, once."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["core", "torch._dynamo", "pytest"])
    return context


class CaseFailed(AssertionError):
    pass


class WorkerDied(CaseFailed):
    """Of a signal, such as the one by which a damaged heap ends a process."""


def _serve(rank, world, device, seed, store, pipe):
    import torch
    import torch.distributed as dist
    from cases import load

    gc.freeze()  # memory that is shared with the process copied stays so, where no collector marks it
    faulthandler.enable()  # who dies of a signal says where
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=TIMEOUT / 2),  # the backend names who is missing before the pool gives up
    )
    load()  # rules that files of cases declare are there for all cases, not for the first one that looks into the table
    meshes = make_meshes() if device == "cpu" else make_gpu_meshes()
    while True:
        task = pipe.recv()
        if task is None:
            break
        function, args = task
        with _registered_for_a_while():
            try:
                torch.manual_seed(seed)
                pipe.send((True, function(meshes, *args)))
            except BaseException:
                pipe.send((False, traceback.format_exc()))
    dist.destroy_process_group()


@contextmanager
def _registered_for_a_while():
    """What a case registers ends with it, and so do the plans that were made of it."""
    from core import dispatch

    before = [(table, dict(table)) for table in (dispatch.RULES, dispatch.HANDLERS, dispatch.COMPOSED)]
    yield
    changed = [(table, kept) for table, kept in before if table != kept]
    for table, kept in changed:
        table.clear()
        table.update(kept)
    if changed:
        dispatch.KINDS.clear()
        dispatch.forget_plans()


def make_meshes():
    """Domain axes of 1, 2 (two groups), 3 (one rank idle) and 4 ranks, and a cut along two axes."""
    import torch
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    one = init_device_mesh("cpu", (4, 1), mesh_dim_names=("ddp", "domain"))
    two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ddp", "domain"))
    return {
        "1": one["domain"],
        "2": two["domain"],
        "3": DeviceMesh("cpu", torch.arange(3), mesh_dim_names=("domain",)),
        "4": init_device_mesh("cpu", (4,), mesh_dim_names=("domain",)),
        "2x2": init_device_mesh("cpu", (2, 2), mesh_dim_names=("domain_h", "domain_w")),
        "ddp x domain": two,
        "domain x tp": init_device_mesh("cpu", (2, 2), mesh_dim_names=("domain", "tp")),
    }


def make_gpu_meshes():
    """Of one GPU, and of as many as there are workers, named by their number."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    world = dist.get_world_size()
    one = init_device_mesh("cuda", (world, 1), mesh_dim_names=("ddp", "domain"))
    return {"1": one["domain"], str(world): init_device_mesh("cuda", (world,), mesh_dim_names=("domain",))}


class Pool:
    def __init__(self, world=WORLD, device="cpu", seed=0):
        self._world, self._device, self._seed, self._workers = world, device, seed, []

    def _start(self):
        self._folder = tempfile.TemporaryDirectory()
        os.environ["OMP_NUM_THREADS"] = "1"
        context = copies() if self._device == "cpu" else mp.get_context("spawn")
        for rank in range(self._world):
            here, there = context.Pipe()
            args = rank, self._world, self._device, self._seed, f"{self._folder.name}/store", there
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            there.close()
            self._workers.append((process, here))

    def run(self, function, *args, timeout=TIMEOUT):
        """Calls ``function(meshes, *args)`` on every worker; the results by rank.

        A case whose worker dies of a signal runs once more, on new workers, with a warning: a heap that an earlier case
        damaged must not be laid to this one's charge, and a case that kills its worker does so twice.
        """
        try:
            return self._run(function, *args, timeout=timeout)
        except WorkerDied as error:
            warnings.warn(f"{function.__name__}{args}: {error}", stacklevel=2)
            return self._run(function, *args, timeout=timeout)

    def _run(self, function, *args, timeout):
        fresh = not self._workers
        if fresh:
            self._start()
        try:
            for _, pipe in self._workers:
                pipe.send((function, args))
        except BrokenPipeError:  # a worker died after its last answer
            self.close(kill=True)
            return self._run(function, *args, timeout=timeout)
        deadline = time.monotonic() + timeout + (60 if fresh else 0)
        results, failures = {}, []
        silent = {pipe: rank for rank, (_, pipe) in enumerate(self._workers)}
        while silent:
            ready = wait(silent, max(0, deadline - time.monotonic()))
            for pipe in ready:
                rank = silent.pop(pipe)
                try:
                    ok, results[rank] = pipe.recv()
                    said = f":\n{results[rank]}"
                except EOFError:
                    process = self._workers[rank][0]
                    process.join(5)
                    ok, results[rank], said = False, None, f" died with exit code {process.exitcode}"
                if not ok:
                    failures.append(f"rank {rank}{said}")
                    deadline = min(deadline, time.monotonic() + 3)
            if not ready:
                failures.append(f"no answer within {timeout} s from ranks {[*silent.values()]}")
                break
        if failures:
            codes = [process.exitcode for process, _ in self._workers]
            if any(v is None for v in results.values()) or len(results) < self._world:
                self.close(kill=True)  # dead or stuck; workers that all answered can go on
            signalled = any((code or 0) < 0 for code in codes)
            raise (WorkerDied if signalled else CaseFailed)("\n".join(failures))
        return [results[r] for r in range(self._world)]

    def close(self, kill=False):
        for process, pipe in self._workers:
            if kill:
                process.kill()
            else:
                pipe.send(None)
        for process, _ in self._workers:
            process.join(20)
        self._workers = []
