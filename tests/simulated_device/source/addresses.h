// Device memory: a file without a name, mapped twice. Tensors have addresses of the mapping that nobody may touch;
// kernels use the other one. So a stray access of the host is a segmentation fault, which names the block.
#pragma once
#include <cstddef>

namespace sim {
struct Range {
  char* device = nullptr;  // no access
  char* alias = nullptr;   // the same bytes, for kernels
  int file = -1;
  size_t nbytes = 0;
};
Range& range_of(int device);
int device_at(const void* p);        // -1 for an address of the host
void* alias_at(const void* p);       // null for null
void forget(int device, size_t offset, size_t nbytes);  // gives the pages back to the system
void install_fault_handler();
}  // namespace sim
