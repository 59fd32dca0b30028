"""What runs inside vLLM's worker processes."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from typing import Any

import psutil


class WorkerExtension:
    """Methods that vLLM adds to its worker class, to be called by ``collective_rpc``."""

    model_runner: Any

    def end_with(self, parent: int, cores: list[int]) -> None:
        """End the engine, with the processes ``cores`` that it has started, once the process that
        opened it is gone, however that ended."""

        opener = psutil.Process(parent)

        def watch() -> None:
            with contextlib.suppress(psutil.NoSuchProcess):
                while opener.is_running() and opener.status() != psutil.STATUS_ZOMBIE:
                    time.sleep(0.5)
            for core in cores:
                with contextlib.suppress(OSError):
                    os.kill(core, signal.SIGKILL)
            os._exit(1)

        threading.Thread(target=watch, daemon=True).start()

    def refresh_embeddings(self) -> None:
        """Derive anew what vLLM keeps beside its embeddings, after weights were reloaded in place.

        On a CPU, vLLM multiplies by a packed copy of the output head. Reloading weights renews that
        copy for layers of their own, but not for a head that is tied to the embeddings, which
        would go on with the head of the policy before.
        """
        from vllm.model_executor.layers.vocab_parallel_embedding import (
            UnquantizedEmbeddingMethod,
            VocabParallelEmbedding,
        )

        for module in self.model_runner.get_model().modules():
            if isinstance(module, VocabParallelEmbedding) and isinstance(
                module.quant_method, UnquantizedEmbeddingMethod
            ):
                module.quant_method.process_weights_after_loading(module)
