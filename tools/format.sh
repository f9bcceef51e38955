#!/usr/bin/env bash
# Rewrites C++ and Python sources in the project's format.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
source tools/sources.sh

mapfile -t cxx < <(cxx_files)
stage "clang-format" format-cxx clang-format-14 -i "${cxx[@]}"
stage "ruff" format-python bash -c "$VENV/bin/ruff format ${python_paths[*]} && $VENV/bin/ruff check --fix ${python_paths[*]}"
