"""Every wrong setting, and the error that names it, its value, the fault and the fix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from kvoffload import ConfigError, Tier, TierConfig, TierContext
from kvoffload.cache.policies.lru import LRUPolicy
from kvoffload.cache.tenants import MAX_TENANTS
from kvoffload.tiers.config import BUILTIN

HERE = __name__
NAN, INFINITY = float("nan"), float("inf")
SECRET = "S3CRET"
"""No message may have it."""
DISK = '{"kind": "disk", "dir": "/var/cache/kvoffload", "bytes": "500GiB"}'
NEEDED = {
    "disk": {"dir": "/cache", "bytes": "1GiB"},
    "shared_dir": {"dir": "/cache", "bytes": "1GiB"},
    "redis": {"url": "redis://10.0.0.5:6379"},
    "object_store": {"url": "s3://bucket/folder"},
    "mooncake": {"master": "10.0.0.5:50051"},
}


class NoPolicy:
    pass


class PolicyThatFails(LRUPolicy):
    def __init__(self, capacity: int) -> None:
        raise RuntimeError("boom")


@dataclass(frozen=True)
class OwnConfig(TierConfig):
    """A stranger's tier."""

    kind = "own"

    blocks: int
    label: str = "none"

    def __post_init__(self) -> None:
        if self.label == "bad":
            raise ConfigError("label", self.label, "must not be bad", "write another")
        if self.label == "worse":
            raise ConfigError("label is worse: write another")
        if self.blocks < 1:
            raise ValueError("too few")

    def open(self, context: TierContext) -> Tier:
        raise NotImplementedError


@dataclass(frozen=True)
class WithoutOpen(TierConfig):
    kind = "none"


@dataclass(frozen=True)
class WithoutName(TierConfig):
    def open(self, context: TierContext) -> Tier:
        raise NotImplementedError


class Wrong(NamedTuple):
    """``options`` beside ``host_bytes``; the error begins with ``said``, and its fix has ``fix``."""

    options: dict[str, Any]
    said: str
    fix: str = ""


def each(name: str, values: list[Any], fault: str, fix: str = "") -> list[Wrong]:
    """Returns a row per value of one option."""
    return [Wrong({name: value}, f"{name}={cut(value)}{fault}", fix) for value in values]


def cut(value: object) -> str:
    """Returns ``value`` as errors show it."""
    text = repr(value)
    return text if len(text) <= 200 else text[:197] + "..."


def entry(kind: str, said: str, fix: str = "", **keys: Any) -> Wrong:
    """Returns the row of a tier with these keys beside those that it needs, unless one is given as ``...``."""
    given = {"kind": kind, **NEEDED.get(kind, {}), **keys}
    given = {key: value for key, value in given.items() if value is not ...}
    return Wrong({"tiers": [given]}, f"tiers[0]{said}", fix)


def own(said: str, fix: str = "", **keys: Any) -> Wrong:
    return entry(f"{HERE}:OwnConfig", said, fix, **{"blocks": 3, **keys})


def tenants(value: Any, said: str, fix: str = "") -> Wrong:
    return Wrong({"host_bytes": "64MiB", "tenants": value}, f"tenants{said}", fix)


AMOUNTS = ["", "yes", "GiB", "-1", "-8GiB", "8 XiB", "8GiBs", "1e9", "1,5GiB", "0x10", "1.GiB", "8GiB 4MiB", 0, -1, 0.0]
AMOUNTS += [-0.5, 0.5, "0", "0GiB", "0.5", "0.0001k", NAN, INFINITY, -INFINITY, True, False, b"8GiB", ["8GiB"], {}]
NUMBERS = ("block_size_factor", "block_size", "store_threshold", "engines_per_node")
DEADLINES = ("load_deadline_ms", "lookup_deadline_ms")
NO_POLICY = 'write one of arc, auto, lru, or a class of your own as "package.module:Class"'
A_KIND = f'write one of {", ".join(BUILTIN)}, or your own TierConfig as "package.module:Class"'

OPTIONS = [
    Wrong({"host_bytes": None}, "host_bytes is not set", 'such as host_bytes="'),
    Wrong({"host_bytes": 10**400}, "host_bytes="),
    Wrong({"host_bytes": "900TiB"}, "host_bytes=989560464998400 (900 TiB): this machine has ", "set host_bytes to"),
    *each("host_bytes", AMOUNTS, ": ", 'host_bytes="8GiB"'),
    *each("host_bytes", [64, "64"], ": 64 bytes are of no use", 'did you mean host_bytes="64GiB"?'),
    *each("host_bytes", [(1 << 20) - 1, "64KiB"], ": "),
    Wrong({"disk_dir": "/cache", "disk_bytes": 64}, "disk_bytes=64: ", 'did you mean disk_bytes="64GiB"?'),
    *each("policy", ["mru", "LRU", "sieve", ""], ": no policy has this name", NO_POLICY),
    *each("policy", ["no.such.module:Policy", "kvoffload.cache.policies.lru:No"], ": cannot be imported", NO_POLICY),
    *each("policy", ["json:JSONDecoder", "json:dumps", f"{HERE}:NoPolicy"], ": is not a subclass of", NO_POLICY),
    *each("policy", [5, True, ["lru"], NAN], ": ", 'write a name such as policy="lru"'),
    *each("policy", ["kvoffload:CachePolicy"], ": does not define clear, evict, insert, remove of"),
    *(row for name in NUMBERS for row in each(name, [0, -4, 1.5, 2.0, True, NAN], ": must be a whole number, ")),
    *(row for name in NUMBERS for row in each(name, [(1 << 30) + 1, 10**400], ": must be a whole number, 1073741824")),
    Wrong({"store_threshold": 1}, "store_threshold=1: must be a whole number, 2 or more; or leave it out"),
    Wrong({"block_size": 32, "block_size_factor": 2}, "block_size=32: block_size_factor sets", "remove one of the two"),
    *(
        row
        for name in DEADLINES
        for row in each(
            name,
            [-1, -0.001, NAN, INFINITY, 1e300, 10**400, 3_600_001, "yes", "1000", [1], True],
            ": must be a number of milliseconds, from 0 to 3600000 (an hour), without quotes",
        )
    ),
    *each("load_only_if_faster", [0, 1, "false", "no", 1.0, []], ": must be true or false, without quotes"),
    *each("host_contents", ["Exclusive", "", 1, True, ["exclusive"]], ": must be ", "leave it out"),
    Wrong(
        {"host_contents": "exclusive", "block_size_factor": 2},
        "host_contents='exclusive': a block has several device blocks (block_size, block_size_factor)",
        "leave it out",
    ),
    *each("disk_dir", ["", "kv", "./kv", "~no-such-user-here/kv", "$HOME/kv"], ": not an absolute path", "/var/cache"),
    *each("disk_dir", [5, True, b"/kv", ["/kv"], "/k\0v"], ": not a path", 'disk_dir="/var/cache/kvoffload"'),
    Wrong({"disk_dir": "/tmp/not/there"}, "disk_dir='/tmp/not/there': disk_bytes is not set", 'such as disk_bytes="'),
    Wrong({"disk_bytes": "1GiB"}, "disk_bytes=1073741824 (1 GiB): disk_dir is not set", 'such as disk_dir="/var/cache'),
    *each("record_trace", ["t.jsonl"], ": not an absolute path", 'record_trace="/var/log/kvoffload/trace.jsonl"'),
    *each("record_trace", [5], ": not a path"),
    *each("model_fingerprint", ["", 5, True, b"v7", ["v7"]], ": must be a string that changes with the weights"),
    *(
        Wrong({name: 17}, f"{name}=", f"did you mean {meant}?")
        for name, meant in {
            "host_byte": "host_bytes",
            "polcy": "policy",
            "load_deadline": "load_deadline_ms",
            "max_local_cpu_size": "host_bytes",
            "cpu_bytes_to_use": "host_bytes",
        }.items()
    ),
    Wrong({"zzz": SECRET}, "zzz=***: unknown option", "remove it. Known: "),
]

TIERS = [
    *(
        Wrong({"tiers": value}, f"tiers={said}: must be a list of tiers, the fastest first, such as tiers=[{DISK}]")
        for value, said in (("disk", "***"), ({"kind": "disk"}, "{***}"), (5, "5"), (True, "True"))
    ),
    *(
        Wrong({"tiers": [value]}, f"tiers[0]={said}: must be a mapping with the key kind, such as {DISK}")
        for value, said in (("disk", "***"), (None, "None"), ([], "[]"))
    ),
    Wrong(
        {"tiers": [{"dir": "/c"}]}, "tiers[0]={***}: no kind", f'such as "kind": "disk". Known: {", ".join(BUILTIN)}'
    ),
    Wrong({"tiers": [{"kind": "x" * 1000}]}, f"tiers[0].kind='{'x' * 196}...: no kind of tier"),
    Wrong({"tiers": [{"kind": ["disk"]}]}, "tiers[0].kind=['disk']: not a kind of tier", A_KIND),
    entry("Disk", ".kind='Disk': no kind of tier has this name", f"did you mean disk? Otherwise {A_KIND}"),
    entry("no_such:X", ".kind='no_such:X': cannot be imported (No module named 'no_such')", A_KIND),
    entry("json:dumps", ".kind='json:dumps': is not a subclass of kvoffload.TierConfig", A_KIND),
    entry(f"{HERE}:WithoutOpen", f".kind='{HERE}:WithoutOpen': does not define open of", "add what is missing"),
    entry(f"{HERE}:WithoutName", f".kind='{HERE}:WithoutName': has no name for logs", 'such as kind = "withoutname"'),
    entry("disk", ".bytes is not set, and a tier of kind disk needs it", f"write all of {DISK}", bytes=...),
    entry(
        "disk", ".byte=***: unknown key of a tier of kind disk", "did you mean bytes? Known: kind, dir, bytes", byte=1
    ),
    *(
        entry(
            "disk", f".{name}=***: unknown key of a tier of kind disk", "remove it. Known: kind, dir", **{name: SECRET}
        )
        for name in ("password", "aws_secret", "zzz")
    ),
    entry("disk", ".bytes='x': not an amount of memory", 'such as bytes="8GiB"', bytes="x"),
    entry("disk", ".dir='cache': not an absolute path", "Variables are not expanded", dir="cache"),
    entry("disk", ".store_threshold=1: must be a whole number, 2 or more", "or leave it out", store_threshold=1),
    entry("disk", ".lookup_deadline_ms='2': must be a number of milliseconds, from", lookup_deadline_ms="2"),
    *(
        entry("shared_dir", f".gone_after_s={value!r}: must be a number of seconds, 60 or more", gone_after_s=value)
        for value in (5, "1h", NAN, True)
    ),
    entry("shared_dir", ".dir='relative': not an absolute path", dir="relative"),
    own(".label=***: must not be bad", "write another", label="bad"),
    own(": label is worse: write another", label="worse"),
    own(".kind='own': OwnConfig does not accept these values (ValueError)", "correct blocks", blocks=0),
    *(
        Wrong(
            {"tiers": [first, {"kind": "disk", "dir": other, "bytes": 1 << 30}], **more}, said, "a directory of its own"
        )
        for other, shown in (("/cache", "/cache"), ("/cache/", "/cache"), ("/cache/below", "/cache/below"), ("/", "/"))
        for first, more, said in (
            (
                {"kind": "disk", **NEEDED["disk"]},
                {},
                f"tiers[1].dir={shown!r}: tiers[0].dir='/cache' has the same directory or one inside the other",
            ),
            (
                {"kind": f"{HERE}:OwnConfig", "blocks": 3},
                {"disk_dir": "/cache", "disk_bytes": "1GiB"},
                f"tiers[1].dir={shown!r}: disk_dir='/cache' has the same directory or one inside the other",
            ),
        )
    ),
    Wrong(
        {"tiers": [{"kind": f"{HERE}:OwnConfig", "blocks": 3}] * 2},
        f"tiers[1].kind='{HERE}:OwnConfig': the same tier as tiers[0].kind='{HERE}:OwnConfig'",
        "remove one of them",
    ),
]

STORES = [
    *(entry(kind, ".prefix='/kv'", "letters, digits", prefix="/kv") for kind in ("redis", "object_store", "mooncake")),
    entry("redis", ".hmac_key_file=''", "write the path of a file made with: openssl rand -hex 32", hmac_key_file=""),
    entry("redis", ".hmac_key_file='/dev/null': has 0 bytes, fewer than 32", hmac_key_file="/dev/null"),
    entry("redis", ".url is not set", "redis://10.0.0.5:6379", url=...),
    *(entry("redis", f".url={url!r}", "write url=", url=url) for url in ("10.0.0.5:6379", "http://a", "redis://")),
    *(entry("redis", f".url={url!r}: ports", url=url) for url in ("redis://a:99999", "redis://a:0")),
    entry("redis", ".url='redis://a,b/3'", "leave out /3", url="redis://a,b/3"),
    entry("redis", ".url='redis://a,", "write 64 nodes at most", url="redis://" + ",".join(["a"] * 65)),
    *(
        entry("redis", ".url=***: has a user name or a password", "password_file", url=url)
        for url in (f"redis://:{SECRET}@a", f"redis://u:{SECRET}/@@a")
    ),
    entry("redis", ".url=***", "write", url=f"redis://a?password={SECRET}"),
    entry("redis", ".password=***", "did you mean password_file", password=SECRET),
    entry("redis", ".password_file='/nowhere/x': there is no such file", password_file="/nowhere/x"),
    entry("redis", ".username=***", "write the name", username="a b", password_file=__file__),
    entry("redis", ".username=***: has no password", "add password_file", username="u"),
    entry("redis", f".ca_file={cut(__file__)}: is for TLS", "begin the URL with rediss://", ca_file=__file__),
    entry("redis", f".ca_file={cut(__file__)}: no certificates in PEM", url="rediss://a", ca_file=__file__),
    entry("redis", f".cert_file={cut(__file__)}", "both cert_file and key_file", url="rediss://a", cert_file=__file__),
    entry(
        "redis",
        f".cert_file={cut(__file__)}: it and key_file are no certificate",
        url="rediss://a",
        cert_file=__file__,
        key_file=__file__,
    ),
    *(entry("redis", f".ttl_s={value}: must be a whole number", ttl_s=value) for value in (0, 1.5)),
    *(entry("object_store", ".url=***", "s3://BUCKET", url=url) for url in (7, "bucket")),
    *(
        entry("object_store", f".url={url!r}", "single slashes", url=url)
        for url in ("http://bucket", "s3:///folder", "s3://bucket//folder", "s3://bucket/a b", "file://bucket/a")
    ),
    entry("object_store", ".endpoint='minio:9000'", "such as", endpoint="minio:9000"),
    entry("object_store", ".endpoint=", "the bucket belongs into url", endpoint="http://minio:9000/bucket"),
    entry(
        "object_store",
        ".endpoint='http://minio:9000': only for stores that are compatible with S3",
        url="gs://bucket",
        endpoint="http://minio:9000",
    ),
    entry("object_store", ".region='a b'", "eu-central-1", region="a b"),
    entry("object_store", ".region='europe': only s3:// has regions", url="gs://bucket", region="europe"),
    *(
        entry("object_store", ".url=***: has ", "credentials come from the environment", url=url)
        for url in (f"s3://KEYID:{SECRET}@bucket", f"az://container?sig={SECRET}", f"s3://bucket#{SECRET}")
    ),
    *(
        entry("object_store", ".endpoint=***", endpoint=endpoint)
        for endpoint in (f"https://KEYID:{SECRET}@minio:9000", f"https://minio:9000?X-Amz-Signature={SECRET}")
    ),
    entry("mooncake", ".master='10.0.0.5'", '"HOST:PORT"', master="10.0.0.5"),
    entry("mooncake", ".master=***", '"HOST:PORT"', master="fd00::1:50051"),
    *(entry("mooncake", f".master={value!r}", '"HOST:PORT"', master=value) for value in ("a:99999", 7)),
    entry("mooncake", ".protocol='udp': must be one of tcp, rdma", protocol="udp"),
    entry("mooncake", ".metadata=''", "P2PHANDSHAKE", metadata=""),
    entry("mooncake", ".host=***", "write a string", host="a b"),
    entry("mooncake", ".segment_bytes='4 apples'", segment_bytes="4 apples"),
    entry("mooncake", ".segment=", "did you mean segment_bytes", segment="4GiB"),
    entry("mooncake", ".master_server_address=", "did you mean master?", master_server_address="x"),
]

TENANTS = [
    tenants(["search"], "=[***]: must be a mapping from names to shares, such as tenants={"),
    tenants({"a b": {}}, ".a b: cannot be the name of a tenant", "use up to 63 letters, digits, '.', '_' and '-'"),
    *(tenants({name: {}}, f".{name}: cannot be the name") for name in ("a,b", 7)),
    tenants({"a": 7}, ".a=7: must be a mapping such as"),
    tenants({"a": {"quotas": {}}}, ".a.quotas={}: unknown key", "did you mean quota?"),
    tenants({"a": {"salt": SECRET}}, ".a.salt=***: unknown key", "did you mean salt_sha256?"),
    tenants({"a": {"host": "8GiB"}}, ".a.host=***: unknown key", 'write an entry such as {"guaranteed": {'),
    tenants({"a": {"quota": 7}}, '.a.quota=7: must map names of tiers to bytes, such as {"host": "8GiB"}'),
    tenants({"a": {"quota": {"host": "much"}}}, ".a.quota.host='much': not an amount of memory"),
    tenants({"a": {"quota": {"disk": 7}}}, ".a.quota.disk=7 (7 bytes): this configuration has no tier disk", "host"),
    tenants(
        {"a": {"quota": {"host": 7}, "guaranteed": {"host": 8}}},
        ".a.quota.host=7 (7 bytes): less than the 8 bytes that are guaranteed",
        "raise it, or lower",
    ),
    tenants(
        {"a": {"guaranteed": {"host": "40MiB"}}, "b": {"guaranteed": {"host": "30MiB"}}},
        ": 70 MiB of host are guaranteed, more than the 64 MiB of its budget",
        "lower some, or raise the",
    ),
    tenants(
        {"a": {"quota": {"host": "16MiB"}, "retain": {"host": "9MiB"}}},
        ".a.retain.host=9437184 (9 MiB): more than half of its quota of 16 MiB",
        "lower it, or raise",
    ),
    tenants(
        {"a": {"retain": {"host": "20MiB"}}, "b": {"retain": {"host": "20MiB"}}},
        ": 40 MiB of host may be retained, more than half of its budget of 64 MiB",
        "lower some, or raise",
    ),
    tenants(
        {"a": {"retain": {"host": "20MiB"}}, "b": {"guaranteed": {"host": "60MiB"}}},
        ": 80 MiB of host are guaranteed or may be retained, more than the 64 MiB of its budget",
        "lower",
    ),
    tenants({"a": {"salt_sha256": SECRET}}, ".a.salt_sha256: must be the SHA-256 of a cache_salt"),
    tenants({"other": {"salt_sha256": "0" * 64}}, '.other.salt_sha256: "other" is every request without a configured'),
    tenants(
        {"a": {"salt_sha256": "0" * 64}, "b": {"salt_sha256": "0" * 64}},
        ".a.salt_sha256: is that of another",
        "give each tenant a salt",
    ),
    tenants({f"t{i}": {} for i in range(MAX_TENANTS + 1)}, ": has 33 entries, at most 32 may be configured"),
    Wrong(
        {
            "tenants": {"a": {"retain": {"shared_dir": 7}}},
            "tiers": [{"kind": "shared_dir", "dir": "/shared", "bytes": "1GiB"}],
        },
        "tenants.a.retain.shared_dir=7 (7 bytes): nothing can be retained in this tier",
    ),
    Wrong(
        {"tenants": {"a": {"quota": {"redis": 7}}}, "tiers": [{"kind": "redis", **NEEDED["redis"]}]},
        "tenants.a.quota.redis=7 (7 bytes): this tier bounds itself and has no",
    ),
]

WRONG = OPTIONS + TIERS + STORES + TENANTS
