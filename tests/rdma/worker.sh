# What the cases share that put blocks, get them back and check every byte, for as long as they like.
# Sourced in a guest after guest.sh; the case sets $transport, $master, $deadline (s), $block (bytes)
# and $blocks (a request).

# start_client: a process of kvctl that takes one command a line and answers it. What it computes for a
# block is determined by the block's key, so that it can tell every wrong byte.
start_client() {
  exec 3>&- 4<&-
  rm -f /tmp/commands /tmp/answers
  mkfifo /tmp/commands /tmp/answers
  kvctl worker --block-bytes "$block" --block-tokens 16 --master "$master" \
    --transport "$transport" --timeout "${deadline}s" \
    < /tmp/commands > /tmp/answers 2> /tmp/client.log &
  client=$!
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
