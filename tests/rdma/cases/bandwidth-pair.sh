# GB/s of kvpool's puts and gets beside those of perftest's ib_write_bw and ib_read_bw, between two guests:
# the master and the node on a, the client on b.
#: guests 2
#: programs dist:kvbench dist:kvmaster dist:kvstore-node
#: limit 480
#: memory 2048
. /lib/guest.sh
. /lib/bandwidth.sh
transport=rdma

if [ "$(hostname)" = a ]; then
  start_pool 768MiB
  tell pool
else
  within 60 told pool || fail "a has no pool"
fi
perftest 1
for shape in $shapes; do
  if [ "$(hostname)" = a ]; then
    within 300 told "$shape" || fail "b has not measured"
  else
    kvpool "$shape" --master http://a:7070
    tell "$shape"
  fi
  perftest 1
done
# Last, because perftest with two queue pairs sometimes stands still between two guests, and the network with it.
perftest 2
perftest 2
[ "$(hostname)" = a ] || compare
