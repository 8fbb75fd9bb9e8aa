# GB/s of kvpool's puts and gets beside those of perftest's ib_write_bw and ib_read_bw, in one guest. The
# processor is emulated: the ratios mean something, the figures themselves do not.
#: guests 1
#: programs dist:kvbench dist:kvmaster dist:kvstore-node
#: limit 420
#: memory 3072
. /lib/guest.sh
. /lib/bandwidth.sh
transport=rdma

perftest 1 2
for shape in $shapes; do
  kvpool "$shape"
  perftest 1 2
done
compare
