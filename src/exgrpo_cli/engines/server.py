"""Generation by a running ``vllm serve``: OpenAI-compatible completions over HTTP.

A row is a request of its own, since each has its own seed. Many are in flight at once, so that the
server can batch them; its prefix cache serves the samples of a prompt.
"""

from __future__ import annotations

import http.client
import json
import os
import queue
import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from exgrpo_cli.engines import Completion, Request, Sampling
from exgrpo_cli.engines.entropy import topk_entropy
from exgrpo_cli.engines.limits import check_lengths, longest_row, policy_end_ids
from exgrpo_cli.errors import InputError, StageError
from exgrpo_cli.models import adapter_base, check_policy, is_adapter
from exgrpo_cli.recipe import Recipe

_IN_FLIGHT = 512  # a connection each: more than servers batch by default, fewer than files allowed
_WAITS = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0)  # seconds before each try after a lost connection
_CONNECT_SECONDS = 30.0


class ServerEngine:
    """A policy behind ``vllm serve`` (see :class:`exgrpo_cli.engines.Engine`).

    The server is never changed: it must have been started with the policy. A key is taken from
    ``VLLM_API_KEY``, as the server does.
    """

    name = "server"

    def __init__(self, recipe: Recipe, policy: str) -> None:
        """Find the policy on the server.

        Raises:
            InputError: no address, no server there, or it serves another policy.
        """
        self._recipe = recipe
        self._url = recipe.rollout.url.rstrip("/").removesuffix("/v1")
        parts = urlsplit(self._url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InputError(
                f"rollout.url = {recipe.rollout.url!r}: the server engine needs the address of a"
                " running vllm serve, such as --url http://node7:8000"
            )
        self._probed: set[float] = set()
        self.load(policy)

    def load(self, policy: str) -> None:
        """Check that the server has this policy; it is not told to change.

        Raises:
            InputError: it has another one, or takes shorter rows than the recipe asks for.
        """
        check_policy(policy)
        base = adapter_base(policy) if is_adapter(policy) else policy
        try:
            cards = _Client(self._url).call("GET", "/v1/models", tries=1)["data"]
        except StageError as error:
            raise InputError(f"{error}; is vllm serve running there?") from error
        card = next((c for c in cards if _serves(c, policy)), None)
        if card is None:
            served = ", ".join(f"{c.get('root')} (as {c.get('id')})" for c in cards) or "nothing"
            raise InputError(
                f"{self._url}: serves {served}, not {policy}; start it with:"
                f" vllm serve {base}" + ("" if base == policy else f" --lora-modules p={policy}")
            )
        self._model = str(card["id"])
        self._longest = longest_row(self._recipe, base)
        limits = [c["max_model_len"] for c in cards if c.get("max_model_len")]
        if limits and min(limits) < self._longest:
            raise InputError(
                f"{self._url}: takes {min(limits)} tokens of prompt and response together, and the"
                f" recipe asks for {self._longest}; start it with --max-model-len {self._longest}"
            )
        self._end_ids = policy_end_ids(policy, self._recipe.model)
        self._vocabulary = _vocabulary(base, self._recipe.model.trust_remote_code)

    def sleep(self) -> bool:
        """Nothing: the server stays as it is."""
        return False

    def close(self) -> None:
        """Nothing is held; the server stays as it is."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
        """Yield every request's completion once, as they finish.

        A lost connection is tried again some times over half a minute; the same seed gives the
        same sample.

        Raises:
            InputError: a prompt is empty or leaves no room for a token; the server reports
                log-probabilities of another distribution than the sampled one, or refuses a row.
            StageError: the server is gone.
        """
        check_lengths(requests, self._longest)
        if not requests:
            return
        if sampling.temperature not in (0.0, 1.0) and sampling.temperature not in self._probed:
            self._check_logprobs_mode(requests[0], sampling)
            self._probed.add(sampling.temperature)
        todo: queue.SimpleQueue[Request] = queue.SimpleQueue()
        done: queue.SimpleQueue[Completion | BaseException] = queue.SimpleQueue()
        for request in requests:
            todo.put(request)
        clients = [_Client(self._url) for _ in range(min(_IN_FLIGHT, len(requests)))]

        def work(client: _Client) -> None:
            try:
                while True:
                    request = todo.get_nowait()
                    done.put(self._complete(client, request, sampling))
            except queue.Empty:
                pass
            except BaseException as error:
                done.put(error)
            finally:
                client.close()

        for client in clients:
            threading.Thread(target=work, args=(client,), daemon=True).start()
        try:
            for _ in requests:
                result = done.get()
                if isinstance(result, BaseException):
                    raise result
                yield result
        finally:  # the caller stopped listening, was interrupted, or the server is gone
            for client in clients:
                client.stop()

    def _complete(self, client: _Client, request: Request, sampling: Sampling) -> Completion:
        room = self._longest - len(request.prompt_ids)
        answer = self._ask(
            client,
            request,
            sampling,
            max_tokens=min(sampling.max_new_tokens, room),
            logprobs=sampling.entropy_top_k,
        )
        choice = answer["choices"][0]
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

    def _ask(
        self, client: _Client, request: Request, sampling: Sampling, **more: Any
    ) -> dict[str, Any]:
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
        return client.call("POST", "/v1/completions", body | more)

    def _check_logprobs_mode(self, request: Request, sampling: Sampling) -> None:
        """Whether log-probabilities are of logits / T: then their differences grow by 1 / T.

        At T = 1 both modes are the same, and nothing needs to be checked.

        Raises:
            InputError: they are of the logits as they are (the server's default).
        """
        client = _Client(self._url)
        gaps = []
        for temperature in (1.0, sampling.temperature):
            answer = self._ask(client, request, Sampling(temperature, 1), max_tokens=1, logprobs=2)
            first, second = sorted(
                answer["choices"][0]["logprobs"]["top_logprobs"][0].values(), reverse=True
            )[:2]
            gaps.append(first - second)
        client.close()
        if abs(gaps[1] - gaps[0]) < abs(gaps[1] - gaps[0] / sampling.temperature):
            raise InputError(
                f"{self._url}: reports log-probabilities without the temperature"
                f" ({sampling.temperature:g}); start it with --logprobs-mode processed_logprobs"
            )


class _Client:
    """One connection, opened when it is needed, and again when it was lost."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._connection: http.client.HTTPConnection | None = None
        self._stopped = threading.Event()

    def call(
        self, method: str, path: str, body: Any = None, tries: int = len(_WAITS)
    ) -> dict[str, Any]:
        """A request's answer.

        Raises:
            InputError: the server refuses it (a status from 400 to 499).
            StageError: no connection, or no answer, after so many tries.
        """
        reason = ""
        for wait in _WAITS[:tries]:
            if self._stopped.wait(wait):
                break
            try:
                status, text = self._send(method, path, body)
            except (OSError, http.client.HTTPException) as error:
                self.close()
                reason = str(error) or type(error).__name__
                continue
            if status < 400:
                answer: dict[str, Any] = json.loads(text)
                return answer
            reason = f"status {status}: {_message(text)}"
            if status < 500:
                raise InputError(f"{self._url}: {reason}")
        raise StageError(
            f"{self._url}: no answer ({reason}); what was finished is kept, and the same command"
            " goes on when the server is back"
            if tries > 1
            else f"{self._url}: no answer ({reason})"
        )

    def _send(self, method: str, path: str, body: Any) -> tuple[int, bytes]:
        connection = self._connection or self._connect()
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("VLLM_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        prefix = urlsplit(self._url).path
        data = None if body is None else json.dumps(body).encode()
        connection.request(method, prefix + path, data, headers)
        response = connection.getresponse()
        return response.status, response.read()

    def _connect(self) -> http.client.HTTPConnection:
        parts = urlsplit(self._url)
        secure = parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        connection = kind(str(parts.hostname), parts.port, timeout=_CONNECT_SECONDS)
        connection.connect()
        # A long response may take hours; that the server still lives is the kernel's to find out.
        connection.sock.settimeout(None)
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, seconds in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 20), ("TCP_KEEPCNT", 6)):
            if hasattr(socket, name):
                connection.sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)
        self._connection = connection
        return connection

    def stop(self) -> None:
        """Give up what another thread is waiting for here; vLLM drops a row nobody waits for."""
        self._stopped.set()
        connection = self._connection
        if connection is not None and connection.sock is not None:
            try:
                connection.sock.shutdown(socket.SHUT_RDWR)
            except OSError:  # is closed already
                return

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _serves(card: dict[str, Any], policy: str) -> bool:
    """Whether an entry of ``/v1/models`` is this policy: by its folder, or by its served name."""
    root = str(card.get("root") or "")
    if policy in (root, card.get("id")):
        return True
    return bool(root) and Path(policy).exists() and Path(root).resolve() == Path(policy).resolve()


def _vocabulary(base: str, trust_remote_code: bool) -> int:
    from transformers import AutoConfig

    config: Any = AutoConfig.from_pretrained(base, trust_remote_code=trust_remote_code)
    return int(config.get_text_config().vocab_size)


def _message(text: bytes) -> str:
    """The server's own words."""
    try:
        value = json.loads(text)
        found = value.get("error", value)
        message = found.get("message", found) if isinstance(found, dict) else found
    except ValueError:
        message = text.decode("utf-8", "replace")
    return " ".join(str(message).split())[:200]
