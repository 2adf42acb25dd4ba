"""The Kubernetes manifests: each overlay is built, and agrees with the schemas of Kubernetes and with kvoffload."""

from __future__ import annotations

import copy
import functools
import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from kvoffload import ConfigError, OffloadConfig
from kvoffload.cli import group
from kvoffload.connector.worker import SUSPEND_DEADLINE_S
from kvoffload.tiers.disk.tier import CLOSE_DEADLINE_S
from kvoffload.units import parse_bytes
from tests.deploy.service_links import PORTS, has_links, variables

yaml = pytest.importorskip("yaml")
kubernetes_validate = pytest.importorskip("kubernetes_validate")

ROOT = Path(__file__).resolve().parents[2]
KUBERNETES = ROOT / "deploy" / "kubernetes"
BUILDER = next((tool for tool in ("kustomize", "kubectl") if shutil.which(tool)), None)
SCHEMAS = "1.32"
REST = "kvoffload/memory-beside-host-bytes"
"""The annotation of a pod that says how much memory it needs beside host_bytes."""
CERTIFICATE = """-----BEGIN CERTIFICATE-----
MIIBdDCCARugAwIBAgIUT5B6ls9tDcmf4Nbnst5fx9hoHnIwCgYIKoZIzj0EAwIw
DzENMAsGA1UEAwwEdGVzdDAgFw0yNjExMjIxMTMxMTJaGA8yMTI2MTAyOTExMzEx
MlowDzENMAsGA1UEAwwEdGVzdDBZMBMGByqGSM49AgEGCCqGSM49AwEHA0IABJbA
NIsCxnq6OQOPyMIojD2F8TZ6xgeL2WRlxercwcl73qKktMY/Ve0z4cJjbunk5jmC
XtmJd1sXHC9ej1mGQwCjUzBRMB0GA1UdDgQWBBQTH6uMgleCLXy0MDRIYGXaqboM
lzAfBgNVHSMEGDAWgBQTH6uMgleCLXy0MDRIYGXaqboMlzAPBgNVHRMBAf8EBTAD
AQH/MAoGCCqGSM49BAMCA0cAMEQCIGDgie0KhCgSKoelYykpt1uPgAG2W09bgm/G
LJcPY2IaAiAMQ+Q0BXe5bM25mb8uKnzkUuG/YSIGjFDtzBxNyqnwZA==
-----END CERTIFICATE-----
"""
"""What the files of the secrets contain: any text for a password or a key."""
OVERLAYS = ["base", *(f"overlays/{path.name}" for path in sorted((KUBERNETES / "overlays").iterdir()))]

pytestmark = pytest.mark.skipif(BUILDER is None, reason="neither kustomize nor kubectl is installed")
every_overlay = pytest.mark.parametrize("overlay", OVERLAYS)

Objects = list[dict[str, Any]]


@functools.cache
def build(folder: Path) -> str:
    command = ["kustomize", "build"] if BUILDER == "kustomize" else ["kubectl", "kustomize"]
    done = subprocess.run([*command, str(folder)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def objects_of(overlay: str) -> Objects:
    return list(yaml.load_all(build(KUBERNETES / overlay), getattr(yaml, "CSafeLoader", yaml.SafeLoader)))


def named(objects: Objects, kind: str, name: str) -> dict[str, Any]:
    (found,) = (each for each in objects if each["kind"] == kind and each["metadata"]["name"] == name)
    return found


def server(objects: Objects) -> dict[str, Any]:
    """The pod of the servers."""
    return dict(named(objects, "StatefulSet", "vllm")["spec"]["template"])


def containers(objects: Objects) -> Iterator[dict[str, Any]]:
    """The two containers that get kvoffload's options: doctor and vllm."""
    spec = server(objects)["spec"]
    yield from (*spec["initContainers"], *spec["containers"])


def volume(objects: Objects, name: str) -> dict[str, Any]:
    templates = named(objects, "StatefulSet", "vllm")["spec"]["volumeClaimTemplates"]
    volumes: dict[str, dict[str, Any]] = {each["name"]: each for each in server(objects)["spec"]["volumes"]}
    volumes |= {each["metadata"]["name"]: each for each in templates}
    return volumes[name]


def options_of(objects: Objects) -> dict[str, Any]:
    """The value of kv_connector_extra_config."""
    (vllm,) = server(objects)["spec"]["containers"]
    (reference,) = (each["valueFrom"] for each in vllm["env"] if each["name"] == "KV_TRANSFER_CONFIG")
    assert "--kv-transfer-config=$(KV_TRANSFER_CONFIG)" in vllm["args"]
    data = named(objects, "ConfigMap", reference["configMapKeyRef"]["name"])["data"]
    config = json.loads(data[reference["configMapKeyRef"]["key"]])
    assert (config["kv_connector"], config["kv_role"]) == ("KVOffloadConnector", "kv_both")
    return dict(config["kv_connector_extra_config"])


def bytes_of(quantity: str) -> int:
    """Returns the bytes of a quantity of Kubernetes, such as "88Gi"."""
    return parse_bytes("quantity", f"{quantity}B" if quantity.endswith("i") else quantity)


def paths_of(options: dict[str, Any]) -> Iterator[tuple[str, PurePosixPath]]:
    """Yields the key and the value of each path in the entries of ``tiers``."""
    for tier in options.get("tiers", []):
        yield from ((key, PurePosixPath(tier[key])) for key in tier if key == "dir" or key.endswith("_file"))


# Checks. Each returns the faults that it finds.


def schema_faults(objects: Objects) -> list[str]:
    faults = []
    for each in objects:
        try:
            kubernetes_validate.validate(each, SCHEMAS, strict=True)
        except (kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError) as error:
            faults.append(f"{each['kind']} {each['metadata']['name']}: {error.message}")
    return faults


def option_faults(objects: Objects, folder: Path) -> list[str]:
    """Faults that the loader of kvoffload finds. Files and directories are looked up below ``folder``, and the memory
    of this machine does not count."""
    options = copy.deepcopy(options_of(objects)) | {"host_bytes": "1MiB"}
    for tier in options.get("tiers", []):
        for key, path in paths_of({"tiers": [tier]}):
            tier[key] = str(folder / path.relative_to("/"))
            Path(tier[key]).parent.mkdir(parents=True, exist_ok=True)
            if key != "dir":
                Path(tier[key]).write_text(CERTIFICATE)
                Path(tier[key]).chmod(0o400)
    try:
        OffloadConfig.from_mapping(options)
    except ConfigError as error:
        return [str(error)]
    return []


def memory_faults(objects: Objects) -> list[str]:
    options = options_of(objects)
    needed = parse_bytes("host_bytes", options["host_bytes"])
    needed += bytes_of(server(objects)["metadata"]["annotations"][REST])
    segments = (tier["segment_bytes"] for tier in options.get("tiers", []) if "segment_bytes" in tier)
    needed += sum(parse_bytes("segment_bytes", each) for each in segments)
    return [
        f"{each['name']}: limits.memory={each['resources']['limits']['memory']} is not {needed >> 30}Gi"
        for each in containers(objects)
        if bytes_of(each["resources"]["limits"]["memory"]) != needed
    ]


def volume_faults(objects: Objects) -> list[str]:
    """Paths that are not in a volume of both containers, and directories that kvoffload would refuse or that are too
    small."""
    faults = []
    options = options_of(objects)
    for each in containers(objects):
        mounts = {PurePosixPath(mount["mountPath"]): mount["name"] for mount in each["volumeMounts"]}
        for key, path in paths_of(options):
            mounted = next((folder for folder in (path, *path.parents) if folder in mounts), None)
            if mounted is None:
                faults.append(f"{each['name']}: {key}={path} is in no volume")
                continue
            found = volume(objects, mounts[mounted])
            if key == "dir" and ("hostPath" in found) != (path == mounted):
                faults.append(f"{each['name']}: {key}={path}: the root of a volume is open to a group; name a folder")
    for tier in options.get("tiers", []):
        for claim in named(objects, "StatefulSet", "vllm")["spec"]["volumeClaimTemplates"]:
            size = bytes_of(claim["spec"]["resources"]["requests"]["storage"])
            if claim["metadata"]["name"] == "kv" and parse_bytes("bytes", tier["bytes"]) > size:
                faults.append(f"bytes={tier['bytes']}: more than the volume")
    return faults


def shutdown_faults(objects: Objects) -> list[str]:
    spec = server(objects)["spec"]
    (vllm,) = spec["containers"]
    before = float(vllm["lifecycle"]["preStop"]["exec"]["command"][1])
    (drain,) = (float(each.partition("=")[2]) for each in vllm["args"] if each.startswith("--shutdown-timeout="))
    needed = before + drain + SUSPEND_DEADLINE_S + CLOSE_DEADLINE_S * len(options_of(objects).get("tiers", []))
    given = spec["terminationGracePeriodSeconds"]
    return [] if given >= needed else [f"terminationGracePeriodSeconds={given}: {needed:.0f} are needed"]


def variable_faults(objects: Objects) -> list[str]:
    """Service links of the servers, and variables of the Services that would keep another vLLM from starting."""
    faults = [name for name in PORTS if name in variables(objects)]
    return [*faults, "the servers get service links"] if has_links(server(objects)["spec"]) else faults


def names_without_an_object(objects: Objects) -> list[str]:
    """ConfigMaps and claims that a pod names, and that are not made."""
    made = {(each["kind"], each["metadata"]["name"]) for each in objects}
    used = referenced("ConfigMap", objects, ("configMap", "configMapRef", "configMapKeyRef"), "name")
    used |= referenced("PersistentVolumeClaim", objects, ("persistentVolumeClaim",), "claimName")
    return sorted(f"{kind} {name}" for kind, name in used - made)


def referenced(kind: str, value: Any, keys: tuple[str, ...], name: str) -> set[tuple[str, str]]:
    """The objects of ``kind`` that ``value``, a part of objects, names: by ``name`` in one of ``keys``."""
    if not isinstance(value, (list, dict)):
        return set()
    items = value if isinstance(value, list) else list(value.values())
    found = {(kind, value[key][name]) for key in keys if isinstance(value, dict) and key in value}
    return found.union(*(referenced(kind, each, keys, name) for each in items))


def secrets_of(objects: Objects) -> set[str]:
    found = referenced("Secret", objects, ("secretRef", "secretKeyRef"), "name")
    return {name for _, name in found | referenced("Secret", objects, ("secret",), "secretName")}


def security_faults(objects: Objects) -> list[str]:
    """Pods that do not meet the restricted Pod Security Standard, except for volumes of kind hostPath."""
    faults = []
    for each in objects:
        spec = each.get("spec", {}).get("template", {}).get("spec")
        if spec is None:
            continue
        pod, name = spec["securityContext"], each["metadata"]["name"]
        if not (pod.get("runAsNonRoot") and pod.get("runAsUser") and pod["seccompProfile"]["type"] == "RuntimeDefault"):
            faults.append(f"{name}: may run as root, or without seccomp")
        for container in [*spec.get("initContainers", []), *spec["containers"]]:
            context = container["securityContext"]
            if context["allowPrivilegeEscalation"] or context["capabilities"] != {"drop": ["ALL"]}:
                faults.append(f"{name}/{container['name']}: has privileges")
    return faults


# What must hold.


@every_overlay
def test_the_manifests_agree_with_the_schemas(overlay: str) -> None:
    assert schema_faults(objects_of(overlay)) == []


@every_overlay
def test_kvoffload_accepts_the_options(overlay: str, tmp_path: Path) -> None:
    assert option_faults(objects_of(overlay), tmp_path) == []


@every_overlay
def test_the_memory_limit_is_host_bytes_and_the_rest(overlay: str) -> None:
    objects = objects_of(overlay)
    assert memory_faults(objects) == []
    shm = volume(objects, "shm")["emptyDir"]
    assert bytes_of(shm["sizeLimit"]) < bytes_of(server(objects)["metadata"]["annotations"][REST])


@every_overlay
def test_paths_are_in_volumes(overlay: str) -> None:
    objects = objects_of(overlay)
    assert volume_faults(objects) == []
    assert names_without_an_object(objects) == []


@every_overlay
def test_pods_have_no_privileges_and_time_to_end(overlay: str) -> None:
    objects = objects_of(overlay)
    assert security_faults(objects) == []
    assert shutdown_faults(objects) == []


@every_overlay
def test_services_set_no_variables_of_vllm(overlay: str) -> None:
    assert variable_faults(objects_of(overlay)) == []


@every_overlay
def test_the_doctor_gets_the_options_of_the_server(overlay: str) -> None:
    objects = objects_of(overlay)
    doctor, vllm = containers(objects)
    assert (doctor["image"], doctor.get("envFrom")) == (vllm["image"], vllm.get("envFrom"))
    shell, flag, line = doctor["command"]
    assert (shell, flag) == ("sh", "-c")
    program, command, option, path, *rest = line.split()
    assert (program, rest) == ("kvoffload", ["||", "true"])
    assert option in {each for parameter in group().commands[command].params for each in parameter.opts}
    (config,) = (mount["mountPath"] for mount in doctor["volumeMounts"] if mount["name"] == "config")
    (variable,) = (each["valueFrom"]["configMapKeyRef"] for each in vllm["env"] if each["name"] == "KV_TRANSFER_CONFIG")
    assert path == f"{config}/{variable['key']}"
    assert volume(objects, "config")["configMap"]["name"] == variable["name"]


@every_overlay
def test_the_guide_names_the_secrets(overlay: str) -> None:
    guide = (ROOT / "docs" / "deploy.md").read_text()
    assert {name for name in secrets_of(objects_of(overlay)) if name not in guide} == set()


# Negative controls.


def change_options(objects: Objects, change: Callable[[dict[str, Any]], object]) -> None:
    for each in objects:
        if "kv-transfer.json" in each.get("data", {}):
            config = json.loads(each["data"]["kv-transfer.json"])
            change(config["kv_connector_extra_config"])
            each["data"]["kv-transfer.json"] = json.dumps(config)


def first_tier(objects: Objects, **changes: str) -> None:
    change_options(objects, lambda options: options["tiers"][0].update(changes))


def test_a_planted_fault_is_found(tmp_path: Path) -> None:
    def spec(objects: Objects) -> dict[str, Any]:
        found: dict[str, Any] = server(objects)["spec"]
        return found

    plants: list[tuple[Callable[[Objects], list[str]], Callable[[Objects], object]]] = [
        (schema_faults, lambda objects: spec(objects)["containers"][0].update(imagePullPolice="Never")),
        (schema_faults, lambda objects: objects[0].update(kind="ConfigMop")),
        (schema_faults, lambda objects: spec(objects).update(terminationGracePeriodSeconds="2m")),
        (functools.partial(option_faults, folder=tmp_path), lambda objects: first_tier(objects, byte="1GiB")),
        (memory_faults, lambda objects: change_options(objects, lambda options: options.update(host_bytes="80GiB"))),
        (volume_faults, lambda objects: first_tier(objects, dir="/data/blocks")),
        (volume_faults, lambda objects: first_tier(objects, dir="/var/cache/kvoffload")),
        (volume_faults, lambda objects: first_tier(objects, bytes="2TiB")),
        (shutdown_faults, lambda objects: spec(objects).update(terminationGracePeriodSeconds=30)),
        (security_faults, lambda objects: spec(objects)["securityContext"].update(runAsNonRoot=False)),
        (variable_faults, lambda objects: spec(objects).pop("enableServiceLinks")),
        (variable_faults, lambda objects: named(objects, "Service", "llm-server")["metadata"].update(name="vllm")),
        (names_without_an_object, lambda objects: objects.pop(0)),
    ]
    for check, plant in plants:
        objects = objects_of("overlays/disk")
        assert check(objects) == []
        plant(objects)
        assert check(objects) != []
