"""What runs inside vLLM's worker processes."""

from __future__ import annotations

from typing import Any


class WorkerExtension:
    """Methods that vLLM adds to its worker class, to be called by ``collective_rpc``."""

    model_runner: Any

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
