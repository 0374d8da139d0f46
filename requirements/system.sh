#!/usr/bin/env bash
# Install the Debian packages that some tests need, as root by apt-get; else say which tests are skipped.
set -uo pipefail

need() {
  local tests=$1
  shift
  if [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
    ${updated:-false} || timeout 300 apt-get update -qq
    updated=true
    timeout 900 apt-get install -y -qq --no-install-recommends "$@" >/dev/null && return
  fi
  printf 'not installed: %s; skipped: %s\n' "$*" "$tests"
}

command -v bwrap >/dev/null || need "tests of the sandbox for programs" bubblewrap
PATH=$PATH:/usr/sbin:/sbin ldconfig -p | grep -q 'libjemalloc\.so\.2' || need "tests of memory under jemalloc" libjemalloc2
exit 0 # a machine that cannot install them runs all other tests
