# Packages of Debian that are downloaded and not installed, which takes no root. Sourced in a directory that
# is for it alone.
#
# A package comes from the suites that this machine's apt reads; what these lack comes from another suite
# of the same mirror, whose index is not kept.

# Lists of our own: fresh ones where the machine's are old or absent, and those of other suites.
lists=(-o "Dir::State::lists=$PWD/apt/lists" -o "Dir::Cache=$PWD/apt/cache")
mkdir -p apt/lists/partial apt/cache/archives/partial

# update [APT OPTION...]: reads the indexes anew.
update() { apt-get "$@" -o "APT::Sandbox::User=" -o "Acquire::Languages=none" --quiet=2 update >&2; }

# download [APT OPTION...] PACKAGE...: into this directory.
download() { apt-get -o "APT::Sandbox::User=" --quiet=2 download "$@" >&2; }

# mirror [APT OPTION...]: where apt gets Debian from, by the first index that it has read.
mirror() {
  apt-get "$@" indextargets --format '$(CREATED_BY) $(ORIGIN) $(LABEL) $(SITE)' |
    awk '$1 == "Packages" && $2 == "Debian" && $3 == "Debian" && !found { print $4; found = 1 }'
}

# elsewhere FETCH SUITE...: calls FETCH with the options by which apt sees one of these suites alone, of the
# mirror that this machine gets Debian from; one after the other, until it succeeds.
elsewhere() {
  local fetch=$1 site suite
  shift
  site=$(mirror)
  [ -n "$site" ] || { update "${lists[@]}" && site=$(mirror "${lists[@]}"); }
  [ -n "$site" ] || { echo "apt reaches no mirror of Debian" >&2; return 1; }
  local only=("${lists[@]}" -o "Dir::Etc::sourcelist=$PWD/apt/sources.list" -o "Dir::Etc::sourceparts=/dev/null")
  for suite in "$@"; do
    echo "looking in $suite" >&2
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $site $suite main" > apt/sources.list
    if update "${only[@]}" && "$fetch" "${only[@]}"; then return 0; fi
  done
  return 1
}
