# A disk of the device mapper holds its writes while a node is killed. The next life of the node waits for
# them: it is attached after they have ended, and never beside them. What was put before is read again.
#: guests 1
#: programs kvctl kvmaster kvstore-node
#: limit 280
. /lib/guest.sh
export KVPOOL_MASTER=http://127.0.0.1:7070
rounds=8

modprobe brd rd_nr=1 rd_size=131072
modprobe dm_mod
dmsetup --noudevsync --noudevrules create slow --table "0 262144 linear /dev/ram0 0" || fail "no device mapper"
disk=$(ls -d /dev/dm-*)

# start_node: a life of the node, whose process id is in $node and whose log is /tmp/life.
start_node() {
  kvstore-node --master "$KVPOOL_MASTER" --listen 127.0.0.1:7072 --http-listen 127.0.0.1:7073 --name one \
    --segment 8MiB --shm-path /tmp/one.sock --ssd "path=$disk" > /tmp/life 2>&1 &
  node=$!
}
serves() { busybox wget -q -O /dev/null http://127.0.0.1:7073/readyz 2> /dev/null; }
is_attached() { grep -q 'medium attached' /tmp/life; }

kvmaster --listen 127.0.0.1:7070 --http-listen 127.0.0.1:7071 --data-dir /tmp/master > /tmp/kvmaster.log 2>&1 &
within 30 busybox wget -q -O /dev/null http://127.0.0.1:7071/readyz 2> /dev/null || fail "kvmaster does not serve"
start_node
within 60 is_attached || { cat /tmp/life; fail "the disk is not attached"; }

for i in 1 2 3 4 5 6; do dd if=/dev/urandom of="/tmp/known$i" bs=1M count=1 2> /dev/null; done
load() {
  i=0
  while :; do
    i=$((i + 1))
    kvctl --timeout 5s put "load-$1-$((i % 20))" --upsert /tmp/known1 > /dev/null 2>&1
  done
}
load a & load b & 

right=0
for round in $(seq $rounds); do
  within 20 serves || fail "the node does not serve"
  # Blocks to read again. The load pushes them out of memory, to the disk.
  for i in 1 2 3 4 5 6; do kvctl --timeout 10s put "known$i" "/tmp/known$i" > /dev/null || fail "a put failed"; done
  sleep 3
  dmsetup --noudevsync suspend --noflush --nolockfs slow
  # Blocks are copied to the disk all the time: now some of these writes wait.
  sleep 2
  kill -9 "$node"
  start_node
  within 20 grep -q 'waiting for it' /tmp/life || { cat /tmp/life; fail "the new life did not wait"; }
  sleep 2
  # The process is gone by now, and the kernel still has its writes: the lock of the disk is theirs.
  grep -q 'disk opened' /tmp/life && fail "a new life has the disk beside a write"
  dmsetup --noudevsync resume slow
  within 30 is_attached || { cat /tmp/life; fail "the disk did not come back"; }
  for i in 1 2 3 4 5 6; do
    if kvctl --timeout 10s get "known$i" --to /tmp/got > /dev/null 2>&1; then
      cmp -s "/tmp/known$i" /tmp/got || fail "known$i has other bytes"
      right=$((right + 1))
    fi
  done
done
say "$rounds kills with writes held: each new life waited; $right gets of $((rounds * 6)) hit, all right"
[ "$right" -gt $rounds ] || fail "hardly a block was read again"
