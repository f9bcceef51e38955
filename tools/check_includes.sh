#!/usr/bin/env bash
# Checks the include rules: tools/check_includes.sh FILE...
#   torch's headers: backends/cpu, its tests and benches alone. Torch also ships an older
#   google/protobuf on its include path, so no file may see both.
#   grpc::internal: one file at most.
set -euo pipefail
status=0
internal=()
complain() {
  echo "$*" >&2
  status=1
}
for file in "$@"; do
  if grep -qE '^#include [<"](torch|ATen|c10)/' "$file"; then
    case $file in
      server/backends/cpu/* | tests/unit/cpu/* | tests/bench/*) ;;
      *) complain "$file includes torch's headers outside of server/backends/cpu" ;;
    esac
    if grep -qE '^#include .*\.pb\.h[">]' "$file"; then
      complain "$file includes both a .pb.h and a torch header"
    fi
  fi
  if grep -q 'grpc::internal' "$file"; then internal+=("$file"); fi
done
if ((${#internal[@]} > 1)); then complain "more than one file uses grpc::internal: ${internal[*]}"; fi
exit "$status"
