. /lib/guest.sh
cat /proc/uptime; uname -r; hostname
ibv_devinfo | head -30
ulimit -a | head; free -m; df -h /tmp /dev/shm
ibv_rc_pingpong -d rxe0 -g 1 -s 65536 -n 50 > /tmp/s.log 2>&1 &
sleep 1
ibv_rc_pingpong -d rxe0 -g 1 -s 65536 -n 50 localhost
