# What the cases that measure share: perftest's figures, kvpool's, and the ratio. Sourced in a guest
# after guest.sh.

# The end of perftest that waits is in this guest, or in guest a.
message=1048576
messages=200
patience=30
turn=0
shapes="32x1MiB 128x256KiB 16x8MiB"

# perftest QUEUE_PAIRS...: each program of perftest with each of these numbers of queue pairs. In a pair both
# guests call it: a waits for b's connections. The cases call it before, between and after what they
# measure of kvpool, because the host's speed changes.
perftest() {
  for _program in ib_write_bw ib_read_bw; do
    for _pairs in "$@"; do perftest_once "$_program" "$_pairs"; done
  done
}

# perftest_once PROGRAM QUEUE_PAIRS: one run; whoever connects notes the figure, in GB/s. A run that comes
# to nothing is named and left out.
perftest_once() {
  turn=$((turn + 1))
  # With the acknowledgement timeout that is usual (67 ms), a guest that waited for a processor sends
  # again what was on its way, and some kernels' software RoCE then refuses a message that was right.
  # 18 is a second, and makes that rare. Each run has a port of its own: after one that did not end, one
  # guest is later than the other, and is not to meet the next run.
  _command="timeout -k 5 $patience $1 -d rxe0 -p $((18515 + turn)) -s $message -n $((messages / $2)) -q $2
    -u 18 --report_gbits"
  case $(hostname) in
    a) tell "turn-$turn"; $_command > /dev/null 2>&1; return ;;
    b) _server=a; within "$patience" told "turn-$turn" ;;
    *) _server=localhost; $_command > /dev/null 2>&1 & ;;
  esac
  # It says that it waits before it does.
  sleep 1
  $_command "$_server" > /tmp/perftest 2>&1
  _status=$?
  case $_status in
    0) awk -v size="$message" '$1 == size { print $4 / 8 }' /tmp/perftest >> "/tmp/$1-$2" ;;
    124 | 137) say "$1 with $2 queue pair(s) did not end within $patience s" ;;
    *) tail -n 3 /tmp/perftest; say "$1 with $2 queue pair(s) ended with $_status" ;;
  esac
  [ "$_server" = a ] || wait
}

# kvpool SHAPE FLAGS...: kvpool's own figures of such batches, a line `put/32x1MiB 0.15` each, in /tmp/kvpool.
kvpool() {
  _only=$transport/put/$1,$transport/get/$1
  shift
  # A window is one batch here, and what else the host does shows in it: the median is of nine.
  kvbench "$@" --quick --pairs 9 --only "$_only" --timeout 60s --json /tmp/bench.json ||
    fail "kvbench ended with $?"
  awk '
    /"case":/ { split($0, part, "\""); case = part[4]; sub("^[a-z]*/", "", case) }
    /"result": \{/ { inside = 1 }
    inside && /"median":/ { gsub("[^0-9.]", ""); print case, $0; inside = 0 }
  ' /tmp/bench.json >> /tmp/kvpool
}

# middle FILE: the median of a number a line.
middle() { sort -n "$1" | awk '{ all[NR] = $1 } END { print (all[int((NR + 1) / 2)] + all[int(NR / 2) + 1]) / 2 }'; }

# compare: all figures, and what each of kvpool's is of the better of perftest's.
compare() {
  for _program in ib_write_bw ib_read_bw; do
    for _pairs in 1 2; do
      if [ -s "/tmp/$_program-$_pairs" ]; then
        _figure=$(middle "/tmp/$_program-$_pairs")
        echo "$_figure $_pairs" >> "/tmp/best-$_program"
        say "$_program, $_pairs queue pair(s): $_figure GB/s, of $(wc -l < "/tmp/$_program-$_pairs") runs"
      else
        say "$_program, $_pairs queue pair(s): no figure: no run came to its end"
      fi
    done
    [ -e "/tmp/best-$_program" ] || fail "$_program has not run once"
  done
  while read -r _case _figure; do
    case $_case in put/*) _program=ib_write_bw ;; *) _program=ib_read_bw ;; esac
    # The figure, and its number of queue pairs.
    set -- $(sort -n "/tmp/best-$_program" | tail -n 1)
    say "kvpool $transport/$_case: $(awk "BEGIN { printf \"%.3f GB/s, %.2f\", $_figure, $_figure / $1 }")" \
      "of $_program with $2 queue pair(s)"
  done < /tmp/kvpool
  [ "$(wc -l < /tmp/kvpool)" = 6 ] || fail "kvbench has not measured all that was asked for"
}
