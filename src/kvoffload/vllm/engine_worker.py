"""The vLLM worker that calls the connector, and its models: vLLM gives a connector no other access to them."""

from __future__ import annotations

import sys
from typing import Any

import torch
from vllm.v1.worker.worker_base import WorkerBase


def calling_worker() -> WorkerBase | None:
    """Returns the vLLM worker among the callers of this function, or None."""
    frame = sys._getframe()
    while True:
        worker = frame.f_locals.get("self")
        if isinstance(worker, WorkerBase):
            return worker
        if frame.f_back is None:
            return None
        frame = frame.f_back


def models_of(worker: Any) -> list[torch.nn.Module]:
    """Returns the model of ``worker``, and its draft model if there is one."""
    draft = worker.get_draft_model() if hasattr(worker, "get_draft_model") else None
    return [worker.get_model(), *([] if draft is None else [draft])]
