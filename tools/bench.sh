#!/usr/bin/env bash
# Benchmarks against peers, one after another, with nothing else running.
#   tools/bench.sh                  all of tests/bench
#   tools/bench.sh NAME [ARGS...]   one of them, for example cpu_peers
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

run() {
  local name=$1 binary
  shift
  echo "== $name"
  if [[ -f tests/bench/$name.py ]]; then
    "$VENV/bin/python" "tests/bench/$name.py" "$@"
  else
    STAGE_TAIL=60 tools/build.sh build "$name"
    binary=$(find build -type f -name "$name" -perm -u+x | head -n 1)
    "$binary" "$@"
  fi
}

names=$(find tests/bench -name '*.py' -o -name '*_bench.cc' | sed 's#.*/##; s/\.[a-z]*$//' | sort)
if (($#)); then
  grep -qx -- "$1" <<<"$names" || die "no benchmark $1; there are: $(paste -sd' ' <<<"$names")"
  run "$@"
else
  for name in $names; do run "$name"; done
fi
