#!/usr/bin/env bash
# Builds the unit tests with a sanitizer and runs them: tools/sanitize.sh address|thread [ROOMS]
# With a regular expression, only the rooms that it matches.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

dir=$ROOT/tools/sanitizers
case ${1:-} in
  address)
    preset=asan
    export ASAN_OPTIONS="detect_stack_use_after_return=1:strict_string_checks=1:check_initialization_order=1"
    export LSAN_OPTIONS="suppressions=$dir/lsan.supp:print_suppressions=0"
    export UBSAN_OPTIONS="print_stacktrace=1:halt_on_error=1:suppressions=$dir/ubsan.supp"
    ;;
  thread)
    preset=tsan
    export TSAN_OPTIONS="suppressions=$dir/tsan.supp:second_deadlock_stack=1:ignore_noninstrumented_modules=1:history_size=4"
    ;;
  *) die "usage: make sanitize SAN=address|thread [UNIT=ROOMS]" ;;
esac

targets=(all)
if [[ ${2:-} ]]; then
  export UNIT_REGEX=$2
  mapfile -t targets < <(basename -a tests/unit/*/ | grep -Ev '^(cuda|kernels|support)$' | grep -E "$2" | sed 's/$/_test/')
  ((${#targets[@]} > 0)) || die "no room with unit tests for the CPU matches $2"
fi

# compute-sanitizer checks GPU code.
DORAD_NO_CUDA=1 CMAKE_FLAGS="--preset $preset" tools/build.sh "build-$preset" "${targets[@]}"
BUILD_DIR=build-$preset UNIT_ONLY=1 tools/test.sh
