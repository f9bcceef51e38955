#!/usr/bin/env bash
# Benchmarks against peers, one after another, with nothing else running.
#   tools/bench.sh [NAME [ARGS...]]    NAME: a file of tests/bench without .py; default: all of them
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

if (($#)); then
  name=$1
  shift
  [[ -f tests/bench/$name.py ]] || die "no tests/bench/$name.py; there are: $(basename -s .py -a tests/bench/*.py | paste -sd' ')"
  exec "$VENV/bin/python" "tests/bench/$name.py" "$@"
fi
for file in tests/bench/*.py; do
  echo "== $(basename -s .py "$file")"
  "$VENV/bin/python" "$file"
done
