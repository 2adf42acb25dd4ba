"""The order of the visits makes every return a miss on the device."""

from __future__ import annotations

import json
from pathlib import Path

from kvoffload.demo import run
from kvoffload.demo.model import write_model


def test_sixty_or_more_requests() -> None:
    assert len(run.plan_visits()) >= 60


def test_a_document_is_evicted_before_it_returns() -> None:
    last: dict[int, int] = {}
    for at, (document, question) in enumerate(run.plan_visits()):
        if question != run.TURNS and document in last:
            between = {d for d, _ in run.plan_visits()[last[document] + 1 : at]} - {document}
            smallest = len(between) * run.DOCUMENT_TOKENS[0]
            assert smallest > 2 * run.DEVICE_BLOCKS * run.BLOCK_SIZE
        last[document] = at


def test_a_follow_up_comes_at_once() -> None:
    visits = run.plan_visits()
    follow_ups = [i for i, (_, question) in enumerate(visits) if question == run.TURNS]
    assert len(follow_ups) >= 10
    assert all(visits[i - 1][0] == visits[i][0] and visits[i - 1][1] != run.TURNS for i in follow_ups)


def test_every_prompt_fits() -> None:
    *asked, follow_up = [len(question.encode()) + run.ANSWER_TOKENS for question in run.QUESTIONS]
    assert len(asked) == run.TURNS
    assert run.DOCUMENT_TOKENS[1] + sum(asked) + run.TURNS * follow_up <= run.MAX_MODEL_LEN


def test_a_model_of_short_sequences_keeps_the_proportions(tmp_path: Path) -> None:
    write_model(tmp_path, seed=0)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1024}))
    act = run._config(tmp_path, builtin=True, text=None, seed=0)
    assert act.max_model_len == 1024
    lengths = [tokens for _, tokens in act.documents]
    assert all(run.DOCUMENT_TOKENS[0] // 3 <= n <= run.DOCUMENT_TOKENS[1] // 3 for n in lengths)
    room = act.device_blocks * act.block_size
    assert act.max_model_len < room < sum(lengths) / 3
