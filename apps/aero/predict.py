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
from apps.aero.dataset import FIELDS, Points, Scaling
from apps.aero.model import ModelConfig, Transolver
from apps.agree import together
from apps.loop import check_kind
from apps.metrics import reduce
from core import DistributedManager, ShardTensor, checkpoint, make_spec, scatter_tensor
from data.sharded import read_sharded

KIND = "aero-transolver"


def load_model(path):
    """(model ready for inference with its averaged weights, Scaling, the checkpoint's JSON part).

    Raises InputError for a missing or damaged checkpoint, and for one of another application.
    """
    state = checkpoint.read_state(path)
    check_kind(state, KIND, path)
    model = Transolver(ModelConfig(**state["task"]["model"])).to(DistributedManager().device)
    checkpoint.load(path, model, averaged=True)
    return model.eval(), Scaling.from_state(state["task"]["scaling"]), state


@dataclass
class Surface:
    """This rank's rows of one run: predicted fields (n, 4) m2/s2, arrays of the archive, and how the rows are cut."""

    run: str
    attrs: dict
    predicted: torch.Tensor
    fields: dict
    held_out: torch.Tensor
    spec: object

    def sums(self, field_std, only_held_out=False):
        """Sums of ``metrics.case_sums`` of these rows."""
        weight = self.held_out if only_held_out else torch.ones_like(self.held_out)
        return metrics.case_sums(self.predicted, self.fields, weight, self.attrs, field_std)

    def largest(self, only_held_out=False):
        """``metrics.case_largest`` of these rows."""
        weight = self.held_out if only_held_out else torch.ones_like(self.held_out)
        return metrics.case_largest(self.predicted, self.fields, weight)

    def whole(self, rows=None):
        """Arrays of the run on every rank, numpy: ``predicted`` and those of the archive.

        rows: take the first rows only, a fair sample of the run, whose areas are scaled up to stand for the whole.
        """
        arrays = {"predicted": self.predicted, **self.fields}
        found = {name: self._gather(values, rows) for name, values in arrays.items()}
        found["area"] *= self.spec.shape[0] / len(found["area"])
        return found

    def _gather(self, values, rows):
        shape, sizes = (self.spec.shape[0], *values.shape[1:]), dict(enumerate(self.spec.sizes))
        sharded = ShardTensor(values, make_spec(self.spec.mesh, self.spec.placements, shape, sizes))
        return (sharded if rows is None else sharded[:rows]).full_tensor().cpu().numpy()


@torch.no_grad()
def predict(model, points, run, domain, chunk=None):
    """Surface of ``run`` under ``model``, cut over the mesh ``domain``. All ranks of the world call it together.

    chunk: rows that are computed at a time, all of the rank's where None.
    """
    weight = next(model.parameters())
    with together():
        features = read_sharded(points, run, "features", domain, [Shard(0)], dtype=weight.dtype)
        fields, held_out = _own_rows(points, run, features.spec, weight.device)
    outputs = _outputs(model, features, domain, chunk)
    attrs = points.reader.run_attrs(run)
    return Surface(run, attrs, points.scaling.fields(outputs, attrs["U"]), fields, held_out, features.spec)


def _own_rows(points, run, spec, device):
    first, last = spec.local_range(0)

    def tensor(values):
        return torch.from_numpy(values.astype(np.int64 if values.dtype == np.int64 else np.float64)).to(device)

    fields = {name: tensor(points.rows(run, name, first, last)) for name in (*FIELDS, "cell_id")}
    return fields, tensor(points.held_out(run, first, last))


@torch.no_grad()
def predict_cells(model, scaling, position, normal, U, domain, chunk=None):
    """Fields (n, 4) m2/s2, fp64 numpy on every rank, of cells in the training's frame that rank 0 holds.

    position (n, 3) m, normal (n, 3): on rank 0; elsewhere ignored. Every rank receives and computes its own rows only.
    """
    weight, features = next(model.parameters()), None
    if dist.get_rank() == 0:
        features = torch.from_numpy(scaling.features(position, normal)).to(weight.device, weight.dtype)
    features = scatter_tensor(features, 0, domain, [Shard(0)])
    fields = scaling.fields(_outputs(model, features, domain, chunk), U)
    spec = make_spec(domain, [Shard(0)], (features.shape[0], fields.shape[1]), dict(enumerate(features.spec.sizes)))
    return ShardTensor(fields, spec).full_tensor().cpu().numpy()


def _outputs(model, features, domain, chunk):
    """This rank's rows of the model's outputs (n, 4), of features (n, 6) cut over the domain."""
    if chunk is None:
        return model(features.unsqueeze(0)).squeeze(0).to_local()
    return streamed(model, features.to_local(), chunk, domain)


def streamed(model, features, chunk, domain):
    """As ``model`` on all rows of all ranks of ``domain``, a layer at a time and ``chunk`` rows at a time.

    features: this rank's rows (n, 6), plain; returns (n, outputs). Each layer goes over the rows twice: once to add up
    the slices of all chunks and ranks, once to take back from the tokens that follow. Between layers only the hidden
    state is kept, n x width numbers; memberships, n x heads x slices, exist for one chunk at a time.
    """
    x = _by_chunks(model.stem, features, chunk)[None]
    for block in model.blocks:
        attention, total = block.attention, 0
        for rows in x.split(chunk, dim=1):
            seen = block.norm1(rows)
            total = total + attention.sums(seen, attention.membership(seen))
        dist.all_reduce(total, group=domain.get_group())
        mixed = attention.mixed(total, x.dtype)
        for rows in x.split(chunk, dim=1):
            weights = attention.membership(block.norm1(rows))
            rows.copy_(block.finish(rows, attention.back(weights, mixed)))
    return _by_chunks(lambda rows: model.head(model.norm(rows)), x[0], chunk)


def _by_chunks(function, rows, chunk):
    """``function`` of all rows, computed on ``chunk`` at a time into one tensor: twice its size is never there."""
    out = None
    for first, part in zip(range(0, max(1, len(rows)), chunk), rows.split(chunk)):
        found = function(part)
        out = found.new_empty(len(rows), found.shape[1]) if out is None else out
        out[first : first + chunk] = found
    return out


def judge(model, reader, scaling, runs, mesh, only_held_out=False, chunk=None):
    """{run: scores} of whole runs, dealt over the data groups of ``mesh`` (ddp, domain); the same on every rank.

    Groups that have no run left predict one again and do not count it: weights cut over the groups need all of them.
    """
    device = DistributedManager().device
    points, table = Points(reader, scaling), metrics.empty_sums(len(runs))
    largest = torch.zeros(len(runs), 2, dtype=torch.float64)
    groups, group = mesh["ddp"].size(), mesh.get_local_rank("ddp")
    for first in range(0, len(runs), groups):
        number = first + group
        surface = predict(model, points, runs[number % len(runs)], mesh["domain"], chunk)
        if number < len(runs):
            largest[number] = surface.largest(only_held_out)
            for key, value in surface.sums(scaling.field_std, only_held_out).items():
                table[key][number] = value
    table = reduce({key: value.to(device) for key, value in table.items()}, mesh)
    largest = largest.to(device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return {run: _scores(reader.run_attrs(run), table, largest, number) for number, run in enumerate(runs)}


def _scores(attrs, table, largest, number):
    sums = {key: value[number].cpu() for key, value in table.items()}
    return metrics.case_scores(sums, attrs, largest[number].cpu())
