#!/bin/bash
# kernel.sh SERIES IMAGE: puts Debian's kernel of that series (6.1, 6.12) into the directory IMAGE:
# `vmlinux`, and under `modules/` the modules that a guest with software RoCE needs. Nothing is
# installed, and root is not needed: the package is unpacked, not configured.
set -euo pipefail
PATH=$PATH:/usr/sbin:/sbin
here=$(cd "$(dirname "$0")" && pwd)
series=$1
mkdir -p "$2"
image=$(cd "$2" && pwd)
# Written last: older than this script, it tells of an image that this script would make otherwise.
if [ "$image/package" -nt "$here/kernel.sh" ]; then exit 0; fi

# What a guest loads, by name; what these need comes with them. crc32-pclmul is left out on purpose:
# where carry-less multiplication is emulated, it is slower than the table that it replaces.
wanted=(rdma_rxe rdma_ucm ib_uverbs ib_umad crc32_generic virtio_pci virtio_net dummy sch_netem dm_mod brd)

# Where to look when this machine's own suites lack the series, the likeliest first.
declare -A suites=([6.1]="bookworm" [6.12]="bookworm-backports trixie")

work=$(mktemp -d "$image/work.XXXXXX")
trap 'rm -rf "$work"' EXIT
cd "$work"
. "$here/debian.sh"

# newest [APT OPTION...]: the newest package of the series: the plain kernel, not that for clouds,
# which has no RDMA, nor the real-time one, nor the unsigned twin.
newest() {
  apt-cache "$@" pkgnames "linux-image-$series." |
    grep -E "^linux-image-${series//./\\.}\.[0-9.]+[^-]*(-[0-9]+)?-amd64\$" | sort -V | tail -1
}

# fetch [APT OPTION...]: downloads it, if there is one.
fetch() {
  package=$(newest "$@") && download "$@" "$package"
}

# fetch_elsewhere: the same from suites that this machine does not read.
fetch_elsewhere() {
  echo "kernel $series is not in this machine's suites" >&2
  # Word splitting of the names is wanted.
  elsewhere fetch ${suites[$series]:-}
}

fetch || { update "${lists[@]}" && fetch "${lists[@]}"; } || fetch_elsewhere ||
  { echo "no suite of Debian that can be reached has kernel $series" >&2; exit 1; }
echo "kernel $series: $package" >&2

dpkg-deb --fsys-tarfile ./*.deb |
  tar -x --wildcards './boot/vmlinuz-*' '*/modules/*/modules.*' '*/modules/*/kernel/*'
[ -d lib/modules ] || { mkdir -p lib; mv usr/lib/modules lib/; }
release=$(basename lib/modules/*)

# Uncompressed, the kernel boots through qemu's PVH entry and unpacks nothing, which takes seconds
# where the processor is emulated. Where the payload lies is in the header of the image; it ends
# with its own length, in four bytes that an unpacker would stumble over.
word() { od -An -tu4 -j "$1" -N 4 boot/vmlinuz-* | tr -d ' '; }
sectors=$(od -An -tu1 -j $((0x1f1)) -N 1 boot/vmlinuz-* | tr -d ' ')
begin=$(((sectors + 1) * 512 + $(word $((0x248)))))
tail -c +$((begin + 1)) boot/vmlinuz-* > payload
truncate -s $(($(word $((0x24c))) - 4)) payload
case $(od -An -tx1 -N 4 payload | tr -d ' ') in
  fd377a58) xz -dc --single-stream < payload > vmlinux ;;
  28b52ffd) zstd -dcq < payload > vmlinux ;;
  *) echo "the kernel is packed in a way that this script does not know" >&2; exit 1 ;;
esac

# The wanted modules and all that they need, unpacked here, because the guest's modprobe cannot.
depmod -b "$work" "$release"
chosen=$work/modules/lib/modules/$release
mkdir -p "$chosen"
for module in "${wanted[@]}"; do
  modprobe --dirname "$work" --set-version "$release" --show-depends "$module"
done | awk '$1 == "insmod" { print $2 }' | sort -u | while read -r file; do
  case $file in
    *.xz) xz -dc "$file" > "$chosen/$(basename "${file%.xz}")" ;;
    *.zst) zstd -dcq "$file" > "$chosen/$(basename "${file%.zst}")" ;;
    *) cp "$file" "$chosen/" ;;
  esac
done
cp "lib/modules/$release"/modules.{order,builtin,builtin.modinfo} "$chosen/"
depmod -b "$work/modules" "$release"

rm -rf "$image/modules"
mv modules vmlinux "$image/"
echo "$package" > "$image/package"
