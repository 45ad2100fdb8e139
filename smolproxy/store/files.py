"""The database's folder and file before SQLite sees them: made when missing, private, and owned by whom they serve."""

from __future__ import annotations

import os
import pwd
import stat
from pathlib import Path

from smolproxy.errors import DatabaseError

_SMALLEST = 512  # bytes of a page of SQLite's
_COMPANIONS = ("-wal", "-shm")

Identity = tuple["tuple[int, int] | None", ...]
"""Which files they are, device and inode: the database, its write-ahead log and that one's index; None: missing."""


def prepare(path: Path, *, create: bool) -> Path:
    """Return the real path of the database file, having made folder (0700) and file (0600) if they are missing.

    SQLite gives its ``-wal`` and ``-shm`` files the mode of the database and, for root, its owner. The file is made
    here because SQLite would make it with 0644.

    :param create: whether to make what is missing.
    :raises DatabaseError: names path and user if it may not be made, or says what is there instead of a file.
    """
    try:
        real = Path(os.path.realpath(path))  # noqa: PTH118,RUF100 - SQLite follows links too
        if create:
            _make_folder(real.parent)
            _make_file(real)
        status = real.stat()
    except FileNotFoundError as error:
        raise DatabaseError(f"there is no database {path}") from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise DatabaseError(f"cannot open database {path} as user {user()}: {reason}") from error
    if stat.S_ISDIR(status.st_mode):
        raise DatabaseError(f"cannot open database {path}: it is a directory")
    if not stat.S_ISREG(status.st_mode):
        raise DatabaseError(f"{path} is not a SQLite database: it is not even a regular file")
    # SQLite would take it for an empty one and write over it. An existing file is never opened here to look into it:
    # closing it would drop the locks that other connections of this process have on it.
    if 0 < status.st_size < _SMALLEST:
        raise DatabaseError(f"{path} is not a SQLite database: it has {status.st_size} bytes only")
    return real


def identity(real: Path | str) -> Identity:
    """Return which files are at a database's paths now.

    SQLite does not notice when they are deleted or replaced under it: it goes on with those that it has open.
    """
    return tuple(_identity(f"{real}{suffix}") for suffix in ("", *_COMPANIONS))


def log_size(real: Path) -> int:
    """Return the bytes of the write-ahead log's file."""
    try:
        return os.stat(f"{real}-wal").st_size  # noqa: PTH116,RUF100 - asked often
    except OSError:
        return 0


def remove_companions(real: Path, of: Identity) -> None:
    """Remove a write-ahead log that belonged to another file in the place of this one: SQLite would take it for its.

    :param of: the identity of that other one; what is not part of it stays.
    :raises DatabaseError: it cannot be removed.
    """
    for suffix, known in zip(_COMPANIONS, of[1:], strict=False):
        path = f"{real}{suffix}"
        if known is not None and _identity(path) == known:
            try:
                Path(path).unlink(missing_ok=True)
            except OSError as error:
                raise DatabaseError(f"cannot remove {path} as user {user()}: {error.strerror}") from error


def user() -> str:
    """Return the name of the user that this process acts as, for messages."""
    uid = os.geteuid()
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _identity(path: str) -> tuple[int, int] | None:
    try:
        status = os.stat(path)  # noqa: PTH116,RUF100 - asked twice for each batch of rows
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _make_folder(folder: Path) -> None:
    missing = [folder, *folder.parents]
    missing = missing[: next(index for index, parent in enumerate(missing) if parent.exists())]
    for child in reversed(missing):
        child.mkdir(mode=0o700, exist_ok=True)
        owner = _owner_to_be(child.parent)
        if owner is not None:
            os.chown(child, *owner, follow_symlinks=False)


def _make_file(file: Path) -> None:
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return
    try:
        owner = _owner_to_be(file.parent)
        if owner is not None:
            os.fchown(descriptor, *owner)
    finally:
        os.close(descriptor)


def _owner_to_be(folder: Path) -> tuple[int, int] | None:
    """Whom to give what root makes in this folder, so that a daemon run by the folder's owner can write it."""
    status = folder.stat()
    return (status.st_uid, status.st_gid) if os.geteuid() == 0 and status.st_uid != 0 else None
