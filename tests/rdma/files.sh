# Putting programs of this machine, with the libraries that they need, into a guest's file system; and what
# the scripts must know of one of them.

# multiplies QEMU: whether this qemu has carry-less multiplication done by the processor that it runs on.
multiplies() {
  local major
  major=$("$1" --version 2> /dev/null | sed -n 's/^QEMU emulator version \([0-9]*\)\..*/\1/p')
  [ "${major:-0}" -ge 9 ]
}

# add_program ROOT PROGRAM [NAME]: a program by name or path, under NAME in /usr/bin.
add_program() {
  local path
  path=$(command -v "$2") || { echo "$2 is not installed" >&2; return 1; }
  local to=$1/usr/bin/${3:-$(basename "$2")}
  # An applet of busybox by that name is a link, and would be written through.
  rm -f "$to"
  cp -L "$path" "$to"
  # Nothing in the guest reads symbols, and they are most of a test's hundred megabytes.
  strip --strip-unneeded "$to" 2> /dev/null || true
  chmod +x "$to"
  add_needed "$1" "$path"
}

# add_needed ROOT FILE: the libraries that a program or library is linked with, and the loader.
add_needed() {
  local library
  # A static program has none, which ldd calls a failure.
  { ldd "$2" 2> /dev/null || true; } | sed -n 's|^[^/]*\(/[^ ]*\).*|\1|p' |
    while read -r library; do copy_once "$1" "$library"; done
}

# add_python ROOT NATIVE PACKAGES PROGRAM...: this machine's python3 with its standard library, the packages
# whose sources lie in PACKAGES, with NATIVE as their native half, and programs for it in /lib.
add_python() {
  local root=$1 interpreter standard modules=$1/usr/lib/modules-of-python
  # Asked, because what is called so may be a script that leads to it.
  interpreter=$(python3 -I -c 'import sys; print(sys.executable)')
  standard=$(python3 -I -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')
  add_program "$1" "$interpreter" python3
  mkdir -p "$1/usr/lib/$(basename "$standard")"
  # What is left out is most of it, and nothing of what runs in a guest.
  tar -c -C "$standard" --exclude='__pycache__' --exclude='./site-packages' --exclude='./dist-packages' \
    --exclude='./test' --exclude='./idlelib' --exclude='./lib2to3' --exclude='./ensurepip' --exclude='./tkinter' \
    --exclude='./turtledemo' --exclude='./pydoc_data' --exclude='./config-*' . |
    tar -x -C "$1/usr/lib/$(basename "$standard")"
  find "$standard" -name '*.so' | while read -r library; do add_needed "$1" "$library"; done
  mkdir -p "$modules"
  tar -c -C "$3" --exclude='__pycache__' kvpool | tar -x -C "$modules"
  tar -c -C "$3/kvpool-mooncake" --exclude='__pycache__' mooncake | tar -x -C "$modules"
  strip --strip-unneeded -o "$modules/kvpool/_native.abi3.so" "$2"
  add_needed "$1" "$2"
  shift 3
  cp "$@" "$root/usr/lib/"
}

# add_library ROOT NAME: a library by its name, with what it needs.
add_library() {
  local path
  # To its end: a list that is left unread fails, now and then, as a broken pipe.
  path=$(ldconfig -p | awk -v name="$2" '$1 == name && !found { print $NF; found = 1 }')
  [ -n "$path" ] || { echo "$2 is not installed" >&2; return 1; }
  copy_once "$1" "$path"
  add_needed "$1" "$path"
}

# add_provider ROOT NAME: what libibverbs opens for the devices of one driver.
add_provider() {
  local path
  path=$(echo /usr/lib/*/libibverbs/lib"$2"-rdmav*.so)
  [ -e "$path" ] || { echo "libibverbs has no provider for $2 (ibverbs-providers)" >&2; return 1; }
  copy_once "$1" "$path"
  add_needed "$1" "$path"
  mkdir -p "$1/etc/libibverbs.d"
  echo "driver $2" > "$1/etc/libibverbs.d/$2.driver"
}

# copy_once ROOT FILE: a file to where it lies here, unless it is there already. What this machine names
# by a path such as /lib/... goes to /usr/lib/..., where that link leads, because a directory in one
# archive would take the place of a link in another.
copy_once() {
  local to=$1$2
  case $2 in /lib*/* | /bin/* | /sbin/*) to=$1/usr$2 ;; esac
  [ ! -e "$to" ] || return 0
  mkdir -p "$(dirname "$to")"
  cp -L "$2" "$to"
}

# pack ROOT: the tree as the kernel unpacks it, on standard output.
pack() { (cd "$1" && find . -mindepth 1 | LC_ALL=C sort | cpio -o -H newc -R 0:0 --quiet); }
