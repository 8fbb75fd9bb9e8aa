#!/usr/bin/env python3
"""Tests the Helm chart without a cluster.

    tests/charts/run.py                    everything; packages come with pip into target/charts
    tests/charts/run.py --without-checkov  without checkov, which brings a hundred packages

It needs helm 3 or 4: in the path, or named in KVPOOL_HELM.
 1. `helm lint --strict` finds nothing.
 2. Each file of values/ makes manifests that the schemas of Kubernetes admit, and whose ports name their protocol. So
    does the example worker. Scrapes show a token where the daemons ask for one. With `ipFamily: IPv6` every port and
    Service takes IPv6.
 3. Each set of refused.yaml is refused, and the message names the key.
 4. The defaults of values.yaml and of values.schema.json are the same.
 5. checkov finds nothing but what checkov.yaml explains.
The last line is a tally. The exit code is 0 if nothing failed.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CHART = ROOT / "charts/kvpool"
MADE = ROOT / "target/charts"
HELM = os.environ.get("KVPOOL_HELM", "helm")
PACKAGES = ["kubernetes-validate", "pyyaml"]
# Versions of Kubernetes whose schemas are asked, beside the latest that the validator has.
VERSIONS = ["1.25", "1.30"]
# Kinds of the Prometheus operator, whose schemas the validator lacks.
WITHOUT_SCHEMA = {"PodMonitor", "PrometheusRule"}


def environment(name, packages):
    """A Python environment with the packages; made once."""
    folder = MADE / name
    python = folder / "bin/python"
    mark = folder / "complete"
    if not mark.exists():
        shutil.rmtree(folder, ignore_errors=True)
        venv.create(folder, with_pip=True)
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *packages], check=True)
        mark.touch()
    return python


def helm(*arguments):
    """The standard output of helm, and its error or None."""
    run = subprocess.run([HELM, *map(str, arguments)], capture_output=True, text=True, check=False)
    return run.stdout, None if run.returncode == 0 else run.stdout + run.stderr


def render(values):
    return helm("template", "kvpool", CHART, "--namespace", "kvpool", "--values", values)


class Tally:
    def __init__(self):
        self.passed, self.failed = 0, 0

    def check(self, name, problem):
        if problem is None:
            self.passed += 1
            return
        self.failed += 1
        print(f"FAILED {name}: {problem}", flush=True)


def invalid(manifests, versions):
    """The first object that a version of Kubernetes refuses."""
    import kubernetes_validate
    import yaml

    objects = [thing for thing in yaml.safe_load_all(manifests) if thing]
    names = [(thing["kind"], thing["metadata"]["name"]) for thing in objects]
    twice = {name for name in names if names.count(name) > 1}
    if not objects or twice:
        return f"no object, or the same twice: {twice}"
    for thing in objects:
        if thing["kind"] in WITHOUT_SCHEMA:
            continue
        for version in versions:
            try:
                kubernetes_validate.validate(thing, version, strict=True)
            except Exception as error:  # noqa: BLE001: each kind of error means the same here
                where = f"{thing['kind']} {thing['metadata']['name']} for Kubernetes {version}"
                return f"{where}: {str(error)[:600]}"
    return None


def without_protocol(manifests):
    """The first port that does not name its protocol. Kubernetes 1.20 refuses it from Helm 4, which applies on the
    server."""
    import yaml

    for thing in yaml.safe_load_all(manifests):
        spec = thing.get("spec", {}) if thing else {}
        services = spec.get("ports", []) if thing and thing["kind"] == "Service" else []
        pod = spec.get("template", {}).get("spec", {})
        containers = [port for container in pod.get("containers", []) for port in container.get("ports", [])]
        for port in [*services, *containers]:
            if "protocol" not in port:
                return f"{thing['kind']} {thing['metadata']['name']}: {port}"
    return None


def deaf_to_ipv6(manifests, values):
    """The first daemon or Service that leaves IPv6 out although the values ask for it, or the other way round."""
    import yaml

    is_ipv6 = (yaml.safe_load(values.read_text()) or {}).get("ipFamily") == "IPv6"
    for thing in yaml.safe_load_all(manifests):
        spec = thing.get("spec", {}) if thing else {}
        name = f"{thing['kind']} {thing['metadata']['name']}" if thing else ""
        if thing and thing["kind"] == "Service" and (spec.get("ipFamilyPolicy") == "PreferDualStack") != is_ipv6:
            return f"{name}: ipFamilyPolicy {spec.get('ipFamilyPolicy')}"
        for container in spec.get("template", {}).get("spec", {}).get("containers", []):
            listens = [arg for arg in container.get("args", []) if "listen" in arg and "127.0.0.1" not in arg]
            for arg in listens:
                if ("[::]:" in arg) != is_ipv6 or ("0.0.0.0:" in arg) == is_ipv6:
                    return f"{name}: {arg}"
    return None


def scraped_without_token(manifests):
    """The first PodMonitor whose scrapes show no token, although the daemons ask for one."""
    import yaml

    objects = [thing for thing in yaml.safe_load_all(manifests) if thing]
    pods = [thing["spec"]["template"]["spec"] for thing in objects if "template" in thing.get("spec", {})]
    args = {arg for pod in pods for container in pod["containers"] for arg in container.get("args", [])}
    if "--auth-http-open=health" not in args:
        return None
    for thing in objects:
        endpoints = thing["spec"]["podMetricsEndpoints"] if thing["kind"] == "PodMonitor" else []
        for endpoint in endpoints:
            token = endpoint.get("authorization", {}).get("credentials", {})
            if not (token.get("name") and token.get("key")):
                return f"{thing['metadata']['name']}: {endpoint}"
    return None


def schema_default(schema):
    """The defaults of a schema, as the values that they stand for."""
    if "default" in schema:
        return schema["default"]
    properties = schema["properties"].items()
    return {name: schema_default(inner) for name, inner in properties if name != "global"}


def names_key(message, key):
    """Whether a message names a key: as a path with dots, or with slashes, or its last part after its parent."""
    parent, _, last = key.rpartition(".")
    forms = [key, "/" + key.replace(".", "/")]
    if not parent:
        forms += [f"'{key}'", f"property {key} "]
    return any(form in message for form in forms) or f"'{last}'" in message


def checkov(manifests, tally):
    """Each finding has an explanation for its object, and each explanation a finding."""
    import yaml

    explained = yaml.safe_load((HERE / "checkov.yaml").read_text())
    program = environment("checkov", ["checkov"]).with_name("checkov")
    with tempfile.TemporaryDirectory() as folder:
        for name, text in manifests.items():
            # Objects of different sets have the same names, and checkov looks at a name once.
            Path(folder, f"{name}.yaml").write_text(text.replace("namespace: kvpool", f"namespace: set-{name}"))
        options = ["--framework", "kubernetes", "--skip-download", "--output", "json", "--compact", "--quiet"]
        run = subprocess.run([program, "--directory", folder, *options], capture_output=True, text=True, check=False)
    try:
        report = json.loads(run.stdout)
    except json.JSONDecodeError:
        tally.check("checkov", f"no report: {run.stdout[:300]} {run.stderr[-600:]}")
        return
    report = report[0] if isinstance(report, list) else report
    passed = report["summary"]["passed"]
    # A report with few passed checks has looked at nothing.
    tally.check("checkov", None if passed > 100 * len(manifests) else f"only {passed} checks passed")
    unused = set(explained)
    findings = {(one["check_id"], one["check_name"], one["resource"]) for one in report["results"]["failed_checks"]}
    for check, name, resource in sorted(findings):
        component = resource.rpartition("-")[2]
        unused.discard(check)
        known = component in explained.get(check, {}).get("only", [])
        tally.check(f"checkov {check}", None if known else f"{name}: {resource}")
    for check in sorted(unused):
        tally.check(f"checkov.yaml {check}", "explains what checkov does not find")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--without-checkov", action="store_true")
    asked = parser.parse_args()
    if shutil.which(HELM) is None:
        sys.exit(f"{HELM} is missing: install helm, or name it in KVPOOL_HELM")
    python = environment("validator", PACKAGES)
    if Path(sys.prefix) != python.parent.parent:
        os.execv(python, [str(python), *sys.argv])

    import kubernetes_validate
    import yaml

    tally = Tally()
    _, error = helm("lint", "--strict", CHART)
    tally.check("helm lint --strict", error)
    versions = [*VERSIONS, kubernetes_validate.latest_version()]
    manifests = {}
    sets = sorted((HERE / "values").glob("*.yaml"))
    tally.check("values/", None if len(sets) >= 10 else f"{len(sets)} sets of values, and 10 are wanted")
    for values in sets:
        text, error = render(values)
        tally.check(f"helm template {values.name}", error)
        if error is None:
            manifests[values.stem] = text
            tally.check(f"{values.name} in Kubernetes' schemas", invalid(text, versions))
            tally.check(f"protocols of {values.name}", without_protocol(text))
            tally.check(f"scrapes of {values.name}", scraped_without_token(text))
            tally.check(f"addresses of {values.name}", deaf_to_ipv6(text, values))
            _, error = helm("lint", "--strict", "--values", values, CHART)
            tally.check(f"helm lint --strict {values.name}", error)
    example = (CHART / "examples/vllm.yaml").read_text()
    tally.check("examples/vllm.yaml", invalid(example, versions))
    tally.check("protocols of examples/vllm.yaml", without_protocol(example))

    refused = yaml.safe_load((HERE / "refused.yaml").read_text())
    tally.check("refused.yaml", None if len(refused) >= 30 else f"{len(refused)} sets, and 30 are wanted")
    with tempfile.NamedTemporaryFile("w+", suffix=".yaml") as file:
        for case in refused:
            file.seek(0)
            file.truncate()
            json.dump(case["values"], file)
            file.flush()
            _, message = render(file.name)
            problem = None
            if message is None:
                problem = "is not refused"
            elif not names_key(message, case["says"]):
                problem = f"the message does not name {case['says']}: {message}"
            tally.check(f"values {json.dumps(case['values'])}", problem)

    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    same = schema_default(schema) == values
    tally.check("defaults", None if same else "values.yaml and values.schema.json differ")
    if not asked.without_checkov:
        checkov(manifests, tally)
    print(f"charts: {tally.passed} passed, {tally.failed} failed")
    sys.exit(tally.failed > 0)


if __name__ == "__main__":
    main()
