#!/usr/bin/env bash
# Rewrites C++ and Python sources in the project's format.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
source tools/sources.sh

stage "clang-format" format-cxx bash -c 'xargs -r clang-format-14 -i' < <(cxx_files)
stage "ruff" format-python bash -c "$VENV/bin/ruff format ${python_paths[*]} && $VENV/bin/ruff check --fix ${python_paths[*]}"
