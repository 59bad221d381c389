"""What was read last stays in memory, up to a number of bytes."""

from collections import OrderedDict


class Kept:
    """Values by key, of which those that were asked for last stay.

    Args:
        most: bytes of all values together.
        nbytes: how many bytes a value has, a function of it.
        least: values that stay however many bytes they have.
    """

    def __init__(self, most, nbytes, least=0):
        self.most, self.least, self._nbytes = most, least, nbytes
        self._values, self._total = OrderedDict(), 0

    def __contains__(self, key):
        return key in self._values

    def __getitem__(self, key):
        self._values.move_to_end(key)
        return self._values[key]

    def __setitem__(self, key, value):
        if key in self._values:
            self._total -= self._nbytes(self._values.pop(key))
        self._values[key] = value
        self._total += self._nbytes(value)
        while self._total > self.most and len(self._values) > self.least:
            self._total -= self._nbytes(self._values.popitem(last=False)[1])

    def of(self, key, make):
        """The value of ``key``, which ``make()`` gives where there is none."""
        if key in self:
            return self[key]
        value = self[key] = make()
        return value
