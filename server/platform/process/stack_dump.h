// Writes every thread's stack to the log before a hanging process is ended.
#pragma once

#include <string>

namespace dorad {

// Enables symbols of this program's own functions. program: argv[0]. Before DumpStacks.
void InitializeStackDump(const char* program);

// Writes one line at level error for each thread, with the thread's name and its functions,
// innermost first. Interrupts every thread; the line of a thread without an answer within a tenth
// of a second says so. Thread-safe; one dump at a time.
void DumpStacks();

}  // namespace dorad
