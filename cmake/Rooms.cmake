# dorad_room(<name> SOURCES ... DEPS ... PRIVATE_DEPS ...): one room of the house as a static
# library. DEPS may be seen by users of the room's headers, PRIVATE_DEPS not.
function(dorad_room name)
  cmake_parse_arguments(ROOM "" "" "SOURCES;DEPS;PRIVATE_DEPS" ${ARGN})
  if(NOT ROOM_SOURCES)
    add_library(dorad_${name} INTERFACE)
    return()
  endif()
  add_library(dorad_${name} STATIC ${ROOM_SOURCES})
  target_include_directories(dorad_${name} PUBLIC ${CMAKE_SOURCE_DIR})
  target_link_libraries(dorad_${name} PUBLIC ${ROOM_DEPS} PRIVATE ${ROOM_PRIVATE_DEPS} dorad_warnings)
endfunction()

# dorad_test(<name> SOURCES ... DEPS ...): one GoogleTest binary, registered with CTest.
function(dorad_test name)
  cmake_parse_arguments(TEST "" "" "SOURCES;DEPS" ${ARGN})
  add_executable(${name} ${TEST_SOURCES})
  target_link_libraries(${name} PRIVATE ${TEST_DEPS} GTest::gmock GTest::gtest_main dorad_warnings)
  add_test(NAME ${name} COMMAND ${name})
  set_tests_properties(${name} PROPERTIES TIMEOUT 900 ENVIRONMENT "OMP_NUM_THREADS=1")
endfunction()
