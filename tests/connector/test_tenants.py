"""Requests of several tenants: none finds, waits for, or learns of another's blocks, in any tier."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvoffload import KVGroup, OffloadConfig, build_scheduler
from kvoffload.abc import ConfigError, LookupState, OffloadKey, ReqContext
from kvoffload.cache.admission import TenantAdmission
from kvoffload.cache.keys import namespace
from kvoffload.cache.tenants import OTHER, TenantConfig, Tenants
from kvoffload.connector.engine import EngineSpec
from kvoffload.connector.options import MAX_TENANT_CHARS, RequestOptions
from tests.connector.rig import FakeRequest, Rig, prompt
from tests.connector.server_rig import DEADLINE_S, FINGERPRINT, SLOT, TierServer
from tests.connector.test_tiered_scheduler import TieredRig

MIB = 1 << 20


def rig(**options: Any) -> Rig:
    return Rig(options={"tenants": Tenants(b"", [TenantConfig("a"), TenantConfig("b")]), **options})


def of(tenant: object, tokens: list[int], name: str = "r") -> FakeRequest:
    return FakeRequest(name, tokens, {"kvoffload": {"tenant": tenant}})


def salted(salt: object, tokens: list[int], name: str = "r") -> FakeRequest:
    request = FakeRequest(name, tokens)
    request.cache_salt = salt  # type: ignore[attr-defined]
    return request


def serve(by: Rig, request: FakeRequest) -> int | None:
    """Returns what the request is offered, after which it computes everything and ends."""
    found, _ = by.look_up(request)
    by.report(*by.start(request).stores)
    by.half.request_finished(request)
    by.step()
    return found


def test_a_tenant_finds_its_own_blocks_only() -> None:
    used = rig()
    assert serve(used, of("a", prompt(9))) == 0
    assert serve(used, of("b", prompt(9))) == 0
    assert serve(used, FakeRequest("r", prompt(9))) == 0
    assert serve(used, of("unknown", prompt(9))) == 0
    for request in (of("a", prompt(9)), of("b", prompt(9)), FakeRequest("r", prompt(9)), of("unknown", prompt(9))):
        assert serve(used, request) == 8
    counts = used.half.metrics.snapshot()
    assert counts["tenant_asked_tokens:a"] == counts["tenant_asked_tokens:b"] == 18
    assert counts[f"tenant_asked_tokens:{OTHER}"] == 36
    assert {name for name in counts if name.startswith("tenant")} == {
        f"tenant_{what}:{tenant}{tier}"
        for what, tier in (("asked_tokens", ""), ("hit_tokens", ""), ("moved_bytes", ",host"))
        for tenant in ("a", "b", OTHER)
    }, "labels are the configured names and no others"


def test_without_shares_a_tenant_is_isolated_too_and_not_counted() -> None:
    used = Rig()
    assert serve(used, of("a", prompt(9))) == 0
    assert serve(used, FakeRequest("r", prompt(9))) == 0
    assert serve(used, of("a", prompt(9))) == 8
    assert not [name for name in used.half.metrics.snapshot() if name.startswith("tenant")]


def test_the_salt_of_a_request_without_the_option_may_name_a_tenant() -> None:
    used = rig()
    assert serve(used, salted("a", prompt(9))) == 0
    assert serve(used, salted("b", prompt(9))) == 0
    assert serve(used, of("a", prompt(9))) == 8, "here hashes do not depend on the salt, so this is the same text"
    for salt in (None, 7, "", "?", "\ud800", b"a"):
        serve(used, salted(salt, prompt(9)))
    assert used.half.metrics.snapshot()[f"tenant_asked_tokens:{OTHER}"] == 54
    assert not used.half.off


@pytest.mark.parametrize(
    "tenant", ["", 7, float("nan"), True, ["a"], {"a": 1}, b"a", "a\n", "\ud800", "x" * (MAX_TENANT_CHARS + 1)]
)
def test_nonsense_is_left_out_with_a_debug_line(tenant: object, caplog: pytest.LogCaptureFixture) -> None:
    used = rig()
    with caplog.at_level(logging.DEBUG, "kvoffload.connector.options"):
        assert serve(used, of(tenant, prompt(9))) == 0
    assert [record.message for record in caplog.records if record.message.endswith(": tenant")]
    assert used.half.metrics.snapshot()["ignored_options:tenant"] == 1
    assert serve(used, FakeRequest("r", prompt(9))) == 8
    assert not used.half.off


def test_names_may_be_in_any_language() -> None:
    assert RequestOptions.from_params({"kvoffload": {"tenant": "Zoë 北京"}}).tenant == "Zoë 北京"
    used = rig()
    serve(used, of("Zoë 北京", prompt(9)))
    assert serve(used, of("Zoë 北京", prompt(9))) == 8


def test_no_tenant_waits_for_anothers_load() -> None:
    used = rig(share_loads=True)
    serve(used, of("a", prompt(9)))
    used.load(of("a", prompt(9), "loading"))
    assert used.look_up(of("a", prompt(9), "same")) == (None, False), "its blocks are being loaded for another request"
    assert used.look_up(of("b", prompt(9), "other")) == (0, False)


def asked_below(stored: list[int]) -> list[tuple[str, list[OffloadKey]]]:
    """Returns every call that reaches the lower tier while tenant b asks for ``prompt(9)``, after tenant a has stored
    ``stored``, partly in host memory and partly below."""
    used = TieredRig(tenants=Tenants(b"", [TenantConfig("a"), TenantConfig("b")]))
    for end in range(4, len(stored) + 1, 4):
        serve(used, of("a", stored[:end], f"writer{end}"))
        used.manager.executor.drain()
        used.step()
    used.manager.host.drop(used.manager.host.table.key_of[used.manager.host.table.slots()[:1]].tolist())
    calls: list[tuple[str, list[OffloadKey]]] = []
    tier = used.manager.tier
    for name in ("contains", "read"):
        method = getattr(tier, name)

        def call(keys: list[OffloadKey], *rest: Any, name: str = name, method: Any = method) -> Any:
            calls.append((name, [*keys, *(rest[0] if name == "contains" and rest else ())]))
            return method(keys, *rest)

        setattr(tier, name, call)
    assert used.look_up(of("b", prompt(9))) == (0, False), "not a moment of waiting"
    return calls


def test_what_is_asked_of_lower_tiers_does_not_depend_on_other_tenants() -> None:
    """The same text, another one, and nothing: every call of a tier on b's behalf is the same."""
    same, other, nothing = asked_below(prompt(9)), asked_below(prompt(9, start=50)), asked_below([])
    assert same == other == nothing
    assert same, "the tier was asked"


# With real tiers.


class Server(TierServer):
    """With a disk and a shared folder."""

    def __init__(self, path: Path, tenants: Any, **options: Any) -> None:
        tiers = [{"kind": kind, "dir": str(path / kind), "bytes": 64 * MIB} for kind in ("disk", "shared_dir")]
        super().__init__(tiers, tenants, **options)

    def keys(self, tenant: str, first: int, n: int) -> list[OffloadKey]:
        return self.keys_of(tenant, (i.to_bytes(32, "big") for i in range(first, first + n)))

    def store(self, keys: list[OffloadKey]) -> None:
        self.serve(keys)
        self.settle()
        self.manager.check_integrity()

    def held(self, keys: list[OffloadKey]) -> list[int]:
        """Returns how many of ``keys`` host and tiers hold."""
        states = [self.manager.host.table.states(keys), *(tier.tier.contains(keys) for tier in self.manager.tiers)]
        return [int(np.count_nonzero(each == LookupState.HIT)) for each in states]


@pytest.fixture
def servers() -> Iterator[list[Server]]:
    made: list[Server] = []
    yield made
    for each in made:
        each.half.shutdown()


def test_no_tier_answers_for_another_tenant(servers: list[Server], tmp_path: Path) -> None:
    servers.append(server := Server(tmp_path, {"a": {}, "b": {}}))
    server.store(server.keys("a", 0, 6))
    assert server.held(server.keys("a", 0, 6)) == [6, 6, 6]
    for tenant in ("b", "unknown"):
        assert server.held(server.keys(tenant, 0, 6)) == [0, 0, 0]
        assert server.manager.lookup(server.keys(tenant, 0, 6), ReqContext("b")) == 0


def test_tiers_keep_to_quotas_and_restart_with_smaller_ones(servers: list[Server], tmp_path: Path) -> None:
    def tenants(disk: int) -> dict[str, Any]:
        return {"a": {"quota": {"host": 16 * SLOT, "disk": disk, "shared_dir": 6 * SLOT}}, "b": {}}

    servers.append(server := Server(tmp_path, tenants(8 * SLOT)))
    block_bytes = server.manager.tiers[0].tier.block_bytes
    assert block_bytes == SLOT
    for first in range(0, 30, 3):
        server.store(server.keys("a", first, 3))
        server.store(server.keys("b", first, 3))
    uses = server.half.metrics.snapshot()
    assert uses["tenant_blocks:a,host"] == 16
    assert [uses[f"tenant_blocks:{name},disk"] for name in ("a", "b", OTHER)] == [8, 30, 0]
    assert uses["tenant_blocks:a,shared_dir"] == 6
    servers.pop().half.shutdown()
    servers.append(server := Server(tmp_path, tenants(3 * SLOT)))
    assert server.held(server.keys("a", 0, 30))[1] == 3
    assert server.held(server.keys("a", 27, 3))[1] == 3, "the most recent ones"
    assert server.held(server.keys("b", 0, 30))[1] == 30
    server.manager.check_integrity()
    server.store(server.keys("a", 40, 3))
    assert server.held(server.keys("a", 40, 3))[1] == 3


def test_a_chain_longer_than_the_quota_loses_its_tail(servers: list[Server], tmp_path: Path) -> None:
    """Nothing is written behind what the tenant may have, so that nothing is written twice."""
    servers.append(server := Server(tmp_path, {"a": {"quota": {"disk": 5 * SLOT}}}))
    server.store(server.keys("a", 0, 12))
    assert server.held(server.keys("a", 0, 5)) == [5, 5, 5]
    assert server.held(server.keys("a", 0, 12))[1] == 5


def test_a_request_waits_for_no_more_than_its_tenant_can_have(servers: list[Server], tmp_path: Path) -> None:
    """As much as of a pool of the size of its quota."""
    servers.append(server := Server(tmp_path, {"a": {}}))
    server.store(server.keys("a", 0, 12))
    servers.pop().half.shutdown()
    options = {"load_only_if_faster": False, "load_deadline_ms": 1000 * DEADLINE_S}
    servers.append(server := Server(tmp_path, {"a": {"quota": {"host": 4 * SLOT}}}, **options))
    context, deadline = ReqContext("r"), time.monotonic() + DEADLINE_S / 2
    while (found := server.manager.lookup(server.keys("a", 0, 12), context)) is None:
        server.manager.poll()
        server.manager.poll(0.01)
        assert time.monotonic() < deadline, "it waits for blocks that it cannot have"
    assert found == 2
    assert server.held(server.keys("a", 0, 12))[0] == 2
    server.manager.check_integrity()


def test_a_request_stores_no_more_than_its_tenant_can_have() -> None:
    config = OffloadConfig.from_mapping({"host_bytes": MIB, "tenants": {"a": {"quota": {"host": 3 * SLOT}}}})
    half = build_scheduler(config, EngineSpec([KVGroup(4)]), [np.zeros((8, SLOT), dtype=np.uint8)], FINGERPRINT)
    for request, most in ((of("a", prompt(40), "a"), 12), (FakeRequest("r", prompt(40)), 32)):
        half.get_num_new_matched_tokens(request, 0)
        assert half.requests[request.request_id].blocks.max_stored_tokens == most


def test_each_tenant_has_a_reuse_filter_of_its_own() -> None:
    config = OffloadConfig.from_mapping({"host_bytes": MIB, "store_threshold": 2, "tenants": {"a": {}, "b": {}}})
    half = build_scheduler(config, EngineSpec([KVGroup(4)]), [np.zeros((8, SLOT), dtype=np.uint8)], FINGERPRINT)
    names, manager = Tenants(namespace(FINGERPRINT), config.tenants), half.manager
    mine = [names.of("a").namespace + bytes([i]) for i in range(3)]
    theirs = [names.of("b").namespace + bytes([i]) for i in range(3)]
    admission = manager.admission  # type: ignore[attr-defined]
    assert isinstance(admission, TenantAdmission)
    first, second = admission._admissions[:2]
    admission.count(mine, None)
    admission.count([*theirs, *mine], None)
    assert admission.accepts([theirs[0], mine[0], theirs[1]]) == [False, True, False]
    assert first.accepts(mine) == [True] * 3
    assert second.accepts(mine) == [False] * 3
    admission.refuse(theirs)
    assert admission.explain(theirs[0]).reason == "not_admitted"
    assert admission.explain(mine[0]).reason == "never_stored"
    admission.check_integrity()


def test_a_share_that_holds_no_block_is_an_error_at_start(tmp_path: Path) -> None:
    for kind, tier in itertools.product(("guaranteed", "quota"), ("host", "disk")):
        with pytest.raises(ConfigError, match=rf"tenants\.a\.{kind}\.{tier}=100 .*: has no room for one block; write "):
            Server(tmp_path, {"a": {kind: {tier: 100}}})
