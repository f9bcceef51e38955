#!/usr/bin/env bash
# Configures and builds: tools/build.sh [BUILD_DIR [TARGET...]], default build and everything.
# CUDA parts are built when nvcc is found, unless DORAD_NO_CUDA=1, for the GPUs of KERNEL_ARCHS (CUDA
# architectures, or `all`), else for those of this machine, else for Hopper.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

build=${1:-build}
shift || true
name=$(basename "$build")
export PATH="$ROOT/$VENV/bin:$PATH"

flags=(-G Ninja)
# Word splitting is wanted: several -D flags.
# shellcheck disable=SC2206
flags+=(${CMAKE_FLAGS:-})
nvcc=$(find_nvcc)
if [[ -n $nvcc && ! ${DORAD_NO_CUDA:-} ]]; then
  flags+=(-DDORAD_CUDA=ON -DCMAKE_CUDA_COMPILER="$nvcc" -DKERNEL_ARCHS="${KERNEL_ARCHS:-}")
  kind="C++ and CUDA"
else
  flags+=(-DDORAD_CUDA=OFF)
  kind="C++, CPU only"
fi

stamp=$build/.configured
want="${flags[*]} $(cat CMakeLists.txt cmake/*.cmake "$VENV"/.dorad-requirements 2>/dev/null | sha256sum)"
if [[ ! -f $build/build.ninja || $(cat "$stamp" 2>/dev/null) != "$want" ]]; then
  rm -f "$stamp" # of an earlier one: this one may fail
  stage "configure $name ($kind)" "configure-$name" cmake -S . -B "$build" "${flags[@]}"
  echo "$want" >"$stamp"
fi
[[ $build != build ]] || ln -sfn build/compile_commands.json compile_commands.json
stage "compile $name (-j$(job_count))" "compile-$name" ninja -C "$build" -j "$(job_count)" "$@"
