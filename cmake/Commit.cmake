# Writes HEADER with DORAD_COMMIT, the git commit of SOURCE, or "unknown" where there is no git. A
# header that says so already stays as it is, so that nothing is compiled again.
set(ENV{GIT_OPTIONAL_LOCKS} 0)
cmake_path(GET SOURCE PARENT_PATH above)
set(ENV{GIT_CEILING_DIRECTORIES} "${above}")  # not that of a repository around it
execute_process(COMMAND git describe --always --dirty --abbrev=12 --exclude=*
  WORKING_DIRECTORY "${SOURCE}" OUTPUT_VARIABLE commit OUTPUT_STRIP_TRAILING_WHITESPACE
  RESULT_VARIABLE failed ERROR_QUIET)
if(failed)
  set(commit unknown)
endif()
file(CONFIGURE OUTPUT "${HEADER}" CONTENT "#define DORAD_COMMIT \"${commit}\"\n" @ONLY)
