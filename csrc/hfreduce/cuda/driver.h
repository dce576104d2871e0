// What the GPU paths need of CUDA. runtime.cpp implements it by the CUDA runtime. Tests simulate a GPU on threads, so
// that all code above this interface runs on machines without one.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace hfreduce::gpu {

using Stream = void*;  // a cudaStream_t
using Event = void*;   // a cudaEvent_t without timing

// A handle by which another process can open memory of this one. Plain bytes, so that it can be sent.
struct Handle {
  char bytes[64];
};

// One device, as seen by one process. Functions that take a stream only enqueue; the others may block. Failures throw
// std::runtime_error with the name of the call and CUDA's message. Each call makes the device current and restores the
// previous one.
class Driver {
 public:
  virtual ~Driver() = default;

  virtual std::string uuid() const = 0;  // of the device; equal in all processes
  virtual int numa_node() const = 0;     // of the device; -1 if unknown

  virtual void* allocate(size_t bytes) = 0;  // zeroed device memory in an allocation of its own
  virtual void release(void* memory) = 0;
  virtual Handle handle(void* memory) = 0;       // of memory returned by allocate
  virtual void* open(const Handle& theirs) = 0;  // another process's memory, maybe on another device
  virtual void close(void* opened) = 0;
  virtual bool reaches(const std::string& uuid) const = 0;  // whether CUDA reports access to that device's memory

  virtual void pin(void* host, size_t bytes) = 0;  // page-locked and mapped at the same address, for all devices
  virtual void unpin(void* host) = 0;

  virtual Stream stream(bool urgent) = 0;  // a new stream, which does not wait for the default stream
  virtual void destroy(Stream) = 0;
  virtual bool capturing(Stream) = 0;  // whether it is being captured into a CUDA graph
  virtual Event event() = 0;
  virtual void destroy_event(Event) = 0;
  virtual void record(Event, Stream) = 0;
  virtual void wait_event(Event, Stream) = 0;
  virtual bool reached(Event) = 0;  // whether all work before its last record is done

  // By a copy engine. Host memory must be pinned.
  virtual void copy(void* to, const void* from, int64_t bytes, Stream) = 0;
  // Within the device, on `stream`. By a copy engine if the driver is of CUDA 13.1 or later, otherwise by
  // multiprocessors.
  virtual void copy_within(void* to, const void* from, int64_t bytes, Stream) = 0;
  // `rows` copies of `bytes`, at distances of to_step and from_step bytes, which are at least `bytes`.
  virtual void copy_rows(void* to, int64_t to_step, const void* from, int64_t from_step, int64_t bytes, int64_t rows,
                         Stream) = 0;
  // Flags in pinned host memory. write: after all earlier work. wait: until int32_t(*flag - value) >= 0. The host can
  // release a waiting stream by writing the flag.
  virtual void write(uint32_t* flag, uint32_t value, Stream) = 0;
  virtual void wait(const uint32_t* flag, uint32_t value, Stream) = 0;
};

// A counter in shared memory. It only increases, and wraps around.
using Flag = std::atomic<uint32_t>;

inline bool passed(uint32_t flag, uint32_t value) { return static_cast<int32_t>(flag - value) >= 0; }

// Several threads may raise a flag at once. It never decreases.
inline void raise(Flag& flag, uint32_t value) {
  uint32_t now = flag.load(std::memory_order_acquire);
  while (!passed(now, value) && !flag.compare_exchange_weak(now, value, std::memory_order_acq_rel)) {
  }
}

// Stream-ordered: raise a flag, or wait for one. If the value is already there, nothing is enqueued: a wait in the
// stream would take 1 us or more.
inline void write(Driver& driver, Flag& flag, uint32_t value, Stream stream) {
  driver.write(reinterpret_cast<uint32_t*>(&flag), value, stream);
}
inline void wait(Driver& driver, const Flag& flag, uint32_t value, Stream stream) {
  if (!passed(flag.load(std::memory_order_acquire), value))
    driver.wait(reinterpret_cast<const uint32_t*>(&flag), value, stream);
}

// For CUDA device `index`. Throws std::runtime_error if hfreduce was built without CUDA.
std::unique_ptr<Driver> cuda(int index);
// "" if this build and machine can use CUDA; otherwise the reason, as a sentence. Initializes CUDA, after which a
// forked child cannot use it.
std::string why_no_cuda();

}  // namespace hfreduce::gpu
