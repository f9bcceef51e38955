#!/usr/bin/env bash
# Refuses the words of tools/retired_words.txt in the project's own files.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

status=0
while IFS=$'\t' read -r pattern instead; do
  [[ $pattern && $pattern != \#* ]] || continue
  if found=$(git grep --untracked -nIP -e "$pattern" -- . ':!tools/retired_words.txt' \
    ':!CHANGELOG.md' ':!bench/results'); then
    printf '%s\n' "$found" | cut -c 1-160 | sed "s|\$|   <- $instead|" >&2
    status=1
  fi
done <tools/retired_words.txt
exit "$status"
