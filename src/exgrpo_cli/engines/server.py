"""Generation by a running ``vllm serve``: OpenAI-compatible completions over HTTP.

A row is a request of its own, since each has its own seed. Many are in flight at once, so that the
server can batch them; its prefix cache serves the samples of a prompt.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from exgrpo_cli.engines import Completion, Request, Sampling
from exgrpo_cli.engines.entropy import topk_entropy
from exgrpo_cli.engines.limits import check_lengths, longest_row, policy_end_ids
from exgrpo_cli.errors import InputError, StageError
from exgrpo_cli.models import adapter_base, check_adapter, check_policy, is_adapter, load_config
from exgrpo_cli.recipe import Recipe

_IN_FLIGHT = 512  # a connection each: more than servers batch by default, fewer than files allowed
_WAITS = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0)  # seconds before each try after a lost connection
_SECONDS = 30.0  # to connect, and to name the models
_LISTEN_SECONDS = 0.5

# A long response may take hours; that the server still lives is the kernel's to find out.
_KEEP_ALIVE = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)] + [
    (socket.IPPROTO_TCP, getattr(socket, name), seconds)
    for name, seconds in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 20), ("TCP_KEEPCNT", 6))
    if hasattr(socket, name)
]


class ServerEngine:
    """A policy behind ``vllm serve`` (see :class:`exgrpo_cli.engines.Engine`).

    The server is never changed: it must have been started with the policy. A key is taken from
    ``VLLM_API_KEY``, as the server does.
    """

    name = "server"

    def __init__(self, recipe: Recipe, policy: str) -> None:
        """Find the policy on the server."""
        self._recipe = recipe
        self._url = recipe.rollout.url.rstrip("/").removesuffix("/v1")
        try:
            url = httpx.URL(self._url)
            good = url.scheme in ("http", "https") and bool(url.host)
        except httpx.InvalidURL:
            good = False
        if not good:
            raise InputError(
                f"rollout.url = {recipe.rollout.url!r}: the server engine needs the address of a"
                " running vllm serve, such as --url http://node7:8000"
            )
        self._probed: set[float] = set()
        self.load(policy)

    def load(self, policy: str) -> None:
        """Check that the server has this policy; it is not told to change."""
        check_policy(policy)
        if is_adapter(policy):
            check_adapter(policy, self._recipe.model)
        base = adapter_base(policy) if is_adapter(policy) else policy
        cards = self._cards()
        card = next((c for c in cards if _serves(c, policy)), None)
        if card is None:
            served = ", ".join(f"{c.get('root')} (as {c['id']})" for c in cards) or "nothing"
            raise InputError(
                f"{self._url}: serves {served}, not {policy}; start it with:"
                f" vllm serve {base}" + ("" if base == policy else f" --lora-modules p={policy}")
            )
        self._model = str(card["id"])
        self._longest = longest_row(self._recipe, base)
        limits = [c["max_model_len"] for c in cards if isinstance(c.get("max_model_len"), int)]
        if limits and min(limits) < self._longest:
            raise InputError(
                f"{self._url}: takes {min(limits)} tokens of prompt and response together, and the"
                f" recipe asks for {self._longest}; start it with --max-model-len {self._longest}"
            )
        self._end_ids = policy_end_ids(policy, self._recipe.model)
        config = load_config(base, self._recipe.model.trust_remote_code)
        self._vocabulary = int(config.get_text_config().vocab_size)

    def _cards(self) -> list[dict[str, Any]]:
        """The entries of ``/v1/models``."""
        try:
            with httpx.Client(
                **self._options(_SECONDS), verify=ssl.create_default_context()
            ) as client:
                response = client.get("/v1/models")
        except httpx.TransportError as error:
            reason = _without_key(str(error) or type(error).__name__)
            raise InputError(f"{self._url}: {reason}; is vllm serve running there?") from error
        if response.status_code in (401, 403):
            raise InputError(f"{self._url}: status {response.status_code}; set VLLM_API_KEY")
        cards = _json(response) if response.status_code == 200 else {}
        cards = cards.get("data") if isinstance(cards, dict) else None
        if not isinstance(cards, list) or not all(isinstance(c, dict) and "id" in c for c in cards):
            raise InputError(
                f"{self._url}: no vllm serve: /v1/models gives no list of models (status"
                f" {response.status_code}: {_message(response)})"
            )
        return cards

    def sleep(self) -> bool:
        """Nothing: the server stays as it is."""
        return False

    def close(self) -> None:
        """Nothing is held; the server stays as it is."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
        """Yield every request's completion once, as they finish.

        A lost connection is tried again some times over half a minute; the same seed gives the
        same sample. All is sent and received by one thread, whose requests are given up at once
        when nobody listens any more; vLLM drops a row that nobody waits for.
        """
        check_lengths(requests, self._longest)
        if not requests:
            return
        done: queue.SimpleQueue[Completion | BaseException] = queue.SimpleQueue()
        loop = asyncio.new_event_loop()
        task = loop.create_task(self._sample(requests, sampling, done.put))

        def work() -> None:
            with contextlib.closing(loop), contextlib.suppress(asyncio.CancelledError):
                loop.run_until_complete(task)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        try:
            for _ in requests:
                result = _next(done)
                if isinstance(result, BaseException):
                    raise result
                yield result
        finally:  # the caller stopped listening, was interrupted, or the server is gone
            with contextlib.suppress(RuntimeError):  # all is done, and the loop is closed
                loop.call_soon_threadsafe(task.cancel)
            thread.join(_SECONDS)

    async def _sample(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        put: Callable[[Completion | BaseException], None],
    ) -> None:
        transport = httpx.AsyncHTTPTransport(
            verify=ssl.create_default_context(),
            limits=httpx.Limits(max_connections=None),
            socket_options=_KEEP_ALIVE,
        )
        todo = iter(requests)

        async def work() -> None:
            for request in todo:  # which all share
                try:
                    put(await self._complete(client, request, sampling))
                except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
                    what = f"{type(error).__name__}: {_without_key(str(error))}"
                    raise InputError(f"{self._url}: answers as no vLLM does ({what})") from error

        try:
            async with httpx.AsyncClient(**self._options(None), transport=transport) as client:
                if sampling.temperature not in (0.0, 1.0, *self._probed):
                    await self._check_logprobs_mode(client, requests[0], sampling)
                    self._probed.add(sampling.temperature)
                async with asyncio.TaskGroup() as group:
                    for _ in range(min(_IN_FLIGHT, len(requests))):
                        group.create_task(work())
        except BaseExceptionGroup as errors:  # the first; the others were cancelled by it
            put(errors.exceptions[0])
        except Exception as error:
            put(error)

    async def _complete(
        self, client: httpx.AsyncClient, request: Request, sampling: Sampling
    ) -> Completion:
        room = self._longest - len(request.prompt_ids)
        choice = await self._ask(
            client,
            request,
            sampling,
            max_tokens=min(sampling.max_new_tokens, room),
            logprobs=sampling.entropy_top_k,
        )
        token_ids = choice.get("token_ids")
        if token_ids is None:
            raise InputError(f"{self._url}: gives no token ids; it needs vLLM 0.10.2 or newer")
        logprobs = choice["logprobs"]["token_logprobs"]
        if len(logprobs) != len(token_ids) or not token_ids or None in logprobs:
            raise StageError(f"{self._url}: row {request.index} came without its log-probabilities")
        if choice["finish_reason"] not in ("stop", "length"):
            raise StageError(f"{self._url}: row {request.index} ended by {choice['finish_reason']}")
        estimate = None
        if sampling.entropy_top_k:
            # the sampled token stands there too, whether it is among the most probable or not
            tops = choice["logprobs"]["top_logprobs"]
            known = [sorted(top.values(), reverse=True)[: sampling.entropy_top_k] for top in tops]
            estimate = float(topk_entropy(np.array(known), self._vocabulary).mean())
        return Completion(
            index=request.index,
            token_ids=token_ids,
            logprobs=logprobs,
            entropies=None,
            finish_reason=choice["finish_reason"],
            topk_entropy=estimate,
        )

    async def _ask(
        self, client: httpx.AsyncClient, request: Request, sampling: Sampling, **more: Any
    ) -> dict[str, Any]:
        """The server's choice for a row."""
        body = {
            "model": self._model,
            "prompt": request.prompt_ids,
            "seed": request.seed,
            "temperature": sampling.temperature,
            "top_p": 1.0,
            # said, since servers take what is not from the model's generation_config
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "stop_token_ids": self._end_ids,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        reason = ""
        for wait in _WAITS:
            await asyncio.sleep(wait)
            try:
                response = await client.post("/v1/completions", json=body | more)
            except httpx.TransportError as error:
                reason = _without_key(str(error) or type(error).__name__)
                continue
            status = response.status_code
            if status == 200:
                try:
                    choice: dict[str, Any] = _json(response)["choices"][0]
                    if isinstance(choice["logprobs"]["token_logprobs"], list):
                        return choice
                except (KeyError, IndexError, TypeError):
                    pass
            reason = f"status {status}: {_message(response)}"
            if status < 500 and status not in (408, 429):
                kind = "answers as no vLLM does" if status < 400 else "refuses a row"
                raise InputError(f"{self._url}: {kind} ({reason})")
        raise StageError(
            f"{self._url}: no answer ({reason}); what was finished is kept, and the same command"
            " goes on when the server is back"
        )

    async def _check_logprobs_mode(
        self, client: httpx.AsyncClient, request: Request, sampling: Sampling
    ) -> None:
        """Whether log-probabilities are of logits / T: then their differences grow by 1 / T.

        At T = 1 both modes are the same, and nothing needs to be checked.
        """
        gaps = []
        for temperature in (1.0, sampling.temperature):
            choice = await self._ask(
                client, request, Sampling(temperature, 1), max_tokens=1, logprobs=2
            )
            tops = choice["logprobs"]["top_logprobs"][0]
            first, second = sorted(tops.values(), reverse=True)[:2]
            gaps.append(first - second)
        if abs(gaps[1] - gaps[0]) < abs(gaps[1] - gaps[0] / sampling.temperature):
            raise InputError(
                f"{self._url}: reports log-probabilities without the temperature"
                f" ({sampling.temperature:g}); start it with --logprobs-mode processed_logprobs"
            )

    def _options(self, seconds: float | None) -> dict[str, Any]:
        """What httpx's clients are made with; ``seconds`` to wait for an answer."""
        key = os.environ.get("VLLM_API_KEY", "").strip()
        if not (key.isascii() and key.isprintable()):
            raise InputError("VLLM_API_KEY: has characters that an HTTP header does not take")
        return {
            "base_url": self._url,
            "headers": {"Authorization": f"Bearer {key}"} if key else {},
            "timeout": httpx.Timeout(seconds, connect=_SECONDS),
            "trust_env": False,  # no proxy, nor passwords from ~/.netrc
        }


def _next(done: queue.SimpleQueue[Completion | BaseException]) -> Completion | BaseException:
    """The next result. It looks up now and then: where polars has set SA_RESTART, a Ctrl-C does not
    end a wait for a lock."""
    while True:
        with contextlib.suppress(queue.Empty):
            return done.get(timeout=_LISTEN_SECONDS)


def _without_key(text: str) -> str:
    """What a library or a server says, in one line, without the key."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    key = os.environ.get("VLLM_API_KEY", "").strip()
    return (line.replace(key, "...") if key else line)[:200]


def _serves(card: dict[str, Any], policy: str) -> bool:
    """Whether an entry of ``/v1/models`` is this policy: by its folder, or by its served name."""
    root = str(card.get("root") or "")
    if policy in (root, card["id"]):
        return True
    return bool(root) and Path(policy).exists() and Path(root).resolve() == Path(policy).resolve()


def _json(response: httpx.Response) -> Any:
    """What it holds; None where that is not JSON."""
    try:
        return json.loads(response.content)
    except (ValueError, RecursionError):
        return None


def _message(response: httpx.Response) -> str:
    """The server's own words, in one line."""
    value = _json(response)
    found = value.get("error", value) if isinstance(value, dict) else value
    found = found.get("message", found) if isinstance(found, dict) else found
    return _without_key(str(response.text if value is None else found)) or "nothing"
