# libtorch from the PyPI wheel in the virtual environment, as two imported targets.
#
# find_package(Torch) is not used: with a CUDA wheel it demands a CUDA toolkit even for a CPU-only
# build, and it shadows protobuf::libprotobuf. The wheel's libraries carry an RPATH to their CUDA
# companions, so linking the two below is enough on the CPU.
#
#   torch::cpu   ATen and c10, headers as SYSTEM. Link it PRIVATE: torch ships an older
#                google/protobuf on its include path, so no target may see both.
file(GLOB _torch_dirs "${DORAD_VENV}/lib/python3.*/site-packages/torch")
list(LENGTH _torch_dirs _torch_count)
if(NOT _torch_count EQUAL 1)
  message(FATAL_ERROR "torch not found in ${DORAD_VENV}: run `make setup`")
endif()
list(GET _torch_dirs 0 TORCH_DIR)

add_library(torch::cpu SHARED IMPORTED GLOBAL)
set_target_properties(torch::cpu PROPERTIES
  IMPORTED_LOCATION "${TORCH_DIR}/lib/libtorch_cpu.so"
  INTERFACE_LINK_LIBRARIES "${TORCH_DIR}/lib/libc10.so"
  INTERFACE_LINK_OPTIONS "LINKER:-rpath-link,${TORCH_DIR}/lib;LINKER:--allow-shlib-undefined"
  INTERFACE_INCLUDE_DIRECTORIES "${TORCH_DIR}/include")
