"""smolproxy servers check, against servers that behave well and badly."""

import importlib
import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from smolproxy.cli import check

MODELS = {"data": [{"id": "m1"}, {"id": "org/m2"}]}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.seen.append((self.path, self.headers.get("Authorization")))
        status, body = self.server.answers.get(self.path, (404, b"not here"))
        if isinstance(body, (dict, list)):
            body = json.dumps(body).encode()
        self.send_response(status)
        if status == 302:
            self.send_header("Location", "/elsewhere")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def serve():
    """Start servers that answer as told by path; return each with its url."""
    started = []

    def start(**answers):
        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.answers = {
            "/health": answers.get("health", (200, {"status": "ok"})),
            "/v1/models": answers.get("models", (200, MODELS)),
            "/props": answers.get("props", (200, {"total_slots": 4})),
        }
        server.seen = []
        server.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        started.append((server, thread))
        return server

    yield start
    for server, thread in started:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def raw():
    """A listener that accepts by itself and is given what to send."""
    listeners = []

    def start(send):
        listener = socket.create_server(("127.0.0.1", 0))
        stop = threading.Event()

        def work():
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                send(connection, stop)

        thread = threading.Thread(target=work)
        thread.start()
        listeners.append((listener, stop, thread))
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    yield start
    for listener, stop, thread in listeners:
        stop.set()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def found(run, exit_code):
    """The result of the only server."""
    (result,) = json.loads(run("servers", "check", "--json", exit_code=exit_code).stdout)
    return result


def test_a_server_that_is_up(run, serve):
    server = serve()
    run("servers", "add", "gpu", server.url, "--api-key", "s3cret")
    result = run("servers", "check")
    assert [line.split() for line in result.stdout.splitlines()] == [
        ["name", "url", "state", "models", "slots", "error"],
        ["gpu", server.url, "up", "m1,", "org/m2", "4", "-"],
    ]
    assert server.seen == [(path, "Bearer s3cret") for path in ("/health", "/v1/models", "/props")]
    assert found(run, 0) == {
        "name": "gpu",
        "url": server.url,
        "state": "up",
        "models": ["m1", "org/m2"],
        "slots": 4,
        "error": None,
    }


def test_a_server_without_a_key_is_sent_none(run, serve):
    server = serve()
    run("servers", "add", "gpu", server.url)
    run("servers", "check")
    assert {authorization for _, authorization in server.seen} == {None}


def test_configured_slots_are_not_asked_for(run, serve):
    server = serve()
    run("servers", "add", "gpu", server.url, "--slots", 9)
    assert found(run, 0)["slots"] == 9
    assert [path for path, _ in server.seen] == ["/health", "/v1/models"]


@pytest.mark.parametrize(
    "props", [(404, b""), (200, {}), (200, b"x"), (200, []), (200, {"total_slots": "4"}), (401, b"")]
)
def test_a_server_that_does_not_tell_its_slots_is_up(run, serve, props):
    run("servers", "add", "gpu", serve(props=props).url)
    result = found(run, 0)
    assert (result["state"], result["slots"], result["error"]) == ("up", None, None)


def test_another_kind_of_server_without_health_is_up_by_its_models(run, serve):
    run("servers", "add", "gpu", serve(health=(404, b"")).url)
    assert found(run, 0)["state"] == "up"


@pytest.mark.parametrize(
    ("answers", "state", "error"),
    [
        ({"health": (503, {"error": {"message": "Loading model"}})}, "loading", None),
        ({"models": (503, {})}, "loading", None),
        ({"models": (401, {})}, "wrong_key", "GET /v1/models answered 401"),
        ({"models": (403, {})}, "wrong_key", "GET /v1/models answered 403"),
        ({"models": (500, {})}, "down", "GET /v1/models answered 500"),
        ({"health": (500, b"")}, "down", "GET /health answered 500"),
        ({"models": (200, b"<html>")}, "down", "GET /v1/models answered no list of models"),
        ({"models": (200, [])}, "down", "GET /v1/models answered no list of models"),
        ({"models": (200, {"data": [1]})}, "down", "GET /v1/models answered no list of models"),
        ({"models": (200, b"[" * 100_000)}, "down", "GET /v1/models answered no list of models"),
    ],
)
def test_a_server_that_is_not_up(run, serve, answers, state, error):
    run("servers", "add", "gpu", serve(**answers).url, "--model", "listed")
    result = found(run, 1)
    assert (result["state"], result["error"], result["models"]) == (state, error, ["listed"])
    assert state.replace("_", " ") in run("servers", "check", exit_code=1).stdout


def test_a_redirect_is_not_followed_since_the_key_would_go_with_it(run, serve):
    server = serve(health=(302, b""))
    server.answers["/elsewhere"] = (200, {})
    run("servers", "add", "gpu", server.url, "--api-key", "s3cret")
    assert found(run, 1)["error"] == "GET /health answered 302"
    assert [path for path, _ in server.seen] == ["/health"]


def test_a_server_that_refuses_connections(run):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    run("servers", "add", "gpu", f"http://127.0.0.1:{port}")
    result = found(run, 1)
    assert (result["state"], result["error"]) == ("down", "Connection refused")


def test_what_does_not_speak_http(run, raw):
    run("servers", "add", "gpu", raw(lambda connection, _: connection.sendall(b"SSH-2.0-x\r\n\r\n")))
    result = found(run, 1)
    assert result["state"] == "down"
    assert "SSH-2.0-x" in result["error"]


def test_a_server_that_closes_without_a_word(run, raw):
    run("servers", "add", "gpu", raw(lambda connection, _: connection.recv(65536)))
    result = found(run, 1)
    assert result["state"] == "down"
    assert result["error"]


def test_a_server_that_keeps_silent(run, raw, monkeypatch):
    monkeypatch.setattr(check, "TIMEOUT", 0.2)
    run("servers", "add", "gpu", raw(lambda _, stop: stop.wait(60)))
    result = found(run, 1)
    assert (result["state"], result["error"]) == ("down", "no answer within 0.2 s")


def test_a_server_that_drips(run, raw, monkeypatch):
    monkeypatch.setattr(check, "TIMEOUT", 0.3)
    sent = []

    def drip(connection, stop):
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n")
        while len(sent) < 500 and not stop.wait(0.02):
            try:
                connection.sendall(b" ")
            except OSError:
                return
            sent.append(1)

    run("servers", "add", "gpu", raw(drip))
    assert found(run, 1)["error"] == "no answer within 0.3 s"
    assert len(sent) < 500


def test_a_disabled_server_is_not_asked_and_does_not_fail(run, serve):
    server = serve(health=(500, b""))
    run("servers", "add", "gpu", server.url, "--model", "m")
    run("servers", "disable", 1)
    assert found(run, 0)["state"] == "disabled"
    assert server.seen == []


def test_one_that_is_down_fails_them_all(run, serve):
    for name, health in (("a", 200), ("b", 500), ("c", 200)):
        run("servers", "add", name, serve(health=(health, b"")).url)
    result = run("servers", "check", "--json", exit_code=1)
    assert [one["state"] for one in json.loads(result.stdout)] == ["up", "down", "up"]


def test_the_proxies_of_the_environment_are_not_asked(run, serve, monkeypatch):
    proxy = serve()
    monkeypatch.setenv("http_proxy", proxy.url)
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    importlib.reload(check)  # it would look for them when it is imported
    run("servers", "add", "gpu", serve().url)
    assert found(run, 0)["state"] == "up"
    assert proxy.seen == []


def test_no_servers_at_all(run):
    result = run("servers", "check")
    assert (result.stdout, result.stderr) == ("", "no servers yet: smolproxy servers add NAME URL\n")
    assert run("servers", "check", "--json").stdout == "[]\n"
