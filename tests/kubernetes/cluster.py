#!/usr/bin/env python3
"""A real Kubernetes of one node on this machine, in a network namespace that reaches nothing outside. Its commands:

* cluster.py build           builds Kubernetes 1.20.2 from Debian's source, once; 6 to 12 minutes.
* cluster.py up              starts it (20 s); needs root.
* cluster.py load ARCHIVE    imports an image.
* cluster.py down            ends it and removes its state.

KVPOOL_KUBERNETES (/var/cache/kvpool-kubernetes) keeps the programs, KVPOOL_KUBERNETES_STATE (/tmp/kvpool-kubernetes)
the state: `kubeconfig`, the logs, the volumes. Commands for the cluster run in the network namespace `kvpool-k8s`.
"""

import glob
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
CACHE = Path(os.environ.get("KVPOOL_KUBERNETES", "/var/cache/kvpool-kubernetes"))
STATE = Path(os.environ.get("KVPOOL_KUBERNETES_STATE", "/tmp/kvpool-kubernetes"))
PROGRAMS = ["kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy"]
SPACE = "kvpool-k8s"
INSIDE = ["nsenter", f"--net=/run/netns/{SPACE}"]
NODE = "10.200.0.1"
API = "https://127.0.0.1:16443"
TOKEN = "administrator"
PAUSE = "localhost/pause:3.1"
# Volumes of the default storage class, each a directory. The local volume plugin gives them to a pod's group.
VOLUMES = 12
PACKAGES = """golang-1.19-go rsync etcd-server containerd runc containernetworking-plugins iptables conntrack catatonit
buildah iproute2 golang-github-modern-go-reflect2-dev""".split()


def call(*command, **options):
    return subprocess.run([str(part) for part in command], check=True, **options)


def quiet(*command):
    """Whether a command succeeds; its output goes to the log of the cluster."""
    with open(STATE / "commands.log", "a") as log:
        return subprocess.run([str(part) for part in command], stdout=log, stderr=log, check=False).returncode == 0


def build():
    programs = CACHE / "bin"
    if all((programs / program).exists() for program in PROGRAMS):
        return
    programs.mkdir(parents=True, exist_ok=True)
    call("apt-get", "install", "--yes", "--no-install-recommends", *PACKAGES, stdout=subprocess.DEVNULL)
    # Sources of their own: the machine's need not list source packages.
    lists, archives = CACHE / "lists/partial", CACHE / "archives/partial"
    for folder in (lists, archives):
        folder.mkdir(parents=True, exist_ok=True)
    uris = [
        line.split()[1]
        for file in glob.glob("/etc/apt/sources.list.d/*.sources")
        for line in Path(file).read_text().splitlines()
        if line.startswith("URIs")
    ]
    sources = CACHE / "kubernetes.sources"
    key = "/usr/share/keyrings/debian-archive-keyring.gpg"
    sources.write_text(f"Types: deb-src\nURIs: {uris[0]}\nSuites: bookworm\nComponents: main\nSigned-By: {key}\n")
    options = [f"Dir::Etc::SourceList={sources}", "Dir::Etc::SourceParts=-", f"Dir::State::Lists={lists.parent}"]
    apt = ["apt-get", *[part for option in options for part in ("-o", option)]]
    call(*apt, "--quiet", "update")
    call(*apt, "--quiet", "source", "--download-only", "kubernetes", cwd=CACHE)
    with tempfile.TemporaryDirectory(dir=CACHE) as work:
        call("tar", "-xzf", *CACHE.glob("kubernetes_*.orig.tar.gz"), "-C", work)
        tree = Path(work) / "kubernetes-1.20.2"
        # The vendored copy crashes under this Go. Debian's own does not.
        vendored = tree / "vendor/github.com/modern-go/reflect2"
        for file in [*vendored.glob("*.go"), *vendored.glob("*.s")]:
            file.unlink()
        for file in Path("/usr/share/gocode/src/github.com/modern-go/reflect2").glob("*.[gs]*"):
            if file.suffix in (".go", ".s") and not file.name.endswith("_test.go"):
                shutil.copy(file, vendored)
        place = tree / ".go/src/k8s.io/kubernetes"
        place.parent.mkdir(parents=True)
        place.symlink_to(tree)
        variables = {
            **os.environ,
            "GOPATH": str(tree / ".go"),
            "PATH": "/usr/lib/go-1.19/bin:" + os.environ["PATH"],
            "CGO_ENABLED": "0",
            "HOME": work,
            "KUBE_GIT_VERSION": "v1.20.2",
            # `make` asks the shell for the directory, and a link must not be resolved.
            "PWD": str(place),
        }
        for program in PROGRAMS:
            call("make", "-C", place, f"WHAT=cmd/{program}", env=variables, cwd=place)
            shutil.copy(tree / "_output/local/bin/linux/amd64" / program, programs)


class Starter:
    """Starts the parts and notes their process ids."""

    def __init__(self):
        self.ids = []

    def start(self, name, *command):
        with open(STATE / f"{name}.log", "w") as log:
            process = subprocess.Popen(
                [*INSIDE, *[str(part) for part in command]], cwd=STATE, stdout=log, stderr=log, start_new_session=True
            )
        self.ids.append(process.pid)
        (STATE / "pids").write_text("\n".join(map(str, self.ids)))

    def kubernetes(self, program, *flags):
        self.start(program, CACHE / "bin" / program, *flags)


def wait(what, is_true, seconds=60):
    until = time.monotonic() + seconds
    while not is_true():
        if time.monotonic() > until:
            sys.exit(f"{what}: not after {seconds} s; the logs are in {STATE}")
        time.sleep(0.3)


def network():
    quiet("ip", "netns", "add", SPACE)
    inside = ["ip", "-n", SPACE]
    quiet(*inside, "link", "set", "lo", "up")
    quiet(*inside, "link", "add", "eth0", "type", "veth", "peer", "name", "nowhere")
    quiet(*inside, "addr", "add", f"{NODE}/24", "dev", "eth0")
    for link in ("eth0", "nowhere"):
        quiet(*inside, "link", "set", link, "up")
    # kube-proxy wants a default route. Nobody answers at its end.
    quiet(*inside, "route", "replace", "default", "via", "10.200.0.254", "dev", "eth0")
    plugins = [
        {
            "type": "bridge",
            "bridge": "pods0",
            "isGateway": True,
            "hairpinMode": True,
            "ipam": {
                "type": "host-local",
                "ranges": [[{"subnet": "10.244.0.0/24"}]],
                "routes": [{"dst": "0.0.0.0/0"}],
                "dataDir": str(STATE / "addresses"),
            },
        },
        {"type": "portmap", "capabilities": {"portMappings": True}},
    ]
    (STATE / "cni").mkdir(exist_ok=True)
    network = {"cniVersion": "0.4.0", "name": "pods", "plugins": plugins}
    (STATE / "cni/pods.conflist").write_text(json.dumps(network))


def kubeconfig():
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "test", "cluster": {"server": API, "insecure-skip-tls-verify": True}}],
        "users": [{"name": "test", "user": {"token": TOKEN}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        "current-context": "test",
    }
    (STATE / "kubeconfig").write_text(json.dumps(config))


def containerd():
    (STATE / "containerd.toml").write_text(f"""version = 2
root = "{STATE}/containerd/root"
state = "{STATE}/containerd/state"
[grpc]
  address = "{STATE}/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE}"
  restrict_oom_score_adj = true
  disable_apparmor = true
[plugins."io.containerd.grpc.v1.cri".cni]
  bin_dir = "/usr/lib/cni"
  conf_dir = "{STATE}/cni"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
""")


def pause():
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(shutil.which("catatonit"), Path(folder) / "pause")
        lines = ["FROM scratch", "COPY pause /pause", 'ENTRYPOINT ["/pause", "-P"]']
        (Path(folder) / "Containerfile").write_text("\n".join(lines))
        call("buildah", "bud", "--quiet", "--tag", PAUSE, folder, stdout=subprocess.DEVNULL)
        archive = Path(folder) / "pause.tar"
        call("buildah", "push", "--quiet", PAUSE, f"docker-archive:{archive}:{PAUSE}")
        load(archive)


def load(archive):
    call("ctr", "--address", STATE / "containerd.sock", "--namespace", "k8s.io", "images", "import", archive)


def images(archive, first, changed, worker):
    """Makes the images of the tests from the programs' image, and imports them."""
    busybox = shutil.which("busybox") or sys.exit("busybox is missing (Debian: busybox-static)")
    if b"statically linked" not in call("file", busybox, capture_output=True).stdout:
        sys.exit(f"{busybox} needs libraries: install busybox-static")
    source = f"{'oci' if is_oci(archive) else 'docker'}-archive:{archive}"
    base = call("buildah", "pull", "--quiet", source, capture_output=True, text=True).stdout.strip()
    etcd = first.rpartition(":")[0] + ":etcd"
    recipes = {
        first: [f"FROM {base}"],
        changed: [f"FROM {base}", "LABEL changed=yes"],
        worker: [f"FROM {base}", "COPY busybox /bin/busybox"],
        etcd: [f"FROM {base}", "COPY etcd /usr/local/bin/etcd"],
    }
    with tempfile.TemporaryDirectory() as folder:
        for program in (busybox, shutil.which("etcd")):
            shutil.copy(program, folder)
        for name, lines in recipes.items():
            (Path(folder) / "Containerfile").write_text("\n".join(lines))
            call("buildah", "bud", "--quiet", "--isolation", "chroot", "--tag", name, folder, stdout=subprocess.DEVNULL)
            made = Path(folder) / "image.tar"
            call("buildah", "push", "--quiet", name, f"docker-archive:{made}:{name}")
            load(made)
            made.unlink()


def is_oci(archive):
    names = call("tar", "-tf", archive, capture_output=True, text=True).stdout.split()
    return any(name.removeprefix("./") == "oci-layout" for name in names)


def is_up():
    config = STATE / "kubeconfig"
    if not config.exists():
        return False
    command = [os.environ.get("KVPOOL_KUBECTL", "kubectl"), "--kubeconfig", config, "get", "nodes"]
    return quiet(*INSIDE, *command)


def kubectl(*arguments, **options):
    kubectl = os.environ.get("KVPOOL_KUBECTL", "kubectl")
    return call(*INSIDE, kubectl, "--kubeconfig", STATE / "kubeconfig", *arguments, **options)


def storage():
    """A default storage class whose volumes exist already."""
    things = [
        {
            "apiVersion": "storage.k8s.io/v1",
            "kind": "StorageClass",
            "metadata": {
                "name": "local",
                "annotations": {"storageclass.kubernetes.io/is-default-class": "true"},
            },
            "provisioner": "kubernetes.io/no-provisioner",
            "volumeBindingMode": "WaitForFirstConsumer",
        }
    ]
    host = [{"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": ["node1"]}]}]
    for number in range(VOLUMES):
        folder = STATE / f"volumes/{number}"
        folder.mkdir(parents=True, exist_ok=True)
        things.append(
            {
                "apiVersion": "v1",
                "kind": "PersistentVolume",
                "metadata": {"name": f"volume-{number}"},
                "spec": {
                    "capacity": {"storage": "500Gi"},
                    "accessModes": ["ReadWriteOnce"],
                    "storageClassName": "local",
                    "persistentVolumeReclaimPolicy": "Retain",
                    "local": {"path": str(folder)},
                    "nodeAffinity": {"required": {"nodeSelectorTerms": host}},
                },
            }
        )
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": things})
    kubectl("apply", "-f", "-", input=text, text=True, stdout=subprocess.DEVNULL)


def empty_volumes():
    """Makes the released volumes empty and free again."""
    kubectl("delete", "pv", "--all", stdout=subprocess.DEVNULL)
    shutil.rmtree(STATE / "volumes")
    storage()


def up():
    STATE.mkdir(parents=True, exist_ok=True)
    os.chdir(STATE)
    network()
    kubeconfig()
    containerd()
    if not Path("accounts.key").exists():
        call("openssl", "genrsa", "-out", "accounts.key", "2048", stderr=subprocess.DEVNULL)
    Path("tokens.csv").write_text(f'{TOKEN},administrator,1,"system:masters"\n')
    parts = Starter()
    etcd = "http://127.0.0.1:12379"
    parts.start(
        "etcd", "etcd", "--data-dir=etcd", f"--listen-client-urls={etcd}", f"--advertise-client-urls={etcd}",
        "--listen-peer-urls=http://127.0.0.1:12380",
    )
    parts.kubernetes(
        "kube-apiserver", f"--etcd-servers={etcd}", "--bind-address=127.0.0.1", "--secure-port=16443",
        f"--advertise-address={NODE}", "--cert-dir=certificates", "--service-cluster-ip-range=10.96.0.0/16",
        "--service-account-issuer=https://test", "--service-account-signing-key-file=accounts.key",
        "--service-account-key-file=accounts.key", "--token-auth-file=tokens.csv", "--authorization-mode=RBAC",
        "--allow-privileged=true", "--kubelet-preferred-address-types=InternalIP",
    )
    authorized = ["-sk", "-H", f"Authorization: Bearer {TOKEN}", "--fail"]
    wait("the API server", lambda: quiet(*INSIDE, "curl", *authorized, f"{API}/readyz"), 120)
    access = ["--kubeconfig=kubeconfig"]
    alone = [*access, "--bind-address=127.0.0.1", "--leader-elect=false"]
    parts.kubernetes("kube-controller-manager", *alone, "--service-account-private-key-file=accounts.key")
    parts.kubernetes("kube-scheduler", *alone)
    parts.start("dns", sys.executable, HERE / "dns.py", NODE, API, TOKEN)
    parts.start("containerd", "containerd", "--config", "containerd.toml")
    wait("containerd", lambda: quiet("ctr", "--address", STATE / "containerd.sock", "version"))
    pause()
    parts.kubernetes(
        "kubelet", *access, "--container-runtime=remote",
        f"--container-runtime-endpoint=unix://{STATE}/containerd.sock", f"--root-dir={STATE}/kubelet",
        f"--cert-dir={STATE}/kubelet-certificates", "--cgroup-driver=cgroupfs", "--fail-swap-on=false",
        "--oom-score-adj=0", f"--node-ip={NODE}", "--hostname-override=node1", "--authorization-mode=AlwaysAllow",
        "--anonymous-auth=true", "--eviction-hard=nodefs.available<1%",
        "--image-gc-high-threshold=100", f"--cluster-dns={NODE}",
        "--cluster-domain=cluster.local",
    )
    parts.kubernetes(
        "kube-proxy", *access, "--proxy-mode=iptables", "--cluster-cidr=10.244.0.0/16",
        "--hostname-override=node1", f"--bind-address={NODE}", "--oom-score-adj=0", "--conntrack-max-per-core=0",
        "--conntrack-tcp-timeout-established=0s", "--conntrack-tcp-timeout-close-wait=0s",
    )
    storage()

    def ready():
        answer = kubectl("get", "nodes", capture_output=True, text=True).stdout
        return " Ready" in answer

    wait("the node", ready, 120)


def end(process, kind):
    try:
        os.kill(process, kind)
    except ProcessLookupError:
        return False
    return True


def down():
    config = STATE / "kubeconfig"
    if config.exists():
        command = ["timeout", "20", os.environ.get("KVPOOL_KUBECTL", "kubectl"), "--kubeconfig", config]
        quiet(*INSIDE, *command, "delete", "pods", "--all", "-A", "--grace-period=0", "--force")
    pids = STATE / "pids"
    ids = [int(line) for line in pids.read_text().split()] if pids.exists() else []
    for process in reversed(ids):
        end(process, signal.SIGTERM)
    time.sleep(3)
    # The shims of containers outlive containerd. Their command line names its socket.
    for command in glob.glob("/proc/[0-9]*/cmdline"):
        try:
            line = Path(command).read_bytes()
        except OSError:
            continue
        if b"containerd-shim" in line and str(STATE / "containerd.sock").encode() in line:
            end(int(command.split("/")[2]), signal.SIGKILL)
    for process in ids:
        end(process, signal.SIGKILL)
    time.sleep(1)
    mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    for mount in sorted((mount for mount in mounts if mount.startswith(str(STATE))), reverse=True):
        subprocess.run(["umount", "--lazy", mount], check=False)
    subprocess.run(["ip", "netns", "del", SPACE], check=False)
    shutil.rmtree(STATE, ignore_errors=True)


def main():
    commands = {"build": build, "up": up, "down": down}
    match sys.argv[1:]:
        case ["load", archive]:
            load(archive)
        case [name] if name in commands:
            commands[name]()
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
