# GB/s of kvpool's puts and gets beside those of perftest's ib_write_bw and ib_read_bw, between two guests:
# the master and the node on a, the client on b.
#: guests 2
#: programs release:kvctl release:kvmaster release:kvstore-node
#: limit 480
#: memory 2048
. /lib/guest.sh
. /lib/bandwidth.sh
transport=rdma

perftest before
case $(hostname) in
  a)
    start_pool 768MiB
    tell pool
    within 300 told measured || fail "b has not measured"
    ;;
  b)
    within 60 told pool || fail "a has no pool"
    kvpool --master http://a:7070
    tell measured
    ;;
esac
perftest after
[ "$(hostname)" = a ] || compare
