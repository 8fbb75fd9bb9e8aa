# The layer over verbs, against the kernel's own: devices, memory, queue pairs, completions, errors.
#: guests 1
#: programs test:transport/unit test:transport/verbs
#: limit 300
. /lib/guest.sh

# A second device, so that there is more than one rail.
add_device rxe1 eth1 10.78.0.1/24

# Those of peers have a case of their own.
run_tests unit rdma:: --skip peer::
run_tests verbs
counters
