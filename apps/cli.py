"""Command lines from dataclasses: one flag a field, its comment as help.

Written here because training must start where only torch, numpy, xarray and zarr are installed.
"""

import argparse
import dataclasses
import types
import typing

from core import InputError


def parse(config_class, argv=None, description=None):
    """A dataclass instance from command line flags ``--field value``.

    Fields may be int, float, str, bool (``--flag`` / ``--no-flag``), ``X | None`` or tuples of one type; help texts are
    ``metadata={"help": ...}`` (see :func:`option`).
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    hints = typing.get_type_hints(config_class)
    for field in dataclasses.fields(config_class):
        _add(parser, field, hints[field.name])
    return config_class(**vars(parser.parse_args(argv)))


def option(default, help, choices=None):
    """A dataclass field with a help text."""
    return dataclasses.field(default=default, metadata={"help": help, "choices": choices})


def _add(parser, field, kind):
    flag, help = "--" + field.name.replace("_", "-"), field.metadata.get("help") or " "
    required = field.default is dataclasses.MISSING
    default = None if required else field.default
    if isinstance(kind, types.UnionType):
        kind = next(k for k in typing.get_args(kind) if k is not type(None))
    common = dict(dest=field.name, help=help, required=required, default=default)
    if kind is bool:
        parser.add_argument(flag, action=argparse.BooleanOptionalAction, **common)
    elif typing.get_origin(kind) is tuple:
        parser.add_argument(flag, nargs="+", type=typing.get_args(kind)[0], action=_Tuple, **common)
    else:
        parser.add_argument(flag, type=kind, choices=field.metadata.get("choices"), **common)


class _Tuple(argparse.Action):
    def __call__(self, parser, namespace, values, option_string=None):
        setattr(namespace, self.dest, tuple(values))


def check_counts(config, *names):
    """Refuses counts below one."""
    for name in names:
        value = getattr(config, name)
        if value is not None and value < 1:
            raise InputError(f"--{name.replace('_', '-')} is {value}", remedy="Choose one or more")
