# What every transport owes to those who use it, over verbs too. On a machine without a device the
# tests over RDMA say that they skip; here none may. The other transports are tested there.
#: guests 1
#: programs test:transport/conformance
#: limit 600
#: memory 2048
. /lib/guest.sh

run_tests conformance rdma
