#!/bin/bash
# image.sh IMAGE: makes IMAGE/base.cpio, the file system of a guest without what run.sh adds for each
# run: the modules that kernel.sh has left in the directory IMAGE, and what this machine has installed
# of busybox, iproute2, rdma-core, perftest and dmsetup, with the libraries that they need.
set -euo pipefail
PATH=$PATH:/usr/sbin:/sbin
here=$(cd "$(dirname "$0")" && pwd)
image=$(cd "$1" && pwd)
. "$here/files.sh"

# Found at run time and not by ldd: the verbs, the connection manager, and what the C library opens.
late=(libibverbs.so.1 librdmacm.so.1 libgcc_s.so.1)

root=$(mktemp -d "$image/root.XXXXXX")
trap 'rm -rf "$root"' EXIT
mkdir -p "$root"/{dev,etc,proc,root,run,sys,tmp,usr/bin,usr/lib,usr/lib64,var}
# As Debian has it, so that a library is found by whichever path names it.
for dir in bin sbin lib lib64; do ln -s "usr/${dir/sbin/bin}" "$root/$dir"; done
ln -s bin "$root/usr/sbin"
ln -s ../run "$root/var/run"

cp -r "$image/modules/lib/modules" "$root/usr/lib/"
# The guest reads every byte of its modules under emulation: debug information would be most of them.
find "$root/usr/lib/modules" -name '*.ko' -exec strip --strip-debug {} +

add_program "$root" busybox
for applet in $(busybox --list); do
  [ "$applet" = busybox ] || ln -s busybox "$root/usr/bin/$applet"
done
# Debian's busybox takes its own commands before others of that name, and its `ip` knows too little:
# so another shell.
add_program "$root" dash
ln -sf dash "$root/usr/bin/sh"
for program in ip tc rdma ibv_devinfo ibv_rc_pingpong ib_write_bw ib_read_bw dmsetup; do
  add_program "$root" "$program"
done
for library in "${late[@]}"; do add_library "$root" "$library"; done
add_provider "$root" rxe

echo 'root:x:0:0::/root:/bin/sh' > "$root/etc/passwd"
printf '127.0.0.1 localhost\n10.77.0.1 a\n10.77.0.2 b\n' > "$root/etc/hosts"
: > "$root/etc/nsswitch.conf"

# In place at once: another run may be reading it.
pack "$root" > "$root.cpio"
mv "$root.cpio" "$image/base.cpio"
