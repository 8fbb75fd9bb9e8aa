#!/bin/bash
# emulator.sh PLACE: puts a qemu into the directory PLACE that leaves carry-less multiplication to the
# processor it runs on, unless the one that is installed does. Older ones go bit by bit: a checksum takes
# fifty times as long as on any processor that a pool runs on, and what is measured is little else. The
# package is unpacked beside the installed one, whose libraries and firmware it uses.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1"
place=$(cd "$1" && pwd)
. "$here/files.sh"

if multiplies qemu-system-x86_64; then exit 0; fi
if [ "$place/package" -nt "$here/emulator.sh" ]; then exit 0; fi

work=$(mktemp -d "$place/work.XXXXXX")
trap 'rm -rf "$work"' EXIT
cd "$work"
. "$here/debian.sh"

fetch() { download "$@" qemu-system-x86 qemu-system-data; }
codename=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
[ -n "$codename" ] && elsewhere fetch "$codename-backports" ||
  { echo "no newer qemu can be had from Debian's backports" >&2; exit 1; }
for package in *.deb; do dpkg-deb --extract "$package" unpacked; done
multiplies unpacked/usr/bin/qemu-system-x86_64 ||
  { echo "the qemu of $codename-backports is too old, or does not run here" >&2; exit 1; }

rm -rf "$place/usr"
mv unpacked/usr "$place/"
dpkg-deb --field qemu-system-x86_*.deb Version > "$place/package"
