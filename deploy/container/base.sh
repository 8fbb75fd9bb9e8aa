#!/usr/bin/env bash
# Makes a base for the image from Debian's packages: glibc, certificates, and no program at all.
#
#   deploy/container/base.sh IMAGE [PACKAGE...]        for instance: base.sh kvpool-base libibverbs1
#
# It needs root, mmdebstrap and buildah, and the package sources of this machine. With the same packages and the
# same SOURCE_DATE_EPOCH the image has the same bytes.
set -euo pipefail
image=${1:?usage: base.sh IMAGE [PACKAGE...]}
shift
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-0}
packages=libc6,ca-certificates
for package in "$@"; do packages+=,$package; done

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# `extract` unpacks and runs no script, so the tree needs no shell.
mmdebstrap --quiet --variant=extract --include="$packages" \
    --dpkgopt='path-exclude=/usr/share/*' \
    --dpkgopt='path-include=/usr/share/ca-certificates/*' \
    --dpkgopt='path-include=/usr/share/doc/*/copyright' \
    "$(. /etc/os-release && echo "$VERSION_CODENAME")" "$work/base.tar"

# Of everything that the packages bring, the programs need libraries, certificates and licence texts.
mkdir "$work/root"
tar -C "$work/root" -xf "$work/base.tar"
cd "$work/root"
mkdir -p etc/ssl/certs tmp run var/lib
find usr/share/ca-certificates -name '*.crt' -print0 | LC_ALL=C sort -z | xargs -0 -r cat \
    > etc/ssl/certs/ca-certificates.crt
rm -rf usr/share/ca-certificates usr/bin usr/sbin bin sbin var/cache var/log boot home media mnt opt root srv
find . -depth -type d \( -name gconv -o -name audit -o -name perl-base \) -exec rm -rf {} +
printf 'root:x:0:0:root:/:/nonexistent\nkvpool:x:65532:65532:kvpool:/:/nonexistent\n' > etc/passwd
printf 'root:x:0:\nkvpool:x:65532:\n' > etc/group
printf 'hosts: files dns\n' > etc/nsswitch.conf
chmod 1777 tmp
container=$(buildah from --quiet scratch)
tar -c --sort=name --owner=0 --group=0 --numeric-owner --mtime="@$SOURCE_DATE_EPOCH" . > "$work/tree.tar"
buildah add --quiet "$container" "$work/tree.tar" / > /dev/null
buildah commit --quiet --rm --timestamp "$SOURCE_DATE_EPOCH" "$container" "$image" > /dev/null
echo "$image"
