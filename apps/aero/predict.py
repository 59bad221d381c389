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
from apps.aero.states import streamed
from apps.agree import together
from apps.checkpoints import check_kind
from apps.meshes import rounds
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
    weight = next(model.parameters())
    with together():
        read = {kind: read_cloud(reader, scaling, run, domain, weight) for kind, scaling in scalings.items()}
    found = outputs(model, [cloud for cloud, _ in read.values()], domain, chunk)
    return {kind: cells_of(reader, scalings[kind], run, output, *read[kind]) for kind, output in zip(scalings, found)}


def read_cloud(reader, scaling, run, domain, like):
    """Features (n, F) of a run, a ShardTensor over ``domain`` of the dtype of ``like``, and this rank's own rows."""
    points = Points(reader, scaling)
    cloud = read_sharded(points, run, "features", domain, [Shard(0)], dtype=like.dtype)
    return cloud, _own_rows(points, run, cloud.spec, like.device)


def cells_of(reader, scaling, run, output, cloud, rows):
    """Cells of outputs (n, 4) of this rank's rows; cloud, rows: of ``read_cloud``."""
    attrs = reader.run_attrs(run)
    return Cells(scaling.kind, run, attrs, scaling.fields(output, attrs["U"]), *rows, cloud.spec)


def _own_rows(points, run, spec, device):
    first, last = spec.local_range(0)

    def tensor(values):
        return torch.from_numpy(values.astype(np.int64 if values.dtype == np.int64 else np.float64)).to(device)

    names = (*points.kind.arrays, "cell_id")
    return {name: tensor(points.rows(run, name, first, last)) for name in names}, tensor(
        points.held_out(run, first, last)
    )


def scattered(model, scaling, place, domain):
    """Features (n, F) of a surface as a ShardTensor. place: (position (n, 3) m, normal (n, 3), None, area (n,) m2) in
    the training's frame on rank 0, elsewhere ignored: every rank receives its own rows only."""
    weight, features = next(model.parameters()), None
    if dist.get_rank() == 0:
        features = torch.from_numpy(scaling.features(*place)).to(weight.device, weight.dtype)
    return scatter_tensor(features, 0, domain, [Shard(0)])


def gathered(fields, cloud):
    """Fields (n, 4) of all ranks' rows of ``cloud``, numpy, on every rank."""
    sizes, spec = dict(enumerate(cloud.spec.sizes)), cloud.spec
    cut = make_spec(spec.mesh, spec.placements, (cloud.shape[0], fields.shape[1]), sizes)
    return ShardTensor(fields, cut).full_tensor().cpu().numpy()


@torch.no_grad()
def outputs(model, clouds, domain, chunk, memory=None):
    """This rank's rows of the model's outputs [(n, 4)], of features [(n, F)] cut over the domain; memory: of States."""
    if chunk is None:
        found = model(*(features.unsqueeze(0) for features in clouds))
        return [part.squeeze(0).to_local() for part in (found if isinstance(found, tuple) else (found,))]
    return streamed(model, [features.to_local() for features in clouds], chunk, domain, memory)


def judge(model, reader, scalings, runs, mesh, only_held_out=False, chunk=None):
    """{run: scores} of whole runs, dealt over the data groups of ``mesh`` (ddp, domain); the same on every rank.

    Groups that have no run left predict one again and do not count it: weights cut over the groups need all of them.
    """
    device = DistributedManager().device
    tables = {kind: metrics.empty_sums(len(runs), kind) for kind in scalings}
    largest = {kind: torch.zeros(len(runs), 2, dtype=torch.float64) for kind in scalings}
    for number, counts in rounds(range(len(runs)), mesh):
        found = predict(model, reader, scalings, runs[number], mesh["domain"], chunk)
        for kind, cells in found.items() if counts else ():
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
