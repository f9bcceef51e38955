// Writes every thread's stack to the log, before a process that hangs is ended.
#pragma once

#include <string>

namespace dorad {

// Makes symbols of this program's own functions known. program: argv[0]. Before DumpStacks.
void InitializeStackDump(const char* program);

// Writes one line at level error for each thread, with the thread's name and its functions,
// innermost first. Interrupts every thread for that; the line of a thread that does not answer
// within a tenth of a second says so. Thread-safe; one dump at a time.
void DumpStacks();

}  // namespace dorad
