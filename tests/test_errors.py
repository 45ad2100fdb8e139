from __future__ import annotations

import json
from http import HTTPStatus

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smolproxy import errors
from smolproxy.errors import CODES, ApiError, ConfigError, Problem, SmolproxyError, envelope

SPEC = {  # of section 3
    "invalid_json": 400,
    "invalid_request": 400,
    "invalid_api_key": 401,
    "forbidden": 403,
    "model_not_found": 404,
    "not_found": 404,
    "method_not_allowed": 405,
    "body_too_large": 413,
    "unsupported_media_type": 415,
    "rate_limit_exceeded": 429,
    "internal_error": 500,
    "server_unreachable": 502,
    "server_error": 502,
    "no_server_available": 503,
    "shutting_down": 503,
    "server_timeout": 504,
    "loop_detected": 508,
}


@pytest.mark.parametrize(("code", "status"), SPEC.items())
def test_codes_have_their_statuses(code: str, status: int) -> None:
    assert ApiError(code, "x").status == status


def test_every_code_is_an_error_with_a_type() -> None:
    for code, (status, kind) in CODES.items():
        assert status == 499 or HTTPStatus(status) >= 400
        assert kind.endswith("_error")
        assert code == code.lower()


@settings(deadline=None)
@given(st.sampled_from(sorted(CODES)), st.text(st.characters()), st.none() | st.text(max_size=5))
def test_the_envelope_has_openais_shape(code: str, message: str, param: str | None) -> None:
    error = ApiError(code, message, param=param)
    body = error.body()
    assert body == envelope(error.code, error.message, error.param)
    assert json.loads(body) == {"error": {"message": message, "type": CODES[code][1], "code": code, "param": param}}
    assert b"\n" not in body  # it is sent as one line of an event stream


def test_lone_surrogates_do_not_hinder_an_answer() -> None:
    assert json.loads(envelope("not_found", "no \ud800 here"))["error"]["message"] == "no \ud800 here"


def test_headers_are_the_errors_own() -> None:
    given_headers = {"Retry-After": "5"}
    error = ApiError("shutting_down", "x", headers=given_headers)
    given_headers.clear()
    assert error.headers == {"Retry-After": "5"}
    assert ApiError("not_found", "x").headers == {}
    assert str(error) == "x"


def test_an_unknown_code_is_a_mistake() -> None:
    with pytest.raises(KeyError):
        envelope("nonsense", "x")


def test_each_exception_has_a_code() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, SmolproxyError)]
    assert len(kinds) > 4
    assert all(kind.code in CODES for kind in kinds)
    assert {kind.__name__: CODES[kind.code][0] for kind in kinds} == {
        "SmolproxyError": 400,
        "Invalid": 400,
        "NotFound": 404,
        "Conflict": 409,
        "DatabaseError": 503,
        "ConfigError": 400,
    }


def test_problems_of_a_config_file_come_all_at_once() -> None:
    problems = [Problem("config.yaml", 3, "no such setting"), Problem("config.yaml", 7, "not a number")]
    error = ConfigError(problems)
    assert error.problems == problems
    assert str(error) == "config.yaml:3: no such setting\nconfig.yaml:7: not a number"
