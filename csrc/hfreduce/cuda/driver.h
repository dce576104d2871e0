// What the paths over GPUs ask of CUDA. runtime.cpp asks the CUDA runtime; the tests play a GPU on threads, so that
// everything above this interface runs, and is tested, on machines without one.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace hfreduce::gpu {

using Stream = void*;  // a cudaStream_t
using Event = void*;   // a cudaEvent_t without timing

// Memory of one process as another can open it. Plain bytes, so that it travels as it is.
struct Handle {
  char bytes[64];
};

// One device, as one process sees it. Everything that takes a stream only enqueues; the rest may block. Failures are
// std::runtime_error that names the call and CUDA's own words. The device is made current by each call, and the one
// that was current is put back.
class Driver {
 public:
  virtual ~Driver() = default;

  virtual std::string uuid() const = 0;  // of the device, equal in all processes
  virtual int numa_node() const = 0;     // the device's; -1 where the machine does not say

  virtual void* allocate(size_t bytes) = 0;  // device memory, zeroed, of an allocation of its own
  virtual void release(void* memory) = 0;
  virtual Handle handle(void* memory) = 0;       // of what allocate returned
  virtual void* open(const Handle& theirs) = 0;  // another process's memory; the device may be another one
  virtual void close(void* opened) = 0;
  virtual bool reaches(const std::string& uuid) const = 0;  // whether it says that it can access that device's memory

  virtual void pin(void* host, size_t bytes) = 0;  // page-locked and mapped at the same address, for all devices
  virtual void unpin(void* host) = 0;

  virtual Stream stream(bool urgent) = 0;  // a new one that does not wait for the default stream
  virtual void destroy(Stream) = 0;
  virtual bool capturing(Stream) = 0;  // into a CUDA graph
  virtual Event event() = 0;
  virtual void destroy_event(Event) = 0;
  virtual void record(Event, Stream) = 0;
  virtual void wait_event(Event, Stream) = 0;
  virtual bool reached(Event) = 0;  // whether all before its last record is done

  // By a copy engine; host memory is pinned.
  virtual void copy(void* to, const void* from, int64_t bytes, Stream) = 0;
  // Within this device, on a stream of `stream`'s. By a copy engine too, where the driver is of CUDA 13.1 or later; by
  // multiprocessors before.
  virtual void copy_within(void* to, const void* from, int64_t bytes, Stream) = 0;
  // `rows` times `bytes`, each a step behind the one before; steps are at least `bytes`.
  virtual void copy_rows(void* to, int64_t to_step, const void* from, int64_t from_step, int64_t bytes, int64_t rows,
                         Stream) = 0;
  // Flags in pinned host memory: written when all before is done; waited for until int32_t(*flag - value) >= 0. A
  // waiting stream is let go by writing the flag from the host.
  virtual void write(uint32_t* flag, uint32_t value, Stream) = 0;
  virtual void wait(const uint32_t* flag, uint32_t value, Stream) = 0;
};

// A counter in memory that is shared: it only rises, and wraps around.
using Flag = std::atomic<uint32_t>;

inline bool passed(uint32_t flag, uint32_t value) { return static_cast<int32_t>(flag - value) >= 0; }

// Several may raise a flag at once: it never goes back.
inline void raise(Flag& flag, uint32_t value) {
  uint32_t now = flag.load(std::memory_order_acquire);
  while (!passed(now, value) && !flag.compare_exchange_weak(now, value, std::memory_order_acq_rel)) {
  }
}

// Behind what the stream was given: raises a flag, and waits for one. A stream that waits for what is there already
// would do so a microsecond or more.
inline void write(Driver& driver, Flag& flag, uint32_t value, Stream stream) {
  driver.write(reinterpret_cast<uint32_t*>(&flag), value, stream);
}
inline void wait(Driver& driver, const Flag& flag, uint32_t value, Stream stream) {
  if (!passed(flag.load(std::memory_order_acquire), value))
    driver.wait(reinterpret_cast<const uint32_t*>(&flag), value, stream);
}

// Of CUDA device `index`. Throws std::runtime_error where hfreduce was built without CUDA.
std::unique_ptr<Driver> cuda(int index);
// "" where this build and this machine can; otherwise why not, in a sentence. Starts CUDA: a child of a fork after it
// has none.
std::string why_no_cuda();

}  // namespace hfreduce::gpu
