#!/usr/bin/env bash
# Torch ships an older google/protobuf on its include path, so no file may include both a .pb.h and
# a torch header. usage: tools/check_includes.sh FILE...
set -euo pipefail
status=0
for file in "$@"; do
  if grep -qE '^#include [<"](torch|ATen|c10)/' "$file" && grep -qE '^#include .*\.pb\.h[">]' "$file"; then
    echo "$file includes both a .pb.h and a torch header" >&2
    status=1
  fi
done
exit "$status"
