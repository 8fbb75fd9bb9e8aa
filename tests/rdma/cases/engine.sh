# mooncake.engine in two processes of one guest: over RDMA both ways, with what it refuses.
#: guests 1
#: programs python
#: limit 240
. /lib/guest.sh

export PYTHONHOME=/usr PYTHONPATH=/lib/modules-of-python PYTHONDONTWRITEBYTECODE=1
before=$(counter sent_pkts)
python3 /lib/engine.py "$own" || fail "engine.py ended with $?"
sent=$(($(counter sent_pkts) - before))
say "rxe0 sent $sent packets"
# 4096 bytes a packet, 16 MiB each way.
[ "$sent" -gt 8000 ] || fail "the bytes have not gone over the device"
