# Two nodes and a client in one guest, over RDMA: each node is killed in the middle of the work and comes
# back as another life of itself, and so is the client. What is asked: no wrong byte, no call past its
# deadline, work that goes on, and no queue pair or registration that is left behind.
#: guests 1
#: programs kvctl kvmaster kvstore-node
#: limit 240
. /lib/guest.sh
. /lib/worker.sh
transport=rdma
master=http://127.0.0.1:7070

deadline=10
block=262144
blocks=32

# start_node NAME PORT: one more node; the next port is its HTTP port.
start_node() {
  kvstore-node --insecure --master "$master" --listen "0.0.0.0:$2" --advertise "$own" \
    --http-listen "127.0.0.1:$(($2 + 1))" --name "$1" --segment 128MiB > "/tmp/$1.log" 2>&1 &
  eval "node_$1=$!"
  within 60 busybox wget -q -O /dev/null "http://127.0.0.1:$(($2 + 1))/readyz" 2> /dev/null ||
    { cat "/tmp/$1.log"; fail "$1 does not serve"; }
}

# resources KIND: how many queue pairs (qp) or registrations (mr) the device has.
resources() { rdma resource show | sed -n "s/.*rxe0:.* $1 \([0-9]*\).*/\1/p"; }

# settled KIND COUNT: whether there are so many.
settled() { [ "$(resources "$1")" = "$2" ]; }

start_pool 128MiB
start_node second 7082
qp=$(resources qp) mr=$(resources mr)
say "two nodes have $qp queue pairs and $mr registrations"

start_client || fail "the client has not reached the pool: $answer"
work 5
report "nobody killed"
[ "$right" -gt 0 ] && [ "$refused" = 0 ] || fail "blocks are missing where nothing has gone wrong"

for _round in 1 2 3; do
  { sleep 2; kill -9 "$node_second"; } &
  _killer=$!
  work 6 gone
  wait "$_killer"
  report "a node killed in the middle"
  start_node second 7082
  work 4
  report "after it"
  [ "$right" -gt 0 ] || fail "nothing goes on"
done

for _round in 1 2 3; do
  # In the middle of a put of many blocks, whose answer nobody waits for.
  request=$((request + 1))
  echo "{\"prefill\":{\"request\":$request,\"prompt\":{\"spans\":[{\"seed\":$request,\"tokens\":$((blocks * 16))}]}}}" >&3
  sleep 0.1
  kill -9 "$client"
  wait "$client" 2> /dev/null
  start_client || fail "no client reaches the pool: $answer"
  work 4
  report "after a client killed in the middle of a put"
  [ "$right" -gt 0 ] || fail "nothing goes on"
done

exec 3>&- 4<&-
wait "$client" 2> /dev/null
within 10 settled qp "$qp" || { rdma resource show; fail "$(resources qp) queue pairs are left, not $qp"; }
within 10 settled mr "$mr" || { rdma resource show; fail "$(resources mr) registrations are left, not $mr"; }
say "no client: $(resources qp) queue pairs and $(resources mr) registrations, as before"
