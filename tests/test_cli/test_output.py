"""Tables, plain and drawn, and what could steer a terminal."""

import json
import sys

import pytest

from smolproxy.cli import output


def test_a_plain_table(capsys):
    output.table(
        ("name", "n", "x", "on", "models"), [("a", 1234567, 0.25, True, ("m", "n")), ("bb", None, 10.0, False, ())]
    )
    assert capsys.readouterr().out == (
        "name          n     x  on   models\n"
        "a     1,234,567   0.2  yes  m, n\n"
        "bb            -  10.0  no   -\n"
    )  # fmt: skip


def test_ids_given_as_text_are_no_numbers(capsys):
    output.table(("id",), [("1234",), ("5",)])
    assert capsys.readouterr().out == "id\n1234\n5\n"


def test_wide_and_combining_characters_are_aligned(capsys):
    output.table(("a", "b"), [("模型", "x"), ("u\u0308u", "x"), ("abcd", "x")])
    assert capsys.readouterr().out == "a     b\n模型  x\nu\u0308u    x\nabcd  x\n"


def test_a_table_without_rows_is_its_header(capsys):
    output.table(("a", "b"), [])
    assert capsys.readouterr().out == "a  b\n"


@pytest.mark.parametrize("text", ["\x1b[31mred", "a\nb", "\u202egpj.exe", "\x9b2J", "\0"])
def test_nothing_printed_steers_the_terminal(capsys, text):
    output.table(("a",), [(text,)])
    output.say(text)
    output.note(text)
    output.print_json([text])
    printed = capsys.readouterr()
    assert all(char.isprintable() or char == "\n" for char in printed.out + printed.err)
    assert printed.out.count("\n") == 6
    assert printed.err.count("\n") == 1


def test_json_is_ascii_and_comes_back(capsys):
    output.print_json({"name": "模型 ü"})
    printed = capsys.readouterr().out
    assert printed.isascii()
    assert json.loads(printed) == {"name": "模型 ü"}


def test_csv(capsys):
    output.print_csv([{"a": 'x,"y"', "b": None, "c": True, "d": 1.5}], ("a", "b", "c", "d"))
    assert capsys.readouterr().out == 'a,b,c,d\n"x,""y""",,true,1.5\n'


# -- on a terminal --


@pytest.fixture
def draw(monkeypatch, capsys):
    """Print a table on a terminal of 80 columns without colours; return what it shows."""

    def table(*args):
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        monkeypatch.setenv("TERM", "dumb")
        output.table(*args)
        return capsys.readouterr().out

    return table


def test_a_terminal_gets_a_drawn_table(draw):
    pytest.importorskip("rich")
    lines = draw(("name", "tokens"), [("a", 1234), ("[bold]b[/bold]", 5)]).splitlines()
    head, rule, *rows = [line.split() for line in lines if line.strip()]
    assert head == ["name", "tokens"]
    assert set("".join(rule)) == {"─"}
    assert rows == [["a", "1,234"], ["[bold]b[/bold]", "5"]]


def test_a_long_name_is_folded_not_cut(draw):
    pytest.importorskip("rich")
    printed = draw(("name", "tokens"), [("m" * 100, 5)])
    assert printed.count("m") == 100 + 1  # and the one in "name"
    assert max(map(len, printed.splitlines())) <= 80


def test_a_terminal_without_rich_gets_a_plain_table(draw, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.table", None)
    assert draw(("a",), [("b",)]) == "a\nb\n"
