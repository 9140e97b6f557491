// Compiled as one file, as most of the time goes into torch's headers: all that needs none of its ops.
#include "machine.cpp"
#include "clocks.cpp"
#include "addresses.cpp"
#include "allocator.cpp"
#include "streams.cpp"
#include "locked.cpp"
