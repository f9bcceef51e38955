#!/usr/bin/env bash
# Builds the server and, at the same time, makes the demo's model and adapters; then runs the demo.
# Arguments go to demo/demo.py.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

# Beside the compiler one thread that never waits for another one is the fastest.
[[ -x build/dorad ]] || export OMP_NUM_THREADS=1
beside demo-assets "$VENV/bin/python" demo/train_adapters.py
unset OMP_NUM_THREADS

tools/client.sh
tools/build.sh build dorad
wait_beside "model and adapters"
"$VENV/bin/python" demo/demo.py "$@"
