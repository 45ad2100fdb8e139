"""Folder and files: modes, owners, and what is said when they cannot be used."""

from __future__ import annotations

import os
import pwd
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from smolproxy.errors import DatabaseError
from smolproxy.store import keys
from smolproxy.store.database import Database

ROOT = os.geteuid() == 0
NOBODY = 65534


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other users can reach, unlike ``tmp_path``."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def no_root() -> Iterator[str]:
    """Act as a user whom file modes bind; the value is his name."""
    if ROOT:
        os.seteuid(NOBODY)
    try:
        yield pwd.getpwuid(os.geteuid()).pw_name
    finally:
        if ROOT:
            os.seteuid(0)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
async def test_folders_and_files_are_private_when_made(tmp_path: Path, umask: int) -> None:
    path = tmp_path / "a" / "b" / "proxy.db"
    before = os.umask(umask)
    try:
        db = await Database.open(path)
        await keys.create(db)
    finally:
        os.umask(before)
    assert [mode(folder) for folder in (path.parent.parent, path.parent)] == [0o700, 0o700]
    files = {file.name: mode(file) for file in path.parent.iterdir()}
    assert files == {"proxy.db": 0o600, "proxy.db-wal": 0o600, "proxy.db-shm": 0o600}
    await db.close()


async def test_an_existing_folder_and_file_keep_their_modes(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    path = tmp_path / "proxy.db"
    path.touch()
    path.chmod(0o640)
    db = await Database.open(path)
    await db.close()
    assert (mode(tmp_path), mode(path)) == (0o755, 0o640)


@pytest.mark.skipif(not ROOT, reason="gives files away")
async def test_what_root_makes_in_a_users_folder_is_the_users(open_folder: Path) -> None:
    os.chown(open_folder, NOBODY, NOBODY)
    path = open_folder / "deeper" / "proxy.db"
    db = await Database.open(path)
    await keys.create(db)
    made = [path.parent, *path.parent.iterdir()]
    assert len(made) == 4
    assert {(file.stat().st_uid, file.stat().st_gid) for file in made} == {(NOBODY, NOBODY)}
    os.seteuid(NOBODY)  # the daemon, while the command still has the file open
    try:
        other = await Database.open(path)
        await keys.create(other)
        assert len(await keys.list_all(db)) == 2
        await other.close()
    finally:
        os.seteuid(0)
    await db.close()


@pytest.mark.skipif(not ROOT, reason="needs a folder of somebody else's")
async def test_a_user_keeps_what_he_makes_in_the_folder_of_another(open_folder: Path) -> None:
    os.chown(open_folder, NOBODY - 1, NOBODY - 1)
    open_folder.chmod(0o777)
    os.seteuid(NOBODY)
    try:
        await (await Database.open(open_folder / "proxy.db")).close()
    finally:
        os.seteuid(0)
    assert (open_folder / "proxy.db").stat().st_uid == NOBODY


async def test_a_folder_that_cannot_be_written_is_told_with_path_and_user(open_folder: Path, no_root: str) -> None:
    if not ROOT:
        open_folder.chmod(0o500)
    for path in (open_folder / "proxy.db", open_folder / "new" / "proxy.db"):
        with pytest.raises(DatabaseError) as caught:
            await Database.open(path)
        assert str(caught.value) == f"cannot open database {path} as user {no_root}: Permission denied"
        assert isinstance(caught.value.__cause__, PermissionError)
    if not ROOT:
        open_folder.chmod(0o700)


@pytest.mark.skipif(not ROOT, reason="needs a file of somebody else's")
async def test_a_file_that_cannot_be_read_or_written_is_told_with_path_and_user(open_folder: Path) -> None:
    path = open_folder / "proxy.db"
    path.touch(0o600)
    name = pwd.getpwuid(NOBODY).pw_name
    os.seteuid(NOBODY)
    try:
        with pytest.raises(DatabaseError, match=f"cannot open database {path} as user {name}: unable to open"):
            await Database.open(path)
    finally:
        os.seteuid(0)
    path.chmod(0o644)
    os.seteuid(NOBODY)
    try:
        with pytest.raises(DatabaseError, match=f"cannot write database {path} as user {name}: .*readonly"):
            await Database.open(path)
    finally:
        os.seteuid(0)


async def test_a_user_without_a_name_is_told_by_number(
    open_folder: Path, no_root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(uid: int) -> object:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    (open_folder / "file").touch() if not ROOT else None
    with pytest.raises(DatabaseError, match=f"as user {os.geteuid()}: "):
        await Database.open(open_folder / "proxy.db" if ROOT else open_folder / "file" / "proxy.db")


async def test_a_folder_that_is_a_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DatabaseError, match=r"cannot open database .*/file/proxy.db as user .*: Not a directory"):
        await Database.open(tmp_path / "file" / "proxy.db")


async def test_a_directory_is_no_database(tmp_path: Path) -> None:
    for readonly in (False, True):
        with pytest.raises(DatabaseError, match=f"cannot open database {tmp_path}: it is a directory"):
            await Database.open(tmp_path, readonly=readonly)


async def test_a_pipe_is_no_database(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DatabaseError, match="not even a regular file"):
        await Database.open(tmp_path / "pipe")


@pytest.mark.parametrize(
    "content",
    [b"x", b"x" * 511, b"x" * 512, b"not a database\n" * 500, b"\0" * 5000, b"SQLite format 3\0" + b"?" * 4080],
)
async def test_garbage_is_no_database_and_stays_as_it_is(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "proxy.db"
    path.write_bytes(content)
    for readonly in (False, True):
        with pytest.raises(DatabaseError, match=f"{path} is not a SQLite database"):
            await Database.open(path, readonly=readonly)
    assert path.read_bytes() == content


@pytest.mark.parametrize("name", ["a\0b", "x" * 300, "🦙" * 100])
async def test_a_name_that_no_file_can_have_is_told(tmp_path: Path, name: str) -> None:
    with pytest.raises(DatabaseError, match="cannot open database"):
        await Database.open(tmp_path / name)


@pytest.mark.parametrize("name", ["100%.db", "a?mode=memory#x", ":memory:", "模型 ü.db", "%2Fx", "a'\"b"])
async def test_any_other_name_is_a_file_of_that_name(tmp_path: Path, name: str) -> None:
    db = await Database.open(tmp_path / name)
    await keys.create(db)
    assert {file.name for file in tmp_path.iterdir()} == {name, f"{name}-wal", f"{name}-shm"}
    assert db.path == tmp_path / name
    await db.close()


async def test_a_relative_path_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    db = await Database.open("data/proxy.db")
    await db.close()
    assert (tmp_path / "data" / "proxy.db").is_file()
    with pytest.raises(DatabaseError, match="is a directory"):
        await Database.open("")


async def test_a_link_to_a_missing_file_makes_that_one_private(tmp_path: Path) -> None:
    target = tmp_path / "elsewhere" / "real.db"
    (tmp_path / "proxy.db").symlink_to(target)
    db = await Database.open(tmp_path / "proxy.db")
    await db.close()
    assert mode(target) == 0o600
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(DatabaseError, match="cannot open database"):
        await Database.open(tmp_path / "loop")


async def test_readonly_makes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "new" / "proxy.db"
    with pytest.raises(DatabaseError, match=f"there is no database {path}"):
        await Database.open(path, readonly=True)
    assert list(tmp_path.iterdir()) == []
