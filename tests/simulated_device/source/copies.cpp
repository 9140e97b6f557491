// Copies between host and device, and between devices, with CUDA's rules for what blocks the host.
//
//   page-locked, non_blocking        neither direction waits
//   blocking                         the host waits for the stream
//   other host memory, to device     up to 64 KiB: read at once, and the call returns. More: the host waits for the
//                                    stream's earlier work, then until the bytes are staged
//   other host memory, from device   the host waits, also with non_blocking
//
// Another dtype or layout goes through temporaries of the kind that CUDA's copies make.
#include <ATen/ops/_copy_from.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <torch/library.h>

#include "kernels.h"
#include "locked.h"

namespace sim {
using at::Tensor;
namespace {
constexpr size_t kStagedAtOnce = 64 << 10;

Tensor over_host(const Tensor& t) {
  return at::from_blob(const_cast<void*>(t.const_data_ptr()), t.sizes(), t.strides(), at::TensorOptions(t.dtype()).device(at::kCPU));
}
bool is_plain(const Tensor& a, const Tensor& b) {
  return a.dtype() == b.dtype() && a.sizes() == b.sizes() && a.strides() == b.strides() && a.is_non_overlapping_and_dense() && !a.is_conj() && !b.is_conj() && !a.is_neg() && !b.is_neg();
}

// The end of a blocking copy.
void block(int device, const char* what) {
  is_dropped(kBlockingCopy, device, current_stream(device).id, what);
  Entry here;
  Stream& s = current_stream(device);
  finish({&s, s.issued, s.clock});
  check_errors();
}
void to_device(const Tensor& src, const Tensor& dst, bool non_blocking) {
  const int device = dst.device().index();
  const size_t n = dst.nbytes();
  auto to = alias_of(dst), from = over_host(src);
  bool locked;
  {
    Entry here;
    locked = is_range_locked(src.const_data_ptr(), n);
    if (locked) {
      Stream& s = current_stream(device);
      issue(s, "h2d", {Kind::h2d, double(n)}, [from, to] { to.copy_(from); });
      note_copy(src.const_data_ptr(), n, {&s, s.issued, s.clock}, false);
    }
  }
  if (!locked) {
    if (n > kStagedAtOnce) {
      is_dropped(kPageable, device, current_stream(device).id, "copy from pageable memory");
      Entry here;
      Stream& s = current_stream(device);
      finish({&s, s.issued, s.clock});
    }
    auto staged = options().compute ? from.clone() : from;
    Entry here;
    Stream& s = current_stream(device);
    issue(s, "h2d staged", {Kind::h2d, double(n), 0, kFloat32, true}, [staged, to] { to.copy_(staged); });
    if (profile().is_on && n > kStagedAtOnce) set_host_clock(std::max(host_clock(), s.clock));
  }
  if (non_blocking) return;
  block(device, "copy to device");
}
void to_host(const Tensor& src, const Tensor& dst, bool non_blocking) {
  const int device = src.device().index();
  const size_t n = dst.nbytes();
  auto from = alias_of(src), to = over_host(dst);
  bool locked;
  {
    Entry here;
    locked = is_range_locked(dst.const_data_ptr(), n);
    Stream& s = current_stream(device);
    issue(s, "d2h", {Kind::d2h, double(n), 0, kFloat32, !locked}, [from, to] { to.copy_(from); });
    if (locked) note_copy(dst.const_data_ptr(), n, {&s, s.issued, s.clock}, true);
  }
  if (non_blocking && locked) return;
  block(device, locked ? "copy to host" : "copy to pageable memory");
}
// Runs on the source's stream; both streams wait for each other, as on CUDA.
void within(const Tensor& src, const Tensor& dst) {
  auto from = alias_of(src), to = alias_of(dst);
  Entry here;
  Stream &s = current_stream(src.device().index()), &t = current_stream(dst.device().index());
  if (&s != &t) wait(s, record(t));
  issue(s, "copy", {Kind::d2d, double(dst.nbytes())}, [from, to] { to.copy_(from); });
  if (&s != &t) wait(t, record(s));
}

Tensor copy_from(const Tensor& given, const Tensor& dst, bool non_blocking) {
  if (!dst.numel()) return dst;
  Uncounted here;
  const Tensor src = given.expand_as(dst);
  if (is_sim(src) && is_sim(dst)) {
    within(src, dst);
  } else if (is_plain(src, dst)) {
    TORCH_CHECK(src.is_cpu() || dst.is_cpu(), "sim: copy from ", src.device(), " to ", dst.device());
    is_sim(dst) ? to_device(src, dst, non_blocking) : to_host(src, dst, non_blocking);
  } else if (is_sim(dst)) {
    Tensor host = src.to(dst.scalar_type()).contiguous().resolve_conj().resolve_neg();
    if (dst.is_contiguous() && !dst.is_conj() && !dst.is_neg()) {
      to_device(host.view(dst.sizes()), dst, non_blocking);
    } else {
      auto there = at::empty_strided(host.sizes(), host.strides(), dst.options());
      to_device(host, there, non_blocking);
      within(there, dst);
    }
  } else {
    Tensor there = src.to(dst.scalar_type()).contiguous();
    if (dst.is_contiguous()) {
      to_host(there, dst, non_blocking);
    } else {
      auto host = at::empty_strided(there.sizes(), there.strides(), dst.options());
      to_host(there, host, false);
      const_cast<Tensor&>(dst).copy_(host);
    }
  }
  return dst;
}
Tensor copy_from_and_resize(const Tensor& src, const Tensor& dst) {
  dst.resize_(src.sizes());
  return copy_from(src, dst, false);
}
}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
}
}  // namespace sim
