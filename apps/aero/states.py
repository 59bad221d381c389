"""Fields of any number of points: the states of the slices are added up once and kept, then each row is answered alone.

In the first pass every layer adds the slices of all chunks, clouds and ranks to a few thousand numbers, its tokens.
With the tokens of all layers a row's answer needs no other row, so in the second pass rows come and go in any order.
Hidden states of the rows are kept from layer to layer where there is room, else computed again from the features: with
L layers that is L / 2 times the work and a memory that does not grow with the number of points.
"""

import torch
import torch.distributed as dist

from apps.agree import together


class States:
    """Tokens of every layer of ``model``, from all rows of all ranks of ``domain``; collective.

    clouds: this rank's rows of each cloud, whose slices [first:last] are tensors (n, F): a tensor, or what reads them
    from files. chunk: rows computed at a time. memory: GiB of hidden states that a rank may keep, half of what its GPU
    has free or 1 where None; whether it keeps them changes no number. Raises on all ranks the InputError of one that
    cannot read its rows.
    """

    @torch.no_grad()
    def __init__(self, model, clouds, chunk, domain, memory=None):
        self.model, self.clouds, self.chunk, self.tokens = model, clouds, chunk, []
        weight, width = next(model.parameters()), model.config.width
        fits = sum(len(cloud) for cloud in clouds) * width * weight.element_size() <= _room(memory, weight.device)
        self.kept = [weight.new_empty(1, len(cloud), width) for cloud in clouds] if fits else None
        for block in model.blocks:
            with together(domain.get_group()):
                total = self._sums(block)
            dist.all_reduce(total, group=domain.get_group())
            self.tokens.append(block.attention.mixed(total, weight.dtype))

    def _sums(self, block):
        """What the slices of a layer get from all rows of this rank."""
        attention, total = block.attention, 0
        for number in range(len(self.clouds)):
            for first in self.chunks(number):
                hidden, share = self._hidden(number, first)
                if self.kept:
                    self.kept[number][:, first : first + self.chunk] = hidden
                seen = block.norm1(hidden)
                total = total + attention.sums(seen, attention.places(seen), share)
        return total

    def chunks(self, number):
        """First rows of the chunks of a cloud; one, of no rows, where it is empty."""
        return range(0, max(1, len(self.clouds[number])), self.chunk)

    @torch.no_grad()
    def outputs(self, number, first):
        """Outputs (n, 4) of the model for the chunk of cloud ``number`` that begins at row ``first``."""
        return self.model.heads[number](self.model.norms[number](self._hidden(number, first)[0]))[0]

    def whole(self, number):
        """Outputs (n, 4) for all rows of a cloud."""
        return torch.cat([self.outputs(number, first) for first in self.chunks(number)])

    def _hidden(self, number, first):
        """Hidden states (1, n, C) of a chunk after all layers whose tokens are known, and its measure (1, n, 1)."""
        rows, depth, share = slice(first, first + self.chunk), len(self.tokens), None
        kept = self.kept[number][:, rows] if self.kept and depth else None
        if kept is None or (self.model.config.weighed and number == 0):
            features = self.clouds[number][rows][None]
            if number == 0:
                (features,), share = self.model.measured((features,))
        x, begin = (self.model.stems[number](features), 0) if kept is None else (kept, depth - 1)
        for block, tokens in zip(self.model.blocks[begin:depth], self.tokens[begin:]):
            x = block.finish(x, block.attention.back(block.attention.places(block.norm1(x)), tokens))
        return x, share


def _room(memory, device):
    """Bytes of hidden states that may be kept."""
    if memory is None and device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] // 2
    return (1 if memory is None else memory) * 2**30


def streamed(model, clouds, chunk, domain, memory=None):
    """As ``model`` on all rows of all ranks of ``domain``, ``chunk`` rows at a time.

    clouds: this rank's rows [(n, F)], plain; memory: as of ``States``; returns [(n, outputs)].
    """
    states = States(model, clouds, chunk, domain, memory)
    return [states.whole(number) for number in range(len(clouds))]
