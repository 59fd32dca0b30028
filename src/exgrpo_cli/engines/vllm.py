"""Generation with vLLM, in process: token ids in, token ids and sampled log-probabilities out.

vLLM runs its core in a child process, which is spawned, not forked: forking a process whose torch
or polars threads have started can hang. Scripts that open this engine therefore need the usual
``if __name__ == "__main__":`` guard.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from pydantic import ValidationError

from exgrpo_cli import interrupts
from exgrpo_cli.engines import Completion, Request, Sampling
from exgrpo_cli.engines.entropy import topk_entropy
from exgrpo_cli.engines.limits import check_lengths, longest_row, policy_end_ids
from exgrpo_cli.engines.output import explained, heard
from exgrpo_cli.errors import InputError, StageError, first_line
from exgrpo_cli.machine import descendants
from exgrpo_cli.models import adapter_base, check_adapter, check_policy, is_adapter, resolve_dtype
from exgrpo_cli.recipe import Recipe

# Ranks that vLLM has LoRA kernels for.
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
_CPU_CACHE_BYTES = 2 << 30
_CLOSE_SECONDS = 20.0


class VllmEngine:
    """A policy in vLLM (see :class:`exgrpo_cli.engines.Engine`).

    Log-probabilities are those of the sampled distribution. vLLM reports no entropies over the
    whole vocabulary; their mean can be estimated from the most probable tokens.
    """

    name = "vllm"

    def __init__(self, recipe: Recipe, policy: str) -> None:
        """Start vLLM with a policy; takes from half a minute to some minutes."""
        self._recipe = recipe
        self._llm: Any = None
        self._loads = 0
        self._start(policy)

    def _start(self, policy: str) -> None:
        check_policy(policy)
        if is_adapter(policy):
            check_adapter(policy, self._recipe.model)
        # Its warnings are many, and tell of what is meant so (no tokenizer, eager, float32).
        wanted = os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        import torch
        from vllm import LLM
        from vllm.platforms import current_platform

        settings, rollout = self._recipe.model, self._recipe.rollout
        on_cpu = current_platform.is_cpu()
        dtype = resolve_dtype(settings.dtype, torch.device("cpu" if on_cpu else "cuda"))
        base = adapter_base(policy) if is_adapter(policy) else policy
        options: dict[str, Any] = {}
        if on_cpu:
            options["enforce_eager"] = True  # compilation takes minutes and gains little there
            # A prompt that is split over two batches makes vLLM step a row's random generator back,
            # which generators on a CPU cannot; so prompts are never split there.
            options["enable_chunked_prefill"] = False
            if not os.environ.get("VLLM_CPU_KVCACHE_SPACE"):
                options["kv_cache_memory_bytes"] = _CPU_CACHE_BYTES
        # Sleep mode allocates by itself, which torch's expandable segments do not allow.
        expandable = "expandable_segments:True" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
        self._can_sleep = current_platform.is_sleep_mode_available() and not expandable
        if self._can_sleep:
            options["enable_sleep_mode"] = True
        self._asleep = False
        self._lora_rank = 0
        if self._recipe.lora.enabled or is_adapter(policy):
            self._lora_rank = _lora_rank(policy, self._recipe.lora.rank)
            options |= {
                "enable_lora": True,
                "max_lora_rank": self._lora_rank,
                "max_loras": 1,
                "max_cpu_loras": 1,
            }
        self._max_model_len = longest_row(self._recipe, base)
        if on_cpu:
            options["max_num_batched_tokens"] = max(self._max_model_len, 4096)
        self._end_ids = policy_end_ids(policy, settings)
        options |= {
            "model": base,
            "skip_tokenizer_init": True,
            "trust_remote_code": settings.trust_remote_code,
            "dtype": str(dtype).removeprefix("torch."),
            "seed": self._recipe.seed % 2**31,
            "max_model_len": self._max_model_len,
            "logprobs_mode": "processed_logprobs",
            "generation_config": "vllm",  # not the model's own top_k, penalties, ...
            "enable_prefix_caching": True,
            "gpu_memory_utilization": rollout.gpu_memory_utilization,
            "tensor_parallel_size": rollout.tensor_parallel,
            "use_tqdm_on_load": False,
            "disable_log_stats": True,
            "worker_extension_cls": "exgrpo_cli.engines.vllm_worker.WorkerExtension",
        }
        before = descendants()
        said: Callable[[], str] = str
        try:
            with heard(show=wanted != "ERROR") as said, interrupts.insisting():
                self._llm = LLM(**options)
        except ValueError as error:  # an architecture, a dtype or a length that vLLM refuses
            why = explained(_reason(error), "")
            raise InputError(f"{base}: vLLM cannot open this policy: {why}") from error
        except Exception as error:  # its processes have written why
            why = explained(_reason(error), said())
            raise StageError(f"{base}: vLLM did not start: {why}") from error
        self._processes = [process for process in descendants() if process not in before]
        cores = [process.pid for process in self._processes if process.ppid() == os.getpid()]
        self._llm.collective_rpc("end_with", args=(os.getpid(), cores))
        self._base, self._adapter = base, None
        if is_adapter(policy):
            self._use_adapter(policy)

    def load(self, policy: str) -> None:
        """Go over to another policy without starting again.

        Weights are read into the running model; an adapter is put on it. Only an adapter that the
        engine was not started for (none was expected, or a higher rank) starts it anew.
        """
        check_policy(policy)
        if is_adapter(policy):
            check_adapter(policy, self._recipe.model)
        if is_adapter(policy) and self._lora_rank < _lora_rank(policy, 1):
            self.close()
            self._start(policy)
            return
        base = adapter_base(policy) if is_adapter(policy) else policy
        if self._asleep:
            self._llm.wake_up(tags=["weights"])  # the cache later: reading weights takes memory too
        if base != self._base or not is_adapter(policy):
            self._llm.collective_rpc("reload_weights", kwargs={"weights_path": base})
            self._llm.collective_rpc("refresh_embeddings")
            self._base = base
        if self._asleep:
            self._llm.wake_up(tags=["kv_cache"])
            self._asleep = False
        self._llm.reset_prefix_cache()
        self._adapter = None
        if is_adapter(policy):
            self._use_adapter(policy)
        self._end_ids = policy_end_ids(policy, self._recipe.model)

    def _use_adapter(self, policy: str) -> None:
        from vllm.lora.request import LoRARequest

        self._loads += 1  # a new number each time: vLLM keeps what it has under an old one
        self._adapter = LoRARequest(f"policy-{self._loads}", self._loads, policy)

    @property
    def llm(self) -> Any:
        """The ``vllm.LLM`` itself."""
        return self._llm

    def parameters(self, request: Request, sampling: Sampling) -> Any:
        """A request's ``vllm.SamplingParams``."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            temperature=sampling.temperature,
            top_p=1.0,
            top_k=0,
            seed=request.seed,
            max_tokens=min(sampling.max_new_tokens, self._max_model_len - len(request.prompt_ids)),
            stop_token_ids=self._end_ids,
            logprobs=sampling.entropy_top_k,  # 0: the sampled token's alone
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
        """Yield every request's completion once, as they finish."""
        check_lengths(requests, self._max_model_len)
        if not requests:
            return
        parameters = [self.parameters(request, sampling) for request in requests]
        names = self._llm.enqueue(
            [{"prompt_token_ids": request.prompt_ids} for request in requests],
            parameters,
            lora_request=self._adapter,
            use_tqdm=False,
        )
        # vLLM adds a random ending to the number it gives each request, and reports the number.
        numbers = [name.partition("-")[0] for name in names]
        waiting = dict(zip(numbers, requests, strict=True))
        engine = self._llm.llm_engine
        vocabulary = self._llm.model_config.get_vocab_size()
        try:
            while waiting and engine.has_unfinished_requests():
                for output in engine.step():
                    if output.finished and output.request_id in waiting:
                        request = waiting.pop(output.request_id)
                        yield _completion(request, output.outputs[0], sampling, vocabulary)
            if waiting:
                raise StageError(f"vLLM dropped {len(waiting)} of {len(requests)} requests")
        finally:
            if waiting:  # the caller stopped listening, or was interrupted
                with contextlib.suppress(Exception):
                    engine.abort_request(list(waiting))

    def sleep(self) -> bool:
        """Free the GPU for training; ``load`` wakes vLLM, which keeps its processes and graphs.

        Weights are dropped, since the next policy brings its own; with adapters, whose base stays,
        they wait in the CPU's memory. On a CPU vLLM has no sleep mode.
        """
        if self._can_sleep and not self._asleep:
            self._llm.sleep(level=1 if self._lora_rank else 2)
            self._asleep = True
        return self._can_sleep

    def close(self) -> None:
        """End vLLM's processes."""
        if self._llm is None:
            return
        llm, self._llm = self._llm, None
        llm.llm_engine.engine_core.shutdown(timeout=_CLOSE_SECONDS)
        _, alive = psutil.wait_procs(self._processes, timeout=_CLOSE_SECONDS)
        for process in alive:  # workers outlive a core that had to be killed
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(alive, timeout=_CLOSE_SECONDS)


def _completion(request: Request, output: Any, sampling: Sampling, vocabulary: int) -> Completion:
    """vLLM's output of one row.

    Its flat log-probabilities hold 1 + k entries a token: the sampled token's, then the k most
    probable ones'.
    """
    token_ids, flat = list(output.token_ids), output.logprobs
    width = 1 + sampling.entropy_top_k
    if flat.token_ids[::width] != token_ids or len(flat.logprobs) != width * len(token_ids):
        raise RuntimeError(f"vLLM gave log-probabilities of other tokens in row {request.index}")
    estimate = None
    if sampling.entropy_top_k:
        known = np.array(flat.logprobs).reshape(len(token_ids), width)[:, 1:]
        estimate = float(topk_entropy(known, vocabulary).mean())
    return Completion(
        index=request.index,
        token_ids=token_ids,
        logprobs=flat.logprobs[::width],
        entropies=None,
        finish_reason=str(output.finish_reason),
        topk_entropy=estimate,
    )


def _lora_rank(policy: str, rank: int) -> int:
    """The smallest rank vLLM has that holds both ``rank`` and the adapter's own."""
    if is_adapter(policy):
        file = Path(policy) / "adapter_config.json"
        rank = max(rank, int(json.loads(file.read_text(encoding="utf-8")).get("r") or 1))
    for known in _RANKS:
        if known >= rank:
            return known
    raise InputError(f"{policy}: LoRA rank {rank} is above {_RANKS[-1]}, the most that vLLM takes")


def _reason(error: Exception) -> str:
    if isinstance(error, ValidationError):
        return str(error.errors()[0]["msg"]).splitlines()[0]
    return first_line(error)
