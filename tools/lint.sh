#!/usr/bin/env bash
# Every check that needs no running program. Runs all of them, then fails if one failed.
#   tools/lint.sh            all
#   tools/lint.sh NAME...    some of: format includes words tidy ruff mypy proto
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
source tools/sources.sh

check_format() { cxx_files | xargs -r clang-format-14 --dry-run -Werror; }

check_includes() { cxx_files | xargs -r tools/check_includes.sh; }

check_words() { tools/check_words.sh; }

# Configures only: clang-tidy needs the compile commands and the generated headers. A build folder of
# its own, because clang cannot read gcc's precompiled headers.
check_tidy() {
  CMAKE_FLAGS=-DCMAKE_DISABLE_PRECOMPILE_HEADERS=ON tools/build.sh build-tidy dorad_proto dorad_commit
  cxx_files | grep -E '^(server|tests)/.*\.cc$' |
    while read -r file; do
      # Fuzzers and other rooms that this build leaves out have no compile command.
      if grep -q "/$file\"" build-tidy/compile_commands.json; then echo "$file"; fi
    done |
    xargs -r -n 1 -P "$(job_count)" clang-tidy-14 --quiet --warnings-as-errors='*' -p build-tidy
}

check_ruff() {
  "$VENV/bin/ruff" check "${python_paths[@]}"
  "$VENV/bin/ruff" format --check "${python_paths[@]}"
}

check_mypy() {
  (cd client && "../$VENV/bin/python" -m mypy)
  "$VENV/bin/python" -m mypy --config-file tools/mypy.ini demo tools client/examples deploy/wheel/src
}

check_proto() { "$VENV/bin/python" tools/proto_lint.py; }

if [[ ${1:-} == --run ]]; then
  "check_$2"
  exit
fi

names=("$@")
((${#names[@]})) || names=(format includes words tidy ruff mypy proto)
failed=()
for name in "${names[@]}"; do
  STAGE_TAIL=60 stage "lint: $name" "lint-$name" tools/lint.sh --run "$name" || failed+=("$name")
done
((${#failed[@]} == 0)) || die "lint failed: ${failed[*]}"
