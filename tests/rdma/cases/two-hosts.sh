# Two hosts: the master and the node on a, a client on b that puts, gets and checks every byte, while
# the network between them is whole, is gone for a while, and loses packets. What is asked: no wrong
# byte, no call past its deadline, and work that goes on as soon as the network does.
#: guests 2
#: programs kvctl kvmaster kvstore-node
#: limit 420
. /lib/guest.sh
. /lib/worker.sh
transport=rdma
master=http://a:7070

deadline=10
block=65536
blocks=64

# lossy SHARE: so many percent of what this guest sends is lost; 0 for none.
lossy() {
  tc qdisc del dev eth0 root 2> /dev/null
  [ "$1" = 0 ] || tc qdisc add dev eth0 root netem loss "$1%" limit 10000
}

if [ "$(hostname)" = a ]; then
  start_pool 256MiB
  tell pool
  # What b asks for, until it is done.
  for share in 0.1 1 0; do
    within 300 told "lossy-$share" || fail "b has not come to losing $share %"
    lossy "$share"
    tell "lossy-$share"
  done
  within 300 told done || fail "b has not come to its end"
  exit 0
fi

within 60 told pool || fail "a has no pool"

start_client || fail "the client has not reached the pool: $answer"

work 10
report "network whole"
[ "$right" -gt 0 ] && [ "$refused" = 0 ] || fail "blocks are missing where nothing has gone wrong"

for down in 2 15; do
  { sleep 3; ip link set eth0 down; sleep "$down"; ip link set eth0 up; } &
  _link=$!
  work $((down + 6)) gone
  wait "$_link"
  report "network gone for $down s"
  within 30 told pool || fail "the network has not come back"
  work 5
  report "after it"
  [ "$right" -gt 0 ] || fail "nothing goes on"
done

for share in 0.1 1; do
  tell "lossy-$share"
  within 30 told "lossy-$share" || fail "a does not lose packets"
  lossy "$share"
  work 10
  report "$share % of packets lost each way"
  [ "$right" -gt 0 ] || fail "nothing goes on"
done
lossy 0
tell lossy-0
within 30 told lossy-0 || fail "a does not stop losing packets"
work 5
report "network whole again"
[ "$right" -gt 0 ] && [ "$refused" = 0 ] || fail "blocks are missing"
counters
tell done
# For as long as a may need to see it.
sleep 3
