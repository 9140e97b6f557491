// Device memory with the rules of CUDA's caching allocator.
//
// Sizes are rounded up to 512 bytes and cut from segments: 2 MiB for blocks of up to 1 MiB, 20 MiB for up to 10 MiB, else
// whole multiples of 2 MiB. A free block is reused by the stream it was allocated on, at once; a block that other
// streams were recorded for waits until they have passed the point at which it was freed. When nothing fits, the cached
// segments are given back, and then torch.OutOfMemoryError is raised. The capacity counts segments.
// Without `segments`, each block is a segment of its own, rounded to 512 bytes only, and may be split at any size.
#pragma once
#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Stream.h>

namespace sim {
c10::DeviceAllocator& device_memory();
void record_use(const void* p, const c10::Stream& stream);

struct BlockNote {
  bool is_known = false, is_live = false;
  size_t nbytes = 0;
  int64_t stream = 0;
  uint64_t serial = 0;
};
// For the handler of a fault: uses no heap, and gives up if another thread holds the lock for long.
BlockNote describe(int device, size_t offset);
}  // namespace sim
