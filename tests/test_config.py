"""The config file: what is read, and that every problem is found at once, with its line."""

import json
import textwrap
from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from smolproxy import config
from smolproxy.config import FileConfig, ServeOptions, ServerEntry, Settings
from smolproxy.errors import ConfigError, Problem
from smolproxy.settings import KEY_DEFAULTS, key_defaults

EXAMPLE = Path(__file__).parent.parent / "examples" / "config.yaml"

DEFAULTS = {
    "max_body_mib": 64,
    "connect_timeout": 5,
    "first_byte_timeout": 0,
    "idle_timeout": 0,
    "drain_timeout": 30,
    "models_require_key": False,
    "retention_days": 0,
    "log_level": "info",
    "log_format": "auto",
    "access_log": True,
    "queue_limit": 1000,
    "queue_timeout": 600,
    "heartbeat": 10,
    "loading_timeout": 60,
    "probe_interval": 5,
    "probe_timeout": 2,
    "affinity": True,
    "affinity_slack": 2,
    "affinity_ratio": 1.5,
    "expose_server": False,
    "default_model": None,
    "slot_fields": "refuse",
    "remote_media": "refuse",
    "cors_origins": (),
    "timezone": "UTC",
    "key_defaults": {},
}


@pytest.fixture
def file(tmp_path):
    """Write a file and return its path."""

    def write(text):
        path = tmp_path / "config.yaml"
        if isinstance(text, bytes):
            path.write_bytes(text)
        else:
            path.write_text(textwrap.dedent(text), encoding="utf-8")
        return path

    return write


@pytest.fixture
def problems(file):
    """Return the problems of a text as (line, message)."""

    def load(text):
        path = file(text)
        with pytest.raises(ConfigError) as caught:
            config.load(path)
        assert all(problem.where == str(path) for problem in caught.value.problems)
        return [(problem.line, problem.message) for problem in caught.value.problems]

    return load


# -- what is read --


def test_settings_have_the_names_and_defaults_of_the_contract():
    defaults = Settings()
    assert {field.name: getattr(defaults, field.name) for field in fields(Settings)} == DEFAULTS


def test_every_setting_is_documented_in_one_sentence():
    for field in fields(Settings):
        assert field.metadata["doc"].endswith("."), field.name
        assert set(field.metadata) == {"doc", "unit", "check"}


def test_settings_do_not_change_and_do_not_share_their_defaults():
    with pytest.raises(FrozenInstanceError):
        Settings().heartbeat = 1
    assert Settings().key_defaults is not Settings().key_defaults


def test_a_whole_file(file):
    path = file(
        """
        servers:
          - name: big-gpu
            url: http://10.0.0.5:8080
            api_key: s3cret
            models:
              - qwen3-30b-a3b.gguf
              - "org/model:tag 50% ü"
            slots: 4
          - {name: other, url: "https://[::1]/sub/"}
        aliases:
          smart: qwen3-30b-a3b.gguf
        settings:
          connect_timeout: 0.5
          cors_origins: ["*", "https://chat.example.org:8443"]
          timezone: Europe/Berlin
          default_model: smart
          key_defaults: {rpm_limit: 60, models: ["a*"], budget_period: week, expires_at: 30d, tpm_limit: null}
        """
    )
    found = config.load(path)
    assert found.path == path
    assert found.servers == (
        ServerEntry(
            "big-gpu", "http://10.0.0.5:8080", "s3cret", True, ("qwen3-30b-a3b.gguf", "org/model:tag 50% ü"), 4
        ),
        ServerEntry("other", "https://[::1]/sub/", None, False, None, None),
    )
    assert found.aliases == {"smart": "qwen3-30b-a3b.gguf"}
    assert found.settings == Settings(
        connect_timeout=0.5,
        cors_origins=("*", "https://chat.example.org:8443"),
        timezone="Europe/Berlin",
        default_model="smart",
        key_defaults={
            "rpm_limit": 60,
            "models": ("a*",),
            "budget_period": "week",
            "expires_at": "30d",
            "tpm_limit": None,
        },
    )
    assert "s3cret" not in repr(found)


@pytest.mark.parametrize("text", ["", "\n# nothing\n", "~", "{}", "servers:\naliases:\nsettings:\n", "---\n"])
def test_an_empty_file_is_good(file, text):
    found = config.load(file(text))
    assert (found.servers, found.aliases, found.settings) == ((), {}, Settings())


def test_an_empty_key_means_none_and_is_not_the_same_as_one_left_out(file):
    found = config.load(file("servers: [{name: a, url: 'http://a', api_key: ''}, {name: b, url: 'http://b'}]"))
    assert [(entry.api_key, entry.api_key_given) for entry in found.servers] == [(None, True), (None, False)]


def test_models_left_out_are_not_the_same_as_an_empty_list(file):
    found = config.load(file("servers: [{name: a, url: 'http://a', models: []}, {name: b, url: 'http://b', models: }]"))
    assert [entry.models for entry in found.servers] == [(), None]


def test_an_expiry_may_be_a_date_of_yaml(file):
    found = config.load(file("settings: {key_defaults: {expires_at: 2031-01-01}}"))
    assert str(found.settings.key_defaults["expires_at"]) == "2031-01-01"


def test_no_file_at_all_is_all_defaults():
    assert FileConfig() == FileConfig(None, (), {}, Settings())


def test_serve_options_keep_the_admin_key_to_themselves():
    options = ServeOptions(host="::1", port=0, db=Path("x"), admin_key="s3cret")
    assert "s3cret" not in repr(options)
    assert (options.config, options.config_required, options.admin_api) == (None, False, True)


# -- the example --


def test_the_example_in_the_repository_is_the_generated_one():
    assert EXAMPLE.read_text(encoding="utf-8") == config.example()


def test_the_example_is_good_and_shows_the_defaults():
    found = config.load(EXAMPLE)
    assert found.settings == Settings()
    assert found.servers
    assert found.aliases
    assert set(yaml.safe_load(config.example())["settings"]) == set(DEFAULTS)


def test_the_example_has_every_documentation():
    words = " ".join(config.example().replace("#", "").split())
    for field in fields(Settings):
        assert " ".join(field.metadata["doc"].split()) in words, field.name


# -- problems --

UNKNOWN_LIMIT = f'unknown name "rpm" in key_defaults; known are {", ".join(KEY_DEFAULTS)}'
NO_LIMIT = f"key_defaults: tpm_limit must be a whole number from 0 to {2**53}"


def test_all_problems_at_once_in_the_order_of_their_lines(problems):
    found = problems(
        """\
        servers:
          - name: a
            url: ftp://x
            models: [m, m]
          - name: a
            url: http://x
        aliases:
          m: other
          b: m
        settings:
          heartbeet: 1
          log_level: loud
        """
    )
    assert [line for line, _ in found] == [3, 4, 5, 8, 9, 11, 12]
    assert found[1:] == [
        (4, 'model "m" is listed twice'),
        (5, 'server "a" is given twice (first in line 2)'),
        (8, 'alias "m" is also the name of a model'),
        (9, 'alias "b" stands for "m", which is an alias itself'),
        (11, 'unknown name "heartbeet" in settings; did you mean "heartbeat"?'),
        (12, "log_level must be one of debug, info, warning, error"),
    ]


def test_the_order_of_lines_is_kept_whatever_the_order_of_sections(problems):
    found = problems("settings: {heartbeat: x}\nwurst: 1\naliases: []\nservers: 7\n")
    assert [line for line, _ in found] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("server: []", 1, 'unknown name "server" in the file; did you mean "servers"?'),
        ("wurst: []", 1, 'unknown name "wurst" in the file; known are servers, aliases, settings'),
        ("- a", 1, "the file must be a mapping (name: value)"),
        ("just text", 1, "the file must be a mapping (name: value)"),
        ("servers: {name: a}", 1, "servers must be a list (- item)"),
        ("servers:\n- 7", 2, "a server must be a mapping (name: value)"),
        ("servers:\n- \n", 2, "a server must be a mapping (name: value)"),
        ("servers:\n- {name: a}", 2, "a server needs a url"),
        ("servers:\n- {url: 'http://a'}", 2, "a server needs a name"),
        ("servers:\n- {name: '', url: 'http://a'}", 2, "name must not be empty"),
        ("servers:\n- {name: 5, url: 'http://a'}", 2, "name must be text (write it in quotes)"),
        ("servers:\n- {name: a, url: 'http://a', urk: 1}", 2, 'unknown name "urk" in a server; did you mean "url"?'),
        ("servers:\n- {name: a, url: 'http://a', slots: 0}", 2, "slots must be a whole number from 1 to 1000000000"),
        ("servers:\n- {name: a, url: 'http://a', slots: yes}", 2, "slots must be a whole number from 1 to 1000000000"),
        ("servers:\n- {name: a, url: 'http://a', models: m}", 2, "models must be a list (- item)"),
        ("servers:\n- name: a\n  url: http://a\n  models:\n  - 3.5", 5, "a model must be text (write it in quotes)"),
        ("servers:\n- {name: a, url: 'http://a', models: [[x]]}", 2, "a model must be text (write it in quotes)"),
        ("servers:\n- {name: a, name: b, url: 'http://a'}", 2, '"name" is given twice in a server'),
        ('servers:\n- {name: a, url: "http://a", models: ["a\\nb"]}', 2, "a model must not hold control characters"),
        (f"servers:\n- {{name: {'n' * 301}, url: 'http://a'}}", 2, "name must have at most 300 characters"),
        ("aliases: [a]", 1, "aliases must be a mapping (name: value)"),
        ("aliases:\n  a: b\n  a: c", 3, '"a" is given twice in aliases'),
        ("aliases:\n  3: b", 2, "a name in aliases must be text (write it in quotes)"),
        ("aliases:\n  ? [a]\n  : b", 2, "a name in aliases must be text (write it in quotes)"),
        ("aliases:\n  a:", 2, 'the model of alias "a" must be text (write it in quotes)'),
        ("aliases:\n  '': m", 2, "the name of an alias must not be empty"),
        ("aliases:\n  a: a", 2, 'alias "a" stands for "a", which is an alias itself'),
        ("settings: 7", 1, "settings must be a mapping (name: value)"),
        ("settings:\n  heartbeat: 1\n  heartbeat: 2", 3, '"heartbeat" is given twice in settings'),
        ("settings:\n  key_defaults:\n    rpm: 1\n", 3, UNKNOWN_LIMIT),
        ("settings:\n  key_defaults:\n    tpm_limit: x\n", 3, NO_LIMIT),
        ("settings:\n  key_defaults: [1]", 2, "key_defaults must be a mapping (name: value)"),
    ],
)  # fmt: skip
def test_a_problem(problems, text, line, message):
    assert problems(text) == [(line, message)]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("max_body_mib", ["-1", "1.5", "true", "x", "null", "10000000"]),
        ("retention_days", ["-1", "0.5", "false"]),
        ("connect_timeout", ["-0.1", ".inf", ".nan", "true", "5s", "[1]", "{a: 1}", "1e300"]),
        ("affinity_ratio", ["-1", "x"]),
        ("affinity", ["1", "x", "null"]),
        ("log_level", ["INFO", "trace", "1", "null"]),
        ("log_format", ["text"]),
        ("slot_fields", ["no"]),
        ("remote_media", ["drop"]),
        ("default_model", ["7", "[a]"]),
        ("timezone", ["Mars/Base", "../etc/passwd", "''", "5", "Europe", "/etc/passwd"]),
        ("cors_origins", ["x", "'*'", "[x]", "['http://a/']", "['http://a/b']", "[1]", "null"]),
        ("key_defaults", ["{rpm_limit: -1}", "{priority: 0}", "{budget_period: year}", "{models: a}"]),
    ],
)  # fmt: skip
def test_a_setting_of_a_wrong_type_or_out_of_range(problems, name, values):
    for value in values:
        found = problems(f"\n\nsettings:\n  {name}: {value}\n")
        assert len(found) == 1, value
        assert found[0][0] == 4
        assert found[0][1].startswith(name)


@pytest.mark.parametrize(
    "url",
    [
        "10.0.0.5:8080", "localhost", "ftp://a", "http://", "http:///path", "http://a:99999", "http://a:0", "http://a:b",
        "http://a b", "http://[::1", "http://a/?q=1", "http://a/#f", "//a", "http://a!b",
    ],
)  # fmt: skip
def test_a_bad_url(problems, url):
    (found,) = problems(f"servers:\n- name: a\n  url: {json.dumps(url)}\n")
    assert found[0] == 3
    assert found[1].startswith("url must ")


def test_a_url_with_credentials_does_not_show_them(problems):
    (found,) = problems("servers:\n- name: a\n  url: http://user:pa55@host\n")
    assert found == (3, "url must not have a name or password in it (a server's key goes to api_key)")


@pytest.mark.parametrize(
    "written",
    [
        "12345678", "[s3cret]", "{s3cret: 1}", '"s3cret\\n"', "' s3cret'", "s3crét", "!s3cret", "*s3cret",
        "!s3cret!x y", '"s3cret', "s3cret: x", "@s3cret", "`s3cret", "%s3cret", "{s3cret", "2031-02-31",
    ],
)  # fmt: skip
def test_no_message_shows_a_key(problems, written):
    found = problems(f"servers:\n- name: a\n  url: http://a\n  api_key: {written}\n")
    assert found
    for line, message in found:
        assert "s3cr" not in message
        assert "12345678" not in message
        assert line in (4, 5)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("servers: [", 1),
        ("servers:\n  - name: a\n\turl: b", 3),
        ("a: b: c", 1),
        ("x: 1\n---\ny: 2\n", 2),
        ("servers:\n  - }", 2),
        (b"settings: {}\n# \xff\n", 2),
        (b"settings: {}\n\n# \x00\n", 3),
    ],
)
def test_what_is_not_yaml_has_the_line(problems, text, line):
    (found,) = problems(text)
    assert found[1].startswith("is not YAML: ")
    assert found[0] == line


def test_what_is_nested_too_deeply(problems):
    assert problems("[" * 10_000) == [(1, "is nested too deeply")]


def test_a_node_that_holds_itself_is_walked_once(problems):
    assert problems("settings: &a\n  heartbeat: *a\n") == [(1, "heartbeat must be a number")]


@pytest.mark.parametrize("missing", ["nothing.yaml", "."])
def test_a_file_that_cannot_be_read(tmp_path, missing):
    with pytest.raises(ConfigError) as caught:
        config.load(tmp_path / missing)
    (problem,) = caught.value.problems
    assert problem.message.startswith("cannot be read: ")
    assert str(caught.value) == str(problem) == f"{tmp_path / missing}:1: {problem.message}"


def test_key_defaults_check_of_its_own():
    assert key_defaults({"rpm_limit": 1}) == {"rpm_limit": 1}
    for wrong in ([], {"rpm": 1}, {"rpm_limit": -1}):
        with pytest.raises(ValueError, match="must"):
            key_defaults(wrong)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(
    content=st.fixed_dictionaries(
        {},
        optional={
            "servers": values | st.lists(st.fixed_dictionaries({"name": values, "url": values, "slots": values})),
            "aliases": values,
            "settings": values | st.dictionaries(st.sampled_from(list(DEFAULTS)), values),
        },
    )
)
def test_whatever_is_in_the_file_it_is_good_or_named_in_problems(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("any") / "config.yaml"
    path.write_text(yaml.safe_dump(content, allow_unicode=True), encoding="utf-8")
    problems = []
    try:
        assert isinstance(config.load(path), FileConfig)
    except ConfigError as error:
        problems = error.problems or [Problem("an error without a problem", 0, "\n")]
    assert all(problem.line >= 1 and "\n" not in problem.message for problem in problems)
