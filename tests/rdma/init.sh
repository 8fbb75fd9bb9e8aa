#!/bin/sh
# The first process of a guest: makes the file systems, the network and the RoCE device, runs /case,
# and ends the machine with its status.
export PATH=/usr/bin HOME=/root NO_COLOR=1 RUST_BACKTRACE=1
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
mkdir -p /dev/shm /dev/pts
mount -t devpts devpts /dev/pts
for place in /dev/shm /tmp /run; do mount -t tmpfs tmpfs "$place"; done
dmesg -n 4
# Registered memory is locked memory, which these machines' programs may have as much of as they like.
ulimit -l unlimited
ulimit -n 65536

hostname -F /etc/hostname
. /lib/guest.sh
ip link set lo up
modprobe virtio_pci
modprobe virtio_net
# Alone, a guest has no Ethernet device: the frames of a RoCE device go round inside it.
ip link show eth0 > /dev/null 2>&1 || ip link add eth0 type dummy
ip addr add "$own/24" dev eth0
ip link set eth0 mtu 9000 up
modprobe rdma_rxe
modprobe rdma_ucm
rdma link add rxe0 type rxe netdev eth0
if [ -e /etc/pair ]; then
  mkdir -p /tmp/told
  busybox httpd -p 9 -h /tmp/told
fi

# What the host says of this run: a line NAME=value each.
set -a
. /etc/settings
set +a

# Through a pipe, so that no program takes the console for somebody's terminal. What the case has left
# running may hold the pipe for ever: the last line ends it.
{ sh /case < /dev/null 2>&1; echo "status-of-case $?"; } |
  awk '$1 == "status-of-case" { print $2 > "/run/status"; exit } { print; fflush() }'
status=$(cat /run/status)
# What the kernel had to say matters when something went wrong.
case $status in 0 | 77) ;; *) echo "-- the kernel's last words:"; dmesg | tail -n 25 ;; esac
echo "guest $(hostname): status $status after $(cut -d' ' -f1 /proc/uptime) s"
# A byte to this port ends qemu with the status twice the byte and one.
printf "$(printf '\\%03o' "$status")" | dd of=/dev/port bs=1 seek=1281 count=1 2>/dev/null
poweroff -f
