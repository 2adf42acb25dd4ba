"""The tier on S3 servers: each fault ends in misses, the tier comes back without a restart, and no secret is logged."""

from __future__ import annotations

import importlib.util
import itertools
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvoffload.abc import ByteArray, Tier, TierError
from kvoffload.abc.tier import HIT, MISS
from kvoffload.testing.tier_conformance import SharedTierConformance
from kvoffload.tiers.object_store import client
from kvoffload.tiers.object_store.bucket import Found, NewObject, Piece, Times
from kvoffload.tiers.object_store.config import ObjectStoreConfig
from kvoffload.tiers.object_store.contents import make_note, mark
from kvoffload.tiers.object_store.errors import BucketProblem, classify, explain
from kvoffload.tiers.object_store.obstore_bucket import ObstoreBucket, open_bucket
from kvoffload.tiers.remote.client import Outcome, StoreError
from kvoffload.tiers.remote.link import LOOKUP_DEADLINE_S, TRANSFER_DEADLINE_S
from kvoffload.tiers.remote.record import ValueFormat
from tests.clock import RealClock
from tests.tiers.made import closed_later
from tests.tiers.object_store.rig import (
    BUCKET,
    CREDENTIALS,
    KEY_ID,
    PATIENT,
    SECRET,
    FakeS3,
    Moto,
    Server,
    Stored,
    chain,
    needs_moto,
    needs_obstore,
    patched,
)
from tests.tiers.remote.hostile import Hostile
from tests.tiers.remote.memory_store import SteppedProcess
from tests.tiers.remote.rig import FINGERPRINT, tier_here

pytestmark = needs_obstore

VALUES = ValueFormat(FINGERPRINT)
KEYS = chain(20)


@pytest.fixture
def fake() -> FakeS3:
    return FakeS3()


@pytest.fixture
def server(fake: FakeS3) -> Server:
    return Server(fake.endpoint)


def bucket(endpoint: str, times: Times = PATIENT, clock: RealClock | None = None, **settings: str) -> ObstoreBucket:
    settings = {"url": "s3://kv-bucket/folder", "endpoint": endpoint, "prefix": "kv", **settings}
    with patched(CREDENTIALS):
        return closed_later(open_bucket(settings, times, clock or time.monotonic))


# On moto.


@needs_moto
def test_servers_share_blocks_on_moto(moto: Moto) -> None:
    one, other, stranger = Server(moto.endpoint), Server(moto.endpoint), Server(moto.endpoint, "6f" * 32)
    assert one.states(KEYS) == [MISS] * 20
    before = moto.do("count")
    assert all(result.ok and result.nbytes for result in one.write(KEYS).values())
    assert moto.do("count") == before + 1, "small blocks do not share an object"
    assert other.states(KEYS) == [HIT] * 20
    assert other.reads_all(KEYS)
    assert other.write(KEYS) == {}
    assert stranger.states(KEYS) == [MISS] * 20
    stranger.works_again(KEYS)
    # Blocks of which the store has changed bytes, then those of other keys.
    for fault in ("corrupt", "exchange"):
        moto.do(fault)
        errors = [each.error for each in other.read(KEYS).values()]
        assert 1 <= errors.count(TierError.CORRUPT) <= 3, "a damaged object is one failure"
        assert set(errors) == {TierError.CORRUPT, TierError.GONE}
        other.works_again(KEYS)
        stranger.works_again(KEYS)
    moto.do("clear")
    assert {each.error for each in other.read(KEYS).values()} == {TierError.GONE}
    other.works_again(KEYS)
    moto.do("fill")
    assert {each.error for each in other.write(chain(4, seed=1)).values()} == {TierError.NO_SPACE}
    moto.do("drain")
    other.works_again(chain(4, seed=1))


VALUE_BYTES = 4096
"""What the client takes for the size of values, so that several share an object."""


class WaitingProcess(SteppedProcess):
    """Spends no CPU time on waiting."""

    def wait(self, timeout_s: float) -> None:
        if not self.requests:
            time.sleep(timeout_s)
        super().wait(timeout_s)


@needs_moto
class TestOnMoto(SharedTierConformance):
    _numbers = itertools.count()

    @pytest.fixture(autouse=True)
    def _bucket(self, moto: Moto) -> None:
        self.bucket = bucket(moto.endpoint, url="s3://kv-bucket")

    def make_tier(self, pools: Sequence[ByteArray], num_blocks: int) -> Tier:
        self.prefix = f"kv{next(self._numbers)}"
        return self.on(pools)

    def on(self, pools: Sequence[ByteArray]) -> Tier:
        made = client.ObjectStoreClient(self.bucket, VALUE_BYTES, [0])
        return tier_here(made, pools, ValueFormat(FINGERPRINT, self.prefix), "object_store", WaitingProcess)

    def reopen(self, tier: Tier, pools: Sequence[ByteArray], num_blocks: int) -> Tier:
        return self.on(pools)

    def another(self, tier: Tier, pools: Sequence[ByteArray]) -> Tier:
        return self.on(pools)

    # Each request takes moto milliseconds.
    @pytest.mark.parametrize("seed", range(2))
    def test_any_calls_in_any_order(self, seed: int) -> None:
        super().test_any_calls_in_any_order(seed)


# On a server that misbehaves.


def spoil(change: Callable[[Stored], Stored]) -> Callable[[FakeS3], None]:
    def apply(fake: FakeS3) -> None:
        for name, each in fake.blocks().items():
            fake.objects[name] = change(each)

    return apply


def lie(each: Stored) -> Stored:
    """The note lists the values in another order."""
    marks = [mark(VALUES.name(key)) for key in KEYS]
    return Stored(each.body, make_note([marks[0], *marks[2:], marks[1]]))


SPOILS: dict[str, tuple[Callable[[FakeS3], None], set[TierError]]] = {
    "expired": (lambda fake: fake.objects.clear(), {TierError.GONE}),
    "garbage": (spoil(lambda each: Stored(np.random.default_rng(0).bytes(len(each.body)), each.note)),
                {TierError.CORRUPT, TierError.GONE}),
    "truncated": (spoil(lambda each: Stored(each.body[:-1], each.note)), {TierError.CORRUPT, TierError.GONE}),
    "a note that lies": (spoil(lie), {TierError.GONE}),
    "no note": (spoil(lambda each: Stored(each.body)), {TierError.GONE}),
}  # fmt: skip


def test_objects_that_others_have_changed_are_never_loaded_and_written_again(fake: FakeS3, server: Server) -> None:
    reader = Server(fake.endpoint)
    for what, (change, errors) in SPOILS.items():
        server.works_again(KEYS)
        reader.works_again(KEYS)
        change(fake)
        results = server.read(KEYS)
        assert {each.error for each in results.values()} == errors, what
        server.works_again(KEYS)
        # It looks the changed objects up first.
        late = Server(fake.endpoint)
        change(fake)
        late.states(KEYS)
        assert not any(each.ok for each in late.read(KEYS[1:]).values()), what
        late.works_again(KEYS)
        late.close()
        reader.works_again(KEYS)


def test_what_a_store_once_could_not_do_is_tried_again(fake: FakeS3, server: Server) -> None:
    """A proxy in between was replaced, and the bucket copied without metadata."""
    (test,) = fake.tests.values()
    test.note = ""
    assert bucket(fake.endpoint, prefix="kvoffload").has_notes
    assert test is not next(iter(fake.tests.values())), "the object with the note was put again"
    clock = RealClock()
    made = bucket(fake.endpoint, clock=clock)
    item = NewObject("conditional", "", [np.zeros(9, dtype=np.uint8)])
    fake.is_conditional = False
    assert made.put([item]) + made.put([item]) == [Outcome.OK] * 2
    fake.is_conditional = True
    assert made.put([item]) == [Outcome.OK], "asked too soon"
    clock.shift += PATIENT.relearn_s
    assert made.put([item]) == [Outcome.HELD]


def test_a_store_that_loses_metadata_gets_an_object_per_block(fake: FakeS3, caplog: pytest.LogCaptureFixture) -> None:
    fake.keeps_notes = False
    server = Server(fake.endpoint)
    keys = chain(20)
    server.works_again(keys)
    assert len(fake.blocks()) == 20
    assert sum("does not return the metadata" in each.message for each in caplog.records) == 1
    server.close()
    # The control: the same store if it keeps metadata. The first client that connects leaves the object that shows it.
    fake.keeps_notes = True
    fake.tests.clear()
    fake.objects.clear()
    server = Server(fake.endpoint)
    server.works_again(keys)
    assert len(fake.blocks()) == 1


def test_a_store_that_drips_or_never_answers_ends_below_the_deadlines(fake: FakeS3) -> None:
    opened = bucket(fake.endpoint, replace(PATIENT, retry_within_s=0.5, transfer_s=0.8, transfer_budget_s=0.5))
    data = [np.zeros(1 << 20, dtype=np.uint8)]
    names = [str(i) for i in range(40)]
    for name in names:
        fake.objects["folder/" + name] = Stored(bytes(1 << 20))
    fake.drip_s = 0.2
    with pytest.raises(StoreError, match="s3://kv-bucket/folder: the store did not answer in time"):
        opened.get([Piece(name, 0, data) for name in names])
    # Of 40 requests, only those began that could in half a second.
    assert fake.count("GET") < 40
    with pytest.raises(StoreError, match="did not answer in time"):
        opened.head(names)


def test_all_deadlines_end_before_those_of_the_link() -> None:
    times = Times()
    lookups = times.more_within_s + times.small_budget_s + times.small_s
    transfers = times.transfer_budget_s + times.transfer_s
    assert lookups < LOOKUP_DEADLINE_S
    # A write looks first.
    assert lookups + transfers < TRANSFER_DEADLINE_S
    # No request is repeated after it has timed out.
    assert min(times.small_s, times.connect_s) > times.retry_within_s


# Errors.

FORBIDDEN = (
    f"<Error><Code>SignatureDoesNotMatch</Code><AWSAccessKeyId>{KEY_ID}</AWSAccessKeyId>"
    f"<StringToSign>{SECRET}</StringToSign></Error>"
)


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (403, FORBIDDEN, "does not accept the credentials.*403 SignatureDoesNotMatch"),
        (403, "<Error><Code>AccessDenied</Code></Error>", "access is refused; .*s3:ListBucket.*403 AccessDenied"),
        (400, f"<Error><Code>ExpiredToken</Code><Token>{SECRET}</Token></Error>", "have expired"),
        (404, "<Error><Code>NoSuchBucket</Code></Error>", "there is no such bucket"),
        (301, "<Error><Code>PermanentRedirect</Code></Error>", "set region"),
        (503, "<Error><Code>SlowDown</Code></Error>", "asks for fewer requests"),
        (500, SECRET, r"the request failed \(500\)"),
    ],
)
def test_a_store_that_refuses_at_start_is_explained_without_secrets(
    fake: FakeS3, status: int, body: str, message: str
) -> None:
    fake.answers["GET"] = status, body
    with pytest.raises(StoreError, match=f"s3://kv-bucket/folder: .*{message}") as raised:
        bucket(fake.endpoint)
    assert raised.value.__cause__ is None
    for secret in (SECRET, KEY_ID):
        assert secret not in str(raised.value)


def test_a_store_that_refuses_is_asked_again_at_once(fake: FakeS3) -> None:
    """Only one that does not answer in time is left alone for a while."""
    opened = bucket(fake.endpoint, replace(PATIENT, quiet_s=600.0))
    fake.objects["folder/a"] = Stored(bytes(9))
    piece = Piece("a", 0, [np.zeros(9, dtype=np.uint8)])
    fake.answers["GET"] = 403, FORBIDDEN
    with pytest.raises(StoreError, match="does not accept the credentials"):
        opened.get([piece])
    del fake.answers["GET"]
    assert isinstance(opened.get([piece])[0], Found)


def test_credentials_come_from_the_environment_or_a_profile(
    fake: FakeS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket(fake.endpoint).close()
    assert fake.signers == {KEY_ID}
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    settings = {"url": "s3://kv-bucket/folder", "endpoint": fake.endpoint, "prefix": "kv"}
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(StoreError, match="s3://kv-bucket/folder: no credentials were found; set AWS_ACCESS_KEY_ID"):
        open_bucket(settings)
    path = tmp_path / "shared"
    path.write_text("[llm]\naws_access_key_id = OFPROFILE\naws_secret_access_key = PLANTED\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(path))
    monkeypatch.setenv("AWS_PROFILE", "other")
    pytest.importorskip("boto3")
    with pytest.raises(StoreError, match=r"the profile of AWS_PROFILE has no credentials .*run aws configure"):
        open_bucket(settings)
    monkeypatch.setenv("AWS_PROFILE", "llm")
    open_bucket(settings).close()
    assert fake.signers == {KEY_ID, "OFPROFILE"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(StoreError, match="profiles need boto3; run pip install boto3"):
        open_bucket(settings)


@pytest.mark.parametrize(
    ("endpoint", "said"),
    [
        ("http://127.0.0.1:9", r"cannot be reached at http://127\.0\.0\.1:9 \(connection refused\)"),
        ("http://nosuch.invalid:9", r"at http://nosuch\.invalid:9 \(its name is not known\)"),
        ("", "does not speak TLS: write http:// if that is intended"),
    ],
)
def test_an_endpoint_that_cannot_be_used(fake: FakeS3, endpoint: str, said: str) -> None:
    with pytest.raises(StoreError, match=f"s3://kv-bucket/folder: .*{said}"):
        bucket(endpoint or fake.endpoint.replace("http:", "https:"))


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_redirects_to_another_host_are_not_followed(host: str) -> None:
    """They would take the session token there. The same host may send requests to another path."""
    asked = []

    def other(connection: socket.socket) -> None:
        asked.append(connection.recv(1 << 16))
        connection.sendall(b"HTTP/1.1 403 No\r\nContent-Length: 0\r\n\r\n")

    def redirect(connection: socket.socket) -> None:
        while connection.recv(1 << 16):
            location = f"Location: http://{host}:{thief.port}/x\r\n"
            connection.sendall(f"HTTP/1.1 307 There\r\nContent-Length: 0\r\n{location}\r\n".encode())

    thief, store = Hostile(other), Hostile(redirect)
    with patched({"AWS_SESSION_TOKEN": SECRET}), pytest.raises(StoreError) as caught:
        bucket(f"http://127.0.0.1:{store.port}")
    if host == "localhost":
        assert "another host, and redirects are not followed" in str(caught.value)
        assert not asked
    else:
        assert SECRET.encode() in asked[0]


def test_planted_secrets_do_not_reach_the_log(fake: FakeS3, server: Server, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    for method in ("GET", "HEAD", "PUT", "DELETE"):
        fake.answers[method] = 403, FORBIDDEN
    starting = Server(fake.endpoint, has_process=True)
    deadline = time.monotonic() + 30
    while "SignatureDoesNotMatch" not in caplog.text:
        assert time.monotonic() < deadline, "the log does not say why it does not start"
        starting.poll()
    starting.close()
    server.states(KEYS)
    server.write(KEYS)
    assert "lookup failed (StoreError: s3://kv-bucket/folder: access is refused" in caplog.text
    for secret in (SECRET, KEY_ID):
        assert secret not in caplog.text


def test_words_for_errors_that_no_server_here_can_make() -> None:
    signed = f"Error performing GET https://store/x?X-Amz-Signature={SECRET} in 1s - HTTP error, kind: Timeout"
    assert classify(Exception(signed)) is BucketProblem.TIMEOUT
    assert SECRET not in explain(Exception(signed), "s3://b")
    assert classify(Exception("http://169.254.169.254/latest/api/token")) is BucketProblem.NO_CREDENTIALS
    # A cloud without a role for this machine answers that request with an error.
    refused = (
        "Error performing PUT http://169.254.169.254/latest/api/token - Server returned status code: 403 Forbidden"
    )
    assert classify(Exception(refused)) is BucketProblem.NO_CREDENTIALS
    assert classify(Exception(refused.replace("169.254.169.254", "store"))) is BucketProblem.REFUSED
    assert classify(Exception("status code: 507 Insufficient Storage")) is BucketProblem.FULL


def test_a_late_answer_to_a_put_keeps_no_read_back(fake: FakeS3) -> None:
    """It does keep further puts back, for as long as they would wait."""
    released = threading.Event()
    store = fake.write
    times = replace(PATIENT, transfer_s=1.0, retry_within_s=0.1, quiet_s=600.0)
    config = ObjectStoreConfig(url=f"s3://{BUCKET}/folder", endpoint=fake.endpoint)
    with patched(CREDENTIALS):
        made = client.connect(config.settings(), times)
    value = [[np.ones(4096, dtype=np.uint8)]]
    assert made.put(["kv/a"], value) == [Outcome.OK]
    fake.write = lambda request: (released.wait(30.0), store(request))  # type: ignore[method-assign, assignment]
    for _ in range(2):
        with pytest.raises(StoreError, match="did not answer in time"):
            made.put(["kv/b"], value)
    assert made.exists(["kv/a", "kv/b"]) == [Outcome.OK, Outcome.MISSING]
    assert made.get(["kv/a"], value) == [Outcome.OK]
    released.set()
