# What the cases that measure share: perftest's figures, kvpool's, and the ratio. Sourced in a guest
# after guest.sh.

# The end of perftest that waits is in this guest, or in guest a.
message=1048576
messages=200
shapes="32x1MiB 128x256KiB 16x8MiB"

# perftest WHEN: each program of perftest with one queue pair and with two, twice over. In a pair both
# guests call it: a waits for b's connections.
perftest() {
  for _round in 1 2; do
    for _program in ib_write_bw ib_read_bw; do
      for _pairs in 1 2; do
        perftest_once "$_program" "$_pairs" "$1-$_round-$_program-$_pairs"
      done
    done
  done
}

# perftest_once PROGRAM QUEUE_PAIRS TURN: one run; whoever connects notes the figure, in GB/s.
perftest_once() {
  # With the acknowledgement timeout that is usual (67 ms), a guest that waited for a processor sends
  # again what was on its way, and some kernels' software RoCE then refuses a message that was right.
  # 18 is a second, and makes that rare; it is tried again when it comes to that all the same.
  _command="$1 -d rxe0 -s $message -n $messages -q $2 -u 18 --report_gbits"
  for _attempt in 1 2 3; do
    perftest_end "$3-$_attempt" > /tmp/perftest 2>&1 && break
    tail -n 3 /tmp/perftest
    [ "$_attempt" -lt 3 ] || fail "$_command"
  done
  [ "$(hostname)" = a ] || awk -v size="$message" '$1 == size { print $4 / 8 }' /tmp/perftest >> "/tmp/$1-$2"
}

# perftest_end TURN: this guest's part of a run.
perftest_end() {
  case $(hostname) in
    a) tell "$1"; timeout 60 $_command; return ;;
    b) _server=a; within 60 told "$1" || fail "guest a does not run $_command" ;;
    *) _server=localhost; timeout 60 $_command > /dev/null 2>&1 & _waiting=$! ;;
  esac
  # It says that it waits before it does.
  sleep 1
  timeout 60 $_command "$_server" || return 1
  [ "$_server" = a ] || wait "$_waiting"
}

# kvpool FLAGS...: kvpool's own figures, a line `put/32x1MiB 0.15` each, in /tmp/kvpool.
kvpool() {
  _only=
  for _shape in $shapes; do _only="$_only,$transport/put/$_shape,$transport/get/$_shape"; done
  # A window is one batch here, and what else the host does shows in it: the median is of nine.
  kvctl "$@" bench --quick --pairs 9 --only "${_only#,}" --timeout 60s --json /tmp/bench.json ||
    fail "kvctl bench ended with $?"
  awk '
    /"case":/ { split($0, part, "\""); case = part[4]; sub("^[a-z]*/", "", case) }
    /"result": \{/ { inside = 1 }
    inside && /"median":/ { gsub("[^0-9.]", ""); print case, $0; inside = 0 }
  ' /tmp/bench.json > /tmp/kvpool
}

# middle FILE: the median of a number a line.
middle() { sort -n "$1" | awk '{ all[NR] = $1 } END { print (all[int((NR + 1) / 2)] + all[int(NR / 2) + 1]) / 2 }'; }

# compare: all figures, and what each of kvpool's is of the better of perftest's.
compare() {
  for _program in ib_write_bw ib_read_bw; do
    for _pairs in 1 2; do
      say "$_program, $_pairs queue pair(s): $(middle "/tmp/$_program-$_pairs") GB/s"
    done
  done
  while read -r _case _figure; do
    case $_case in put/*) _program=ib_write_bw ;; *) _program=ib_read_bw ;; esac
    _best=$({ middle "/tmp/$_program-1"; middle "/tmp/$_program-2"; } | sort -n | tail -n 1)
    say "$(awk "BEGIN { printf \"kvpool $transport/$_case: %.3f GB/s, %.2f of $_program\", $_figure, $_figure / $_best }")"
  done < /tmp/kvpool
  [ "$(wc -l < /tmp/kvpool)" = 6 ] || fail "kvctl bench has not measured all that was asked for"
}
