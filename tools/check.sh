#!/usr/bin/env bash
# One room of the server: builds it, runs its unit tests and its smoke tests.
#   tools/check.sh ROOM     a folder of tests/unit, for example engine
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

room=${1:-}
if [[ ! $room || ! -d tests/unit/$room || $room == support ]]; then
  rooms=$(cd tests/unit && for folder in */; do [[ $folder == support/ ]] || echo "${folder%/}"; done)
  die "usage: make check ROOM=NAME, one of: ${rooms//$'\n'/ }"
fi
tools/build.sh build "${room}_test" dorad
enter_tests build
status=0
STAGE_TAIL=80 stage "unit tests of $room" ctest-check ctest --test-dir build -L "^$room\$" \
  --output-on-failure --parallel "$cores" || status=1
# 5: no smoke test names the room.
DORAD_BINARY="$ROOT/build/dorad" "$VENV/bin/python" -m pytest -q --smoke "$room" \
  --junit-xml "$results/python.xml" || [[ $? == 5 ]] || status=1
"$VENV/bin/python" tools/test_summary.py "$results" || status=1
exit "$status"
