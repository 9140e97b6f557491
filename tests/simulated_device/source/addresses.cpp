#include "addresses.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>

#include "allocator.h"
#include "machine.h"

namespace sim {
namespace {
Range ranges[kDevices];
struct sigaction before;

Range mapped() {
  for (size_t n = options().range_bytes; n >= size_t(1) << 30; n /= 2) {
    Range r;
    r.nbytes = n;
    r.file = memfd_create("simulated-device", MFD_CLOEXEC);
    if (r.file < 0) break;
    if (ftruncate(r.file, n) == 0) {
      void* device = mmap(nullptr, n, PROT_NONE, MAP_SHARED | MAP_NORESERVE, r.file, 0);
      void* alias = mmap(nullptr, n, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, r.file, 0);
      if (device != MAP_FAILED && alias != MAP_FAILED) {
        r.device = static_cast<char*>(device), r.alias = static_cast<char*>(alias);
        madvise(alias, n, MADV_DONTDUMP);
        madvise(device, n, MADV_DONTDUMP);
        return r;
      }
      if (device != MAP_FAILED) munmap(device, n);
      if (alias != MAP_FAILED) munmap(alias, n);
    }
    close(r.file);
  }
  TORCH_CHECK(false, "sim: the system gives no address range");
}

// A line of text without the heap: a handler of a fault may use nothing else.
struct Line {
  char text[256];
  size_t n = 0;
  void add(const char* s) { while (*s && n < sizeof text) text[n++] = *s++; }
  void add(size_t value, unsigned base) {
    char digits[24];
    int i = 24;
    do digits[--i] = "0123456789abcdef"[value % base]; while (value /= base);
    while (i < 24 && n < sizeof text) text[n++] = digits[i++];
  }
};

void on_fault(int signal, siginfo_t* info, void* context) {
  int device = device_at(info->si_addr);
  if (device < 0) {
    if (before.sa_flags & SA_SIGINFO) return before.sa_sigaction(signal, info, context);
    if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) return before.sa_handler(signal);
    sigaction(signal, &before, nullptr);  // and the access faults again
    return;
  }
  Line line;
  line.add("host touched device memory at 0x");
  line.add(reinterpret_cast<size_t>(info->si_addr), 16);
  line.add(", sim:");
  line.add(device, 10);
  BlockNote note = describe(device, static_cast<char*>(info->si_addr) - ranges[device].device);
  if (note.is_known) {
    line.add(", block of ");
    line.add(note.nbytes, 10);
    line.add(note.is_live ? " bytes allocated" : " bytes free, last allocated");
    line.add(" on stream ");
    line.add(note.stream, 10);
    line.add(" as number ");
    line.add(note.serial, 10);
  } else {
    line.add(", in no block");
  }
  line.add("\n");
  (void)!write(2, line.text, line.n);
  sigaction(signal, &before, nullptr);
}
}  // namespace

Range& range_of(int device) {
  static bool once = [] {
    for (auto& r : ranges) r = mapped();
    return true;
  }();
  (void)once;
  return ranges[device];
}
int device_at(const void* p) {
  for (int d = 0; d < kDevices; ++d) {
    auto at = static_cast<const char*>(p);
    if (ranges[d].device && at >= ranges[d].device && at < ranges[d].device + ranges[d].nbytes) return d;
  }
  return -1;
}
void* alias_at(const void* p) {
  if (!p) return nullptr;
  int d = device_at(p);
  TORCH_CHECK(d >= 0, "sim: not an address of a device");
  return ranges[d].alias + (static_cast<const char*>(p) - ranges[d].device);
}
void forget(int device, size_t offset, size_t nbytes) {
  size_t first = (offset + 4095) / 4096 * 4096, end = (offset + nbytes) / 4096 * 4096;
  if (end > first) (void)!fallocate(ranges[device].file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, first, end - first);
}
void install_fault_handler() {
  struct sigaction ours = {};
  ours.sa_sigaction = on_fault;
  ours.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  sigaction(SIGSEGV, &ours, &before);
}
}  // namespace sim
