"""Scenarios of ``driver.py`` in which kvoffload is one of several connectors of an engine."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from random import Random
from typing import Any

from demo.engine import Engine, connector, sampling
from demo.process import serve
from kvoffload.connector.scheduler import OffloadingConnectorScheduler

VOCABULARY = 500
SLOTS = 3


def conversations(number: int, turns: int, tokens: int = 40) -> list[list[list[int]]]:
    """Returns conversations, each a list of prompts that begin with the one before."""
    random = Random(1)
    made = []
    for _ in range(number):
        prompt: list[int] = []
        made.append([prompt := [*prompt, *random.choices(range(VOCABULARY), k=tokens)] for _ in range(turns)])
    return made


def multi(connectors: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the configuration of vLLM's MultiConnector with ``connectors``, each the arguments of ``connector``."""
    entries = [connector(**each) for each in connectors]
    return connector({"connectors": entries}, "MultiConnector", None)


def beside(config: dict[str, Any]) -> dict[str, Any]:
    """Answers the prompts of ``conversations`` with ``connectors``, once per entry of ``rounds``, which may say what is
    done before: "break" the loads of BrokenExampleConnector from then on and drop what kvoffload has, or "forget" all
    files in a folder. Then the device's cache is reset. Counts by connector the loads that vLLM has chosen it for."""
    engine = Engine(str(model_of(config["model"])), multi(config["connectors"]), config["engine"])
    outer, loads = engine.scheduler.connector, dict[str, int]()
    for each in outer.sub_connectors:
        _count(each, loads)
    half = half_of(outer)
    made = conversations(config["conversations"], config["turns"])
    answers, loads_of = [], []
    for what in config["rounds"]:
        engine.settle()
        if "break" in what:
            # The worker has a connector of its own.
            type(outer.sub_connectors[0]).is_broken = True
            half.manager.reset()
        if "forget" in what:
            for folder in Path(what["forget"]).iterdir():
                shutil.rmtree(folder)
        if what:
            assert engine.llm.reset_prefix_cache()
        before = dict(loads)
        answers.append(engine.converse(made, SLOTS, config["max_tokens"])["answers"])
        loads_of.append({name: loads[name] - before[name] for name in loads})
    half.manager.check_integrity()
    engine.close()
    return {
        "outputs": [[[answer["tokens"], answer["logprobs"]] for answer in each] for each in answers],
        "loads": loads_of,
        "off": half.off,
    }


def model_of(path: str) -> Path:
    """Returns the directory of a model, which is written if it does not exist."""
    from driver import write_model

    model = Path(path + "-llama")
    if not model.exists():
        write_model(model)
    return model


def half_of(outer: Any) -> OffloadingConnectorScheduler:
    """Returns the scheduler half of kvoffload's connector among several."""
    halves = [getattr(each, "connector_scheduler", None) for each in outer.sub_connectors]
    (half,) = [each for each in halves if isinstance(each, OffloadingConnectorScheduler)]
    return half


def _count(connector: Any, loads: dict[str, int]) -> None:
    name, update = type(connector).__name__, connector.update_state_after_alloc
    loads[name] = 0

    def counting(request: Any, blocks: Any, num_external_tokens: int) -> None:
        loads[name] += num_external_tokens > 0
        update(request, blocks, num_external_tokens)

    connector.update_state_after_alloc = counting


LOWEST_PRIORITY = 19


def calm_nixl() -> None:
    """Gives way to everything else in the threads of NIXL: one of them never sleeps, and several engines share few
    cores."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker

    make, tasks = base_worker.NixlWrapper, Path("/proc/self/task")

    def calm(*args: Any) -> Any:
        before = set(os.listdir(tasks))
        agent = make(*args)
        for task in set(os.listdir(tasks)) - before:
            os.setpriority(os.PRIO_PROCESS, int(task), LOWEST_PRIORITY)
        return agent

    base_worker.NixlWrapper = calm


class Half(Engine):
    """A prefill or a decode engine: ``python companion_scenarios.py FD``, see ``demo.process.serve``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        calm_nixl()
        super().__init__(*args, **kwargs)
        self.loads: dict[str, int] = {}
        for each in getattr(self.scheduler.connector, "sub_connectors", ()):
            _count(each, self.loads)

    def answer_all(
        self, prompts: list[list[int]], max_tokens: int, params: list[dict[str, Any] | None]
    ) -> list[dict[str, Any]]:
        """Answers ``prompts`` at once, each with its ``kv_transfer_params``."""
        engine, answers, names = self.llm.llm_engine, dict[str, dict[str, Any]](), list[str]()
        for prompt, sent in zip(prompts, params, strict=True):
            self.num_asked += 1
            names.append(f"request{self.num_asked}")
            extra = None if sent is None else {"kv_transfer_params": sent}
            engine.add_request(names[-1], {"prompt_token_ids": prompt}, sampling(max_tokens, extra_args=extra))
        while len(answers) < len(names):
            for output in engine.step():
                if output.finished:
                    index = names.index(output.request_id)
                    answer = self.answer(prompts[index], output, 0, 0)
                    answers[output.request_id] = answer | {"params": output.kv_transfer_params}
        return [answers[name] for name in names]

    def forget(self) -> bool:
        """Empties the cache of the device, so that only connectors have blocks. Returns whether it could."""
        return bool(self.llm.reset_prefix_cache())

    def state(self) -> dict[str, Any]:
        """Returns the loads by connector, how many tokens kvoffload has found, and whether it is off."""
        half = half_of(self.scheduler.connector)
        half.manager.check_integrity()
        return {
            "off": half.off,
            "loads": self.loads,
            "host_tokens": sum(record.host_tokens for record in half.records),
        }


if __name__ == "__main__":
    serve(Half)
