# Memory of a process that its peers reach by address: what is so over TCP is so over RDMA, and what only
# RDMA can get wrong.
#: guests 1
#: programs test:transport/unit
#: limit 300
#: memory 2048
. /lib/guest.sh

# A second device, which the first one does not reach.
add_device rxe1 eth1 10.78.0.1/24

before=$(counter sent_pkts)
export KVPOOL_TEST_PEERS_OVER_RDMA=1
run_tests unit peer::
sent=$(($(counter sent_pkts) - before))
say "rxe0 sent $sent packets"
# 4096 bytes a packet: the largest of the tests alone needs so many.
[ "$sent" -gt 20000 ] || fail "the bytes have not gone over the device"
