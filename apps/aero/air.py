"""The answer in the air: a VTU file of every cell or point, written by all ranks, its errors and a sample to draw.

Every rank computes and writes its own rows, a chunk at a time, into one file of known size, which appears under its
name when all of it is there. Nothing is gathered but sums and the sample.
"""

import math
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from apps.aero import metrics
from apps.agree import together
from apps.outputs import on_disk
from data.aero.vtu_writer import VtuWriter

SAMPLE = 200_000  # points to draw


@dataclass
class Air:
    """part: the written file under its temporary name; scores: errors where the true fields are known, and ``points``;
    arrays: of a fair sample on rank 0, position (n, 3) m, predicted (n, 4), pressure and velocity where known, in the
    training's frame, and of all ranks None."""

    part: str
    scores: dict
    arrays: dict | None

    def lines(self):
        """The chief scores in words."""
        names = ("points", "volume_pressure_l2", "volume_pressure_l2_volume", "velocity_l2", "velocity_l2_volume")
        told = {name: self.scores[name] for name in names if name in self.scores}
        return ["volume: " + ", ".join(f"{k} {v:,}" if k == "points" else f"{k} {v:.4f}" for k, v in told.items())]


def write_air(part, states, number, U):
    """Air of cloud ``number`` (of apps.aero.cloud) of ``states`` at inflow U m/s, its file written to ``part``, a Path.

    Collective. Raises InputError, on all ranks, where the file cannot be written.
    """
    cloud, group = states.clouds[number], states.clouds[number].group
    rank, total = dist.get_rank(group), sum(cloud.sizes)
    before, stride = sum(cloud.sizes[:rank]), -(-total // SAMPLE)
    none = _fields(cloud, cloud.known(slice(0, 0)), np.zeros((0, 4)), U)
    writer = VtuWriter(part, cloud.mesh, {name: (v.dtype, v.shape[1:]) for name, v in none.items()})
    try:
        with together(), on_disk(part):
            if rank == 0:
                part.parent.mkdir(parents=True, exist_ok=True)
                writer.create()
        with together(), on_disk(part):
            sums, largest, sample = _written(writer, states, number, U, before, stride)
            writer.copy(rank, len(cloud.sizes))
    except BaseException:
        if rank == 0:
            with suppress(OSError):
                part.unlink()
        raise
    scores = {"points": total} | _scores(sums, largest, group, states.tokens[0].device)
    return Air(part, scores, _gathered(sample, group))


def _written(writer, states, number, U, before, stride):
    """Writes this rank's rows, the first of which is row ``before`` of the file; returns sums and largest errors, and
    the rows that are drawn, one in ``stride``."""
    cloud, sample = states.clouds[number], []
    sums, largest = metrics.empty_sums(1, "volume"), torch.zeros(2, dtype=torch.float64)
    for first in states.chunks(number):
        known = cloud.known(slice(first, first + states.chunk))
        predicted = cloud.scaling.fields(states.outputs(number, first), U).cpu()
        for name, values in _fields(cloud, known, predicted.numpy(), U).items():
            writer.write("CellData", name, before + first, values)
        if not cloud.mesh.copied:
            writer.write("Points", "Points", before + first, cloud.shown(known["position"]))
        if "velocity" in known:
            _add(sums, largest, predicted, known)
        taken = (before + first + np.arange(len(predicted))) % stride == 0
        sample.append({k: v[taken] for k, v in (known | {"predicted": predicted.numpy()}).items()})
    return sums, largest, sample


def _fields(cloud, known, y, U):
    """{name: values by row} of the file; vectors in its frame."""
    found = {"pressure_predicted": y[:, 0], "velocity_predicted": y[:, 1:] @ cloud.frame}
    if "velocity" in known:
        found |= {"pressure_true": known["pressure"], "velocity_true": known["velocity"] @ cloud.frame}
        found |= {f"{n}_error": found[f"{n}_predicted"] - found[f"{n}_true"] for n in ("pressure", "velocity")}
    found |= {"Cp_predicted": y[:, 0] / (0.5 * U**2), "sdf": known["sdf"]}
    found = {name: np.asarray(values, np.float32) for name, values in found.items()}
    return found | ({"cell_id": known["cell_id"]} if "cell_id" in known else {})


def _add(sums, largest, predicted, known):
    fields = {k: torch.from_numpy(np.asarray(known[k], np.float64)) for k in ("pressure", "velocity", "volume")}
    weight = torch.ones(len(predicted), dtype=torch.float64)
    for name, values in metrics.volume_sums(predicted, fields, weight, (1.0,) * 4).items():
        sums[name][0] += values
    if len(predicted):
        largest[:] = torch.maximum(largest, metrics.case_largest(predicted, fields, weight))


def _scores(sums, largest, group, device):
    sums = {name: values[0].to(device) for name, values in sums.items()}
    largest = largest.to(device)
    for values in sums.values():
        dist.all_reduce(values, group=group)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    if not sums["weight"][0] > 0:
        return {}
    found = metrics.volume_scores({name: values.cpu() for name, values in sums.items()}, largest.cpu())
    return {name: value for name, value in found.items() if name != "loss" and math.isfinite(value)}  # truths of zero


def _gathered(sample, group):
    own = {name: np.concatenate([part[name] for part in sample]).astype(np.float32) for name in sample[0]}
    parts = [None] * dist.get_world_size(group) if dist.get_rank() == 0 else None
    dist.gather_object(own, parts, group=group)
    return parts and {name: np.concatenate([part[name] for part in parts]) for name in own}
