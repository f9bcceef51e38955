#!/usr/bin/env bash
# The acceptance tests with the RL libraries' own packages (tests/rl). Each library gets an
# environment of its own, .cache/rl/NAME. Further arguments go to pytest.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

# The first of the commands that runs. A pyenv shim may exist for a version that it does not run.
first_python() {
  local python
  for python in "$@"; do
    "$python" -c '' 2>/dev/null && echo "$python" && return
  done
  return 1
}

make_environment() { # FOLDER PYTHON PROJECT WHOLE... -- ALONE...
  local folder=$1 python=$2 project=$3 whole=() pip
  shift 3
  while [[ $1 != -- ]]; do
    whole+=("$1")
    shift
  done
  shift
  rm -rf "$folder"
  "$python" -m venv "$folder"
  # torch, transformers and peft of this project: the library's own versions of them are not needed.
  if [[ $project == project ]]; then
    "$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
      >"$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/project.pth"
  fi
  pip=("$folder/bin/python" -m pip install --disable-pip-version-check --no-input)
  "${pip[@]}" "${whole[@]}"
  (($# == 0)) || "${pip[@]}" --no-deps "$@"
  echo "$key" >"$folder/.made"
}

environment() { # NAME PYTHON project|alone WHOLE... -- ALONE...
  local name=$1 folder=.cache/rl/$1
  local key="$*"
  [[ $(cat "$folder/.made" 2>/dev/null) == "$key" ]] && return
  shift
  mkdir -p .cache/rl
  stage "environment of $name" "rl-$name" make_environment "$ROOT/$folder" "$@" ||
    die "making the environment of $name failed"
}

python=$ROOT/$VENV/bin/python
newer=$(first_python python3.12 python3.13 "$HOME"/.pyenv/versions/3.1[23]*/bin/python) ||
  die "SkyRL needs Python 3.12 or later: none was found"

environment trl "$python" project trl==1.16.0 aiohttp requests --
environment renderers "$python" alone renderers==0.1.12 'openai<3' httpx transformers --
environment skyrl "$newer" alone aiohttp pydantic -- skyrl==0.3.0
# Of AReaL's dependencies, those that its client code imports.
environment areal "$python" project aiofiles aiohttp colorlog einops flask hydra-core lark numba \
  orjson pillow ray tenacity uvloop -- areal==1.0.4 torchdata
# Of verl's dependencies, those that its GRPO training with FSDP2 imports. verl asks for
# transformers < 5.11, and works with this project's.
environment verl "$python" project cachetools codetiming dill fastapi hydra-core msgspec pillow \
  pyzmq ray==2.60.0 tensordict==0.10.0 torchdata -- verl==0.9.1 TransferQueue==0.1.11 torchvision==0.26.0
environment qdora "$python" project bitsandbytes==0.50.2 --
environment tinker "$python" project tinker==0.38.0 chz pillow termcolor -- tinker_cookbook==0.5.8

DORAD_RL=1 DORAD_BINARY=${DORAD_BINARY:-$ROOT/build/dorad} OMP_NUM_THREADS=1 \
  OMP_WAIT_POLICY=passive "$VENV/bin/python" -m pytest tests/rl "$@"
