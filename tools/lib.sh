# shellcheck shell=bash
# Shared by the scripts in this folder: stages with progress, clear failures, job counts.
# Source it; it changes to the repository's root.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$ROOT"
LOGS=build/logs
# shellcheck disable=SC2034  # used by the scripts that source this file
VENV=.venv
mkdir -p "$LOGS"

if [[ -t 1 && ${TERM:-dumb} != dumb ]]; then
  TTY=1 DIM=$'\e[2m' RED=$'\e[31m' GREEN=$'\e[32m' RESET=$'\e[0m'
else
  TTY='' DIM='' RED='' GREEN='' RESET=''
fi

# One clear line, then exit 1.
die() {
  printf '%sdorad: %s%s\n' "$RED" "$*" "$RESET" >&2
  exit 1
}

# Is dotted version $1 at least $2?
version_at_least() { [[ $(printf '%s\n%s\n' "$2" "$1" | sort -V | head -n 1) == "$2" ]]; }

_last_line() { tail -c 4000 "$1" 2>/dev/null | tr '\r' '\n' | grep -v '^[[:space:]]*$' | tail -n 1 || true; }

# stage TITLE LOG COMMAND...: runs the command with its output in build/logs/LOG.log and shows one
# line with the elapsed time: on a terminal a live one with the log's last line, otherwise one now
# and then. Shows the tail of the log and returns the command's status when it fails.
stage() {
  local title=$1 log=$LOGS/$2.log start=$SECONDS beat=$SECONDS status=0 elapsed width line
  shift 2
  mkdir -p "$LOGS"
  : >"$log"
  "$@" >"$log" 2>&1 </dev/null &
  local pid=$!
  [[ $TTY ]] || printf '%-34s ...\n' "$title"
  while kill -0 "$pid" 2>/dev/null; do
    elapsed=$((SECONDS - start))
    if [[ $TTY ]]; then
      width=$(($(tput cols 2>/dev/null || echo 80) - 48))
      line=$(_last_line "$log")
      ((width > 10)) || width=10
      printf '\r\e[K%-34s %4d s  %s%s%s' "$title" "$elapsed" "$DIM" "${line:0:width}" "$RESET"
    elif ((SECONDS - beat >= 30)); then
      beat=$SECONDS
      line=$(_last_line "$log")
      printf '%-34s %4d s  %s\n' "$title" "$elapsed" "${line:0:100}"
    fi
    sleep 0.2
  done
  wait "$pid" || status=$?
  elapsed=$((SECONDS - start))
  [[ $TTY ]] && printf '\r\e[K'
  if ((status == 0)); then
    printf '%-34s %4d s  %sok%s\n' "$title" "$elapsed" "$GREEN" "$RESET"
  else
    printf '%-34s %4d s  %sfailed%s (exit %d); the end of %s:\n' "$title" "$elapsed" "$RED" \
      "$RESET" "$status" "$log" >&2
    tail -n "${STAGE_TAIL:-30}" "$log" >&2
  fi
  return "$status"
}

# beside LOG COMMAND...: starts a command beside the following stages. Its output is in
# build/logs/LOG.log and, a line at a time, between theirs. It ends with this script.
beside() {
  BESIDE_LOG=$LOGS/$1.log
  shift
  : >"$BESIDE_LOG"
  PYTHONUNBUFFERED=1 "$@" >"$BESIDE_LOG" 2>&1 </dev/null &
  BESIDE=$!
  trap 'kill "$BESIDE" 2>/dev/null || true' EXIT
  tail -n +1 -f --pid="$BESIDE" "$BESIDE_LOG" 2>/dev/null |
    while IFS= read -r line; do printf '%s%s\n' "${TTY:+$'\r\e[K'}" "$line"; done &
  BESIDE_LINES=$!
}

# wait_beside WHAT: until the command of `beside` has ended. Returns its status.
wait_beside() {
  local status=0
  wait "$BESIDE" || status=$?
  wait "$BESIDE_LINES" || true
  trap - EXIT
  ((status == 0)) || printf '%sdorad: %s failed: see %s%s\n' "$RED" "$1" "$BESIDE_LOG" "$RESET" >&2
  return "$status"
}

# Compilers of this code take up to 2 GiB each: as many jobs as fit.
job_count() {
  local cores memory_kib jobs
  cores=$(nproc)
  memory_kib=$(awk '/^MemAvailable:/ {print $2}' /proc/meminfo)
  jobs=$((memory_kib / (2 * 1024 * 1024)))
  ((jobs < 1)) && jobs=1
  ((jobs > cores)) && jobs=$cores
  echo "${JOBS:-$jobs}"
}

# The environment of tests, for a build folder: an empty folder of results, and `cores`.
enter_tests() {
  results=$ROOT/$1/test-results
  rm -rf "$results"
  mkdir -p "$results/unit"
  export PATH="$ROOT/$VENV/bin:$PATH"
  # shellcheck disable=SC2034  # nproc heeds OMP_NUM_THREADS: before it is set
  cores=$(nproc)
  # Torch's OpenMP threads spin: two processes with default threads on two cores crawl.
  export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive TOKENIZERS_PARALLELISM=false
}

# Path of nvcc, or nothing.
find_nvcc() {
  command -v nvcc 2>/dev/null || { [[ -x /usr/local/cuda/bin/nvcc ]] && echo /usr/local/cuda/bin/nvcc; } || true
}
