#!/usr/bin/env bash
# Builds the fuzz targets and runs them one after the other: tools/fuzz.sh [SECONDS [NAME...]]
# SECONDS is the time of each (default 600). Interesting inputs are kept in .cache/fuzz/NAME for
# the next run; an input that fails is kept in build-fuzz/findings.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

seconds=${1:-600}
shift || true
[[ $seconds =~ ^[0-9]+$ ]] || die "usage: tools/fuzz.sh [SECONDS [NAME...]]"
mapfile -t names < <(basename -s _fuzz.cc tests/fuzz/*_fuzz.cc)
(($# == 0)) || names=("$@")
corpora=$ROOT/.cache/fuzz
findings=$ROOT/build-fuzz/findings

DORAD_NO_CUDA=1 CMAKE_FLAGS="--preset fuzz -DDORAD_BUILD_TESTS=OFF" tools/build.sh build-fuzz fuzzers
mkdir -p "$findings"
"$VENV/bin/python" client/generate.py --if-stale
"$VENV/bin/python" tests/fuzz/make_seeds.py "$corpora"
export ASAN_OPTIONS="detect_stack_use_after_return=1:allocator_may_return_null=1"
export UBSAN_OPTIONS="print_stacktrace=1:halt_on_error=1:suppressions=$ROOT/tools/sanitizers/ubsan.supp"
# Without libtorch's threads, which are not under test.
export OMP_NUM_THREADS=1

status=0
for name in "${names[@]}"; do
  stage "fuzz $name" "fuzz-$name" "build-fuzz/tests/fuzz/${name}_fuzz" "$corpora/$name" \
    -dict="$corpora/$name.dict" -artifact_prefix="$findings/$name-" -max_total_time="$seconds" \
    -rss_limit_mb=2048 -timeout=20 -print_final_stats=1 -verbosity=1 || status=1
  awk '/stat::number_of_executed_units/ {runs = $2} /stat::new_units_added/ {added = $2}
       / cov: / {cov = $4; corpus = $8}
       END {printf "  %d executions, coverage %s, corpus %s, %d new\n", runs, cov, corpus, added}' \
    "$LOGS/fuzz-$name.log"
done
exit "$status"
