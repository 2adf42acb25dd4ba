"""The vLLM worker that calls the connector, and its models: vLLM gives a connector no other access to them."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.worker_base import WorkerBase

from kvoffload.vllm.versions import callers


def calling_worker() -> WorkerBase:
    """Returns the vLLM worker among the callers of this function. Raises RuntimeError if there is none."""
    for frame in callers():
        if isinstance(worker := frame.f_locals.get("self"), WorkerBase):
            return worker
    raise RuntimeError("no vLLM worker is among the callers")


def models_of(worker: Any) -> list[torch.nn.Module]:
    """Returns the model of ``worker``, and its draft model if there is one."""
    draft = worker.get_draft_model() if hasattr(worker, "get_draft_model") else None
    return [worker.get_model(), *([] if draft is None else [draft])]
