# shellcheck shell=bash
# For scripts that ship programs: which shared libraries go along. Source it after lib.sh.

# Is a library the host's: glibc, the C++ runtime, or one that torch's wheel brings or loads?
is_host_library() {
  case $1 in
    libstdc++* | libgcc_s* | ld-linux* | libc.so* | libm.so* | libdl.so* | librt.so* | libpthread.so* | libutil.so*) return 0 ;;
    libtorch* | libc10* | libgomp* | libcublas* | libcudart* | libcuda.so* | libcudnn* | libnv* | libcupti*) return 0 ;;
  esac
  return 1
}

# copy_libraries PROGRAM FOLDER: the libraries of this distribution with which a program is linked.
copy_libraries() {
  local name path
  while read -r name path; do
    is_host_library "$name" && continue
    [[ $path == /* ]] || die "$1 needs $name: not found"
    cp -Lu "$path" "$2/"
  done < <(ldd "$1" | awk '$2 == "=>" {print $1, $3}')
}
