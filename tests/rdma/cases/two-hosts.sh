# Two hosts: the master and the node on a, a client on b that puts, gets and checks every byte, while
# the network between them is whole, is gone for a while, and loses packets. What is asked: no wrong
# byte, no call past its deadline, and work that goes on as soon as the network does.
#: guests 2
#: programs kvctl kvmaster kvstore-node
#: limit 420
. /lib/guest.sh
transport=rdma

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

# start_client: a process of kvctl that takes one command a line and answers it. What it computes for a
# block is determined by the block's key, so that it can tell every wrong byte.
mkfifo /tmp/commands /tmp/answers
start_client() {
  exec 3>&- 4<&-
  kvctl worker --block-bytes "$block" --block-tokens 16 --master http://a:7070 \
    --transport "$transport" --timeout "${deadline}s" \
    < /tmp/commands > /tmp/answers 2> /tmp/client.log &
  exec 3> /tmp/commands 4< /tmp/answers
  ask ''
  case $answer in *'"ready"'*) return 0 ;; *) return 1 ;; esac
}

# ask COMMAND: its answer, in $answer.
ask() {
  [ -z "$1" ] || echo "$1" >&3
  read -r answer <&4 || { cat /tmp/client.log; fail "the client is gone"; }
}

# in_answer NAME: a number that the answer has.
in_answer() { echo "$answer" | sed -n "s/.*\"$1\":\([0-9]*\).*/\1/p"; }

# work SECONDS [gone]: new blocks put, each got back and checked, for so long. Only while the network is
# gone may a client find that it cannot reach the pool, and end; another one takes its place.
work() {
  _end=$(($(seconds) + $1))
  right=0 refused=0 slowest=0
  while [ "$(seconds)" -lt "$_end" ]; do
    request=$((request + 1))
    _prompt="{\"spans\":[{\"seed\":$request,\"tokens\":$((blocks * 16))}]}"
    for _command in "{\"prefill\":{\"request\":$request,\"prompt\":$_prompt}}" \
      "{\"decode\":{\"prompt\":$_prompt}}" "{\"release\":{\"request\":$request}}"; do
      _begin=$(seconds)
      ask "$_command"
      _took=$(($(seconds) - _begin))
      [ "$_took" -le "$slowest" ] || slowest=$_took
      # A prefill is three calls, each with its own deadline.
      [ "$_took" -le $((3 * deadline + 2)) ] || fail "$_took s for $_command"
      case $answer in
        *'"failed":{"message"'*'"unreachable":true'*)
          [ "${2:-}" = gone ] || fail "the client gave up: $answer"
          refused=$((refused + blocks))
          within $((3 * deadline)) start_client || fail "no client reaches the pool: $answer"
          break
          ;;
        *'"failed":{"message"'*) fail "the client failed: $answer" ;;
        *'"decoded"'*)
          [ "$(in_answer wrong)" = 0 ] || fail "wrong bytes: $answer"
          _checked=$(in_answer checked)
          right=$((right + _checked))
          refused=$((refused + blocks - _checked))
          ;;
        *'"prefilled"'*) [ "$(in_answer wrong)" = 0 ] || fail "wrong bytes: $answer" ;;
      esac
    done
  done
}

# report WHAT: a line about the work that was done.
report() {
  say "$1: $right blocks of $((block / 1024)) KiB right, $refused not there, slowest call $slowest s"
}

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
