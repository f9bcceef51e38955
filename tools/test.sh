#!/usr/bin/env bash
# All tests: the unit tests of every room through ctest, then tests/*.py against build/dorad.
# Further arguments go to pytest. Ends with a summary and exits non-zero when anything failed.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

build=${BUILD_DIR:-build}
results=$ROOT/$build/test-results
rm -rf "$results"
mkdir -p "$results"
export PATH="$ROOT/$VENV/bin:$PATH"
# Torch's OpenMP threads spin: two processes with default threads on two cores crawl.
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive TOKENIZERS_PARALLELISM=false

status=0
STAGE_TAIL=80 stage "unit tests" "ctest-$(basename "$build")" ctest --test-dir "$build" \
  --output-on-failure --output-junit "$results/unit.xml" --parallel "$(nproc)" \
  ${UNIT_REGEX:+-R "$UNIT_REGEX"} || status=1

if [[ ! ${UNIT_ONLY:-} ]]; then
  echo "tests against $build/dorad"
  DORAD_BINARY="$ROOT/$build/dorad" "$VENV/bin/python" -m pytest --junit-xml "$results/python.xml" \
    --durations 5 "$@" || status=1
fi

"$VENV/bin/python" tools/test_summary.py "$results"/*.xml || status=1
exit "$status"
