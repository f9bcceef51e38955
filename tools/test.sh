#!/usr/bin/env bash
# The unit tests of every room through ctest and, at the same time, tests/*.py against build/dorad:
# in two processes for each core, because many tests wait; a file in one of them, because its tests
# share servers. Up to three failed ones run once more, alone. DORAD_DEEP=1 adds the long ones.
# Further arguments go to pytest. Ends with a summary and exits non-zero when anything failed.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

build=${BUILD_DIR:-build}
enter_tests "$build"
unset PYTHONDONTWRITEBYTECODE # all processes would each compile all tests again

unit_tests=(ctest --test-dir "$build" --output-on-failure --output-junit "$results/programs.xml"
  ${UNIT_REGEX:+-R "$UNIT_REGEX"})
log=ctest-$(basename "$build")
status=0
if [[ ${UNIT_ONLY:-} ]]; then
  STAGE_TAIL=80 stage "unit tests" "$log" "${unit_tests[@]}" --parallel "$cores" || status=1
else
  beside "$log" "${unit_tests[@]}"
  echo "tests against $build/dorad"
  export DORAD_BINARY=$ROOT/$build/dorad
  failed=0
  "$VENV/bin/python" -m pytest --junit-xml "$results/python.xml" --numprocesses "$((2 * cores))" \
    --dist loadfile --no-loadscope-reorder --durations 5 "$@" || failed=1
  wait_beside "unit tests" || status=1
  if ((failed)); then
    # A machine with much other work outlasts the patience of a test. The summary names such tests.
    "$VENV/bin/python" tools/test_summary.py "$results" --again &&
      echo "the failed tests once more, alone" &&
      "$VENV/bin/python" -m pytest --junit-xml "$results/again.xml" --last-failed \
        --last-failed-no-failures none "$@" || status=1
  fi
fi

"$VENV/bin/python" tools/test_summary.py "$results" || status=1
exit "$status"
