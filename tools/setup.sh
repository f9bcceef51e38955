#!/usr/bin/env bash
# Everything `make build` and `make test` need: Debian/Ubuntu packages, then a virtual environment
# in .venv with the pinned Python packages. Runs only missing steps.
#
#   tools/setup.sh         the needs of the server, its tests and the demo
#   tools/setup.sh --dev   also clang-format, clang-tidy and clang (lint, fuzzing)
#
# DORAD_SKIP_APT=1 leaves system packages alone (for distributions without apt).
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

MIN_PYTHON=3.11
lists=(tools/apt-packages.txt)
[[ ${1:-} == --dev ]] && lists+=(tools/apt-packages-dev.txt)

check_platform() {
  local arch id version
  arch=$(uname -m)
  [[ $arch == x86_64 || $arch == aarch64 ]] || die "unsupported processor $arch: x86_64 or aarch64 needed"
  [[ ${DORAD_SKIP_APT:-} ]] && return
  id=$(. /etc/os-release 2>/dev/null && echo "${ID:-unknown}") || id=unknown
  version=$(. /etc/os-release 2>/dev/null && echo "${VERSION_ID:-0}") || version=0
  case $id in
    debian) version_at_least "$version" 12 && return ;;
    ubuntu) version_at_least "$version" 24.04 && return ;;
  esac
  die "unsupported distribution $id $version: Debian 12 or Ubuntu 24.04 (or later) needed;" \
    "elsewhere install the equivalents of ${lists[*]} and set DORAD_SKIP_APT=1"
}

# Names in the package lists that dpkg does not know as installed.
missing_packages() {
  local wanted installed
  wanted=$(sed -e 's/#.*//' -e '/^[[:space:]]*$/d' "${lists[@]}" | sort -u)
  installed=$(dpkg-query -W -f='${db:Status-Status} ${Package}\n' 2>/dev/null |
    awk '$1 == "installed" {print $2}' | sort -u)
  comm -23 <(echo "$wanted") <(echo "$installed")
}

apt_install() {
  export DEBIAN_FRONTEND=noninteractive
  local options=(-y --no-install-recommends -o Acquire::Retries=3 -o DPkg::Lock::Timeout=300)
  "${AS_ROOT[@]}" apt-get update -o Acquire::Retries=3 -o DPkg::Lock::Timeout=300
  "${AS_ROOT[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install "${options[@]}" "$@"
  end_daemons "$@"
}

# Of packages that were installed just now, for their programs: where systemd runs, such a package
# starts a daemon at once and at each boot.
end_daemons() {
  local package
  [[ -d /run/systemd/system ]] || return 0
  for package in "$@"; do
    case $package in
      nginx | prometheus) "${AS_ROOT[@]}" systemctl disable --now "$package.service" ;;
    esac
  done
}

explain_network() {
  grep -qiE 'could not resolve|temporary failure|connection (refused|timed out)|network is unreachable|NewConnectionError|Max retries' "$LOGS/$1.log" &&
    die "no network: $2 could not be reached"
  die "$3 failed: see $LOGS/$1.log"
}

setup_system() {
  [[ ${DORAD_SKIP_APT:-} ]] && return
  local packages
  mapfile -t packages < <(missing_packages)
  ((${#packages[@]})) || return 0
  AS_ROOT=()
  if ((EUID != 0)); then
    command -v sudo >/dev/null || die "root or sudo is needed to install: ${packages[*]}"
    sudo -n true 2>/dev/null || { [[ $TTY ]] && sudo -v; } ||
      die "sudo without a password (or a terminal to ask for it) is needed to install: ${packages[*]}"
    AS_ROOT=(sudo)
  fi
  stage "system packages (${#packages[@]} missing)" apt apt_install "${packages[@]}" ||
    explain_network apt "the package mirror of this distribution" "installing system packages"
}

# The first interpreter that is new enough and can make a virtual environment.
find_python() {
  local candidate
  for candidate in ${PYTHON:-} python3 python3.13 python3.12 python3.11 /usr/bin/python3; do
    "$candidate" -c "import sys, venv, ensurepip
sys.exit(sys.version_info < tuple(map(int, '$MIN_PYTHON'.split('.'))))" 2>/dev/null &&
      { command -v "$candidate"; return; }
  done
  die "Python $MIN_PYTHON or later with venv is needed; found $(python3 --version 2>/dev/null || echo none)" \
    "(set PYTHON=/path/to/python3 to choose one)"
}

pip_install() {
  local python
  if ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
    python=$(find_python)
    rm -rf "$VENV"
    "$python" -m venv "$VENV"
  fi
  "$VENV/bin/python" -m pip install --disable-pip-version-check --no-input --progress-bar off \
    -r requirements.txt -c constraints.txt
}

setup_python() {
  local stamp=$VENV/.dorad-requirements want free_kib
  want=$(cat requirements.txt constraints.txt | sha256sum | cut -d' ' -f1)
  [[ -x $VENV/bin/python && $(cat "$stamp" 2>/dev/null) == "$want" ]] && return
  if [[ ! -x $VENV/bin/python ]]; then
    find_python >/dev/null
    free_kib=$(df -Pk . | awk 'NR == 2 {print $4}')
    ((free_kib > 8 * 1024 * 1024)) ||
      die "8 GiB of free disk are needed for .venv (libtorch); $((free_kib / 1024 / 1024)) GiB are free"
  fi
  stage "Python packages (5 GB at first)" pip pip_install ||
    explain_network pip "the Python package index" "installing Python packages"
  echo "$want" >"$stamp"
}

check_platform
setup_system
setup_python
