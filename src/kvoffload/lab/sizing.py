"""Sizing: how many prompt tokens each choice of RAM and disk would serve, how fast and at what price."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from kvoffload.abc import ConfigError
from kvoffload.cache.tenants import HOST
from kvoffload.config import HostContents, contents_of
from kvoffload.lab.capacity import slot_bytes
from kvoffload.lab.curves import Curve, LRUCurve, hit_curve
from kvoffload.lab.latency import DEFAULT_SPEEDS, Speeds, ttft_seconds
from kvoffload.lab.model import ModelShape
from kvoffload.lab.replay import (
    DISK,
    NO_CONTRACT,
    Contract,
    ReplayConfig,
    ReplayResult,
    part,
    replay_many,
    why_inclusive,
)
from kvoffload.lab.trace import Floats, Ints, Progress, Trace
from kvoffload.tiering.reads import PROMOTION_SHARE
from kvoffload.units import format_bytes

MAX_SETTINGS = 1000
MAX_MORE = 3
"""Replays after those of all settings: the best one without the contract, with more RAM, and with more disk."""
KNEE_SHARE = 0.9
"""The largest default RAM finds this share of what an unlimited cache finds."""
ALL_SHARE = 0.98
"""The largest default disk finds this share of what an unlimited cache finds."""
RAM_STEPS = 6
GOOD_SHARE = 0.9
"""Without a target, the cheapest setting is chosen that saves this share of the time that the fastest one saves."""


@dataclass(frozen=True, slots=True)
class Goal:
    """The least price, for a time to first token if one is given. Prices are in any currency; only their ratio matters.
    The defaults are typical prices of server parts in dollars."""

    target_p95_s: float | None = None
    ram_per_gib: float = 5.0
    disk_per_gib: float = 0.1


DEFAULT_GOAL = Goal()


@dataclass(frozen=True, slots=True)
class Choices:
    """What to evaluate: every combination of ``ram`` and ``disk``."""

    policy: str = "lru"
    """Of RAM and disk."""
    ram: Sequence[int] = ()
    """In bytes. By default powers of two, up to a cache that finds nearly everything."""
    disk: Sequence[int] = ()
    """In bytes; 0: none. By default powers of two; with only ``ram``, no disk."""
    device: int = 0
    """The engine's own cache on the device, in bytes; 0: counted as a part of RAM."""
    host_contents: HostContents | None = None
    """Exclusive: RAM does not repeat what the device holds. None stands for those of a server."""

    def caches(self, ram_bytes: int, disk_bytes: int) -> tuple[int, int]:
        """Returns the size of the cache that device and RAM are together, and that of the disk."""
        is_exclusive = self.host_contents is HostContents.EXCLUSIVE
        return ram_bytes + self.device if is_exclusive else max(ram_bytes, self.device), disk_bytes


DEFAULT_CHOICES = Choices()


@dataclass(frozen=True, slots=True)
class Setting:
    """What one choice of RAM and disk serves, in percent of all prompt tokens."""

    ram_bytes: int
    disk_bytes: int
    """0: no disk."""
    served_pct: float
    """Found on the device, in RAM or on disk, so not computed."""
    device_pct: float
    ram_pct: float
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p95_s: float
    price: float

    @property
    def disk_pct(self) -> float:
        return max(0.0, self.served_pct - self.ram_pct - self.device_pct)

    @property
    def parts(self) -> dict[str, float]:
        """What comes from the device, from RAM and from disk, in tenths of a percent that add up to ``served_pct``."""
        served = round(self.served_pct, 1)
        device = min(round(self.device_pct, 1), served)
        above = max(device, min(round(self.device_pct + self.ram_pct, 1), served))
        return {"device": device, "RAM": round(above - device, 1), "disk": round(served - above, 1)}

    def __str__(self) -> str:
        disk = f" + {format_bytes(self.disk_bytes)} disk" if self.disk_bytes else ""
        return f"{format_bytes(self.ram_bytes)} RAM{disk}"


class Comparison(NamedTuple):
    """Replays of one setting with a contract and without."""

    result: ReplayResult
    without: ReplayResult

    def to_dict(self) -> dict[str, Any]:
        """Returns what each tenant finds, and all about the replay without the contract, for JSON."""
        by_tenant = [dataclasses.asdict(tenant) for tenant in self.result.tenants]
        return {**({"by_tenant": by_tenant} if by_tenant else {}), "without_contract": self.without.to_dict()}


@dataclass(frozen=True, eq=False)
class Sizing:
    """The result of sizing. ``chosen`` is one of ``settings``, or None if none meets the target."""

    policy: str
    block_bytes: int
    """RAM or disk per block."""
    footprint_bytes: int
    """RAM for all distinct blocks."""
    ceiling: Setting
    """RAM for every block of the trace, so that nothing is ever evicted."""
    nothing: Setting
    """No RAM and no disk: everything is computed."""
    settings: tuple[Setting, ...]
    target_p95_s: float | None
    chosen: Setting | None
    more_ram: Setting
    """``best`` with twice the RAM."""
    more_disk: Setting | None
    """``best`` with twice the disk, if it has one."""
    warnings: tuple[str, ...]
    curve: Curve
    """Without a contract. Of ``policy``; of LRU if the settings were replayed with a contract."""
    lru_pct: Floats
    """Percent of prompt tokens that LRU serves, by capacity in blocks, from 0 to all distinct blocks."""
    comparison: Comparison | None
    """What the contract brings and costs in ``best``; None without a contract."""
    choices: Choices

    @property
    def best(self) -> Setting:
        """The chosen setting, or else the one with the lowest TTFT p95."""
        return self.chosen or _fastest(self.settings)

    @property
    def answer(self) -> str:
        """The result in sentences."""
        device = [f"The device's own cache has {format_bytes(self.choices.device)}."] if self.choices.device else []
        return " ".join((*device, *_verdict(self), *_marginal(self)))

    @property
    def places(self) -> list[str]:
        """Which of the ``parts`` of settings to show."""
        has_disk = any(setting.disk_bytes for setting in self.settings)
        return [*(["device"] if self.choices.device else []), "RAM", *(["disk"] if has_disk else [])]

    def table(self) -> list[list[str]]:
        """Returns the titles of the columns, and a row per setting."""
        titles = ["RAM", "disk", "served", *(f"from {place}" for place in self.places), "TTFT p50", "TTFT p95", "price"]
        return [
            titles,
            *(
                [
                    format_bytes(each.ram_bytes),
                    format_bytes(each.disk_bytes) if each.disk_bytes else "-",
                    f"{each.served_pct:.1f}%",
                    *(
                        f"{each.parts[place]:.1f}%" if place != "disk" or each.disk_bytes else "-"
                        for place in self.places
                    ),
                    milliseconds(each.ttft_p50_s),
                    milliseconds(each.ttft_p95_s),
                    f"{each.price:,.0f}",
                ]
                for each in self.settings
            ),
        ]

    def to_dict(self) -> dict[str, Any]:
        """Returns all but the curve of LRU, for JSON."""

        def plain(setting: Setting | None) -> dict[str, Any] | None:
            return None if setting is None else {**dataclasses.asdict(setting), "disk_pct": setting.disk_pct}

        return {
            "answer": self.answer,
            "policy": self.policy,
            "device_bytes": self.choices.device,
            "block_bytes": self.block_bytes,
            "footprint_bytes": self.footprint_bytes,
            "ceiling": plain(self.ceiling),
            "nothing": plain(self.nothing),
            "target_ttft_p95_s": self.target_p95_s,
            "chosen": plain(self.chosen),
            "more_ram": plain(self.more_ram),
            "more_disk": plain(self.more_disk),
            "settings": [plain(setting) for setting in self.settings],
            "curve": [
                {"capacity_blocks": blocks, "capacity_bytes": blocks * self.block_bytes, "hit_pct": hit}
                for blocks, hit in zip(self.curve.capacities, self.curve.hit_pct.tolist(), strict=True)
            ],
            **({} if self.comparison is None else {"curve_policy": self.curve.policy, **self.comparison.to_dict()}),
            "warnings": list(self.warnings),
        }


Pair: TypeAlias = tuple[int, int]
"""RAM and disk of one setting, in bytes."""


def size(
    trace: Trace,
    model: ModelShape,
    choices: Choices = DEFAULT_CHOICES,
    *,
    contract: Contract = NO_CONTRACT,
    speeds: Speeds = DEFAULT_SPEEDS,
    goal: Goal = DEFAULT_GOAL,
    processes: int | None = None,
    on_progress: Progress | None = None,
) -> Sizing:
    """Evaluates ``choices`` of RAM and disk for ``trace``.

    The disk gets a copy of all that is written to RAM, and both see every use, so each holds what it would hold alone:
    a request finds the longer of the two prefixes. Device and RAM that do not repeat each other count as one cache.
    Blocks from disk need room in RAM: a request gets at most
    ``PROMOTION_SHARE`` of RAM from disk. Requests are served one after the other.

    With a ``contract`` that counts in the trace, every setting is replayed instead, so the numbers are exact;
    ``nothing`` and ``ceiling`` are without it. Its shares are divided into blocks as RAM is, whatever its
    ``block_bytes``. Default sizes that have no room for them are left out. Raises ConfigError, also if sizes that are
    given have no room for the shares.
    """
    contents = contents_of(choices.host_contents, why_inclusive(choices.device, model))
    choices = dataclasses.replace(choices, host_contents=contents)
    block_bytes = slot_bytes(trace, model)
    for name, sizes in (("ram", choices.ram), ("disk", choices.disk), ("device", [choices.device])):
        for amount in sizes:
            if amount < block_bytes and not (name != "ram" and amount == 0):
                raise ConfigError(
                    name,
                    format_bytes(amount),
                    f"too small for one block of {format_bytes(block_bytes)} ({trace.block_tokens} "
                    f"tokens of {model.name})",
                    "give many times that",
                )
    contract = dataclasses.replace(contract, block_bytes=block_bytes)
    has_contract = contract.counts_in(trace)
    asked = max(1, int(trace.input_tokens.sum()))
    lru_pct = 100.0 * LRUCurve(trace).total_hit_tokens() / asked
    all_pairs = _pairs(choices, *_default_sizes(lru_pct, block_bytes))
    pairs = _with_room(all_pairs, choices, contract)
    footprint = trace.num_distinct * block_bytes
    tried = [(ram * r, disk * d) for ram, disk in pairs for r, d in ((1, 1), (2, 1), (1, 2))]
    amounts = {amount for pair in (*tried, (footprint, 0), (0, 0)) for amount in choices.caches(*pair)}
    amounts.add(choices.device)
    capacities = {min(amount // block_bytes, trace.num_distinct) for amount in amounts if amount}
    # LRU's curve takes no replays, and where nothing is evicted, all policies find the same.
    curve_policy = "lru" if has_contract else choices.policy
    curve = hit_curve(trace, curve_policy, sorted(capacities), processes=processes, on_progress=on_progress)
    sizer = _Sizer(trace, model, speeds, goal, choices, contract, curve)
    nothing, ceiling = map(sizer.setting, [(0, 0), (footprint, 0)])
    share = len(pairs) / (len(pairs) + MAX_MORE)
    if has_contract:
        sizer.replay([(pair, True) for pair in pairs], processes, part(on_progress, 0.0, share))
    settings = list(map(sizer.setting, pairs))
    chosen = _choose(settings, nothing, goal.target_p95_s)
    best = chosen or _fastest(settings)
    pair = (best.ram_bytes, best.disk_bytes)
    more = [(2 * best.ram_bytes, best.disk_bytes)]
    if best.disk_bytes:
        more.append((best.ram_bytes, 2 * best.disk_bytes))
    comparison = None
    if has_contract:
        asked_too = [(pair, False), *((each, True) for each in more)]
        sizer.replay(asked_too, processes, part(on_progress, share, 1.0))
        comparison = Comparison(sizer.results[pair, True], sizer.results[pair, False])
    more_ram, *more_disk = map(sizer.setting, more)
    return Sizing(
        policy=choices.policy,
        block_bytes=block_bytes,
        footprint_bytes=footprint,
        ceiling=ceiling,
        nothing=nothing,
        settings=tuple(settings),
        target_p95_s=goal.target_p95_s,
        chosen=chosen,
        more_ram=more_ram,
        more_disk=more_disk[0] if more_disk else None,
        warnings=tuple(_warnings(len(all_pairs) - len(pairs), footprint, max((0, *choices.ram, *choices.disk)))),
        curve=curve,
        lru_pct=lru_pct,
        comparison=comparison,
        choices=choices,
    )


def _default_sizes(lru_pct: Floats, block_bytes: int) -> tuple[list[int], list[int]]:
    """Returns default sizes of RAM and disk. RAM: powers of two up to the size for KNEE_SHARE. Disk: none, that size,
    and the size for ALL_SHARE."""

    def enough(share: float) -> int:
        blocks = max(1, int(np.searchsorted(lru_pct, share * lru_pct[-1])))
        return 1 << (blocks * block_bytes - 1).bit_length()

    knee, everything = enough(KNEE_SHARE), enough(ALL_SHARE)
    ram = [knee >> step for step in reversed(range(RAM_STEPS)) if knee >> step >= block_bytes]
    return ram, sorted({0, knee, everything})


def _pairs(choices: Choices, default_ram: Sequence[int], default_disk: Sequence[int]) -> list[Pair]:
    """Returns RAM and disk of every setting, ordered by size."""
    disks = sorted(set(choices.disk or ((0,) if choices.ram else default_disk)))
    rams = sorted(set(choices.ram or default_ram))
    if len(rams) * len(disks) > MAX_SETTINGS:
        raise ConfigError(
            fault=f"ram and disk: {len(rams) * len(disks):,} combinations, but at most {MAX_SETTINGS:,} are allowed",
            fix="give fewer sizes",
        )
    pairs = [(ram_bytes, disk_bytes) for ram_bytes in rams for disk_bytes in disks]
    useful = [pair for pair in pairs if pair[1] == 0 or pair[1] > pair[0]]
    return pairs if choices.ram or not useful else useful


def _with_room(pairs: Sequence[Pair], choices: Choices, contract: Contract) -> list[Pair]:
    """Returns the settings that have room for the shares of the tenants. Raises ConfigError if sizes were given that
    have none, or if no setting has."""
    if not contract.tenants:
        return list(pairs)
    block_bytes = contract.block_bytes
    least_ram, least_disk = (contract.least_blocks(tier) * block_bytes for tier in (HOST, DISK))
    for ram_bytes, disk_bytes in pairs:
        if choices.ram:
            contract.shares(HOST, ram_bytes // block_bytes)
        if choices.disk and disk_bytes:
            contract.shares(DISK, disk_bytes // block_bytes)
        if least_disk and not disk_bytes and (choices.disk or choices.ram):
            raise ConfigError(
                fault=f"disk=none: the shares of the tenants need {format_bytes(least_disk)} of disk",
                fix="give a disk, or remove these shares",
            )
    roomy = [pair for pair in pairs if pair[0] >= least_ram and pair[1] >= least_disk]
    if not roomy:
        ram, disk = (format_bytes(max(sizes)) for sizes in zip(*pairs, strict=True))
        needed = f"{format_bytes(least_ram)} of RAM"
        if least_disk:
            needed += f" and {format_bytes(least_disk)} of disk"
        raise ConfigError(
            fault=f"ram={ram}, disk={disk}: the largest sizes tried have no room for the shares of the "
            f"tenants, which need {needed}",
            fix="give larger sizes, or lower the shares",
        )
    return roomy


class _Found(NamedTuple):
    """The tokens that each request finds on the device, in RAM and on disk."""

    device: Ints
    ram: Ints
    disk: Ints
    total_on_device: int
    """With other policies than LRU, a larger cache may find less of a request than the device alone, which counts."""


@dataclass(frozen=True, slots=True)
class _Sizer:
    """Makes settings of what requests find: in a replay if there was one, else by the curve."""

    trace: Trace
    model: ModelShape
    speeds: Speeds
    goal: Goal
    choices: Choices
    contract: Contract
    curve: Curve
    results: dict[tuple[Pair, bool], ReplayResult] = field(default_factory=dict)
    """Replays by setting, and whether they have the contract."""

    def setting(self, pair: Pair) -> Setting:
        """Returns the setting with RAM and disk of these sizes."""
        ram_bytes, disk_bytes = pair
        replayed = self.results.get((pair, True))
        if replayed is None:
            found = self._on_curve(ram_bytes, disk_bytes)
        else:
            tokens = replayed.device_tokens, replayed.host_tokens, replayed.disk_tokens
            found = _Found(*tokens, replayed.device_hit_tokens)
        asked, (device, ram, disk, on_device) = self.trace.input_tokens, found
        in_memory = int((device + ram).sum())
        device_pct, ram_pct, served_pct = (
            100.0 * tokens / max(1, int(asked.sum()))
            for tokens in (on_device, in_memory - on_device, in_memory + int(disk.sum()))
        )
        seconds = ttft_seconds(self.model, self.speeds, asked, device, ram, disk)
        p50, p95 = np.percentile(seconds, (50, 95))
        return Setting(
            ram_bytes=ram_bytes,
            disk_bytes=disk_bytes,
            served_pct=served_pct,
            device_pct=device_pct,
            ram_pct=ram_pct,
            ttft_mean_s=float(seconds.mean()),
            ttft_p50_s=float(p50),
            ttft_p95_s=float(p95),
            price=(ram_bytes * self.goal.ram_per_gib + disk_bytes * self.goal.disk_per_gib) / (1 << 30),
        )

    def _on_curve(self, ram_bytes: int, disk_bytes: int) -> _Found:
        in_ram = self._at(self.choices.caches(ram_bytes, disk_bytes)[0])
        alone = self._at(self.choices.device)
        on_device = np.minimum(alone, in_ram)
        either = np.maximum(in_ram, self._at(disk_bytes))
        served = np.minimum(either, np.maximum(in_ram, self._limit(in_ram, ram_bytes)))
        return _Found(on_device, in_ram - on_device, served - in_ram, min(int(alone.sum()), int(in_ram.sum())))

    def _at(self, amount: int) -> Ints:
        """Returns the tokens that each request finds in a cache of ``amount`` bytes."""
        if amount == 0:
            return np.zeros(self.trace.num_requests, dtype=np.int64)
        blocks = min(amount // self.contract.block_bytes, self.trace.num_distinct)
        return self.curve.hit_tokens[self.curve.capacities.index(blocks)]

    def _limit(self, in_ram: Ints, ram_bytes: int) -> Ints:
        """Returns how many tokens each request can get if the disk holds everything: only as much of a chain as fits in
        RAM was stored, and blocks from disk may use only a share of RAM."""
        blocks = ram_bytes // self.contract.block_bytes
        promoted = max(1, int(blocks * PROMOTION_SHARE))
        most: Ints = np.minimum(in_ram + promoted * self.trace.block_tokens, blocks * self.trace.block_tokens)
        return most

    def replay(self, asked: Iterable[tuple[Pair, bool]], processes: int | None, on_progress: Progress | None) -> None:
        """Replays settings, with the contract or without, that were not replayed yet."""
        new = [each for each in dict.fromkeys(asked) if each not in self.results]
        configs = [self._config(*each) for each in new]
        results = replay_many(
            self.trace, configs, model=self.model, speeds=self.speeds, processes=processes, on_progress=on_progress
        )
        self.results.update(zip(new, results, strict=True))

    def _config(self, pair: Pair, has_contract: bool) -> ReplayConfig:
        host, device, disk = (amount // self.contract.block_bytes for amount in (pair[0], self.choices.device, pair[1]))
        contract = self.contract if has_contract else NO_CONTRACT
        return ReplayConfig(self.choices.policy, host, device, disk, None, self.choices.host_contents, contract)


def _choose(settings: Sequence[Setting], nothing: Setting, target_p95_s: float | None) -> Setting | None:
    """Returns the cheapest setting that meets the target or, without a target, that saves nearly as much time as the
    best."""
    if target_p95_s is not None:
        good = [setting for setting in settings if setting.ttft_p95_s <= target_p95_s]
    else:
        saved = GOOD_SHARE * max(nothing.ttft_mean_s - setting.ttft_mean_s for setting in settings)
        good = [setting for setting in settings if nothing.ttft_mean_s - setting.ttft_mean_s >= saved]
    return min(good, key=lambda setting: (setting.price, setting.ttft_mean_s), default=None)


def _fastest(settings: Sequence[Setting]) -> Setting:
    return min(settings, key=lambda setting: (setting.ttft_p95_s, setting.price))


def _warnings(left_out: int, footprint: int, largest: int) -> Iterator[str]:
    if left_out:
        have = "setting has" if left_out == 1 else "settings have"
        yield f"{left_out} default {have} no room for the shares of the tenants and were left out."
    if largest > footprint:
        yield (
            f"All blocks of this trace take {format_bytes(footprint)}, so {format_bytes(largest)} never fills up: the "
            "trace is too short to predict what that much would serve. Record a longer one."
        )


# Sentences.


_THE = {"device": "the device", "RAM": "RAM", "disk": "disk"}


def _verdict(sizing: Sizing) -> list[str]:
    best, target = sizing.best, sizing.target_p95_s
    served = f"{best.served_pct:.1f}% of prompt tokens"
    parts = [
        f"{best.parts[each]:.1f}% from {_THE[each]}" for each in sizing.places if best.disk_bytes or each != "disk"
    ]
    if len(parts) > 1:
        served += f" ({', '.join(parts)})"
    if target is None:
        return [f"{best} {'serve' if best.disk_bytes else 'serves'} {served}."]
    goal = f"a TTFT p95 of {milliseconds(target)}"
    reached = milliseconds(best.ttft_p95_s)
    if sizing.chosen is not None:
        return [f"{best} is the cheapest setting tried that meets {goal}: it reaches {reached} and serves {served}."]
    return [
        f"No setting tried meets {goal}.",
        f"{best} comes closest: it reaches {reached} and serves {served}.",
        f"A cache that never evicts would reach {milliseconds(sizing.ceiling.ttft_p95_s)}.",
    ]


def _marginal(sizing: Sizing) -> list[str]:
    best, ram, disk = sizing.best, sizing.more_ram, sizing.more_disk
    more = f"The next {format_bytes(best.ram_bytes)}"
    if disk is None:
        text = f"{more} of RAM would add {ram.served_pct - best.served_pct:z.1f} points."
    else:
        text = (
            f"{more} of RAM would serve {ram.ram_pct - best.ram_pct:z.1f} points more from RAM; the next "
            f"{format_bytes(best.disk_bytes)} of disk would add {disk.served_pct - best.served_pct:z.1f} points."
        )
    return [text, f"A cache that never evicts would serve {sizing.ceiling.served_pct:.1f}%."]


def milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:,.0f} ms" if seconds < 10 else f"{seconds:,.1f} s"


def footnote(speeds: Speeds, sizing: Sizing) -> str:
    """Returns the assumptions behind the numbers, in sentences."""
    nothing, rule = sizing.nothing, ""
    if sizing.target_p95_s is None and len(sizing.settings) > 1:
        rule = (
            f" * marks the cheapest setting that saves {100 * GOOD_SHARE:.0f}% of the time to first token that the "
            "fastest one saves."
        )
    device = " The device's own cache counts as a part of RAM; --device sets it apart."
    if sizing.choices.device:
        repeats = "does not repeat" if sizing.choices.host_contents is HostContents.EXCLUSIVE else "repeats"
        device = f" RAM {repeats} what the device holds."
    replayed = (
        "" if sizing.comparison is None else " Every setting was replayed with the tenants' shares and the hints."
    )
    return (
        f"Percentages are of prompt tokens, with the policy {sizing.policy} in RAM and on disk; the disk also has a "
        f"copy of everything in RAM.{device}{replayed}{rule} {speeds} Without a cache, p50 is "
        f"{milliseconds(nothing.ttft_p50_s)} and p95 {milliseconds(nothing.ttft_p95_s)}."
    )
