#!/usr/bin/env bash
# A program and the libraries that it is linked with, in a folder: OUT/bin and OUT/lib. Files of the
# distribution's C library are left out, since every image of that distribution has them.
#
#   deploy/docker/collect.sh PROGRAM OUT
set -euo pipefail

program=$1
out=$2

is_c_library() {
  case $1 in
    ld-linux* | libc.so* | libm.so* | libdl.so* | librt.so* | libpthread.so*) return 0 ;;
  esac
  return 1
}

mkdir -p "$out/bin" "$out/lib"
install -m 0755 "$program" "$out/bin/"
while read -r name arrow path _; do
  [[ $arrow == "=>" ]] || continue
  if [[ $path != /* ]]; then
    echo "$program needs $name, which is not there" >&2
    exit 1
  fi
  is_c_library "$name" || install -m 0644 "$path" "$out/lib/$name"
done < <(ldd "$program")
