"""What the parent tells an act's engine process, and what comes back: one JSON object, then JSON lines."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Source(StrEnum):
    """Where the larger part of a request's prompt came from."""

    RECOMPUTE = "recompute"
    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


@dataclass(frozen=True, slots=True)
class ActConfig:
    """Everything one engine process needs; sent as a JSON object on its standard input.

    A document is (text, tokens to keep of it). A visit is (document, question): the prompt is
    the document, the questions asked of it so far with their answers, and the new question.
    """

    model: str
    tokenizer: bool
    """Encode with the model's own tokenizer; else a token is a byte."""
    token_offset: int
    """Added to a byte's value to make its token."""
    documents: list[tuple[str, int]]
    questions: list[str]
    visits: list[tuple[int, int]]
    question_tokens: int
    """A question's text is cut to so many."""
    answer_tokens: int
    max_model_len: int
    block_size: int
    device_blocks: int
    device_cache_gib: int
    """What a CPU engine is told to set aside for its cache."""
    seed: int
    connector: dict[str, Any] | None
    """Arguments of vLLM's KVTransferConfig, or None for vLLM alone."""
    answers: list[list[int] | None]
    """For each visit None, and it is asked; or the answer an earlier act gave, which is taken as given."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Sent once, when the engine is up and warm."""

    vllm_version: str
    device: str
    start_s: float


@dataclass(frozen=True, slots=True)
class RequestResult:
    """Sent when a request has finished.

    ``logprobs[i]`` is the one of ``output_tokens[i]``; None where it is not finite, as corrupted bytes can
    make it.
    """

    index: int
    document: int
    follow_up: bool
    """Asked right after another question about the same document."""
    prompt_tokens: int
    device_tokens: int
    host_tokens: int
    disk_tokens: int
    source: Source
    reason: str | None
    """Why the first missing block missed, in kvoffload's words; None without kvoffload."""
    ttft_ms: float
    total_ms: float
    output_tokens: list[int]
    logprobs: list[float | None]
    pool_used: int
    """Blocks of the host pool in use."""
    pool_blocks: int
    """Blocks of the host pool; 0 without kvoffload."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "source", Source(self.source))


@dataclass(frozen=True, slots=True)
class ActSummary:
    """Sent last. ``metrics`` are kvoffload's own counters over the act, warm-up left out."""

    wall_s: float
    metrics: dict[str, float] = field(default_factory=dict)
    direct_io: bool = False
    """Whether the disk was read and written past the page cache."""


def classify(prompt_tokens: int, device_tokens: int, host_tokens: int, disk_tokens: int) -> Source:
    """The source of a prompt of which so many tokens were found; a minority found counts as none."""
    found = {Source.DEVICE: device_tokens, Source.HOST: host_tokens, Source.DISK: disk_tokens}
    if 2 * sum(found.values()) < prompt_tokens:
        return Source.RECOMPUTE
    return max(found, key=found.__getitem__)
