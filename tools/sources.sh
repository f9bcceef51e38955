# shellcheck shell=bash disable=SC2034
# Lists of our own files, from git, tracked or new. Source it from the repository's root.
cxx_files() {
  git ls-files --cached --others --exclude-standard -- '*.cc' '*.h' '*.cu' '*.cuh' |
    while read -r file; do if [[ -f $file ]]; then echo "$file"; fi; done
}
python_paths=(client demo deploy tests tools)
