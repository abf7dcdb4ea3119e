"""`make check-k8s`, its second half: the built overlays agree with the service's settings, metrics and code."""

import os
import re
from pathlib import Path

import pytest
import yaml

from scorer.config import Config
from scorer.flags import SETTINGS
from scorer.listen import CLOSE_SECONDS
from scorer.metrics import Metrics
from scorer.server import LINGER_SECONDS, SERVICE

pytestmark = pytest.mark.target

ROOT = Path(__file__).parent.parent.parent
BUILT = Path(os.environ.get("K8S_BUILT", ROOT / "build/k8s"))
OVERLAYS = ("dev", "gpu")


def objects(overlay):
    return list(yaml.safe_load_all((BUILT / f"{overlay}.yaml").read_text()))


def of(overlay, kind, name=None):
    return [o for o in objects(overlay) if o["kind"] == kind and name in (None, o["metadata"]["name"])]


def deployment(overlay):
    (found,) = of(overlay, "Deployment", "prefixrank")
    return found["spec"]


def container(overlay):
    (found,) = deployment(overlay)["template"]["spec"]["containers"]
    return found


def settings(overlay):
    """The service's settings as the container's arguments give them; the service itself reads them."""
    command, *flags = container(overlay)["args"]
    assert command == "serve"
    pairs = dict(flag.removeprefix("--").split("=", 1) for flag in flags)
    given = {name.replace("-", "_"): value for name, value in pairs.items()}
    assert given.keys() <= set(SETTINGS)
    return Config.read(given, environ={})


def queries(overlay):
    for scaled in of(overlay, "ScaledObject"):
        yield from (t["metadata"]["query"] for t in scaled["spec"]["triggers"] if t["type"] == "prometheus")


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_ports_are_those_that_the_service_listens_on(overlay):
    config = settings(overlay)
    ports = {p["name"]: p["containerPort"] for p in container(overlay)["ports"]}
    expected = {"grpc": config.port, "metrics": config.metrics_port, "http": config.http_port}
    if config.health_port >= 0:
        expected["health"] = config.health_port
    assert ports == expected
    assert config.host == "0.0.0.0"
    for service in of(overlay, "Service"):
        if service["metadata"]["name"].startswith("prefixrank"):
            assert {p["targetPort"] for p in service["spec"]["ports"]} <= ports.keys()


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_probes_ask_health_where_it_speaks_no_tls(overlay):
    config, found = settings(overlay), container(overlay)
    port = config.port if config.tls_certificate is None else config.health_port
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert found[probe]["grpc"]["port"] == port
    assert found["readinessProbe"]["grpc"]["service"] == found["startupProbe"]["grpc"]["service"] == SERVICE
    started = found["startupProbe"]
    assert started["periodSeconds"] * started["failureThreshold"] >= 600, "a large model loads for minutes"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_grace_outlasts_pre_stop_and_drain(overlay):
    spec, config = deployment(overlay)["template"]["spec"], settings(overlay)
    before = container(overlay)["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert spec["terminationGracePeriodSeconds"] >= before + config.drain_seconds + LINGER_SECONDS + CLOSE_SECONDS + 2
    assert before >= 3, "endpoints and Envoy must hear of it first"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_selector_finds_the_pods(overlay):
    labels = deployment(overlay)["template"]["metadata"]["labels"]

    def selects(selector):
        return selector.items() <= labels.items()

    assert selects(deployment(overlay)["selector"]["matchLabels"])
    for kind, path in (("PodDisruptionBudget", "selector"), ("NetworkPolicy", "podSelector")):
        (found,) = of(overlay, kind, "prefixrank")
        assert selects(found["spec"][path]["matchLabels"])
    for service in of(overlay, "Service"):
        if service["metadata"]["name"].startswith("prefixrank"):
            assert selects(service["spec"]["selector"])
    for spread in deployment(overlay)["template"]["spec"]["topologySpreadConstraints"]:
        assert selects(spread["labelSelector"]["matchLabels"])


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_prometheus_finds_the_metrics_under_the_job_that_the_alerts_name(overlay):
    (monitor,) = of(overlay, "ServiceMonitor")
    wanted = monitor["spec"]["selector"]["matchLabels"].items()
    found = [s for s in of(overlay, "Service") if wanted <= s["metadata"].get("labels", {}).items()]
    (service,) = found
    assert monitor["spec"]["endpoints"][0]["port"] in {p["name"] for p in service["spec"]["ports"]}
    job = service["metadata"]["labels"][monitor["spec"]["jobLabel"]]
    rules = yaml.safe_load((ROOT / "deploy/prometheus/rules.yaml").read_text())
    named = set(re.findall(r'job="(\w+)"', yaml.safe_dump(rules)))
    assert named == {job}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_operators_rules_are_those_that_are_tested(overlay):
    (rule,) = of(overlay, "PrometheusRule")
    assert rule["spec"] == yaml.safe_load((ROOT / "deploy/prometheus/rules.yaml").read_text())


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_one_thing_scales_and_leaves_a_replica_to_evict(overlay):
    scalers = of(overlay, "HorizontalPodAutoscaler") + of(overlay, "ScaledObject")
    (scaler,) = scalers
    assert scaler["spec"]["scaleTargetRef"]["name"] == "prefixrank"
    assert "replicas" not in deployment(overlay), "the scaler's number would be set back at every apply"
    least = scaler["spec"].get("minReplicas") or scaler["spec"]["minReplicaCount"]
    (budget,) = of(overlay, "PodDisruptionBudget", "prefixrank")
    assert budget["spec"]["maxUnavailable"] < least


def test_keda_asks_for_metrics_that_exist():
    page = {s.name for family in Metrics("1").registry.collect() for s in family.samples}
    recorded = {
        r["record"] for g in of("gpu", "PrometheusRule")[0]["spec"]["groups"] for r in g["rules"] if "record" in r
    }
    named = {name for query in queries("gpu") for name in re.findall(r"\bprefixrank[_:][\w:]+", query)}
    assert len(named) == 2
    assert named <= page | recorded


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_containers_are_restricted_and_nothing_takes_a_token(overlay):
    for found in of(overlay, "Deployment"):
        spec = found["spec"]["template"]["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["enableServiceLinks"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for each in spec["containers"] + spec.get("initContainers", []):
            context = each["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["readOnlyRootFilesystem"] is True
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert "memory" in each["resources"]["limits"]


def test_what_the_service_reads_is_mounted():
    config, mounts = settings("gpu"), {m["mountPath"] for m in container("gpu")["volumeMounts"]}
    for path in (config.auth_tokens_file, config.tls_certificate, config.tls_key, config.tls_client_ca):
        assert str(Path(path).parent) in mounts
    assert any(Path(config.model).is_relative_to(mount) for mount in mounts)
    volumes = {v["name"] for v in deployment("gpu")["template"]["spec"]["volumes"]}
    assert {m["name"] for m in container("gpu")["volumeMounts"]} <= volumes
    (checksum,) = deployment("gpu")["template"]["spec"]["initContainers"]
    assert config.model in checksum["command"][-1]
    assert container("gpu")["resources"]["limits"]["nvidia.com/gpu"] == "1"


def test_envoy_finds_the_service_and_may_call_it():
    envoy = yaml.safe_load((ROOT / "deploy/envoy/envoy-mtls.yaml").read_text())
    (cluster,) = envoy["static_resources"]["clusters"]
    address = cluster["load_assignment"]["endpoints"][0]["lb_endpoints"][0]["endpoint"]["address"]["socket_address"]
    (service,) = of("gpu", "Service", address["address"])
    assert service["spec"]["clusterIP"] == "None"
    assert address["port_value"] in {p["port"] for p in service["spec"]["ports"]}
    (pods,) = of("gpu", "Deployment", "envoy")
    template = pods["spec"]["template"]
    (policy,) = of("gpu", "NetworkPolicy", "prefixrank")
    allowed = policy["spec"]["ingress"][0]["from"][0]["podSelector"]["matchLabels"]
    assert allowed.items() <= template["metadata"]["labels"].items()
    port = envoy["static_resources"]["listeners"][0]["address"]["socket_address"]["port_value"]
    (proxy,) = template["spec"]["containers"]
    assert [p["containerPort"] for p in proxy["ports"]] == [port]
    mounts = {m["mountPath"] for m in proxy["volumeMounts"]}
    text = yaml.safe_dump(envoy)
    for path in re.findall(r"/etc/[\w./-]+", text):
        assert str(Path(path).parent) in mounts
    (config,) = [o for o in of("gpu", "ConfigMap") if o["metadata"]["name"].startswith("envoy")]
    assert config["data"]["envoy.yaml"] == (ROOT / "deploy/envoy/envoy-mtls.yaml").read_text()
    assert "scorer.pb" in config["binaryData"]
