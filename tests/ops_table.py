"""docs/ops.md from the table of cases: what every row sends, forward and backward, and what is refused.

    python tests/ops_table.py        # runs every row on two ranks and writes the file

The run also notes which functions of torch and which rules of core each row reached; tests ask it what has no row.
"""

import sys
from collections import defaultdict
from pathlib import Path

import torch
from cases import REFUSED, TABLE, load, operands, run_refused, seed_torch, tensors_of
from cases import cut as cut_operand
from torch.overrides import TorchFunctionMode

from core import above, below, dispatch
from core.debug import trace

FILE = Path(__file__).parents[1] / "docs" / "ops.md"
HEAD = """# What every operation sends

Made from the table of cases by `python tests/ops_table.py`; a test fails when it is out of date. Every row is compared
with one process, values and every gradient, on 1, 2, 3 and 4 ranks and a 2 x 2 mesh, for even, uneven, one-row and
empty parts. Here it runs on two ranks with the even split; bytes are what the first rank sends.

A cut names, for each tensor operand, the dim that is cut: `S(1)`; `plain` is a plain tensor, `R` a replicated
ShardTensor, `P` one that is a pending sum. Columns with one entry hold for all cuts of the row. The gradient of a plain
operand (a weight) is summed over the ranks: that is the all_reduce of most backward passes.
"""


class Functions(TorchFunctionMode):
    """Names of the functions of torch that are called."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.add(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


class Rules(dict):
    """The registry, noting the keys that are looked up with success."""

    seen = frozenset()

    def get(self, key, default=None):
        found = super().get(key, default)
        if found is not None:
            self.seen |= {key}
        return found


def survey(meshes):
    """For every row: functions, keys of rules, and the messages of every cut on this rank."""
    mesh = meshes["2"]
    if mesh.mesh.flatten()[0] != 0:
        return None
    rows = load()  # before the rules are copied: files of cases may declare some
    rules, found = Rules(dispatch.RULES), {}
    above.RULES = below.RULES = rules
    try:
        for name, row in rows.items():
            rules.seen = frozenset()
            dispatch.forget_plans()
            try:
                with Functions() as functions:
                    row.fn(*operands(row, 0, "cpu"))
                cuts = [(_text(dims), *_messages(row, mesh, dims)) for dims in row.cuts]
            except Exception as error:
                raise AssertionError(f"row {name}") from error
            keys = {_key(k) for k in rules.seen}
            found[name] = row.family, functions.names, keys, cuts
        rules.seen = frozenset()
        refused = {name: run_refused(meshes, name) for name in REFUSED}
    finally:
        above.RULES = below.RULES = dispatch.RULES
    return found, refused, {_key(k) for k in rules.seen}


def _key(k):
    """Rules of one function under several names are one entry."""
    return getattr(k, "__name__", str(k)), dispatch.RULES[k].__qualname__


def _messages(row, mesh, dims):
    seed_torch(0)
    cut = [cut_operand(x, mesh, d, "chunk") for x, d in zip(operands(row, 0, "cpu"), dims)]
    with trace() as forward:
        outs = [o for o in tensors_of(row.fn(*cut)) if isinstance(o, torch.Tensor) and o.requires_grad]
    if row.wire is not None:
        assert tuple(forward.kinds()) == row.wire, f"cut {dims} sent {forward.kinds()}, expected {row.wire}"
    with trace() as backward:
        if outs:
            torch.autograd.backward(outs, [torch.ones_like(o) for o in outs])
    return _wire(forward), _wire(backward)


def _wire(recorded):
    kinds = defaultdict(lambda: [0, 0])
    for m in recorded.messages:
        kinds[m.kind][0] += 1
        kinds[m.kind][1] += m.bytes
    return ", ".join(f"{n} {kind} {size:,} B" for kind, (n, size) in kinds.items()) or "nothing"


def _text(dims):
    names = ["plain" if d is None else d if isinstance(d, str) else f"S({d})" for d in dims]
    return "·".join(names)


def render(found, refused):
    load()
    lines, family = [HEAD], None
    for name, (module, _, _, cuts) in sorted(found.items(), key=lambda item: item[1][0]):
        if module != family:
            family = module
            title = sys.modules[module].__doc__.splitlines()[0] if module in sys.modules else module
            lines += ["", f"## {title}", "", "| row | cuts | forward | backward |", "|---|---|---|---|"]
        columns = [_column([c[i] for c in cuts]) for i in range(3)]
        lines.append(f"| {name} | {' | '.join(columns)} |")
    lines += ["", "## Refused, on every rank and before anything is sent", "", "| call | error |", "|---|---|"]
    lines += [f"| {name} | {text.splitlines()[0].replace('|', '/')} |" for name, text in refused.items()]
    return "\n".join(lines) + "\n"


def _column(entries):
    return entries[0] if len(set(entries)) == 1 else "; ".join(entries)


def main():
    from pool import Pool

    pool = Pool()
    found, refused, _ = pool.run(survey, timeout=900)[0]
    pool.close()
    FILE.write_text(render(found, refused))
    print(f"{FILE}: {len(TABLE)} rows, {len(refused)} refusals")


if __name__ == "__main__":
    main()
