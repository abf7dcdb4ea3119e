"""`make check-k8s`: builds each overlay and holds every object against its schema; runs in an environment of its own.

Objects of Kubernetes against the API's schemas, strictly; those of operators against models that forbid unknown keys.
Each object is also damaged by a key that does not exist, and must then be refused: a validator that lets everything
through would show here. Nothing is applied anywhere: scheduling, rollouts and scaling are not tried.
"""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml
from cloudcoil.models.keda.v1alpha1 import ScaledObject
from cloudcoil.models.prometheus_operator.v1 import PrometheusRule, ServiceMonitor
from pydantic import ValidationError

HERE = Path(__file__).parent
OVERLAYS = ("dev", "gpu")
VERSIONS = ("1.30", "1.34", "1.37")  # the oldest has preStop's sleep
OPERATORS = {"ScaledObject": ScaledObject, "PrometheusRule": PrometheusRule, "ServiceMonitor": ServiceMonitor}
REFUSED = (kubernetes_validate.ValidationError, ValidationError)

Object = dict[str, Any]


def build(overlay: str) -> list[Object]:
    """The overlay's objects, as kubectl would apply them."""
    kubectl = Path(sys.executable).parent / "kubectl"
    command = [str(kubectl), "kustomize", str(HERE / "overlays" / overlay)]
    built = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [each for each in yaml.safe_load_all(built) if each]


def validators(each: Object) -> list[Callable[[Object], object]]:
    """What holds an object against its schema; each raises one of REFUSED."""
    model = OPERATORS.get(each["kind"])
    if model is not None:
        return [lambda given: model.model_validate(given, extra="forbid")]
    return [_api(version) for version in VERSIONS]


def _api(version: str) -> Callable[[Object], object]:
    return lambda given: kubernetes_validate.validate(given, version, strict=True)


def damaged(each: Object) -> Object:
    """The object with a key that its schema does not know."""
    broken = copy.deepcopy(each)
    broken.get("spec", broken)["noSuchKey"] = 1
    return broken


def complaints(each: Object) -> list[str]:
    """What is wrong with an object, and whether its validators see what is made wrong."""
    name, found = f"{each['kind']}/{each['metadata']['name']}", []
    for validate in validators(each):
        try:
            validate(each)
        except REFUSED as error:
            found.append(f"{name}: {error}")
        try:
            validate(damaged(each))
        except REFUSED:
            continue
        found.append(f"{name}: its validator lets an unknown key through")
    return found


def main(arguments: Sequence[str]) -> int:
    """Writes each overlay's objects to OUTPUT/NAME.yaml; 1 where something is wrong."""
    output = Path(arguments[0])
    output.mkdir(parents=True, exist_ok=True)
    wrong: list[str] = []
    for overlay in OVERLAYS:
        objects = build(overlay)
        (output / f"{overlay}.yaml").write_text(yaml.safe_dump_all(objects), encoding="utf-8")
        found = [complaint for each in objects for complaint in complaints(each)]
        print(f"overlay {overlay}: {len(objects)} objects, {len(found)} complaints")
        wrong += [f"{overlay}: {complaint}" for complaint in found]
    print("\n".join(wrong), end="\n" if wrong else "")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
