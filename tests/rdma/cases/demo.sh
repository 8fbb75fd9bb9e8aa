# The whole of `kvctl demo` in one guest: a master, two nodes, four workers, every byte checked; and
# the device's own counters, which say by which way the bytes went.
#: guests 1
#: programs kvctl kvmaster kvstore-node
#: limit 180
. /lib/guest.sh
transport=rdma

rdma statistic show link rxe0/1 || true
packets=$(counter sent_pkts)
kvctl demo --transport "$transport" --requests 60 --block-size 64KiB --pool-size 128MiB \
  --timeout 30s --output json > /tmp/demo.json || fail "kvctl demo ended with $?"
packets=$(($(counter sent_pkts) - packets))
rdma statistic show link rxe0/1 || true
cat /tmp/demo.json

moved=$(($(number bytes_put /tmp/demo.json) + $(number bytes_got /tmp/demo.json)))
verified=$(number bytes_verified /tmp/demo.json)
[ "$(number wrong_blocks /tmp/demo.json)" = 0 ] || fail "wrong bytes"
[ "$verified" -gt 0 ] || fail "nothing was verified"
# The device counts packets, and none carries more than the path MTU.
carried=$((packets * 4096))
say "$moved bytes put and got, $verified verified; rxe0 sent $packets packets: at most $carried bytes"
if [ "$transport" = rdma ]; then
  [ "$carried" -ge "$moved" ] || fail "the device has not carried what was moved"
fi
