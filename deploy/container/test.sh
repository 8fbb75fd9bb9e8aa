#!/usr/bin/env bash
# Runs a small pool from an image as strictly as a cluster would, and puts and gets a block.
#
#   deploy/container/test.sh IMAGE
#
# Every container has: no capability, no new privileges, a read-only root, the default seccomp profile, and a
# network of their own that ends at their loopback interface.
set -euo pipefail
image=${1:?usage: test.sh IMAGE}
name=kvpool-test-$$
work=$(mktemp -d)
trap 'podman rm --force --time 1 $name-node $name-master > "$work/removed" 2>&1 || true; rm -rf "$work"' EXIT
strict=(--read-only --read-only-tmpfs=false --cap-drop all --security-opt no-new-privileges --pull never)

fail() {
    echo "FAILED: $*" >&2
    for container in $name-master $name-node; do podman logs --tail 20 "$container" >&2 || true; done
    exit 1
}
# As a worker: in the network and the process namespace of the node, with the directory of its socket.
kvctl() {
    podman run --rm --interactive "${strict[@]}" --network "container:$name-master" --pid "container:$name-node" \
        --volume "$work/run:/run/kvpool" "$image" kvctl "$@"
}

user=$(podman image inspect --format '{{.Config.User}}' "$image")
[ "$user" = 65532:65532 ] || fail "the image's user is '$user'"
for program in kvmaster kvstore-node kvctl; do
    podman run --rm "${strict[@]}" --network none "$image" "$program" --version || fail "$program does not start"
done
if podman run --rm "${strict[@]}" --network none "$image" /bin/sh -c true 2> /dev/null; then
    echo "note: the base has a shell, which nothing here needs"
else
    echo "the image has no shell"
fi

install --directory --owner 65532 --group 65532 "$work/run"
podman run --detach --name "$name-master" "${strict[@]}" --network none --tmpfs /data:mode=1777 \
    "$image" kvmaster --data-dir /data/kvmaster > "$work/id"
podman run --detach --name "$name-node" "${strict[@]}" --network "container:$name-master" \
    --volume "$work/run:/run/kvpool" "$image" \
    kvstore-node --name test --segment 64MiB --shm-path /run/kvpool/node.sock > "$work/id"
for _ in $(seq 60); do
    kvctl --output json status > "$work/status" 2> "$work/why" && grep -q '"test"' "$work/status" && break
    sleep 0.5
done
grep -q '"test"' "$work/status" || fail "the store node did not register: $(cat "$work/why")"

head -c 1000000 /dev/urandom > "$work/block"
kvctl put greeting - < "$work/block" || fail "kvctl put"
kvctl get greeting > "$work/copy" || fail "kvctl get"
cmp "$work/block" "$work/copy" || fail "the block came back with other bytes"
echo "put and got a block of 1000000 bytes: equal"
kvctl doctor > "$work/doctor" || fail "kvctl doctor: $(cat "$work/doctor")"
grep -q 'shm *taken' "$work/doctor" || fail "no shared memory: $(cat "$work/doctor")"
echo "kvctl in another container shares memory with the store node"

for container in $name-master $name-node; do
    pid=$(podman inspect --format '{{.State.Pid}}' "$container")
    uids=$(awk '/^Uid:/ {print $2, $3, $4, $5}' "/proc/$pid/status")
    [ "$uids" = "65532 65532 65532 65532" ] || fail "$container runs as $uids"
    capabilities=$(awk '/^Cap(Prm|Eff|Bnd):/ {print $2}' "/proc/$pid/status" | sort -u)
    [ "$capabilities" = 0000000000000000 ] || fail "$container has capabilities $capabilities"
done
echo "both daemons run as 65532 without a capability"

podman stop --time 60 "$name-node" "$name-master" > "$work/stopped"
for container in $name-node $name-master; do
    code=$(podman inspect --format '{{.State.ExitCode}}' "$container")
    [ "$code" = 0 ] || fail "$container ended with $code after SIGTERM"
done
echo "both daemons end with 0 after SIGTERM"
