# What the scripts that run inside a guest share; they begin with `. /lib/guest.sh`.
#
# In a guest there is `eth0`, with 9000 bytes to a frame and an address: 10.77.0.1 in a single guest
# and in guest a of a pair, 10.77.0.2 in guest b. `rxe0` is a RoCE device on it.

address_a=10.77.0.1
address_b=10.77.0.2
case $(hostname) in b) own=$address_b ;; *) own=$address_a ;; esac

# say WORDS: a line on the console that stands out.
say() { echo "== $*"; }

# fail WORDS: ends the case.
fail() { echo "FAILED: $*"; exit 1; }

# skip WORDS: ends the case, which was not to be had here. The status is the one that says so.
skip() { echo "SKIPPED: $*"; exit 77; }

# seconds: how long the guest has been up, in whole seconds.
seconds() { cut -d. -f1 /proc/uptime; }

# within SECONDS COMMAND...: tries a command until it succeeds; whether it did in time.
within() {
  _until=$(($(seconds) + $1)); shift
  while ! "$@"; do
    [ "$(seconds)" -lt "$_until" ] || return 1
    sleep 0.2
  done
}

# add_device NAME LINK ADDRESS/BITS: one more RoCE device, on an Ethernet device of its own.
add_device() {
  ip link add "$2" type dummy
  ip addr add "$3" dev "$2"
  ip link set "$2" mtu 9000 up
  rdma link add "$1" type rxe netdev "$2"
}

# counter NAME [DEVICE]: one of a RoCE device's counters; 0 where this kernel does not have it.
counter() {
  for _dir in hw_counters counters; do
    cat "/sys/class/infiniband/${2:-rxe0}/ports/1/$_dir/$1" 2>/dev/null && return
  done
  echo 0
}

# counters: all that are not zero, a line each.
counters() {
  for _file in /sys/class/infiniband/*/ports/1/hw_counters/* /sys/class/infiniband/*/ports/1/counters/*; do
    case $_file in */lifespan) continue ;; esac
    _value=$(cat "$_file" 2>/dev/null) || continue
    case $_value in 0|"") ;; *) echo "$_file" | sed "s|/sys/class/infiniband/||; s|/ports/1/.*counters/| |; s|\$| $_value|" ;; esac
  done
}

# In a pair, one guest tells the other what it has come to, over the Ethernet between them.
# tell WORD: leaves a word for the other guest, for as long as this one runs.
tell() { mkdir -p /tmp/told; : > "/tmp/told/$1"; }

# told WORD: whether the other guest has left it.
told() {
  case $(hostname) in a) _other=$address_b ;; *) _other=$address_a ;; esac
  # Debian's static wget crashes when it is given a timeout of its own.
  busybox timeout 2 busybox wget -q -O /dev/null "http://$_other:9/$1" 2>/dev/null
}

# number NAME FILE: the first number of that name in JSON with a line for each.
number() { awk -v name="\"$1\":" '$1 == name { gsub("[^0-9.]", "", $2); print $2; exit }' "$2"; }

# start_pool SEGMENT: a kvmaster and a kvstore-node with a segment of that size, for whoever reaches
# this guest's address, in the background.
start_pool() {
  kvmaster --insecure --listen 0.0.0.0:7070 --advertise "$(hostname):7070" --data-dir /tmp/master \
    > /tmp/kvmaster.log 2>&1 &
  within 30 busybox wget -q -O /dev/null http://127.0.0.1:7071/readyz 2> /dev/null ||
    { cat /tmp/kvmaster.log; fail "kvmaster does not serve"; }
  kvstore-node --insecure --master http://127.0.0.1:7070 --listen 0.0.0.0:7072 --advertise "$own" \
    --name "$(hostname)" --segment "$1" > /tmp/kvstore-node.log 2>&1 &
  within 60 busybox wget -q -O /dev/null http://127.0.0.1:7073/readyz 2> /dev/null ||
    { cat /tmp/kvstore-node.log; fail "kvstore-node does not serve"; }
}

# run_tests PROGRAM [PART [--skip OTHER]]: a test binary of cargo's, and what it came to. Tests whose names have
# PART in them are wanted, or TESTS, if the host has set it. Here is what every test needs: none may skip.
run_tests() {
  _program=$1 _part=${2:-}
  shift "$(($# < 2 ? $# : 2))"
  "$_program" --test-threads=2 --show-output ${TESTS:-$_part} "$@" > /tmp/tests 2>&1
  _status=$?
  grep -v '^$' /tmp/tests
  say "$(grep '^test result:' /tmp/tests || echo "no result")"
  [ "$_status" = 0 ] || fail "$_program ended with $_status"
  grep '^SKIPPED ' /tmp/tests && fail "a test has skipped"
  [ -n "${TESTS:-}" ] || grep -q '^test result: ok. [1-9]' /tmp/tests || fail "no test of $_program has run"
  return 0
}
