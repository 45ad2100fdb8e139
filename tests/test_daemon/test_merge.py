"""Merging a config file into the database."""

import pytest

from smolproxy.config import FileConfig, ServerEntry
from smolproxy.daemon.merge import Merged, merge
from smolproxy.errors import Conflict, Invalid
from smolproxy.store import aliases, keys, servers
from smolproxy.store.database import Database


@pytest.fixture
async def db(tmp_path):
    database = await Database.open(tmp_path / "proxy.db")
    yield database
    await database.close()


def file(*entries, **names):
    return FileConfig(servers=entries, aliases=names)


def entry(name="gpu", url="http://a:8080", key=..., **other):
    given = key is not ...
    return ServerEntry(name, url, key if given else None, given, **other)


async def stored(db):
    return {server.name: server for server in await servers.list_all(db)}


async def test_a_new_server_and_alias(db):
    merged = await merge(db, file(entry(key="s3cret", models=("m", "n"), slots=4), fast="m"))
    (server,) = await servers.list_all(db)
    assert (server.name, server.url, server.api_key, server.models, server.slots, server.active) == (
        "gpu", "http://a:8080", "s3cret", ("m", "n"), 4, True,
    )  # fmt: skip
    assert await aliases.list_all(db) == [aliases.Alias("fast", "m")]
    assert merged == Merged(("server gpu added", "alias fast added"), ())


async def test_what_the_file_names_is_updated_by_name(db):
    await servers.add(db, "other", "http://o")
    await servers.add(db, "gpu", "http://old", api_key="old", models=["m"], slots=1)
    await aliases.create(db, "fast", "m")
    merged = await merge(db, file(entry(key="new", models=("n",), slots=2), fast="n"))
    server = (await stored(db))["gpu"]
    assert (server.id, server.url, server.api_key, server.models, server.slots) == (
        2, "http://a:8080", "new", ("n",), 2,
    )  # fmt: skip
    assert await aliases.list_all(db) == [aliases.Alias("fast", "n")]
    assert merged.changes == ("server gpu changed: url, api_key, models, slots", "alias fast changed")


async def test_what_the_file_does_not_mention_stays(db):
    await servers.add(db, "gpu", "http://a:8080", api_key="k", models=["m"], slots=3)
    await servers.update(db, 1, {"active": False})
    await servers.add(db, "mine", "http://mine", models=["x"])
    await aliases.create(db, "mine", "x")
    await keys.create(db, "ann")
    before = await servers.list_all(db), await aliases.list_all(db), await keys.list_all(db)
    await merge(db, file(entry(), fast="m"))
    assert await servers.list_all(db) == before[0]
    assert before[1][0] in await aliases.list_all(db)
    assert await keys.list_all(db) == before[2]


async def test_an_empty_key_and_an_empty_list_clear(db):
    await servers.add(db, "gpu", "http://a:8080", api_key="k", models=["m"])
    merged = await merge(db, file(entry(key=None, models=())))
    server = (await stored(db))["gpu"]
    assert (server.api_key, server.models) == (None, ())
    assert merged.changes == ("server gpu changed: api_key, models",)


async def test_a_second_merge_writes_nothing(db, tmp_path):
    config = file(entry(url="HTTP://A:8080/v1/", key="k", models=("m", "n"), slots=2), entry("b", "http://b"), fast="m")
    await merge(db, config)
    other = await Database.open(tmp_path / "proxy.db")
    before = await db.revisions(), await other.data_version()
    assert await merge(db, config) == Merged()
    reordered = file(entry(key="k", models=("n", "m")), fast="m")
    assert await merge(db, reordered) == Merged()
    assert (await db.revisions(), await other.data_version()) == before
    await other.close()


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (file(entry("new"), taken="x"), Conflict),  # an alias that is a model of the database
        (file(entry("new"), a="fast"), Invalid),  # an alias of an alias of the database
        (file(entry("new"), entry("gpu", "http://a:0")), Invalid),
    ],
)
async def test_after_an_error_nothing_is_merged(db, bad, error):
    await servers.add(db, "gpu", "http://old", models=["taken"])
    await aliases.create(db, "fast", "taken")
    before = await servers.list_all(db), await aliases.list_all(db), await db.revisions()
    with pytest.raises(error):
        await merge(db, bad)
    assert (await servers.list_all(db), await aliases.list_all(db), await db.revisions()) == before


async def test_an_alias_whose_model_no_server_lists_is_warned_of(db):
    merged = await merge(db, file(entry(models=("m",)), fast="m", slow="zzz"))
    assert merged.warnings == ("alias slow: no server lists zzz; one without a list may still have it",)


async def test_a_model_that_an_alias_of_the_database_hides_is_warned_of(db):
    await aliases.create(db, "fast", "m")
    merged = await merge(db, file(entry(models=("m", "fast"))))
    assert merged.warnings == ("alias fast is without effect: a model of that name comes first",)


async def test_no_word_tells_a_key(db):
    for key in ("s3cret", "s3cret2"):
        assert "s3cret" not in repr(await merge(db, file(entry(key=key))))


async def test_an_empty_file_changes_nothing(db):
    await servers.add(db, "gpu", "http://a")
    assert await merge(db, FileConfig()) == Merged()
    assert len(await servers.list_all(db)) == 1
