#!/usr/bin/env bash
# A relocatable archive for a GPU host whose only other part is the same torch: dist/dorad-bundle
# (and .tar.xz beside it) with the server, the kernels' test and bench programs, the libraries of
# this distribution that they need, and the self-test with its Python tests.
#
#   tools/bundle.sh [BUILD_DIR]     default build
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
source tools/libraries.sh

build=${1:-build}
out=dist/dorad-bundle
[[ -x $build/dorad ]] || die "$build/dorad is missing: run \`make build\` first"

rm -rf "$out"
mkdir -p "$out/bin" "$out/lib"
programs=("$build/dorad" "$build"/tests/unit/{kernels,cuda}_test "$build"/tests/bench/{kernels,cuda}_*_bench)
for program in "${programs[@]}"; do
  [[ -x $program ]] || continue
  # Names stay: a hung server's stacks in the log need them.
  strip --strip-debug -o "$out/bin/$(basename "$program")" "$program"
  copy_libraries "$program" "$out/lib"
done
trace=$build/tests/bench/libkernel_trace.so
[[ ! -f $trace ]] || strip -o "$out/lib/$(basename "$trace")" "$trace"

# The self-test, and what its tests in Python need of the repository.
cp tools/selftest.py "$out/"
mkdir -p "$out/checks/tests/golden"
cp -a pytest.ini proto "$out/checks/"
cp -a tests/conftest.py tests/lib "$out/checks/tests/"
cp -a tests/golden/test_{invariance,fidelity}.py "$out/checks/tests/golden/"
mkdir "$out/checks/client"
cp -aL client/{VERSION,generate.py,sync_source.py,proto,src} "$out/checks/client/"
find "$out/checks" -name __pycache__ -prune -exec rm -r {} +
rm -f "$out"/checks/client/src/dorad/train/*.so

# Starts a program of the bundle with the host's torch: the one that `python3` finds, or
# DORAD_TORCH, the folder of the torch package.
cat >"$out/run" <<'RUN'
#!/usr/bin/env bash
# usage: run PROGRAM [ARGUMENTS...]; programs are in bin/. selftest: all tests and benches, a report
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if [[ $1 == selftest ]]; then exec python3 "$here/selftest.py" "${@:2}"; fi
torch=${DORAD_TORCH:-$(python3 -c 'import importlib.util as u; print(u.find_spec("torch").submodule_search_locations[0])')}
libraries=$here/lib:$torch/lib
for folder in "$torch"/../nvidia/*/lib; do libraries+=:$(cd "$folder" && pwd); done
program=$1
shift
LD_LIBRARY_PATH=$libraries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} exec "$here/bin/$program" "$@"
RUN
printf '#!/usr/bin/env bash\nexec "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/run" dorad "$@"\n' >"$out/dorad"
chmod +x "$out/run" "$out/dorad"
git describe --always --dirty >"$out/COMMIT" 2>/dev/null || true
# The programs hold the same kernels: a window over all of them packs these once.
tar -C dist -c dorad-bundle | xz --lzma2=preset=6,dict=256MiB >"$out.tar.xz"
du -h "$out.tar.xz" | awk '{print "bundle:", $2, $1}'
