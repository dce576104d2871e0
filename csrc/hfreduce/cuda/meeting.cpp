// How ranks prove that they reach each other. Each rank's copy engine writes a line from its own device memory into the
// memory of every peer, and each rank checks the lines in its own memory. Then a kernel does an all-gather of such
// lines. CUDA's answer alone is not enough: on some machines, mostly virtual ones, CUDA reports peer access, but
// written data never arrives.
#include "cuda/meeting.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <thread>

namespace hfreduce::gpu {

namespace {

constexpr size_t kWords = 200;               // characters of an objection
constexpr milliseconds kProof{20000};        // for copies and kernels that take microseconds once modules are loaded
constexpr milliseconds kLimit{3600000};      // of a kernel's waits, in case its host process has died
constexpr int64_t kLine = 64, kPage = 4096;  // bytes

struct Introduction {
  char uuid[48];
  int32_t p2p;  // HFREDUCE_P2P; -1 if it is not set
};

template <class T>
std::vector<T> gather(Communicator& c, const T& mine, milliseconds timeout) {
  std::vector<T> all(c.size());
  c.all_gather(&mine, all.data(), sizeof(T), DType::u8, timeout);
  return all;
}

std::vector<Introduction> tell(Communicator& c, const Driver& driver, milliseconds timeout) {
  Introduction mine{};
  driver.uuid().copy(mine.uuid, sizeof(mine.uuid) - 1);
  const char* const given = std::getenv("HFREDUCE_P2P");
  mine.p2p = given && *given ? std::atoi(given) : -1;
  return gather(c, mine, timeout);
}

// Why the ranks' kernels may not wait for each other; "" if they may. Equal on all ranks.
std::string apart(const Communicator& c, const std::vector<Introduction>& all) {
  if (!c.one_host()) return "ranks are on several hosts";
  if (all.size() > kMaxRanks) return "there are more than " + std::to_string(kMaxRanks) + " ranks";
  bool shared = false, forced = false;
  for (size_t i = 0; i < all.size(); ++i) {
    forced = forced || all[i].p2p > 0;
    for (size_t j = 0; j < i; ++j) shared = shared || !std::strcmp(all[i].uuid, all[j].uuid);
  }
  return shared && !forced ? "ranks share a device (HFREDUCE_P2P=1 lets their kernels wait for each other)" : "";
}

// Pinned host memory for the duration of a proof.
class Page {
 public:
  explicit Page(Driver& driver) : driver_(driver), memory_(std::aligned_alloc(kPage, kPage)) {
    if (!memory_) throw std::bad_alloc();
    try {
      driver.pin(memory_, kPage);
    } catch (...) {
      std::free(memory_);
      throw;
    }
  }
  ~Page() {
    driver_.unpin(memory_);
    std::free(memory_);
  }
  char* at(int64_t line) { return static_cast<char*>(memory_) + line * kLine; }

 private:
  Driver& driver_;
  void* memory_;
};

// One rank's part in the proof that ranks reach each other.
class Proof {
 public:
  Proof(Communicator& c, Driver& driver, const Links& links)
      : c_(c), driver_(driver), links_(links), page_(driver), stream_(driver.stream(false)), event_(driver.event()) {}
  ~Proof() {
    driver_.destroy_event(event_);
    driver_.destroy(stream_);
  }

  // Lines of the slots of step 0 of block 0: lines 0 to size - 1 receive the ranks' lines; this rank's own follow.
  void write() {
    for (int i = 0; i < links_.size; ++i) line(page_.at(i), links_.rank, i);
    char* const mine = links_.slots[links_.rank];
    driver_.copy(mine + links_.size * kLine, page_.at(0), links_.size * kLine, stream_);
    for (int i = 0; i < links_.size; ++i)
      driver_.copy(links_.slots[i] + links_.rank * kLine, mine + (links_.size + i) * kLine, kLine, stream_);
    done("copies to peers");
  }
  void read() {
    driver_.copy(page_.at(0), links_.slots[links_.rank], links_.size * kLine, stream_);
    done("a copy from this device");
    for (int i = 0; i < links_.size; ++i) check("a copy", page_.at(i), i, links_.rank);
  }
  void kernel() {
    line(page_.at(links_.size), links_.rank, links_.rank);
    char* const lines = links_.slots[links_.rank] + kSlot / 2;  // all_gather of one line does not use this part
    driver_.copy(lines, page_.at(links_.size), kLine, stream_);
    all_gather(links_, lines, lines + kLine, kLine, {stream_, 1, 128, 1});
    driver_.copy(page_.at(0), lines + kLine, links_.size * kLine, stream_);
    done("a kernel that writes to peers");
    for (int i = 0; i < links_.size; ++i) check("a kernel", page_.at(i), i, i);
  }
  // From the page and into it. Each kernel runs twice, because packets and slots are elsewhere in the second run.
  void mapped() {
    for (int i : {0, 1, 2, 3}) {
      line(page_.at(kMaxRanks), links_.rank, i);
      const auto kernel = i < 2 ? all_gather_packets : all_gather;
      kernel(links_, page_.at(kMaxRanks), page_.at(0), kLine, {stream_, 1, 128, 1, links_.slot});
      done("a kernel that writes to the host's memory");
      for (int from = 0; from < links_.size; ++from) check("a kernel", page_.at(from), from, i);
    }
  }

 private:
  static void line(char* to, int from, int target) {
    for (int i = 0; i < kLine; ++i) to[i] = static_cast<char>(1 + 31 * from + 7 * target + i);
  }
  void check(const char* how, const char* found, int from, int target) const {
    char expected[kLine];
    line(expected, from, target);
    if (std::memcmp(found, expected, kLine))
      throw std::runtime_error(std::string("what rank ") + std::to_string(from) + " wrote by " + how +
                               " did not come, although CUDA says that it reaches this memory");
  }
  void done(const char* what) {
    driver_.record(event_, stream_);
    Deadline deadline = Clock::now() + kProof;
    bool stopped = false;
    while (!driver_.reached(event_)) {
      if (Clock::now() > deadline || c_.failed()) {
        if (stopped) throw std::runtime_error(std::string(what) + " did not end, and could not be stopped");
        __atomic_store_n(&links_.board->stop, 1u, __ATOMIC_RELEASE);
        stopped = true;
        deadline = Clock::now() + milliseconds(2000);
      }
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    if (stopped) throw std::runtime_error(std::string(what) + " did not end");
  }

  Communicator& c_;
  Driver& driver_;
  const Links& links_;
  Page page_;
  const Stream stream_;
  const Event event_;
};

std::string proven(Communicator& c, Driver& driver, const Links& links, milliseconds timeout) {
  std::unique_ptr<Proof> proof;
  std::string objection = attempt(c, timeout, [&] { proof = std::make_unique<Proof>(c, driver, links); });
  if (objection.empty()) objection = attempt(c, timeout, [&] { proof->write(); });
  if (objection.empty()) objection = attempt(c, timeout, [&] { proof->read(); });
  if (objection.empty()) objection = attempt(c, timeout, [&] { proof->kernel(); });
  return objection;
}

}  // namespace

std::string agree(Communicator& c, const std::string& objection, milliseconds timeout) {
  struct Opinion {
    char words[kWords];
  } mine{};
  objection.copy(mine.words, kWords - 1);
  const auto all = gather(c, mine, timeout);
  for (int i = 0; i < c.size(); ++i)
    if (all[i].words[0]) return "rank " + std::to_string(i) + ": " + std::string(all[i].words);
  return "";
}

std::string attempt(Communicator& c, milliseconds timeout, const std::function<void()>& attempt) {
  std::string objection;
  try {
    attempt();
  } catch (const Fault&) {
    throw;  // the communicator's: there is nothing left to agree on
  } catch (const std::exception& error) {
    objection = *error.what() ? error.what() : "an error without words";
  }
  return agree(c, objection, timeout);
}

std::string ordered(Communicator& c, Driver& driver, milliseconds timeout) {
  return attempt(c, timeout, [&] {
    Page page(driver);
    auto* const flag = reinterpret_cast<uint32_t*>(page.at(0));
    __atomic_store_n(flag, 0u, __ATOMIC_RELEASE);
    const Stream stream = driver.stream(false);
    driver.write(flag, 1, stream);
    driver.wait(flag, 1, stream);
    const Deadline deadline = Clock::now() + kProof;
    while (__atomic_load_n(flag, __ATOMIC_ACQUIRE) != 1 && Clock::now() < deadline)
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    const bool came = __atomic_load_n(flag, __ATOMIC_ACQUIRE) == 1;
    __atomic_store_n(flag, 1u, __ATOMIC_RELEASE);
    driver.destroy(stream);
    if (!came) throw std::runtime_error("a stream does not write into the host's memory");
  });
}

std::vector<DeviceRow> agree(Communicator& c, std::vector<DeviceRow> rows, milliseconds timeout) {
  auto count = static_cast<int64_t>(rows.size());
  c.broadcast(&count, 1, DType::i64, 0, timeout);
  rows.resize(count);
  if (count) c.broadcast(rows.data(), count * static_cast<int64_t>(sizeof(DeviceRow)), DType::u8, 0, timeout);
  return rows;
}

std::string forbidden(Communicator& c, const Driver& driver, milliseconds timeout) {
  const std::vector<Introduction> all = tell(c, driver, timeout);
  for (int i = 0; i < c.size(); ++i)
    if (all[i].p2p == 0) return "HFREDUCE_P2P=0 on rank " + std::to_string(i);
  std::string objection = apart(c, all);
  if (!objection.empty()) return objection;
  for (int i = 0; i < c.size(); ++i) {
    const bool here = !std::strcmp(all[i].uuid, all[c.rank()].uuid);
    if (objection.empty() && !here && !driver.reaches(all[i].uuid))
      objection = "CUDA says that its device does not reach that of rank " + std::to_string(i);
  }
  return agree(c, objection, timeout);
}

// A failure before the handles are exchanged must not leave the other ranks waiting for them.
std::string connect(Communicator& c, Driver& driver, milliseconds timeout, std::unique_ptr<Peers>& peers) {
  struct Offer {
    Handle handle;
    int32_t good;
  };
  bool exchanged = false;
  const auto exchange = [&](const Handle& handle) {
    exchanged = true;
    std::vector<Handle> handles;
    for (const Offer& offer : gather(c, Offer{handle, 1}, timeout)) {
      if (!offer.good) throw std::runtime_error("another rank has no memory for its peers");
      handles.push_back(offer.handle);
    }
    return handles;
  };
  std::string objection = attempt(c, timeout, [&] {
    try {
      peers =
          std::make_unique<Peers>(driver, c.rank(), c.size(), exchange, std::max<milliseconds>(kLimit, 2 * timeout));
    } catch (const std::exception&) {
      if (!exchanged) gather(c, Offer{}, timeout);
      throw;
    }
  });
  if (objection.empty()) objection = proven(c, driver, peers->links(), timeout);
  if (objection.empty()) return "";
  static_cast<void>(peers.release());  // a rank may still write to it: leaked
  return objection;
}

std::string connect(Communicator& c, Driver& driver, milliseconds timeout, std::unique_ptr<Copies>& copies) {
  Copies::Options options;
  options.rank = c.rank(), options.size = c.size();
  std::string objection = ordered(c, driver, timeout);
  if (!objection.empty()) return objection;
  std::vector<Segment> segments = c.share(Copies::segment_bytes(), timeout);
  Handle mine{};
  objection = attempt(c, timeout, [&] {
    copies = std::make_unique<Copies>(driver, std::move(segments), options);
    mine = copies->handle();
  });
  if (objection.empty()) {
    const std::vector<Handle> handles = gather(c, mine, timeout);
    objection = attempt(c, timeout, [&] { copies->open(handles); });
  }
  if (!objection.empty()) copies.reset();
  return objection;
}

std::string connect(Communicator& c, Driver& driver, milliseconds timeout, std::unique_ptr<DeviceMessages>& messages) {
  const char* const asked = std::getenv("HFREDUCE_DEVICE_MESSAGES");
  std::string objection = agree(c, asked && std::atoi(asked) ? "" : "HFREDUCE_DEVICE_MESSAGES=1 is not set", timeout);
  if (objection.empty()) objection = ordered(c, driver, timeout);
  if (!objection.empty()) return objection;
  const auto segments =
      std::make_shared<const std::vector<Segment>>(c.share(DeviceMessages::segment_bytes(c.size()), timeout));
  objection = attempt(
      c, timeout, [&] { messages = std::make_unique<DeviceMessages>(c, driver, segments, DeviceMessages::Options()); });
  if (!objection.empty()) messages.reset();
  return objection;
}

// Memory is placed by first touch, and pinning touches it: all ranks settle their own before any rank pins the others'.
std::string map(Communicator& c, Driver& driver, milliseconds timeout, std::unique_ptr<Peers>& mapped) {
  std::string objection = apart(c, tell(c, driver, timeout));
  if (!objection.empty()) return objection;
  std::vector<Segment> segments = c.share(Peers::mapped_bytes(c.size()), timeout);
  objection = attempt(c, timeout, [&] { segments[c.rank()].settle(driver.numa_node()); });
  if (objection.empty())
    objection = attempt(c, timeout, [&] {
      mapped =
          std::make_unique<Peers>(driver, c.rank(), std::move(segments), std::max<milliseconds>(kLimit, 2 * timeout));
    });
  std::unique_ptr<Proof> proof;
  if (objection.empty())
    objection = attempt(c, timeout, [&] { proof = std::make_unique<Proof>(c, driver, mapped->links()); });
  if (objection.empty()) objection = attempt(c, timeout, [&] { proof->mapped(); });
  if (!objection.empty()) static_cast<void>(mapped.release());  // its kernel may still run
  return objection;
}

}  // namespace hfreduce::gpu
