// Page-locked host memory: ranges that were registered. Copies from and to other memory block the host.
#pragma once
#include <cstddef>
#include <cstdint>

#include "streams.h"

namespace sim {
// Codes of cudaHostRegister.
enum LockCode { kLocked = 0, kInvalidValue = 1, kNoMemory = 2, kAlreadyLocked = 712, kNotLocked = 713 };
int lock_range(uintptr_t at, size_t nbytes);
int unlock_range(uintptr_t at);
void fail_lock(int64_t nth, int code);  // counted from now; -1: none
size_t locked_bytes();

bool is_locked(const void* p);  // takes the lock itself
// Whether all of the bytes are locked. Raises "invalid argument", as CUDA does, if they begin in one registration and
// end outside of it. Under the lock, as the next one.
bool is_range_locked(const void* p, size_t nbytes);
void note_copy(const void* p, size_t nbytes, const Mark& mark, bool is_written);
}  // namespace sim
