# dorad_room(<name> SOURCES ... DEPS ... PRIVATE_DEPS ... HEADERS ...): one room of the house as a
# static library. DEPS may be seen by users of the room's headers, PRIVATE_DEPS not. HEADERS are
# precompiled for the room's sources, besides those that nearly every file includes.
set(DORAD_COMMON_HEADERS <algorithm> <functional> <map> <memory> <optional> <string> <utility>
  <vector> <absl/status/statusor.h> <absl/strings/str_cat.h> <absl/synchronization/mutex.h>
  <absl/time/time.h>)

function(dorad_room name)
  cmake_parse_arguments(ROOM "" "" "SOURCES;DEPS;PRIVATE_DEPS;HEADERS" ${ARGN})
  add_library(dorad_${name} STATIC ${ROOM_SOURCES})
  target_include_directories(dorad_${name} PUBLIC ${CMAKE_SOURCE_DIR})
  target_link_libraries(dorad_${name} PUBLIC ${ROOM_DEPS} PRIVATE ${ROOM_PRIVATE_DEPS} dorad_warnings)
  target_precompile_headers(dorad_${name} PRIVATE ${DORAD_COMMON_HEADERS} ${ROOM_HEADERS})
endfunction()

# dorad_test(<name> SOURCES ... DEPS ... SHARDS n LABELS ... HEADERS ...): one GoogleTest program for
# a room, which CTest runs as n shards side by side.
function(dorad_test name)
  cmake_parse_arguments(TEST "" "SHARDS" "SOURCES;DEPS;LABELS;HEADERS" ${ARGN})
  add_executable(${name} ${TEST_SOURCES})
  target_link_libraries(${name} PRIVATE ${TEST_DEPS} GTest::gmock GTest::gtest_main dorad_warnings)
  target_precompile_headers(${name} PRIVATE <gmock/gmock.h> <gtest/gtest.h> ${DORAD_COMMON_HEADERS}
    ${TEST_HEADERS})
  if(NOT TEST_SHARDS)
    set(TEST_SHARDS 1)
  endif()
  math(EXPR last "${TEST_SHARDS} - 1")
  foreach(shard RANGE ${last})
    set(test ${name})
    if(TEST_SHARDS GREATER 1)
      string(APPEND test ".${shard}")
    endif()
    add_test(NAME ${test} COMMAND ${name} WORKING_DIRECTORY ${CMAKE_BINARY_DIR})
    set_tests_properties(${test} PROPERTIES TIMEOUT 900 LABELS "${TEST_LABELS}" ENVIRONMENT
      "OMP_NUM_THREADS=1;GTEST_OUTPUT=xml:${CMAKE_BINARY_DIR}/test-results/unit/${test}.xml;GTEST_TOTAL_SHARDS=${TEST_SHARDS};GTEST_SHARD_INDEX=${shard}")
  endforeach()
endfunction()
