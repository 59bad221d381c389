"""Opens an archive of either application, or says what lies there in its place.

A form is the name of a layout, such as "shardfield-aero-1": of whom, for what, and its version.
"""

from pathlib import Path

import zarr

from core.errors import InputError


def require_archive(path, form):
    """Raises `InputError` where nothing lies at ``path``, or something that is no Zarr folder."""
    kind, build = _told(form)
    if not Path(path).exists():
        raise InputError(
            f"there is no such file or folder, so no {kind} archive", file=path, remedy=f"Build one with {build}"
        )
    if not (Path(path) / "zarr.json").is_file():
        raise InputError(f"is no {kind} archive: it holds no zarr.json", file=path, remedy=f"Build one with {build}")


def open_archive(path, store, key, form):
    """The root group of ``store``, an archive at ``path`` whose attribute ``key`` names its form.

    Raises:
        InputError: as of `require_archive`; for metadata that cannot be read, an archive of another kind or version.
    """
    require_archive(path, form)
    kind, build = _told(form)
    try:
        root = zarr.open_group(store, mode="r")
    except Exception as error:
        problem = f"cannot be opened as Zarr ({type(error).__name__}: {error})"
        raise InputError(problem, file=path, remedy="Build the archive again") from error
    found = root.attrs.get(key)
    if found == form:
        return root
    if str(found).startswith(form.rpartition("-")[0]):
        raise InputError(f"is of the version {found}, not {form}", file=path, remedy=f"Build it again with {build}")
    other = next((root.attrs[name] for name in ("schema", "format", "title") if root.attrs.get(name)), None)
    is_one = "it names no format" if other is None else f"it is {other!r}"
    raise InputError(f"is no {kind} archive: {is_one}", file=path, remedy=f"Build one with {build}")


def _told(form):
    kind = form.split("-")[1]
    return kind, f"python -m data.{kind}.build"
