"""Processes of their own, as a launcher would start them, for cases in which ranks die or their number matters."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from pool import copies


def exit_status(main, argv):
    """Exit status of a command."""
    try:
        main(argv)
    except SystemExit as end:
        return end.code or 0
    return 0


def interpreted(file):
    """What a file prints at last, JSON, where Triton is interpreted on a CPU: that is settled before Triton is loaded,
    so the file runs by itself, in a process of its own."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, file], env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def launch(world, function, *args, timeout=180):
    """Calls ``function(rank, *args)`` in ``world`` processes; by rank, exit status and standard error."""
    context, port = copies(), free_port()
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / str(rank) for rank in range(world)]
        ranks = [
            context.Process(target=_start, args=(rank, world, port, files[rank], function, args), daemon=True)
            for rank in range(world)
        ]
        for process in ranks:
            process.start()
        deadline = time.monotonic() + timeout
        for process in ranks:
            process.join(max(0, deadline - time.monotonic()))
        for process in ranks:
            process.kill()
            process.join()
        return [(process.exitcode, file.read_text()) for process, file in zip(ranks, files)]


def _start(rank, world, port, file, function, args):
    os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), 2)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    facts = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in facts.items()})
    import torch

    torch.set_num_threads(1)
    function(rank, *args)


def succeed(world, function, *args, **kwargs):
    """As :func:`launch`, for a function that must not fail, and that leaves its process group before it returns;
    standard error by rank."""
    outcome = launch(world, function, *args, **kwargs)
    assert all(status == 0 for status, _ in outcome), "\n".join(
        f"rank {rank}: exit status {status}\n{text}" for rank, (status, text) in enumerate(outcome)
    )
    return [text for _, text in outcome]
