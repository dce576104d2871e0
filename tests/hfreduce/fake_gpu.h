// A GPU simulated on threads: each stream is a queue that a thread serves, device memory is heap memory, and a stream
// that waits for a flag polls it. Streams pause at random, by a seed, to vary the order. What CUDA would reject, or
// would hang, ends the process with a message.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <thread>

#include "cuda/driver.h"

namespace hfreduce::gpu {

class FakeGpu : public Driver {
 public:
  // dawdle: the percentage of operations that sleep up to 300 us first. All FakeGpus of the process share memory and
  // handles.
  explicit FakeGpu(unsigned seed = 0, int dawdle = 5, std::string uuid = "played")
      : uuid_(std::move(uuid)), random_(seed), dawdle_(dawdle) {}
  ~FakeGpu() override {
    if (!streams_.empty() || !events_.empty())
      fail("%zu streams, %zu events not destroyed", streams_.size(), events_.size());
    if (!pinned_.empty()) fail("%zu ranges still pinned", pinned_.size());
  }

  std::string uuid() const override { return uuid_; }
  int numa_node() const override { return -1; }

  void* allocate(size_t bytes) override {
    void* memory = std::calloc(bytes + !bytes, 1);
    std::lock_guard lock(memory_mutex());
    return device_memory()[static_cast<char*>(memory)] = bytes, memory;
  }
  void release(void* memory) override {
    std::lock_guard lock(memory_mutex());
    if (!device_memory().erase(static_cast<char*>(memory))) fail("released what was not allocated");
    std::free(memory);
  }
  Handle handle(void* memory) override {
    Handle handle{};
    std::memcpy(&handle, &memory, sizeof(memory));
    return handle;
  }
  void* open(const Handle& theirs) override {
    void* memory;
    std::memcpy(&memory, &theirs, sizeof(memory));
    return memory;
  }
  void close(void*) override {}
  bool reaches(const std::string&) const override { return true; }

  void pin(void* host, size_t bytes) override {
    std::lock_guard lock(mutex_);
    if (!pinned_.emplace(static_cast<char*>(host), bytes).second) fail("pinned twice");
  }
  void unpin(void* host) override {
    std::lock_guard lock(mutex_);
    if (!pinned_.erase(static_cast<char*>(host))) fail("unpinned what was not pinned");
  }

  Stream stream(bool) override {
    std::lock_guard lock(mutex_);
    auto queue = std::make_unique<Queue>(random_(), dawdle_);
    Queue* const stream = queue.get();
    streams_[stream] = std::move(queue);
    return stream;
  }
  // Waits for queued work, which CUDA does not: detects the destruction of a stream that will not end.
  void destroy(Stream stream) override {
    std::unique_ptr<Queue> queue;
    {
      std::lock_guard lock(mutex_);
      queue = std::move(streams_.at(stream));
      streams_.erase(stream);
    }
  }
  bool capturing(Stream) override { return false; }

  Event event() override {
    std::lock_guard lock(mutex_);
    const Event event = new char;
    events_[event] = nullptr;
    return event;
  }
  void destroy_event(Event event) override {
    std::lock_guard lock(mutex_);
    if (!events_.erase(event)) fail("destroyed what is no event");
    delete static_cast<char*>(event);
  }
  void record(Event event, Stream stream) override {
    auto mark = std::make_shared<std::atomic<bool>>(false);
    {
      std::lock_guard lock(mutex_);
      events_.at(event) = mark;
    }
    push(stream, [mark] { *mark = true; });
  }
  void wait_event(Event event, Stream stream) override {
    if (const Mark mark = last(event)) push(stream, [mark] { await("an event", [&] { return mark->load(); }); });
  }
  bool reached(Event event) override {
    const Mark mark = last(event);
    return !mark || mark->load();
  }

  void copy(void* to, const void* from, int64_t bytes, Stream stream) override {
    copy_rows(to, bytes, from, bytes, bytes, 1, stream);
  }
  void copy_within(void* to, const void* from, int64_t bytes, Stream stream) override { copy(to, from, bytes, stream); }
  void copy_rows(void* to, int64_t to_step, const void* from, int64_t from_step, int64_t bytes, int64_t rows,
                 Stream stream) override {
    if (rows < 1 || bytes < 0 || (rows > 1 && std::min(to_step, from_step) < bytes)) fail("a copy of odd rows");
    known(to, (rows - 1) * to_step + bytes), known(from, (rows - 1) * from_step + bytes);
    push(stream, [=] {
      for (int64_t i = 0; i < rows; ++i)
        std::memcpy(static_cast<char*>(to) + i * to_step, static_cast<const char*>(from) + i * from_step, bytes);
    });
  }
  void write(uint32_t* flag, uint32_t value, Stream stream) override {
    pinned(flag, sizeof(value));
    push(stream, [=] { __atomic_store_n(flag, value, __ATOMIC_SEQ_CST); });
  }
  void wait(const uint32_t* flag, uint32_t value, Stream stream) override {
    pinned(flag, sizeof(value));
    push(stream, [=] {
      await("a flag", [=] { return static_cast<int32_t>(__atomic_load_n(flag, __ATOMIC_SEQ_CST) - value) >= 0; });
    });
  }

  // For tests: a kernel on a stream, and the host waiting for a stream.
  static void run(Stream stream, std::function<void()> kernel) { static_cast<Queue*>(stream)->push(std::move(kernel)); }
  void synchronize(Stream stream) {
    const Event end = event();
    record(end, stream);
    await("the end of a stream", [&] { return reached(end); });
    destroy_event(end);
  }

 private:
  using Mark = std::shared_ptr<std::atomic<bool>>;

  class Queue {
   public:
    Queue(unsigned seed, int dawdle) : random_(seed), dawdle_(dawdle), thread_([this] { run(); }) {}
    ~Queue() {
      push(nullptr);
      thread_.join();
    }
    void push(std::function<void()> work) {
      {
        std::lock_guard lock(mutex_);
        works_.push_back(std::move(work));
      }
      more_.notify_one();
    }

   private:
    void run() {
      while (true) {
        std::unique_lock lock(mutex_);
        more_.wait(lock, [this] { return !works_.empty(); });
        const std::function<void()> work = std::move(works_.front());
        works_.pop_front();
        lock.unlock();
        if (!work) return;
        if (static_cast<int>(random_() % 100) < dawdle_)
          std::this_thread::sleep_for(std::chrono::microseconds(random_() % 300));
        work();
      }
    }

    std::mt19937 random_;
    const int dawdle_;
    std::mutex mutex_;
    std::condition_variable more_;
    std::deque<std::function<void()>> works_;
    std::thread thread_;  // last: it uses all of the above
  };

  [[noreturn]] static void fail(const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    std::fputs("FakeGpu: ", stderr);
    std::vfprintf(stderr, format, arguments);
    std::fputc('\n', stderr);
    std::abort();
  }

  template <class Until>
  static void await(const char* what, Until until) {
    const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    for (int i = 0; !until(); ++i) {
      i < 100 ? std::this_thread::yield() : std::this_thread::sleep_for(std::chrono::microseconds(20));
      if (std::chrono::steady_clock::now() > limit) fail("waited 30 s for %s", what);
    }
  }

  static std::mutex& memory_mutex() {
    static std::mutex mutex;
    return mutex;
  }
  static std::map<char*, size_t>& device_memory() {
    static std::map<char*, size_t> memory;
    return memory;
  }

  static bool inside(const std::map<char*, size_t>& ranges, const void* data, int64_t bytes) {
    char* const first = const_cast<char*>(static_cast<const char*>(data));
    auto range = ranges.upper_bound(first);
    if (range == ranges.begin()) return false;
    --range;
    return first + bytes <= range->first + range->second;
  }
  void pinned(const void* data, int64_t bytes) {
    std::lock_guard lock(mutex_);
    if (!inside(pinned_, data, bytes)) fail("a flag that is not in pinned memory");
  }
  void known(const void* data, int64_t bytes) {
    {
      std::lock_guard lock(memory_mutex());
      if (inside(device_memory(), data, bytes)) return;
    }
    std::lock_guard lock(mutex_);
    if (!inside(pinned_, data, bytes))
      fail("a copy of %lld bytes that are neither the device's nor pinned", (long long)bytes);
  }

  Mark last(Event event) {
    std::lock_guard lock(mutex_);
    return events_.at(event);
  }
  void push(Stream stream, std::function<void()> work) {
    std::lock_guard lock(mutex_);
    streams_.at(stream)->push(std::move(work));
  }

  const std::string uuid_;
  std::mutex mutex_;
  std::mt19937 random_;
  const int dawdle_;
  std::map<Stream, std::unique_ptr<Queue>> streams_;
  std::map<Event, Mark> events_;
  std::map<char*, size_t> pinned_;
};

}  // namespace hfreduce::gpu
