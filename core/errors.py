"""Errors that a person can act on: what is wrong, in which file and variable, and what to do about it."""


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
