. /lib/guest.sh
hostname; uname -r
case $(hostname) in
a) tell ready; ib_write_bw -d rxe0 -s 1048576 -n 20 --report_gbits ;;
b) within 20 told ready || fail "a is not there"; sleep 1; ib_write_bw -d rxe0 -s 1048576 -n 20 --report_gbits a ;;
esac
