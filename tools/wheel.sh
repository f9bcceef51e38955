#!/usr/bin/env bash
# The two Python packages: dorad, the client, and dorad-server, the built server with the libraries
# of this distribution that it needs. DORAD_URL: the repository's address, for their metadata.
#
#   tools/wheel.sh [BUILD_DIR [OUT]]     default build, dist
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
source tools/libraries.sh

build=${1:-build}
out=${2:-dist}
stage=$build/wheel
[[ -x $build/dorad ]] || die "$build/dorad is missing: run \`make wheel\`"

# Copies, because setuptools leaves files beside its sources and takes old ones of them.
copy_sources() {
  local files=$stage/server/src/dorad_server
  rm -rf "$stage"
  mkdir -p "$stage"
  cp -rL client proto VERSION LICENSE "$stage/"
  rm -rf "$stage"/client/{build,src/*.egg-info}
  cp -rL deploy/wheel "$stage/server"
  cp requirements.txt "$stage/server/"
  cmake --install "$build" --prefix "$files"
  mkdir -p "$files/lib"
  copy_libraries "$build/dorad" "$files/lib"
  if grep -q '^DORAD_CUDA:BOOL=ON' "$build/CMakeCache.txt"; then
    cp client/src/dorad/train/libdorad_train.so "$files/lib/"
  fi
  # Names stay: a hung server's stacks in the log need them.
  strip --strip-debug "$files/bin/dorad" "$files"/lib/*
}

build_wheels() {
  mkdir -p "$out"
  rm -f "$out"/dorad-*.whl "$out"/dorad_server-*.whl
  "$VENV/bin/python" -m pip wheel --disable-pip-version-check --no-input --no-deps \
    --no-build-isolation --no-index --wheel-dir "$out" "$stage/client" "$stage/server"
  # protoc 26 and later write modules that refuse older runtimes than pyproject.toml promises.
  if grep -rq --include='*_pb2.py' ValidateProtobufRuntimeVersion "$stage/client/build"; then
    rm "$out"/dorad-*.whl
    die "protoc is too new for a wheel ($(protoc --version)): 25 or older is needed"
  fi
}

export PATH="$ROOT/$VENV/bin:$PATH"
stage "files of the packages" wheel-files copy_sources
stage "wheels" wheel build_wheels
du -h "$out"/dorad-*.whl "$out"/dorad_server-*.whl | awk '{print "wheel:", $2, $1}'
