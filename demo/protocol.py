"""The messages between the demo and an act's engine process: a configuration as JSON, then results as JSON lines."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Source(StrEnum):
    """The source of most of a request's prompt tokens."""

    RECOMPUTE = "recompute"
    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


@dataclass(frozen=True, slots=True)
class ActConfig:
    """The configuration of one engine process, sent as a JSON object on its standard input.

    A document is (text, number of its tokens to use); each has a conversation, and documents that several users ask
    about are listed once per user. A visit is (document, turn). Its prompt consists of the document, earlier questions
    about it with their answers, and the new question.
    """

    model: str
    tokenizer: bool
    """Whether to use the model's own tokenizer and chat template; otherwise each byte is a token."""
    token_offset: int
    """Added to the value of a byte to get its token."""
    documents: list[tuple[str, int]]
    questions: list[list[str]]
    """By document and turn."""
    visits: list[tuple[int, int]]
    question_tokens: int
    """Every question is cut to this many tokens, if each byte is one."""
    answer_tokens: int
    max_model_len: int
    block_size: int
    device_blocks: int
    device_cache_gib: int
    """Size of the KV cache of a CPU engine."""
    seed: int
    connector: dict[str, Any] | None
    """Arguments of vLLM's KVTransferConfig, or None to run without kvoffload."""
    answers: list[list[int] | None]
    """Per visit the answer of an earlier act, which is used without asking; or None to ask."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Sent once, when the engine has started and warmed up."""

    vllm_version: str
    device: str
    start_s: float


@dataclass(frozen=True, slots=True)
class RequestResult:
    """Sent when a request has finished.

    ``logprobs[i]`` belongs to ``output_tokens[i]``; None if it is not finite, which corrupted bytes can cause.
    """

    index: int
    document: int
    follow_up: bool
    """Whether it was asked right after another question about the same document."""
    prompt_tokens: int
    device_tokens: int
    host_tokens: int
    disk_tokens: int
    source: Source
    reason: str | None
    """The reason of the first missing block, as in kvoffload's records; None without kvoffload."""
    ttft_ms: float
    total_ms: float
    output_tokens: list[int]
    logprobs: list[float | None]
    question: str = ""
    answer: str = ""
    """The output as text, if the model has a tokenizer."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "source", Source(self.source))


@dataclass(frozen=True, slots=True)
class ActSummary:
    """Sent last. ``metrics`` are kvoffload's counters over the act, without the warm-up."""

    wall_s: float
    metrics: dict[str, float] = field(default_factory=dict)
    direct_io: bool = False
    """Whether disk reads and writes bypassed the page cache."""


def classify(prompt_tokens: int, device_tokens: int, host_tokens: int, disk_tokens: int) -> Source:
    """Returns the tier that had most of a prompt's tokens, or RECOMPUTE if less than half of them were found."""
    found = {Source.DEVICE: device_tokens, Source.HOST: host_tokens, Source.DISK: disk_tokens}
    if 2 * sum(found.values()) < prompt_tokens:
        return Source.RECOMPUTE
    return max(found, key=found.__getitem__)
