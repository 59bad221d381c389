"""Errors that a person can act on: what is wrong, where, and what to do about it.

None of them is a TypeError or a NotImplementedError: Python's operators swallow those and report something else.
"""


class InputError(Exception):
    """Input that cannot be used: a missing or broken file, an unknown variable, a grid that does not match.

    Commands print it on standard error and leave with exit status 2.
    """

    def __init__(self, problem, *, file=None, variable=None, remedy=None):
        self.problem, self.file, self.variable, self.remedy = problem, file, variable, remedy
        where = ", ".join(f"{k} {v}" for k, v in (("file", file), ("variable", variable)) if v is not None)
        text = f"{where}: {problem}" if where else str(problem)
        super().__init__(f"{text}. {remedy}" if remedy else text)

    def __reduce__(self):
        keys = dict(file=self.file, variable=self.variable, remedy=self.remedy)
        return _rebuild, (self.problem, keys)


def _rebuild(problem, keys):
    return InputError(problem, **keys)


class ShardingError(RuntimeError):
    """An operation that cannot be done on shards; raised on every rank alike, before any communication."""

    def __init__(self, problem, *, op=None, operands=None, remedy=None):
        text = f"{op}: {problem}" if op else str(problem)
        if operands:
            text += " on " + ", ".join(map(str, operands))
        super().__init__(f"{text}. {remedy}" if remedy else text)


class MissingShardPatch(ShardingError):
    """No rule computes this operation on shards with these arguments."""


class UndeterminedShardingError(ShardingError):
    """Placements, sizes and shapes that contradict each other or leave the cut open."""
