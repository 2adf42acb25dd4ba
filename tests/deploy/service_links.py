"""The environment variables that Kubernetes sets in pods for the Services of their namespace."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

KUBERNETES = Path(__file__).parents[2] / "deploy" / "kubernetes"
ADDRESS = "10.96.0.7"
PORTS = (
    "VLLM_PORT",
    "VLLM_DP_MASTER_PORT",
    "VLLM_NIXL_SIDE_CHANNEL_PORT",
    "VLLM_P2P_SIDE_CHANNEL_PORT",
    "VLLM_EC_SIDE_CHANNEL_PORT",
    "VLLM_MOONCAKE_BOOTSTRAP_PORT",
)
"""Variables that vLLM reads as numbers, and that Kubernetes sets to an address for a Service of the same name."""


def has_links(pod: Mapping[str, Any]) -> bool:
    """Whether a pod with the spec ``pod`` gets them."""
    return bool(pod.get("enableServiceLinks", True))


def variables(objects: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Returns the variables for all Services among ``objects``. A headless Service has none."""
    found: dict[str, str] = {}
    for each in objects:
        if each["kind"] != "Service" or each["spec"].get("clusterIP") == "None":
            continue
        name = each["metadata"]["name"].upper().replace("-", "_")
        first = each["spec"]["ports"][0]
        found[f"{name}_SERVICE_HOST"] = ADDRESS
        found[f"{name}_SERVICE_PORT"] = str(first["port"])
        found[f"{name}_PORT"] = f"tcp://{ADDRESS}:{first['port']}"
        for port in each["spec"]["ports"]:
            protocol, number = port.get("protocol", "TCP"), port["port"]
            link = f"{name}_PORT_{number}_{protocol}"
            if "name" in port:
                found[f"{name}_SERVICE_PORT_{port['name'].upper().replace('-', '_')}"] = str(number)
            found[link] = f"{protocol.lower()}://{ADDRESS}:{number}"
            found |= {f"{link}_PROTO": protocol.lower(), f"{link}_PORT": str(number), f"{link}_ADDR": ADDRESS}
    return found


def manifests() -> list[dict[str, Any]]:
    """Returns all objects of the base and the overlays."""
    files = (path for path in KUBERNETES.rglob("*.yaml") if path.name != "kustomization.yaml")
    return [each for path in sorted(files) for each in yaml.safe_load_all(path.read_text())]
