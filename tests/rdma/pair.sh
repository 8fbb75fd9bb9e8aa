#!/bin/bash
# pair.sh IMAGE CASE [PROGRAM[=NAME]...]: two guests, with the host names a and b, on one Ethernet between
# them. Both run CASE, which tells by `hostname` which it is. Arguments and environment are those of
# run.sh, but a guest has one core unless GUEST_CORES says otherwise.
#
# Exit status: 0 when both guests said so; else that of the one that failed first, and the other is
# ended.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
guests=()
trap 'kill "${guests[@]}" 2> /dev/null || true; rm -rf "$work"' EXIT
trap 'exit 143' TERM INT HUP

# start NAME NUMBER LISTENS ARGUMENTS...: a guest in the background; its console with its name before
# each line.
start() {
  local name=$1 number=$2 listens=$3
  shift 3
  GUEST_NAME=$name GUEST_PAIR=yes GUEST_CORES=${GUEST_CORES:-1} \
    GUEST_DEVICES="-netdev stream,id=wire,server=$listens,addr.type=unix,addr.path=$work/wire
      -device virtio-net-pci,netdev=wire,mac=52:54:00:77:00:0$number,host_mtu=9000" \
    "$here/run.sh" "$@" > >(sed -u "s/^/$name| /") 2>&1 &
  guests+=($!)
}

start a 1 on "$@"
for _ in $(seq 100); do
  [ ! -S "$work/wire" ] || break
  sleep 0.1
done
start b 2 off "$@"

# The first that fails ends the other; after the first that succeeds, the other one's own time limit
# counts.
while [ ${#guests[@]} -gt 0 ]; do
  status=0
  wait -n -p ended "${guests[@]}" || status=$?
  [ "$status" = 0 ] || exit "$status"
  for index in "${!guests[@]}"; do
    [ "${guests[index]}" != "$ended" ] || unset "guests[index]"
  done
done
