#!/usr/bin/env python3
"""Tests the Helm chart on a real Kubernetes.

`run.py --archive IMAGE.tar` starts a cluster of its own (cluster.py). `--keep` keeps it for the next run.

`run.py --kubeconfig FILE --image NAME:TAG --changed NAME:TAG --worker NAME:TAG` uses a cluster that has the images.

Names of cases at the end run these alone: defaults etcd upgrade scale reinstall secured.

It needs helm and kubectl: in the path, or named in KVPOOL_HELM and KVPOOL_KUBECTL. A cluster of its own needs root,
buildah, and the package busybox-static for the worker's shell. The changed image is IMAGE with another label; the
worker is IMAGE with busybox. A cluster that is given needs a default storage class.

The last line is a tally. The exit code is 0 if nothing failed.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

import cluster
from cases import CASES

CHART = Path(__file__).resolve().parents[2] / "charts/kvpool"
HELM = os.environ.get("KVPOOL_HELM", "helm")
KUBECTL = os.environ.get("KVPOOL_KUBECTL", "kubectl")
NAMESPACE = "kvpool"


class Failed(Exception):
    """What a case found."""


class Pool:
    """A release of the chart, and a worker pod beside it."""

    def __init__(self, asked, prefix, config):
        self.asked, self.prefix, self.config = asked, prefix, config

    def call(self, *command, check=True, text=None, seconds=600):
        """The outcome of a command, which ends in time and well."""
        command = [*self.prefix, *[str(part) for part in command]]
        run = subprocess.run(
            command, input=text, capture_output=True, text=True, check=False, timeout=seconds,
            env={**os.environ, "KUBECONFIG": str(self.config)},
        )
        if check and run.returncode != 0:
            raise Failed(f"{' '.join(command)} ended with {run.returncode}: {run.stdout[-2000:]}{run.stderr[-2000:]}")
        return run

    def kubectl(self, *arguments, **options):
        return self.call(KUBECTL, "--namespace", NAMESPACE, *arguments, **options)

    def get(self, *arguments):
        return json.loads(self.kubectl("get", *arguments, "--output", "json").stdout)

    def helm(self, *arguments, **options):
        return self.call(HELM, "--namespace", NAMESPACE, *arguments, **options)

    def release(self, values, image=None):
        """Installs the release or changes it, and waits until it is ready."""
        repository, _, tag = (image or self.asked.image).rpartition(":")
        values = {**values, "image": {"repository": repository, "tag": tag, "pullPolicy": "Never"}}
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            json.dump(values, file)
            file.flush()
            options = ["--create-namespace", "--values", file.name, "--wait", "--timeout", "4m"]
            try:
                self.helm("upgrade", "--install", "kvpool", CHART, *options)
            except Failed as failed:
                raise Failed(f"{failed}\n{self.state()}") from failed

    def state(self):
        parts = [self.kubectl("get", "pods,pvc", "--output", "wide", check=False).stdout]
        parts.append(self.kubectl("get", "events", "--sort-by=.lastTimestamp", check=False).stdout[-3000:])
        for pod in self.get("pods")["items"]:
            name = pod["metadata"]["name"]
            log = self.kubectl("logs", name, "--all-containers", "--tail=15", check=False)
            parts.append(f"--- {name}\n{log.stdout}{log.stderr}")
        return "\n".join(parts)

    def remove(self, keep_volumes=False):
        self.helm("uninstall", "kvpool", "--wait", check=False)
        # Helm keeps the pod of a test that failed.
        self.kubectl("delete", "pod", "worker", "kvpool-test", "--ignore-not-found", "--grace-period=1")
        self.wait("the pods end", lambda: not self.get("pods")["items"], 180)
        if keep_volumes:
            return
        self.kubectl("delete", "pvc", "--all")
        # Volumes of the cluster's own class are emptied here. A provisioner of another cluster does it itself.
        if self.asked.own:
            cluster.empty_volumes()

    def wait(self, what, is_true, seconds=120):
        until = time.monotonic() + seconds
        while not is_true():
            if time.monotonic() > until:
                raise Failed(f"{what}: not after {seconds} s\n{self.state()}")
            time.sleep(0.5)

    def pods(self, component):
        label = f"app.kubernetes.io/component={component}"
        return [pod["metadata"]["name"] for pod in self.get("pods", "--selector", label)["items"]]

    def is_ready(self, component, count):
        label = f"app.kubernetes.io/component={component}"
        pods = self.get("pods", "--selector", label)["items"]
        ready = [
            pod
            for pod in pods
            if "deletionTimestamp" not in pod["metadata"]
            and any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions", []))
        ]
        return len(pods) == len(ready) == count

    def masters(self, count=1, scheme="http"):
        return ",".join(f"{scheme}://kvpool-master-{number}.{NAMESPACE}.svc:7070" for number in range(count))

    def start_worker(self, masters=1, user=0, account=None, scheme="http"):
        """A pod with kvctl and a shell, and with the directory of the store node's socket.

        With `account` it has the token of that service account, and the authority of the secured case.
        """
        manifest = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "worker"},
            "spec": {
                "restartPolicy": "Never",
                "terminationGracePeriodSeconds": 1,
                "containers": [
                    {
                        "name": "worker",
                        "image": self.asked.worker,
                        "imagePullPolicy": "Never",
                        "command": ["/bin/busybox", "sleep", "100000"],
                        "securityContext": {"runAsUser": user},
                        "env": [{"name": "KVPOOL_MASTER", "value": self.masters(masters, scheme)}],
                        "volumeMounts": [
                            {"name": "kvpool", "mountPath": "/run/kvpool"},
                            {"name": "work", "mountPath": "/scratch"},
                            {"name": "work", "mountPath": "/tmp"},
                        ],
                    }
                ],
                "volumes": [
                    {"name": "kvpool", "hostPath": {"path": f"/run/kvpool/{NAMESPACE}/kvpool"}},
                    {"name": "work", "emptyDir": {}},
                ],
            },
        }
        if account is not None:
            self.with_identity(manifest["spec"], account)
        self.kubectl("apply", "-f", "-", text=json.dumps(manifest))
        self.kubectl("wait", "pod/worker", "--for=condition=Ready", "--timeout=60s")

    @staticmethod
    def with_identity(spec, account):
        """As docs/operations/security.md says: a projected token, and the authority's certificates."""
        spec["serviceAccountName"] = account
        token = {"serviceAccountToken": {"audience": "kvpool", "expirationSeconds": 3600, "path": "token"}}
        authority = {"secretName": "kvpool-tls", "items": [{"key": "ca.crt", "path": "ca.crt"}]}
        spec["volumes"] += [
            {"name": "token", "projected": {"sources": [token]}},
            {"name": "tls", "secret": authority},
        ]
        [container] = spec["containers"]
        container["volumeMounts"] += [
            {"name": "token", "mountPath": "/var/run/secrets/kvpool", "readOnly": True},
            {"name": "tls", "mountPath": "/etc/kvpool/tls", "readOnly": True},
        ]
        container["env"] += [
            {"name": "KVPOOL_TOKEN_FILE", "value": "/var/run/secrets/kvpool/token"},
            {"name": "KVPOOL_TLS_CA", "value": "/etc/kvpool/tls/ca.crt"},
            {"name": "KVPOOL_TLS_SERVER_NAME", "value": "kvpool"},
        ]

    def shell(self, script, check=True, seconds=600):
        """Runs a script of the shell in the worker, with kvctl and the functions of `SHELL`."""
        command = ["exec", "worker", "--", "/bin/busybox", "sh", "-ec", SHELL + script]
        return self.kubectl(*command, check=check, seconds=seconds)

    def start_shell(self, script):
        """The same in the background."""
        shell = ["/bin/busybox", "sh", "-ec", SHELL + script]
        command = [KUBECTL, "--namespace", NAMESPACE, "exec", "worker", "--", *shell]
        return subprocess.Popen(
            [*self.prefix, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "KUBECONFIG": str(self.config)},
        )

    def kill(self, pod):
        self.kubectl("delete", "pod", pod, "--grace-period=0", "--force")


# A block's bytes follow from its key, so that a reader needs no other copy: `bytes KEY COUNT`.
SHELL = """
export PATH=/usr/local/bin:/bin HOME=/scratch
for applet in yes head cat cmp seq wc grep sleep rm; do eval "$applet() { busybox $applet \\"\\$@\\"; }"; done
bytes() { busybox yes "$1" | busybox head -c "$2"; }
put() { bytes "$1" "$2" | kvctl --timeout 60s put "$1" - > /dev/null; }
same() { kvctl --timeout 10s get "$1" > /scratch/got 2> /scratch/why && bytes "$1" "$2" | busybox cmp - /scratch/got; }
"""


def prepare(asked):
    """The images, in a cluster of our own."""
    if shutil.which(KUBECTL) is None or shutil.which(HELM) is None:
        sys.exit("helm and kubectl are needed: name them in KVPOOL_HELM and KVPOOL_KUBECTL")
    if asked.kubeconfig:
        if not (asked.image and asked.changed and asked.worker):
            sys.exit("a cluster that is given needs --image, --changed and --worker")
        asked.own = False
        return [], Path(asked.kubeconfig).resolve()
    asked.own = True
    if not asked.archive:
        sys.exit(__doc__)
    archive = Path(asked.archive).resolve()
    cluster.build()
    if not cluster.is_up():
        cluster.up()
    asked.image = "localhost/kvpool-test:first"
    asked.changed = "localhost/kvpool-test:changed"
    asked.worker = "localhost/kvpool-test:worker"
    cluster.images(archive, asked.image, asked.changed, asked.worker)
    return cluster.INSIDE, cluster.STATE / "kubeconfig"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option in ("--archive", "--kubeconfig", "--image", "--changed", "--worker"):
        parser.add_argument(option)
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("cases", nargs="*", choices=[[], *CASES])
    asked = parser.parse_args()
    prefix, config = prepare(asked)
    pool = Pool(asked, prefix, config)
    failed = 0
    chosen = asked.cases or list(CASES)
    try:
        for name in chosen:
            begun = time.monotonic()
            print(f"== {name}", flush=True)
            try:
                pool.remove()
                CASES[name](pool)
                print(f"passed {name} in {time.monotonic() - begun:.0f} s", flush=True)
            except (Failed, subprocess.TimeoutExpired, AssertionError) as problem:
                failed += 1
                print(f"FAILED {name}: {problem}", flush=True)
            except Exception:  # noqa: BLE001: a fault of one case must not end the others
                failed += 1
                print(f"FAILED {name}: {traceback.format_exc()}", flush=True)
    finally:
        if asked.own and not asked.keep:
            cluster.down()
    print(f"kubernetes: {len(chosen) - failed} passed, {failed} failed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
