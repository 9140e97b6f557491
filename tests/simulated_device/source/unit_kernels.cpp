// Compiled as one file, as most of the time goes into torch's headers: all that needs its ops.
#include "generators.cpp"
#include "flops.cpp"
#include "kernels.cpp"
#include "copies.cpp"
#include "attention.cpp"
#include "hooks.cpp"
#include "interface.cpp"
