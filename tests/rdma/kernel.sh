#!/bin/bash
# kernel.sh SERIES DIR: puts Debian's kernel of that series (6.1, 6.12) into DIR: `vmlinux`, and
# under `modules/` the modules that a guest with software RoCE needs. Nothing is installed, and root
# is not needed: the package is unpacked, not configured.
#
# The package comes from the suites that this machine's apt already reads. A series that is not in
# them comes from another suite of the same mirror, whose index goes into DIR as well.
set -euo pipefail
series=$1
mkdir -p "$2"
dir=$(cd "$2" && pwd)

# What a guest loads, by name; what these need comes with them. The carry-less multiplication of
# crc32-pclmul is left out on purpose: emulated, it is slower than the table that it replaces.
wanted=(rdma_rxe rdma_ucm ib_uverbs ib_umad crc32_generic virtio_pci virtio_net dummy sch_netem)

# The suites to look in when this machine's own lists lack the series, the likeliest first.
declare -A suites=([6.1]="bookworm" [6.12]="bookworm-backports trixie")

# Apt with lists of its own, for suites that this machine does not read.
foreign=(-o "Dir::State::lists=$dir/apt/lists" -o "Dir::Cache=$dir/apt/cache"
  -o "Dir::Etc::sourcelist=$dir/apt/sources.list" -o "Dir::Etc::sourceparts=/dev/null"
  -o "APT::Sandbox::User=" -o "Acquire::Languages=none")

# newest [APT OPTION...]: the newest package of the series: the plain kernel, not that for clouds
# (without RDMA), not the real-time one, not the unsigned twin.
newest() {
  apt-cache "$@" pkgnames "linux-image-$series." |
    grep -E "^linux-image-${series//./\\.}\.[0-9.]+[^-]*(-[0-9]+)?-amd64\$" | sort -V | tail -1
}

# mirror: where this machine gets Debian from.
mirror() {
  apt-get indextargets --format '$(CREATED_BY) $(ORIGIN) $(LABEL) $(SITE)' |
    awk '$1 == "Packages" && $2 == "Debian" && $3 == "Debian" { print $4; exit }'
}

options=()
package=$(newest || true)
if [ -z "$package" ]; then
  site=$(mirror)
  [ -n "$site" ] || { echo "apt knows no mirror of Debian: apt-get update, as root" >&2; exit 1; }
  mkdir -p "$dir/apt/lists/partial" "$dir/apt/cache/archives/partial"
  for suite in ${suites[$series]:-}; do
    echo "kernel $series is not in this machine's suites: looking in $suite" >&2
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $site $suite main" \
      > "$dir/apt/sources.list"
    apt-get "${foreign[@]}" --quiet=2 update >&2 || continue
    package=$(newest "${foreign[@]}" || true)
    [ -z "$package" ] || { options=("${foreign[@]}"); break; }
  done
fi
[ -n "$package" ] || { echo "no Debian suite that can be reached has kernel $series" >&2; exit 1; }

work=$(mktemp -d "$dir/work.XXXXXX")
trap 'rm -rf "$work" "$dir/apt"' EXIT
cd "$work"
echo "kernel $series: $package" >&2
apt-get "${options[@]}" -o "APT::Sandbox::User=" --quiet=2 download "$package" >&2
dpkg-deb --fsys-tarfile ./*.deb |
  tar -x --wildcards './boot/vmlinuz-*' '*/modules/*/modules.*' '*/modules/*/kernel/*'
[ -d lib/modules ] || { mkdir -p lib; mv usr/lib/modules lib/; }
release=$(basename lib/modules/*)

# Uncompressed, the kernel boots through qemu's PVH entry and unpacks nothing, which takes seconds
# where the processor is emulated. Where the payload lies is in the header of the image; it ends
# with its own length, in four bytes that the unpackers would stumble over.
word() { od -An -tu4 -j "$1" -N 4 boot/vmlinuz-* | tr -d ' '; }
sectors=$(od -An -tu1 -j $((0x1f1)) -N 1 boot/vmlinuz-* | tr -d ' ')
begin=$((($sectors + 1) * 512 + $(word $((0x248)))))
tail -c +$((begin + 1)) boot/vmlinuz-* | head -c $(($(word $((0x24c))) - 4)) > payload || true
case $(od -An -tx1 -N 4 payload | tr -d ' ') in
  fd377a58) xz -dc --single-stream < payload > "$work/vmlinux" ;;
  28b52ffd) zstd -dcq < payload > "$work/vmlinux" ;;
  *) echo "the kernel is packed in a way that this script does not know" >&2; exit 1 ;;
esac

# The closure of the wanted modules, unpacked here, because the guest's modprobe cannot.
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

rm -rf "$dir/modules"
mv "$work/modules" "$dir/modules"
mv "$work/vmlinux" "$dir/vmlinux"
echo "$package" > "$dir/package"
