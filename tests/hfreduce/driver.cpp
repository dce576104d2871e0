// Ranks as threads of one process, for ThreadSanitizer and AddressSanitizer: all collectives and messages with checked
// results, on one host and on two, then a fault in the middle. Arguments: rounds, seed. Prints "ok".
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>

#include "communicator.h"
#include "threads.h"
#include "torch/turns.h"

using namespace hfreduce;

namespace {

using Floats = std::vector<float>;

void reductions(Communicator& c, int64_t count) {
  const int n = c.size();
  Floats x(count * n, static_cast<float>(c.rank() + 1)), y(count * n), z(count);
  const float sum = static_cast<float>(n) * static_cast<float>(n + 1) / 2;
  c.all_reduce(x.data(), y.data(), count * n, DType::f32, {});
  for (float v : y) EXPECT(v == sum);
  c.reduce_scatter(x.data(), z.data(), count, DType::f32, {Op::max});
  for (float v : z) EXPECT(v == static_cast<float>(n));
  c.reduce(x.data(), y.data(), count, DType::f32, {Op::min}, n - 1);
  if (c.rank() == n - 1)
    for (int64_t i = 0; i < count; ++i) EXPECT(y[i] == 1);
}

void moves(Communicator& c, int64_t count) {
  const int n = c.size(), root = static_cast<int>(count) % n;
  Floats x(count, static_cast<float>(c.rank())), y(count * n, -1.f), z(count);
  const auto blocks = [&] {
    for (int64_t i = 0; i < count * n; ++i) EXPECT(y[i] == static_cast<float>(i / count));
  };
  c.all_gather(x.data(), y.data(), count, DType::f32);
  blocks();
  c.scatter(y.data(), z.data(), count, DType::f32, root);
  for (float v : z) EXPECT(v == static_cast<float>(c.rank()));
  c.gather(x.data(), y.data(), count, DType::f32, root);
  if (c.rank() == root) blocks();
  c.broadcast(x.data(), count, DType::f32, root);
  for (float v : x) EXPECT(v == static_cast<float>(root));
  Floats sent(count * n, static_cast<float>(c.rank()));
  std::vector<int64_t> offsets(n), counts(n, count);
  for (int i = 0; i < n; ++i) offsets[i] = i * count;
  c.all_to_all(sent.data(), offsets, counts, y.data(), offsets, counts, DType::f32);
  blocks();
  c.barrier();
}

// Each rank sends to the next and receives from the previous one at the same time.
void messages(Communicator& c, int64_t count) {
  const int n = c.size(), next = (c.rank() + 1) % n, last = (c.rank() + n - 1) % n;
  Floats x(count, static_cast<float>(c.rank())), y(count, -1.f);
  std::thread sender([&] { c.send(x.data(), count, DType::f32, next, 7); });
  c.recv(y.data(), count, DType::f32, last, 7);
  sender.join();
  for (float v : y) EXPECT(v == static_cast<float>(last));
}

constexpr int kTags = 4, kEach = 3;
constexpr int64_t kKept = 20000, kAsked = 300000;  // elements; eager for all tags together; always rendezvous

float value(int from, int tag, int k) { return static_cast<float>(1 + from + 10 * tag + 100 * k); }

void send_tag(Communicator& c, int to, int tag, int64_t count) {
  for (int k = 0; k < kEach; ++k) {
    const Floats x(count * k / (kEach - 1), value(c.rank(), tag, k));  // the first one is empty
    c.send(x.data(), static_cast<int64_t>(x.size()), DType::f32, to, tag);
  }
}

void recv_tag(Communicator& c, int from, int tag, int64_t count) {
  for (int k = 0; k < kEach; ++k) {
    Floats y(count * k / (kEach - 1), -1.f);
    c.recv(y.data(), static_cast<int64_t>(y.size()), DType::f32, from, tag);
    for (float v : y) EXPECT(v == value(from, tag, k));
  }
}

// Messages with several tags. Eager ones are kept until they are received, in reverse order. Then, with a thread per
// tag, rendezvous messages beside eager ones.
void tags(Communicator& c) {
  const int n = c.size(), next = (c.rank() + 1) % n, last = (c.rank() + n - 1) % n;
  messages(c, kAsked);  // its reply tells the sender that all earlier messages are taken
  std::thread sender([&] {
    for (int tag = 0; tag < kTags; ++tag) send_tag(c, next, tag, kKept);
  });
  for (int tag = kTags; tag-- > 0;) recv_tag(c, last, tag, kKept);
  sender.join();
  const auto count = [](int tag) { return tag % 2 ? kKept : kAsked; };
  std::vector<std::thread> threads;
  for (int tag = 0; tag < kTags; ++tag) {
    threads.emplace_back([&, tag] { send_tag(c, next, tag, count(tag)); });
    threads.emplace_back([&, tag] { recv_tag(c, last, tag, count(tag)); });
  }
  for (std::thread& t : threads) t.join();
  send_tag(c, c.rank(), kTags, kAsked);
  recv_tag(c, c.rank(), kTags, kAsked);
}

// All ranks send to the last one, which receives from any rank.
void any(Communicator& c, int64_t count, int tag) {
  const int to = c.size() - 1;
  if (c.rank() != to) {
    const Floats x(count, static_cast<float>(c.rank()));
    for (int k = 0; k < kEach; ++k) c.send(x.data(), count, DType::f32, to, tag);
    return;
  }
  std::vector<int> from(c.size());
  Floats y(count);
  for (int k = 0; k < kEach * to; ++k) {
    const int source = c.recv_any(y.data(), count, DType::f32, tag);
    for (float v : y) EXPECT(v == static_cast<float>(source));
    ++from[source];
  }
  for (int r = 0; r < to; ++r) EXPECT(from[r] == kEach);
}

void rank(Store& store, Config config, int rounds, unsigned seed) {
  Communicator c(store, config);
  std::mt19937 random(seed);
  for (int i = 0; i < rounds; ++i) {
    const int64_t count = static_cast<int64_t>(random() % 3000);
    reductions(c, count);
    moves(c, count);
    messages(c, count);
    tags(c);
    any(c, count, 5);
    any(c, kAsked, 6);
  }
  bool threw = false;
  try {
    c.barrier();
    if (c.rank() == 1) c.abort("the end");
    for (int i = 0; i < 1000000; ++i) c.barrier();
  } catch (const Fault& fault) {
    threw = std::strstr(fault.what(), "the end") != nullptr;
  }
  EXPECT(threw);
}

void job(int size, int hosts, int rounds, unsigned seed) {
  Notes store;
  std::vector<std::thread> ranks;
  for (int r = 0; r < size; ++r) {
    Config config;
    config.rank = r, config.size = size, config.slot_bytes = 4096, config.timeout = milliseconds(60000);
    config.host_id = "host " + std::to_string(r * hosts / size), config.interface = "127.0.0.1";
    ranks.emplace_back([&store, config, rounds, seed] { rank(store, config, rounds, seed); });
  }
  for (std::thread& r : ranks) r.join();
}

}  // namespace

// All_reduces take the streams in turn, unless they share memory with an earlier one. All else stays on its stream.
void turns() {
  Turns turns;
  const char memory[40] = {};
  const auto next = [&](bool overlaps, int begin, int end) {
    return turns.next(overlaps, {{memory + begin, memory + end}});
  };
  const int first = next(false, 0, 10);
  EXPECT(next(true, 0, 10) == first);  // after an operation that is no all_reduce
  const int second = next(true, 10, 20), third = next(true, 20, 30);
  EXPECT(second != first && third != first && third != second);
  EXPECT(next(true, 15, 25) == third);  // that of the later of the two that it overlaps
  EXPECT(next(true, 30, 40) == first && next(true, 0, 1) == first);
  EXPECT(next(false, 10, 20) == first && next(true, 10, 20) == first && next(true, 30, 40) != first);
}

int main(int argc, char** argv) {
  const Given given(argc, argv);
  turns();
  job(3, 1, given.rounds, given.seed);
  job(4, 2, given.rounds, given.seed);
  std::puts("ok");
}
