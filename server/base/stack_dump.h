// Every thread's stack in the log: for a process that is about to be ended because it hangs.
#pragma once

#include <string>

namespace dorad {

// Makes symbols of this program's own functions known. program: argv[0]. Before DumpStacks.
void InitializeStackDump(const char* program);

// One line of the log at level error for each thread, with the thread's name and what it is in,
// innermost first. Interrupts every thread for that; one that does not answer within a tenth of a
// second has a line that says so. Thread-safe; one dump at a time.
void DumpStacks();

}  // namespace dorad
