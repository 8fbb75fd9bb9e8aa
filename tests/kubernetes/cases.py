"""What holds on a real Kubernetes, case by case. Each begins without a release and without volumes."""

import json
import subprocess
import tempfile
import time
from pathlib import Path

MIB = 1 << 20
# The loads' timeouts are above the restart of the only master's pod. The kubelet of Kubernetes 1.20 looks every 10 s
# whether an ended pod may go, and took 28 s once on a busy host.
# Bytes of a put during an upgrade. All of them fit the nodes that are up, however long it takes.
LOAD = 16 << 10
# Requests that let all pods fit on one small host.
SMALL = {"cpu": "50m", "segments": ["64MiB"], "memoryOverhead": "192MiB"}
SMALL_MASTER = {"resources": {"requests": {"cpu": "50m", "memory": "64Mi"}, "limits": {"memory": "2Gi"}}}


def say(text):
    print(f"   {text}", flush=True)


def put_blocks(pool, keys, size):
    pool.shell(f"for key in {' '.join(keys)}; do put $key {size}; done")


def present(pool, keys, size):
    """The keys whose blocks are there with their bytes."""
    script = f"for key in {' '.join(keys)}; do if same $key {size}; then echo $key; fi; done"
    found = pool.shell(script).stdout.split()
    # The name of the key is printed after `cmp` found no difference.
    return [key for key in keys if key in found]


def check_test(pool):
    run = pool.helm("test", "kvpool", "--timeout", "3m", check=False)
    said = run.stdout
    if run.returncode != 0:
        containers = ("put", "get", "load", "remove")
        logs = [pool.kubectl("logs", "kvpool-test", "-c", name, check=False).stdout for name in containers]
        raise AssertionError("\n".join([said, run.stderr, *logs]))
    assert "Phase:          Succeeded" in said, said
    say("helm test: Succeeded")


def defaults(pool):
    """No values at all, on one host: test, demo, load from a pod, shared memory, and a killed pod of each kind."""
    pool.release({})
    check_test(pool)
    pool.start_worker()
    said = pool.shell("kvctl demo --requests 40 --pool-size 128MiB").stdout
    assert "wrong blocks           0" in said, said
    say("kvctl demo in a pod: wrong blocks 0")
    load = "kvctl --timeout 30s --output json bench --duration 5s --threads 2 --verify-every 1 --working-set 64MiB"
    report = json.loads(pool.shell(load).stdout)
    assert not lost(report), report
    say(f"kvctl bench from a pod, every block verified: {summary(report)}")
    doctor = pool.shell("kvctl doctor", check=False).stdout
    assert any("shm" in line and "taken" in line for line in doctor.splitlines()), doctor
    pool.shell("yes shared | head -c 1000000 > /scratch/block; kvctl --transport shm put shared /scratch/block")
    pool.shell("kvctl --transport shm get shared -o /scratch/copy; cmp /scratch/block /scratch/copy")
    say("a worker pod put and got a block with --transport shm")

    keys = [f"kept/{number}" for number in range(20)]
    put_blocks(pool, keys, 65536)
    [master] = pool.pods("master")
    pool.kill(master)
    pool.wait("the master is back", lambda: pool.is_ready("master", 1))
    kept = present(pool, keys, 65536)
    assert kept == keys, f"{len(kept)} of {len(keys)} blocks after the master was killed"
    say("kvmaster killed: 20 of 20 blocks are there")
    [node] = pool.pods("node")
    pool.kill(node)
    pool.wait("the node is back", lambda: pool.is_ready("node", 1))
    pool.shell("put again 65536; same again 65536")
    check_test(pool)
    say("kvstore-node killed: the pool takes blocks again")


def etcd(pool):
    """Two masters over etcd; the leader, the standby, a node and etcd itself are killed."""
    pool.release(two_masters({"kind": "StatefulSet", "replicas": 2, **SMALL}))
    pool.start_worker(masters=2)
    pool.wait("a standby follows", lambda: roles(pool) == ["leader", "standby"])
    check_test(pool)
    keys = [f"kept/{number}" for number in range(20)]
    put_blocks(pool, keys, 65536)
    for role in ("leader", "standby"):
        pod = pod_of(pool, role)
        begun = time.monotonic()
        pool.kill(pod)
        pool.shell(f"put after/{role} 65536")
        waited = time.monotonic() - begun
        kept = present(pool, keys, 65536)
        assert kept == keys, f"{len(kept)} of {len(keys)} after the {role} was killed"
        pool.wait("both masters are back", lambda: roles(pool) == ["leader", "standby"])
        say(f"{role} {pod} killed: a put ended after {waited:.1f} s, 20 of 20 blocks are there")
    pool.kill("kvpool-etcd-0")
    pool.shell("put after/etcd 65536")
    kept = present(pool, keys, 65536)
    assert kept == keys, f"{len(kept)} of {len(keys)} after etcd was killed"
    say("etcd killed: the next put succeeds, 20 of 20 blocks are there")
    pool.kill("kvpool-node-1")
    pool.wait("the node is back", lambda: pool.is_ready("node", 2))
    check_test(pool)


def upgrade(pool):
    """helm upgrade to a changed image under load, with two masters over etcd and with one on its embedded store."""
    nodes = {"kind": "StatefulSet", "replicas": 3, **SMALL}
    for name, values, masters in (
        ("two masters over etcd", two_masters(nodes), 2),
        ("one master on its embedded store", {"master": SMALL_MASTER, "node": nodes}, 1),
    ):
        pool.remove()
        pool.release(values)
        pool.start_worker(masters=masters)
        keys = [f"early/{number}" for number in range(60)]
        put_blocks(pool, keys, 262144)
        pool.shell("rm -f /scratch/stop /scratch/report.*; : > /scratch/acknowledged; : > /scratch/failed")
        puts = pool.start_shell(
            "number=0; while [ ! -e /scratch/stop ]; do number=$((number + 1)); "
            f"if put load/$number {LOAD} 2>> /scratch/failed; then echo load/$number >> /scratch/acknowledged; fi; done"
        )
        load = pool.start_shell(
            "number=0; while [ ! -e /scratch/stop ]; do number=$((number + 1)); "
            "kvctl --timeout 60s bench --duration 5s --threads 1 --batch 4 --block-size 64KiB --working-set 8MiB "
            "--verify-every 1 --json /scratch/report.$number > /scratch/bench 2>&1 "
            "|| cat /scratch/bench >> /scratch/failed; done"
        )
        begun = time.monotonic()
        pool.release(values, image=pool.asked.changed)
        pool.wait("every pod has the changed image", lambda: images(pool) == {pool.asked.changed})
        seconds = time.monotonic() - begun
        time.sleep(3)
        pool.shell("echo > /scratch/stop")
        puts.communicate(timeout=120)
        load.communicate(timeout=120)
        reports = [json.loads(text) for text in pool.shell(
            "for file in /scratch/report.*; do busybox tr -d '\\n' < $file; echo; done"
        ).stdout.splitlines()]
        bad = [problem for report in reports if (problem := lost(report))]
        assert reports and not bad, f"{len(reports)} loads, with {bad}"
        blocks = sum(part["blocks"] for report in reports for part in made(report).values())
        failed = pool.shell("cat /scratch/failed").stdout.strip()
        assert not failed, f"puts failed: {failed[:1000]}"
        written = pool.shell("cat /scratch/acknowledged").stdout.split()
        assert len(written) > 20, f"only {len(written)} puts in {seconds:.0f} s"
        lost_keys = sorted(set(keys) - set(present(pool, keys, 262144)))
        lost_keys += sorted(set(written) - set(present(pool, written, LOAD)))
        assert not lost_keys, f"{len(lost_keys)} of {len(keys) + len(written)} keys are lost: {lost_keys[:20]}"
        say(f"{name}: upgraded in {seconds:.0f} s under {len(reports)} loads with {blocks} blocks put and got, none "
            f"failed; {len(written)} further puts, 0 failed; 0 of {len(keys) + len(written)} keys lost")


def scale(pool):
    """A StatefulSet of three nodes shrinks to two: the leaving node's blocks in the top half by use are still hits."""
    values = {"master": SMALL_MASTER, "node": {"kind": "StatefulSet", "replicas": 3, **SMALL}}
    pool.release(values)
    pool.start_worker()
    keys = [f"block/{number}" for number in range(160)]
    put_blocks(pool, keys, MIB)
    on_node = pool.shell(
        f"for key in {' '.join(keys)}; do "
        "if kvctl --output json describe $key | grep -q kvpool-node-2; then echo $key; fi; done"
    ).stdout.split()
    hot = [key for key in keys if int(key.split("/")[1]) % 2 == 0]
    assert present(pool, hot, MIB) == hot
    leaving = [key for key in on_node if key in hot]
    assert len(leaving) >= 10, f"only {len(leaving)} hot blocks on the node: {len(on_node)} blocks there"
    values["node"]["replicas"] = 2
    begun = time.monotonic()
    pool.release(values)
    pool.wait("the node is gone", lambda: pool.is_ready("node", 2), 200)
    seconds = time.monotonic() - begun
    hits = present(pool, leaving, MIB)
    share = len(hits) / len(leaving)
    say(f"scale-in in {seconds:.0f} s: {len(hits)} of {len(leaving)} hot blocks of the node are hits, "
        f"of {len(on_node)} blocks there and {len(keys)} in the pool")
    assert share >= 0.9, f"{share:.2f}"


def reinstall(pool):
    """Uninstalled and installed again: blocks on SSD and the embedded metadata are found in the kept volumes."""
    ssd = {"enabled": True, "volume": "claim", "claim": {"size": "1Gi"}, "size": "512MiB"}
    values = {"master": SMALL_MASTER, "node": {"kind": "StatefulSet", "replicas": 2, **SMALL, "ssd": ssd}}
    pool.release(values)
    pool.start_worker()
    keys = [f"kept/{number}" for number in range(60)]
    put_blocks(pool, keys, MIB)
    cluster_id = json.loads(pool.shell("kvctl --output json cluster").stdout)["cluster_id"]
    pool.remove(keep_volumes=True)
    claims = sorted(claim["metadata"]["name"] for claim in pool.get("pvc")["items"])
    assert claims == ["data-kvpool-master-0", "ssd-kvpool-node-0", "ssd-kvpool-node-1"], claims
    say(f"uninstalled; kept {', '.join(claims)}")
    pool.release(values)
    pool.start_worker()
    again = json.loads(pool.shell("kvctl --output json cluster").stdout)["cluster_id"]
    assert again == cluster_id, (again, cluster_id)
    kept = present(pool, keys, MIB)
    assert kept == keys, f"{len(kept)} of {len(keys)} blocks"
    say(f"installed again: the same pool {again}, {len(kept)} of {len(keys)} blocks")
    check_test(pool)


def secured(pool):
    """TLS and tokens of service accounts, two masters over etcd: a pod with the right account works, others do not."""
    issuer = json.loads(pool.kubectl("get", "--raw", "/.well-known/openid-configuration").stdout)["issuer"]
    with tempfile.TemporaryDirectory() as folder:
        secrets(pool, Path(folder))
    tls = {"secretName": "kvpool-tls", "serverName": "kvpool"}
    security = {
        "insecure": False,
        "tls": tls,
        "tokens": {"configMapName": "kvpool-auth", "issuer": issuer},
    }
    ssd = {"enabled": True, "volume": "claim", "claim": {"size": "1Gi"}, "size": "512MiB"}
    values = two_masters({"kind": "StatefulSet", "replicas": 2, **SMALL, "ssd": ssd})
    pool.release({**values, "security": security})
    check_test(pool)

    def start(account):
        pool.kubectl("delete", "pod", "worker", "--ignore-not-found", "--grace-period=1")
        found = pool.kubectl("get", "serviceaccount", account, check=False).returncode == 0
        if not found:
            pool.kubectl("create", "serviceaccount", account)
        pool.start_worker(masters=2, account=account, scheme="https")

    start("team-a")
    team = "export KVPOOL_NAMESPACE=team-a; "
    keys = [f"kept/{number}" for number in range(20)]
    pool.shell(f"{team} for key in {' '.join(keys)}; do put $key {MIB}; done")

    def kept():
        script = f"{team} for key in {' '.join(keys)}; do if same $key {MIB}; then echo $key; fi; done"
        return pool.shell(script).stdout.split()

    assert kept() == keys
    load = "kvctl --timeout 30s --output json bench --duration 5s --threads 2 --verify-every 1 --working-set 64MiB"
    report = json.loads(pool.shell(team + load).stdout)
    assert not lost(report), report
    say(f"a pod of team-a put and got {len(keys)} blocks; {summary(report)}, every block verified")

    refused(pool, "kvctl --namespace default put foreign /etc/hostname", "forbidden")
    refused(pool, f"{team} kvctl rm --all", "forbidden")
    refused(pool, f"{team} busybox env -u KVPOOL_TOKEN_FILE kvctl get kept/0 --to /scratch/copy", "unauthenticated")
    plain = pool.masters(2)
    refused(pool, f"{team} kvctl --timeout 5s --master {plain} get kept/0 --to /scratch/copy", "unreachable")
    say("refused: another namespace (forbidden), no token (unauthenticated), a plain connection (unreachable)")

    leader = pool.get("pods", "--selector", "app.kubernetes.io/component=master")["items"][0]["metadata"]["name"]
    for pod in (leader, "kvpool-node-1"):
        pool.kill(pod)
        pool.shell(f"{team} put after/{pod} 65536")
        pool.wait(f"{pod} is back", lambda: pool.is_ready("master", 2) and pool.is_ready("node", 2))
    there = kept()
    assert len(there) >= len(keys) // 4, f"{len(there)} of {len(keys)} blocks after the kills of a master and a node"
    say(f"{leader} and kvpool-node-1 killed: they register again with their tokens; puts go on")

    start("stranger")
    refused(pool, f"{team} kvctl get kept/0 --to /scratch/copy", "forbidden")
    say("a pod of another service account is refused (forbidden)")


def refused(pool, script, code):
    """The command fails with this code and with nothing else."""
    run = pool.shell(f"{script} 2>&1", check=False)
    assert run.returncode != 0 and code in run.stdout, f"{script}: {run.returncode} {run.stdout}{run.stderr}"


POLICY = """
[[rule]]
subject = "system:serviceaccount:kvpool:kvpool-node"
roles = ["node"]

[[rule]]
subject = "system:serviceaccount:kvpool:kvpool-master"
roles = ["operator"]

[[rule]]
subject = "system:serviceaccount:kvpool:default"
roles = ["writer"]
namespaces = ["default"]

[[rule]]
subject = "system:serviceaccount:kvpool:team-a"
roles = ["writer"]
namespaces = ["team-a"]
"""


def secrets(pool, folder):
    """The certificates and the policy of docs/operations/security.md, with the keys of the cluster."""

    def openssl(*arguments):
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    openssl("req", "-x509", *key, "-subj", "/CN=kvpool-ca", "-days", "2", "-keyout", "ca.key", "-out", "ca.pem")
    openssl("req", *key, "-subj", "/CN=kvpool", "-keyout", "pool.key", "-out", "pool.csr")
    (folder / "pool.ext").write_text("subjectAltName=DNS:kvpool\nextendedKeyUsage=serverAuth,clientAuth\n")
    authority = ["-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "pool.ext"]
    openssl("x509", "-req", "-in", "pool.csr", *authority, "-out", "pool.pem")
    (folder / "jwks.json").write_text(pool.kubectl("get", "--raw", "/openid/v1/jwks").stdout)
    (folder / "policy.toml").write_text(POLICY)
    if pool.kubectl("get", "namespace", "kvpool", check=False).returncode != 0:
        pool.kubectl("create", "namespace", "kvpool")
    files = {"ca.crt": "ca.pem", "tls.crt": "pool.pem", "tls.key": "pool.key"}
    secret = [f"--from-file={name}={folder / file}" for name, file in files.items()]
    pool.kubectl("delete", "secret/kvpool-tls", "configmap/kvpool-auth", "--ignore-not-found")
    pool.kubectl("create", "secret", "generic", "kvpool-tls", *secret)
    files = [f"--from-file={folder / name}" for name in ("jwks.json", "policy.toml")]
    pool.kubectl("create", "configmap", "kvpool-auth", *files)


def two_masters(node):
    trial = {"enabled": True, "image": "localhost/kvpool-test:etcd", "storage": {"size": "1Gi"}}
    master = {**SMALL_MASTER, "store": "etcd", "replicas": 2}
    return {"master": master, "node": node, "etcd": {"trial": trial}}


def members(pool):
    run = pool.shell("kvctl --timeout 5s --output json cluster", check=False)
    return json.loads(run.stdout)["members"] if run.returncode == 0 and run.stdout else []


def roles(pool):
    return sorted(master["role"] for master in members(pool))


def pod_of(pool, role):
    [address] = [master["address"] for master in members(pool) if master["role"] == role]
    return address.removeprefix("http://").split(".")[0]


def images(pool):
    found = set()
    for pod in pool.pods("master") + pool.pods("node"):
        found.add(pool.get("pod", pod)["spec"]["containers"][0]["image"])
    return found


def made(report):
    """The kinds of calls that a load made. A load has one call alone if this call waited until the load's end."""
    return {name: report[name] for name in ("put", "get") if report[name] is not None}


def lost(report):
    """What a report of kvctl bench has of blocks that failed, that the pool lost, or that had wrong bytes."""
    found = {name: {**part["failed"], "evicted": part["evicted"]} for name, part in made(report).items()}
    found["wrong"] = {"blocks": report["wrong_blocks"]}
    return {name: part for name, part in found.items() if any(part.values())}


def summary(report):
    return ", ".join(f"{report[name]['blocks']} blocks {what}" for name, what in (("put", "put"), ("get", "got")))


CASES = {
    "defaults": defaults,
    "etcd": etcd,
    "upgrade": upgrade,
    "scale": scale,
    "reinstall": reinstall,
    "secured": secured,
}
