# Gets of blocks on a disk over RDMA, beside plain reads of a disk and gets from memory. The processor is emulated, and
# the disks are memory: the ratios mean something, the figures themselves do not.
#: guests 1
#: programs bench:media dist:kvmaster dist:kvstore-node
#: limit 580
#: memory 6000
. /lib/guest.sh

# A zone of the medium takes a block of 8 MiB. Only the pages that are written take memory.
modprobe brd rd_nr=2 rd_size=786432
within 10 [ -b /dev/ram1 ] || skip "this kernel has no disks in memory"
media 2 total=268435456 transports=rdma medium=/dev/ram0 plain=/dev/ram1 > /tmp/media 2>&1
status=$?
[ $status = 0 ] || { cat /tmp/media; fail "media ended with $status"; }
while read -r line; do say "$line"; done < /tmp/media
