#!/usr/bin/env bash
# The documentation: checks its form, then builds the site in build/site. Warnings are errors.
#   tools/docs.sh           check and build
#   tools/docs.sh --serve   the same, then show the site at http://127.0.0.1:8008 until Ctrl-C
# Has a virtual environment of its own (.venv-docs, 80 MB): no torch, no compiler.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

venv=.venv-docs

install() {
  [[ -x $venv/bin/python ]] || python3 -m venv "$venv"
  "$venv/bin/python" -m pip install --disable-pip-version-check --no-input --progress-bar off \
    -r requirements-docs.txt
}

stamp=$venv/.dorad-requirements
want=$(sha256sum <requirements-docs.txt)
if [[ $(cat "$stamp" 2>/dev/null) != "$want" ]]; then
  stage "packages of the documentation" pip-docs install || die "see $LOGS/pip-docs.log"
  echo "$want" >"$stamp"
fi

# The theme's notice about a future mkdocs is not about this repository.
export NO_MKDOCS_2_WARNING=1
STAGE_TAIL=60 stage "check the pages' form" docs-check "$venv/bin/python" tools/docs_check.py ||
  die "tools/docs_check.py --fix wraps prose; the rest is above"
"$venv/bin/python" client/sync_source.py || die "generating the synchronous client failed"
STAGE_TAIL=60 stage "build the site" mkdocs "$venv/bin/mkdocs" build --strict --clean --quiet ||
  die "see $LOGS/mkdocs.log"
echo "the site: build/site/index.html"

if [[ ${1:-} == --serve ]]; then
  exec "$venv/bin/python" -m http.server --bind 127.0.0.1 --directory build/site 8008
fi
