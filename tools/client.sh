#!/usr/bin/env bash
# The Python client in .venv: generated modules, and `doractl` through an editable install.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

stamp=$VENV/.dorad-client
want=$(cat VERSION client/pyproject.toml client/setup.py | sha256sum)
if [[ $(cat "$stamp" 2>/dev/null) != "$want" ]]; then
  stage "Python client" client "$VENV/bin/python" -m pip install --disable-pip-version-check \
    --no-input --no-build-isolation --no-deps -e client
  echo "$want" >"$stamp"
fi
"$VENV/bin/python" client/generate.py --if-stale || die "generating the client's modules failed"
