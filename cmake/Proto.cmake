# C++ code for the wire contract: target dorad_proto.
find_package(Protobuf REQUIRED)
find_package(gRPC CONFIG REQUIRED)
find_program(GRPC_CPP_PLUGIN grpc_cpp_plugin REQUIRED)

# google.rpc.Status and friends: the .proto files of the PyPI package googleapis-common-protos.
file(GLOB GOOGLEAPIS_DIR "${DORAD_VENV}/lib/python3.*/site-packages/google/rpc/error_details.proto")
if(NOT GOOGLEAPIS_DIR)
  message(FATAL_ERROR "googleapis-common-protos not found in ${DORAD_VENV}: run `make setup`")
endif()
cmake_path(GET GOOGLEAPIS_DIR PARENT_PATH GOOGLEAPIS_DIR)
cmake_path(GET GOOGLEAPIS_DIR PARENT_PATH GOOGLEAPIS_DIR)
cmake_path(GET GOOGLEAPIS_DIR PARENT_PATH GOOGLEAPIS_DIR)

set(_out ${CMAKE_BINARY_DIR}/proto_gen)
file(MAKE_DIRECTORY ${_out})
# Only google/rpc comes from the package; google/protobuf must stay the system's, so the files are
# taken through a folder of their own.
file(MAKE_DIRECTORY ${CMAKE_BINARY_DIR}/googleapis/google/rpc)
foreach(_name status error_details code)
  configure_file(${GOOGLEAPIS_DIR}/google/rpc/${_name}.proto
                 ${CMAKE_BINARY_DIR}/googleapis/google/rpc/${_name}.proto COPYONLY)
endforeach()

set(_sources)
foreach(_name dorad/v1/types dorad/v1/inference dorad/v1/adapters dorad/v1/control
        grpc/health/v1/health)
  set(_proto ${CMAKE_SOURCE_DIR}/proto/${_name}.proto)
  set(_generated ${_out}/${_name}.pb.cc ${_out}/${_name}.pb.h ${_out}/${_name}.grpc.pb.cc
                 ${_out}/${_name}.grpc.pb.h)
  add_custom_command(
    OUTPUT ${_generated}
    COMMAND protobuf::protoc -I ${CMAKE_SOURCE_DIR}/proto --cpp_out=${_out} --grpc_out=${_out}
            --plugin=protoc-gen-grpc=${GRPC_CPP_PLUGIN} ${_proto}
    DEPENDS ${CMAKE_SOURCE_DIR}/proto/dorad/v1/types.proto ${_proto}
    VERBATIM)
  list(APPEND _sources ${_out}/${_name}.pb.cc ${_out}/${_name}.grpc.pb.cc)
endforeach()
foreach(_name status error_details)
  set(_proto ${CMAKE_BINARY_DIR}/googleapis/google/rpc/${_name}.proto)
  add_custom_command(
    OUTPUT ${_out}/google/rpc/${_name}.pb.cc ${_out}/google/rpc/${_name}.pb.h
    COMMAND protobuf::protoc -I ${CMAKE_BINARY_DIR}/googleapis --cpp_out=${_out} ${_proto}
    DEPENDS ${_proto}
    VERBATIM)
  list(APPEND _sources ${_out}/google/rpc/${_name}.pb.cc)
endforeach()

add_library(dorad_proto STATIC ${_sources})
target_include_directories(dorad_proto SYSTEM PUBLIC ${_out})
target_link_libraries(dorad_proto PUBLIC gRPC::grpc++ protobuf::libprotobuf)
