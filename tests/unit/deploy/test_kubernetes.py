"""The manifests are valid for Kubernetes, and hold together: names, ports, secrets, users."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from penstock.shared.redis_access.rights import Role

from ...yaml_files import load_yaml
from .manifests import DEPLOY, alert_rules, kustomized

jsonschema = pytest.importorskip("jsonschema")
kubernetes_validate = pytest.importorskip("kubernetes_validate")

VERSION = "1.32"
FOLDERS = ("base", "redis", "monitoring", "autoscaling")
CUSTOM = {"ServiceMonitor", "PodMonitor", "PrometheusRule", "ScaledObject"}
SCHEMAS_VARIABLE = "PENSTOCK_TEST_SCHEMAS"
WORKLOADS = ("Deployment", "StatefulSet")


def of_kind(folder: str, *kinds: str) -> list[dict[str, Any]]:
    return [manifest for manifest in kustomized(folder) if manifest["kind"] in kinds]


@pytest.mark.parametrize("folder", FOLDERS)
def test_kubernetes_knows_every_field(folder: str) -> None:
    for manifest in kustomized(folder):
        if manifest["kind"] not in CUSTOM:
            kubernetes_validate.validate(manifest, VERSION, strict=True)


def test_the_validator_refuses_wrong_manifests() -> None:
    (worker,) = [
        manifest for manifest in of_kind("base", "Deployment") if manifest["metadata"]["name"] == "penstock-worker"
    ]
    worker["spec"]["template"]["spec"]["containers"][0]["livenessprobe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(worker, VERSION, strict=True)


@pytest.mark.parametrize("folder", ["monitoring", "autoscaling"])
def test_custom_resources_fit_their_definitions(folder: str) -> None:
    """The definitions are of other projects, and not kept here: a variable names a folder of their YAML files."""
    schemas = definitions()
    for manifest in kustomized(folder):
        jsonschema.Draft202012Validator(schemas[manifest["kind"]]).validate(manifest)


def definitions() -> dict[str, Any]:
    folder = os.environ.get(SCHEMAS_VARIABLE)
    if not folder:
        pytest.skip(f"{SCHEMAS_VARIABLE} names no folder with the definitions of KEDA and the Prometheus operator")
    resources = {}
    for path in Path(folder).glob("*.yaml"):
        definition = load_yaml(path.read_text())
        schema = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
        close(schema["properties"]["spec"])
        resources[definition["spec"]["names"]["kind"]] = schema
    return resources


def close(schema: Any) -> None:
    """Refuse fields that a definition does not have, as the API server drops them without a word."""
    if isinstance(schema, list):
        for part in schema:
            close(part)
    elif isinstance(schema, dict):
        if "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
            schema.setdefault("additionalProperties", False)
        for part in schema.values():
            close(part)


def test_pods_have_no_rights() -> None:
    for manifest in [*of_kind("base", *WORKLOADS), *of_kind("redis", *WORKLOADS)]:
        pod = manifest["spec"]["template"]["spec"]
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        for container in pod["containers"]:
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False
            assert security["readOnlyRootFilesystem"] is True
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert "memory" in container["resources"]["limits"]
        labels = manifest["spec"]["template"]["metadata"]["labels"]
        assert labels["app.kubernetes.io/part-of"] == "penstock"


def test_each_workload_reads_the_url_of_its_user_from_a_file() -> None:
    roles = {}
    for manifest in of_kind("base", "Deployment"):
        pod = manifest["spec"]["template"]["spec"]
        (secret,) = [volume["secret"] for volume in pod["volumes"] if "secret" in volume]
        (item,) = secret["items"]
        roles[manifest["metadata"]["name"]] = item["key"]
        (container,) = pod["containers"]
        environment = {variable["name"]: variable["value"] for variable in container["env"]}
        (mount,) = [mount for mount in container["volumeMounts"] if mount["name"] == "redis"]
        assert environment["PENSTOCK_REDIS_URL_FILE"] == f"{mount['mountPath']}/{item['path']}"
        assert "PENSTOCK_REDIS_URL" not in environment
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert roles == {
        "penstock-gateway": f"{Role.GATEWAY}.url",
        "penstock-worker": f"{Role.WORKER}.url",
        "penstock-jobs": f"{Role.JOBS}.url",
        "penstock-dashboard": f"{Role.OPERATOR}.url",
        "penstock-metrics": f"{Role.OPERATOR}.url",
    }


def test_probes_services_and_monitors_name_existing_ports() -> None:
    objects = [*kustomized("base"), *kustomized("redis")]
    ports: dict[str, dict[str, int]] = {}
    for manifest in objects:
        if manifest["kind"] in WORKLOADS:
            (container,) = manifest["spec"]["template"]["spec"]["containers"]
            own = {port["name"]: port["containerPort"] for port in container.get("ports", [])}
            ports[manifest["metadata"]["name"]] = own
            for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
                probe = container.get(kind, {})
                for way in ("httpGet", "tcpSocket"):
                    assert probe.get(way, {}).get("port") in {None, *own}
    for manifest in objects:
        if manifest["kind"] == "Service":
            (port,) = manifest["spec"]["ports"]
            assert ports[manifest["metadata"]["name"]][port["targetPort"]] == port["port"]
    for monitor in of_kind("monitoring", "ServiceMonitor", "PodMonitor"):
        for endpoint in monitor["spec"].get("endpoints", monitor["spec"].get("podMetricsEndpoints")):
            assert endpoint["port"] in {name for own in ports.values() for name in own}
    (scaled,) = kustomized("autoscaling")
    assert scaled["spec"]["scaleTargetRef"]["name"] in ports


def test_a_pod_has_longer_to_end_than_its_process_takes() -> None:
    deployments = {manifest["metadata"]["name"]: manifest for manifest in of_kind("base", "Deployment")}
    pod = deployments["penstock-worker"]["spec"]["template"]["spec"]
    (drain,) = [v["value"] for v in pod["containers"][0]["env"] if v["name"] == "PENSTOCK_DRAIN_TIMEOUT"]
    assert pod["terminationGracePeriodSeconds"] >= float(drain) + 15
    # --shutdown-timeout is 30 s.
    assert deployments["penstock-gateway"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] >= 45


def test_the_operator_has_the_same_alerts() -> None:
    (rules,) = of_kind("monitoring", "PrometheusRule")
    assert rules["spec"] == alert_rules()


def test_every_manifest_is_part_of_a_kustomization() -> None:
    for folder in FOLDERS:
        path = DEPLOY / "kubernetes" / folder
        whole = load_yaml((path / "kustomization.yaml").read_text())
        named = {*whole["resources"], *(patch["path"] for patch in whole.get("patches", []))}
        assert named == {file.name for file in path.glob("*.yaml")} - {"kustomization.yaml"}
