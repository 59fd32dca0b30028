"""Addresses where no vLLM answers, or not as it should: one line each, at once, without the key."""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from exgrpo_cli.engines import Request, Sampling, open_engine
from exgrpo_cli.engines import server as engine
from exgrpo_cli.errors import InputError, StageError
from exgrpo_cli.recipe import Recipe, parse_recipe

Answer = tuple[int, str | bytes]


class Site:
    """A web server that answers as it is told, and remembers what it was asked."""

    def __init__(self, answer: Callable[[str, dict[str, Any]], Answer]) -> None:
        self.asked: list[tuple[str, str]] = []
        self.open = threading.Event()
        site = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                site.asked.append((self.path, self.headers.get("Authorization", "")))
                size = int(self.headers.get("Content-Length", 0))
                body = json.loads(self.rfile.read(size) or "{}")
                status, text = answer(self.path, body)
                data = text.encode() if isinstance(text, str) else text
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_POST = do_GET  # noqa: N815

            def log_message(self, *_: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def site() -> Iterator[Callable[..., Site]]:
    made: list[Site] = []

    def make(answer: Callable[[str, dict[str, Any]], Answer]) -> Site:
        made.append(Site(answer))
        return made[-1]

    yield make
    for one in made:
        one.server.shutdown()
        one.server.server_close()


def recipe(url: str) -> Recipe:
    return parse_recipe({"rollout": {"engine": "server", "url": url, "max_new_tokens": 8}}, "test")


@pytest.mark.parametrize(
    ("status", "text", "says"),
    [
        (200, "<html><h1>It works!</h1></html>", "no vllm serve.*It works!"),
        (200, "", "no vllm serve.*nothing"),
        (200, b"\xff\xfe\x00", "no vllm serve"),
        (200, "[]", "no vllm serve"),
        (200, "null", "no vllm serve"),
        (200, '{"models": []}', "no vllm serve"),
        (200, '{"data": {"id": "m"}}', "no vllm serve"),
        (200, '{"data": [{"name": "m"}]}', "no vllm serve"),
        (200, '{"data": ["m"]}', "no vllm serve"),
        (200, '{"data": []}', "serves nothing, not"),
        (200, '{"data": [{"id": "m", "max_model_len": "x"}]}', "serves None .as m., not"),
        (200, "[" * 100_000, "no vllm serve"),
        (301, "", "no vllm serve.*status 301"),
        (401, '{"error": "Unauthorized"}', "status 401; set VLLM_API_KEY"),
        (404, '{"detail":"Not Found"}', "no vllm serve.*status 404.*Not Found"),
        (500, "\x1b[31mInternal\nError", r"status 500: \[31mInternal Error"),
    ],
)
def test_what_is_no_vllm_is_one_line(
    site: Callable[..., Site], guesser: Path, status: int, text: str | bytes, says: str
) -> None:
    there = site(lambda *_: (status, text))
    with pytest.raises(InputError, match=says) as error:
        open_engine(recipe(there.url), str(guesser))
    assert str(error.value).isprintable()
    assert str(error.value).startswith(there.url)
    assert len(str(error.value)) < 500


@pytest.mark.parametrize(
    "url", ["node7", "node7:8000", "ftp://node7", "http://", "http://[::1", "http://node7:x", ""]
)
def test_what_is_no_address_is_said(guesser: Path, url: str) -> None:
    with pytest.raises(InputError, match="needs the address of a running vllm serve"):
        open_engine(recipe(url), str(guesser))


@pytest.mark.parametrize(
    "url", ["http://me:secret@node7", "me:secret@node7:8000", "http://node7/?api_key=secret"]
)
def test_credentials_are_not_taken_into_a_recipe(url: str) -> None:
    with pytest.raises(InputError, match="VLLM_API_KEY") as error:
        recipe(url)
    assert "secret" not in str(error.value)


def models(policy: Path) -> str:
    return json.dumps({"data": [{"id": "m", "root": str(policy), "max_model_len": 4096}]})


def choice(**changes: Any) -> str:
    values = {
        "token_ids": [5], "finish_reason": "stop",
        "logprobs": {"token_logprobs": [-0.5], "top_logprobs": [{"token_id:5": -0.5}]},
    }  # fmt: skip
    return json.dumps({"choices": [values | changes]})


REQUESTS = [Request(i, [5, 6], i) for i in range(40)]
ONCE = Sampling(1.0, 4)


def test_the_key_is_sent_and_never_said(
    site: Callable[..., Site], guesser: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = site(lambda path, _: (404, "no such path; you sent Bearer hush-hush"))
    monkeypatch.setenv("VLLM_API_KEY", "hush-hush\n")  # as $(cat FILE) would not, but files do
    with pytest.raises(InputError) as error:
        open_engine(recipe(there.url), str(guesser))
    assert there.asked == [("/v1/models", "Bearer hush-hush")]
    assert "hush-hush" not in str(error.value)
    monkeypatch.setenv("VLLM_API_KEY", "hush\nhush")
    with pytest.raises(InputError, match="VLLM_API_KEY: has characters") as error:
        open_engine(recipe(there.url), str(guesser))
    assert "hush" not in str(error.value)


@pytest.mark.parametrize(
    ("status", "text", "says"),
    [
        (200, "<html>", "answers as no vLLM does"),
        (200, '{"choices": []}', "answers as no vLLM does"),
        (200, '{"choices": [{"text": "4", "logprobs": null}]}', "answers as no vLLM does"),
        (200, choice(token_ids=5), "answers as no vLLM does"),
        (200, choice(token_ids=None), "it needs vLLM 0.10.2 or newer"),
        (400, '{"error": {"message": "too long"}}', "refuses a row .status 400: too long."),
    ],
)
def test_answers_that_no_vllm_gives(
    site: Callable[..., Site], guesser: Path, status: int, text: str, says: str
) -> None:
    there = site(lambda p, _: (200, models(guesser)) if "models" in p else (status, text))
    opened = open_engine(recipe(there.url), str(guesser))
    with pytest.raises(InputError, match=says):
        list(opened.generate(REQUESTS, ONCE))


def test_lost_answers_are_asked_for_again(
    site: Callable[..., Site], guesser: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_WAITS", (0.0, 0.01, 0.01))
    failed: set[int] = set()

    def answer(path: str, body: dict[str, Any]) -> Answer:
        if "models" in path:
            return 200, models(guesser)
        if body["seed"] in failed:
            return 200, choice()
        failed.add(body["seed"])
        return (503, "busy") if body["seed"] % 2 else (429, "slow down")

    there = site(answer)
    opened = open_engine(recipe(there.url + "/v1/"), str(guesser))
    rows = {row.index: row.token_ids for row in opened.generate(REQUESTS, ONCE)}
    assert rows == {request.index: [5] for request in REQUESTS}
    assert len(there.asked) == 1 + 2 * len(REQUESTS)
    always = site(lambda p, _: (200, models(guesser)) if "models" in p else (503, "busy"))
    opened = open_engine(recipe(always.url), str(guesser))
    with pytest.raises(StageError, match=r"no answer \(status 503: busy\).*same command goes on"):
        list(opened.generate(REQUESTS, ONCE))


def test_all_are_in_flight_and_are_given_up_at_once(
    site: Callable[..., Site], guesser: Path
) -> None:
    hold, begun = threading.Event(), threading.Semaphore(0)

    def answer(path: str, body: dict[str, Any]) -> Answer:
        if "models" in path:
            return 200, models(guesser)
        if body["seed"]:
            begun.release()
            hold.wait(60)
        return 200, choice()

    there = site(answer)
    opened = open_engine(recipe(there.url), str(guesser))
    before = threading.active_count()
    rows = opened.generate(REQUESTS, ONCE)
    try:
        assert next(rows).index == 0
        for _ in REQUESTS[1:]:
            assert begun.acquire(timeout=20)
        started = time.monotonic()
        rows.close()  # type: ignore[attr-defined]
        assert time.monotonic() - started < 5
    finally:
        hold.set()
    while threading.active_count() > before and time.monotonic() - started < 20:
        time.sleep(0.05)  # the site's own
    assert threading.active_count() <= before
