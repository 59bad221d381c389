"""What torch.distributed.checkpoint asks a tensor for: which box of the whole this rank writes, or wants to read.

So ``torch.distributed.checkpoint.save`` and ``load`` take ShardTensors of any cut as they take DTensors: every rank
writes its own part, reads the parts that overlap its own, and nobody holds the whole. torch is imported where the
questions are asked, because core is used without checkpoints too.
"""

import torch

from core.errors import ShardingError
from core.shard_tensor import ShardTensor


def _box(tensor):
    """The part of this rank in the whole; None where it holds nothing of a tensor that is not empty itself."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    spec, local = tensor._spec, tensor._local_tensor
    if not local.numel() and spec.shape.numel():
        return None  # it would have the offsets of the next rank's part, and offsets name a part
    offsets = torch.Size(spec.local_range(dim)[0] for dim in range(spec.ndim))
    return ChunkStorageMetadata(offsets=offsets, sizes=local.shape)


def _write_items(self, name, tensor):
    """This rank's part, to be written under ``name``; of equal parts torch keeps one.

    Raises:
        ShardingError: a pending sum.
    """
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    if self._spec.is_partial():
        raise ShardingError(
            f"{name} is a pending sum, and each rank has only its own term",
            op="checkpoint",
            operands=[self._spec],
            remedy="Redistribute it to Replicate() or Shard(dim) first.",
        )
    box = _box(self)
    if box is None:
        return []
    data = TensorWriteData(
        chunk=box, properties=TensorProperties.create_from_tensor(self._local_tensor), size=self._spec.shape
    )
    return [WriteItem(index=MetadataIndex(name, box.offsets), type=WriteItemType.SHARD, tensor_data=data)]


def _chunk_list(self):
    box = _box(self)
    return [] if box is None else [box]


def _part(self, index):
    return self._local_tensor


for _name, _answer in (
    ("__create_write_items__", _write_items),
    ("__create_chunk_list__", _chunk_list),
    ("__get_tensor_shard__", _part),
):
    setattr(ShardTensor, _name, _answer)
