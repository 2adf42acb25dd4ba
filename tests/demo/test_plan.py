"""The plan of the acts: returning documents miss on the device, prompts fit, the disk outlives its act."""

from __future__ import annotations

from pathlib import Path

import pytest

from demo import run
from demo.act import ActResult
from demo.model import CONFIG, write_model
from demo.process import DemoError


@pytest.mark.parametrize("sizes", [run.USUAL, run.CHATS], ids=["random", "chats"])
def test_a_document_is_evicted_before_it_returns(sizes: run.Sizes) -> None:
    """Whoever asks about it."""
    last: dict[int, int] = {}
    for at, (conversation, turn) in enumerate(run.plan_visits(sizes)):
        document = conversation % sizes.documents
        if turn != sizes.turns and document in last:
            between = {c % sizes.documents for c, _ in run.plan_visits(sizes)[last[document] + 1 : at]} - {document}
            assert len(between) * sizes.document_blocks[0] > sizes.device_blocks
        last[document] = at


def test_after_the_restart_each_document_is_asked_once(baseline: ActResult) -> None:
    answers = run.known_answers(baseline.requests)
    asked = [request for request, answer in zip(baseline.requests, answers, strict=True) if answer is None]
    assert sorted(request.document for request in asked) == list(range(run.USUAL.documents))
    for request, answer in zip(baseline.requests, answers, strict=True):
        later = [r for r in baseline.requests[request.index + 1 :] if r.document == request.document]
        assert (answer is None) == (not later)
        assert answer in (None, request.output_tokens)


def test_the_disk_outlives_the_act(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    plans = run.act_plans(2 << 30, tmp_path, trace)
    options = [(plan.connector or {}).get("kv_connector_extra_config", {}) for plan in plans]
    assert [plan.is_restart for plan in plans] == [False, False, True]
    assert options[2] == {"host_bytes": "2GiB", "disk_dir": str(tmp_path), "disk_bytes": "2GiB"}
    assert options[1] == options[2] | {"record_trace": str(trace)}, "only the second act is recorded"


def test_a_full_disk_is_reported_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(DemoError, match="choose a directory on another disk"), run.disk_directory(tmp_path, 1 << 60):
        pass
    with run.disk_directory(tmp_path, 1) as directory:
        (directory / "slab").write_bytes(b"x")
        assert directory.parent == tmp_path
    assert not directory.exists()


def test_every_prompt_fits() -> None:
    for max_model_len in (1024, 2048, run.USUAL.max_model_len):
        longest = run.document_blocks(run.USUAL, max_model_len)[1] * run.BLOCK_SIZE
        assert longest + 2 * run.USUAL.turns * (run.QUESTION_TOKENS + run.ANSWER_TOKENS) <= max_model_len
    for sizes in (run.USUAL, run.CHATS):
        assert run.document_blocks(sizes, sizes.max_model_len) == sizes.document_blocks


def test_users_of_a_document_ask_other_questions_about_the_same_text(tmp_path: Path) -> None:
    write_model(tmp_path, 0, CONFIG | {"num_hidden_layers": 1})
    (tmp_path / "tokenizer.json").touch()
    documents = run.load(tmp_path, False, None, 0, run.CHATS)
    act = run.make_config(tmp_path, False, documents, 0, run.CHATS, run.plan_visits(run.CHATS))
    assert act.tokenizer
    assert len(documents) == run.CHATS.documents
    assert act.documents[: len(documents)] == act.documents[len(documents) :]
    assert len({tuple(questions) for questions in act.questions}) == len(act.questions) == run.CHATS.conversations
    assert {len(questions) for questions in act.questions} == {run.CHATS.turns + 1}
