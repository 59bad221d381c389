"""Fields of whole surfaces from a trained model: all cells at once, cut over the domain, with or without chunks.

Every cell attends to the whole body, so the answer depends neither on the number of ranks, nor on the order of cells,
nor on chunks: these bound the memory of a layer's computation, not what a cell sees.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard

from apps.aero import metrics
from apps.aero.dataset import KINDS, Points, Scaling
from apps.aero.model import ModelConfig, Transolver
from apps.agree import together
from apps.loop import check_kind
from apps.metrics import reduce
from core import DistributedManager, InputError, ShardTensor, checkpoint, make_spec, scatter_tensor
from data.sharded import read_sharded

KIND = "aero-transolver"


def load_model(path):
    """(model ready for inference with its averaged weights, {"surface" or "volume": Scaling}, the checkpoint's JSON).

    The scalings are in the order of the model's clouds. Raises InputError for a missing or damaged checkpoint, and for
    one of another application.
    """
    state = checkpoint.read_state(path)
    check_kind(state, KIND, path)
    if "scalings" not in state["task"]:
        raise InputError("was written by an earlier version", file=path, remedy="Train again")
    model = Transolver(ModelConfig(**state["task"]["model"])).to(DistributedManager().device)
    checkpoint.load(path, model, averaged=True)
    found = [Scaling.from_state(part) for part in state["task"]["scalings"]]
    return model.eval(), {scaling.kind: scaling for scaling in found}, state


@dataclass
class Cells:
    """This rank's rows of the surface or the volume of a run: predicted fields (n, 4), pressure m2/s2 and shear m2/s2
    or velocity m/s, arrays of the archive, and how the rows are cut."""

    kind: str
    run: str
    attrs: dict
    predicted: torch.Tensor
    fields: dict
    held_out: torch.Tensor
    spec: object

    def sums(self, field_std, only_held_out=False):
        """Sums of ``metrics.case_sums`` or ``metrics.volume_sums`` of these rows."""
        weight = self.held_out if only_held_out else torch.ones_like(self.held_out)
        if self.kind == "volume":
            return metrics.volume_sums(self.predicted, self.fields, weight, field_std)
        return metrics.case_sums(self.predicted, self.fields, weight, self.attrs, field_std)

    def largest(self, only_held_out=False):
        """``metrics.case_largest`` of these rows."""
        weight = self.held_out if only_held_out else torch.ones_like(self.held_out)
        return metrics.case_largest(self.predicted, self.fields, weight)

    def whole(self, rows=None):
        """Arrays of the run on every rank, numpy: ``predicted`` and those of the archive.

        rows: take the first rows only, a fair sample of the run, whose areas or volumes are scaled up to stand for the
        whole.
        """
        arrays = {"predicted": self.predicted, **self.fields}
        found = {name: self._gather(values, rows) for name, values in arrays.items()}
        found[KINDS[self.kind].measure] *= self.spec.shape[0] / len(found["predicted"])
        return found

    def _gather(self, values, rows):
        shape, sizes = (self.spec.shape[0], *values.shape[1:]), dict(enumerate(self.spec.sizes))
        sharded = ShardTensor(values, make_spec(self.spec.mesh, self.spec.placements, shape, sizes))
        return (sharded if rows is None else sharded[:rows]).full_tensor().cpu().numpy()


@torch.no_grad()
def predict(model, reader, scalings, run, domain, chunk=None):
    """{kind: Cells} of ``run`` under ``model``, cut over the mesh ``domain``. All ranks of the world call it together.

    scalings: of ``load_model``; chunk: rows that are computed at a time, all of the rank's where None.
    """
    weight, attrs = next(model.parameters()), reader.run_attrs(run)
    with together():
        read = [Points(reader, scaling) for scaling in scalings.values()]
        clouds = [read_sharded(p, run, "features", domain, [Shard(0)], dtype=weight.dtype) for p in read]
        own = [_own_rows(points, run, cloud.spec, weight.device) for points, cloud in zip(read, clouds)]
    outputs = _outputs(model, clouds, domain, chunk)
    return {
        kind: Cells(kind, run, attrs, scaling.fields(output, attrs["U"]), *rows, cloud.spec)
        for (kind, scaling), output, rows, cloud in zip(scalings.items(), outputs, own, clouds)
    }


def _own_rows(points, run, spec, device):
    first, last = spec.local_range(0)

    def tensor(values):
        return torch.from_numpy(values.astype(np.int64 if values.dtype == np.int64 else np.float64)).to(device)

    names = (*points.kind.arrays, "cell_id")
    return {name: tensor(points.rows(run, name, first, last)) for name in names}, tensor(
        points.held_out(run, first, last)
    )


@torch.no_grad()
def predict_cells(model, scalings, places, U, domain, chunk=None):
    """[fields (n, 4) fp64 numpy] of new points in the training's frame: of a body on every rank, of the air around it
    this rank's own.

    scalings: Scaling of each cloud; places: of a surface (position (n, 3) m, normal (n, 3)) on rank 0, elsewhere
    ignored, because every rank receives its own rows only; of a volume apps.aero.air.OwnCloud, made by each rank.
    """
    weight, clouds, found = next(model.parameters()), [], []
    for scaling, place in zip(scalings, places):
        if scaling.kind == "volume":
            features = scaling.features(place.position, place.direction, place.sdf)
            shape, sizes = (sum(place.sizes), features.shape[1]), {0: tuple(place.sizes)}
            local = torch.from_numpy(features).to(weight.device, weight.dtype)
            clouds.append(ShardTensor(local, make_spec(domain, [Shard(0)], shape, sizes)))
            continue
        features = None
        if dist.get_rank() == 0:
            features = torch.from_numpy(scaling.features(*place)).to(weight.device, weight.dtype)
        clouds.append(scatter_tensor(features, 0, domain, [Shard(0)]))
    for scaling, cloud, output in zip(scalings, clouds, _outputs(model, clouds, domain, chunk)):
        fields = scaling.fields(output, U)
        if scaling.kind == "surface":
            spec = make_spec(domain, [Shard(0)], (cloud.shape[0], fields.shape[1]), dict(enumerate(cloud.spec.sizes)))
            fields = ShardTensor(fields, spec).full_tensor()
        found.append(fields.cpu().numpy())
    return found


def _outputs(model, clouds, domain, chunk):
    """This rank's rows of the model's outputs [(n, 4)], of features [(n, F)] cut over the domain."""
    if chunk is None:
        found = model(*(features.unsqueeze(0) for features in clouds))
        return [part.squeeze(0).to_local() for part in (found if isinstance(found, tuple) else (found,))]
    return streamed(model, [features.to_local() for features in clouds], chunk, domain)


def streamed(model, clouds, chunk, domain):
    """As ``model`` on all rows of all ranks of ``domain``, a layer at a time and ``chunk`` rows at a time.

    clouds: this rank's rows [(n, F)], plain; returns [(n, outputs)]. Each layer goes over the rows twice: once to add
    up the slices of all chunks, clouds and ranks, once to take back from the tokens that follow. Between layers only
    the hidden state is kept, n x width numbers; everything else exists for one chunk at a time.
    """
    clouds, measure = model.measured(clouds)
    hidden = [_by_chunks(stem, rows, chunk)[None] for stem, rows in zip(model.stems, clouds)]
    measures = [measure, *(None for _ in clouds[1:])]
    for block in model.blocks:
        attention, total = block.attention, 0
        for rows, share in (part for cloud in zip(hidden, measures) for part in _split(*cloud, chunk)):
            seen = block.norm1(rows)
            total = total + attention.sums(seen, attention.places(seen), share)
        dist.all_reduce(total, group=domain.get_group())
        mixed = attention.mixed(total, hidden[0].dtype)
        for rows in (rows for x in hidden for rows in x.split(chunk, dim=1)):
            places = attention.places(block.norm1(rows))
            rows.copy_(block.finish(rows, attention.back(places, mixed)))
    ends = zip(model.heads, model.norms, hidden)
    return [_by_chunks(lambda rows, head=head, norm=norm: head(norm(rows)), x[0], chunk) for head, norm, x in ends]


def _split(x, measure, chunk):
    """Chunks of rows of x (1, n, C), each with that of measure (n, 1), or with None."""
    parts = x.split(chunk, dim=1)
    return zip(parts, [None] * len(parts) if measure is None else measure[None].split(chunk, dim=1))


def _by_chunks(function, rows, chunk):
    """``function`` of all rows, computed on ``chunk`` at a time into one tensor: twice its size is never there."""
    out = None
    for first, part in zip(range(0, max(1, len(rows)), chunk), rows.split(chunk)):
        found = function(part)
        out = found.new_empty(len(rows), found.shape[1]) if out is None else out
        out[first : first + chunk] = found
    return out


def judge(model, reader, scalings, runs, mesh, only_held_out=False, chunk=None):
    """{run: scores} of whole runs, dealt over the data groups of ``mesh`` (ddp, domain); the same on every rank.

    Groups that have no run left predict one again and do not count it: weights cut over the groups need all of them.
    """
    device = DistributedManager().device
    tables = {kind: metrics.empty_sums(len(runs), kind) for kind in scalings}
    largest = {kind: torch.zeros(len(runs), 2, dtype=torch.float64) for kind in scalings}
    groups, group = mesh["ddp"].size(), mesh.get_local_rank("ddp")
    for first in range(0, len(runs), groups):
        number = first + group
        found = predict(model, reader, scalings, runs[number % len(runs)], mesh["domain"], chunk)
        for kind, cells in found.items() if number < len(runs) else ():
            largest[kind][number] = cells.largest(only_held_out)
            for key, value in cells.sums(scalings[kind].field_std, only_held_out).items():
                tables[kind][key][number] = value
    scores = {run: {} for run in runs}
    for kind in scalings:
        table = reduce({key: value.to(device) for key, value in tables[kind].items()}, mesh)
        most = largest[kind].to(device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        for number, run in enumerate(runs):
            sums = {key: value[number].cpu() for key, value in table.items()}
            new = metrics.scores(kind, sums, reader.run_attrs(run), most[number].cpu())
            scores[run] |= new | {"loss": scores[run].get("loss", 0) + new["loss"]}
    return scores
