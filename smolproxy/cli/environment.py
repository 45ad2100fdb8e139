"""Where a command finds its files: flags win over the environment, that over ``.env``, that over defaults.

This module also opens the database for a command; it interprets no other setting.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from smolproxy.errors import Invalid

if TYPE_CHECKING:
    from smolproxy.store.database import Database

T = TypeVar("T")

_DOTENV = Path(".env")


class Environment:
    """The environment of one command.

    :param db: the flag ``--db``.
    """

    def __init__(self, db: str | None = None) -> None:
        self._db = db
        self._dotenv: Mapping[str, str | None] | None = None

    def get(self, name: str) -> str | None:
        """Return a variable from the environment or from ``.env``; None if it is missing or blank.

        :raises Invalid: if ``.env`` cannot be read.
        """
        value = os.environ.get(name)
        if value and value.strip():
            return value
        if self._dotenv is None:
            self._dotenv = _read_dotenv()
        value = self._dotenv.get(name)
        return value if value and value.strip() else None

    def database(self) -> Path:
        """Return the path of the SQLite file."""
        return Path(self._db or self.get("DB_PATH") or "data/proxy.db")

    def config(self, flag: str | None = None) -> tuple[Path, bool]:
        """Return the path of the config file, and whether it was named: then it may not be missing."""
        named = flag or self.get("CONFIG_PATH")
        return Path(named or "config.yaml"), named is not None

    def run(self, work: Callable[[Database], Awaitable[T]], *, readonly: bool = False) -> T:
        """Return the result of ``work`` with the opened database.

        :param readonly: for long reports, which then do not keep the write-ahead log from being emptied.
        :raises SmolproxyError: what ``work`` raises; DatabaseError if the file cannot be used.
        """
        import asyncio

        from smolproxy.store.database import Database

        async def opened() -> T:
            db = await Database.open(self.database())  # also makes or migrates the file
            if readonly:
                await db.close()
                db = await Database.open(self.database(), readonly=True)
            try:
                return await work(db)
            finally:
                await db.close()

        return asyncio.run(opened())


def _read_dotenv() -> Mapping[str, str | None]:
    # A folder of this name is somebody's virtual environment.
    if not _DOTENV.is_file():
        return {}
    from dotenv import dotenv_values

    try:
        return dotenv_values(_DOTENV)
    except OSError as error:
        raise Invalid(f".env cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise Invalid(".env is not UTF-8") from error
