#!/bin/bash
# run.sh IMAGE CASE [PROGRAM[=NAME]...]: boots a guest, runs the script CASE in it, and exits with its
# status. The PROGRAMs of this machine are in the guest's PATH, under their own names or NAME. The native
# half of the Python package, called `python`, brings this machine's interpreter and the packages with it.
# IMAGE is a directory that kernel.sh and image.sh have filled.
#
# Exit status: that of CASE (0 to 126); 124 at the time limit; 125 when the guest ended without a status.
#
# In the environment:
#   GUEST_MEMORY    MiB (1536)                GUEST_CORES   (2)
#   GUEST_LIMIT     seconds (300)             GUEST_NAME    its host name (guest)
#   GUEST_CPU       qemu's -cpu               GUEST_ACCEL   qemu's -accel
#   GUEST_EMULATOR  a directory that emulator.sh has filled, or nothing: the installed qemu
#   GUEST_SETTINGS  what CASE finds in its environment: a line NAME=value each
#   GUEST_DEVICES   more arguments of qemu    GUEST_PAIR    not empty: one of two
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
image=$1 case=$2
shift 2
. "$here/files.sh"

emulator=(qemu-system-x86_64)
if [ -e "${GUEST_EMULATOR:-/none}/package" ]; then
  emulator=("$GUEST_EMULATOR/usr/bin/qemu-system-x86_64" -L "$GUEST_EMULATOR/usr/share/qemu")
fi

# Without the instructions that a real processor has for speed, and whose emulation is slower than the
# plain code that runs in their place: string moves in microcode (half the speed of a RoCE device), and
# carry-less multiplication in older emulators (a checksum at 0.15 GB/s and not at 0.4). Newer ones have
# the host multiply (1.5 GB/s), unless the guest uses registers of 256 bits too: the host's processor
# waits whenever it goes from such instructions to older ones (0.14 GB/s).
cpu=max,-erms,-fsrm
if multiplies "${emulator[0]}"; then cpu=$cpu,-avx,-avx2; else cpu=$cpu,-pclmulqdq; fi
cpu=${GUEST_CPU:-$cpu}

work=$(mktemp -d)
qemu=
trap '[ -z "$qemu" ] || kill "$qemu" 2> /dev/null || true; rm -rf "$work"' EXIT
trap 'exit 143' TERM INT HUP

root=$work/root
mkdir -p "$root/etc" "$root/usr/bin" "$root/usr/lib"
cp "$case" "$root/case"
cp "$here/guest.sh" "$here/worker.sh" "$here/bandwidth.sh" "$root/usr/lib/"
cp "$here/init.sh" "$root/init"
chmod +x "$root/init"
echo "${GUEST_NAME:-guest}" > "$root/etc/hostname"
[ -z "${GUEST_PAIR:-}" ] || : > "$root/etc/pair"
printf '%s\n' "${GUEST_SETTINGS:-}" > "$root/etc/settings"
for program in "$@"; do
  case $program in
    *=python) add_python "$root" "${program%%=*}" "$here/../../python" "$here/engine.py" ;;
    *=*) add_program "$root" "${program%%=*}" "${program#*=}" ;;
    *) add_program "$root" "$program" ;;
  esac
done
# The kernel unpacks archives one after the other, and later files take the place of earlier ones.
{ cat "$image/base.cpio"; pack "$root"; } > "$work/initrd"
rm -rf "$root"

# Word splitting of the devices is wanted: they are arguments.
timeout --kill-after=5 "${GUEST_LIMIT:-300}" "${emulator[@]}" \
  -accel "${GUEST_ACCEL:-tcg,thread=multi}" -cpu "$cpu" \
  -smp "${GUEST_CORES:-2}" -m "${GUEST_MEMORY:-1536}" \
  -nodefaults -no-user-config -display none -no-reboot -serial stdio \
  -device isa-debug-exit,iobase=0x501,iosize=1 ${GUEST_DEVICES:-} \
  -kernel "$image/vmlinux" -initrd "$work/initrd" \
  -append "console=ttyS0 quiet panic=-1 mitigations=off nokaslr tsc=reliable random.trust_cpu=on cryptomgr.notests audit=0" \
  < /dev/null &
qemu=$!
status=0
wait "$qemu" || status=$?
qemu=
case $status in
  124 | 137) echo "the guest did not end within ${GUEST_LIMIT:-300} s" >&2; exit 124 ;;
esac
# qemu's status is twice the guest's and one; it is even when no guest said it.
[ $((status % 2)) = 1 ] || { echo "the guest ended without a status" >&2; exit 125; }
exit $((status / 2))
