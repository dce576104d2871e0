// Double binary tree: few hops for many hosts, at full bandwidth.
//
// In a binary tree sums go up from the leaves to the root, and results come down, piece by piece: a host adds up a
// piece of its children's data and its own, in the order of the tree, in one pass and with one rounding, and sends it
// on. But a leaf never sends down, and an inner node sends up half of what it could at most. So there are two trees,
// each for half of the message. Every inner node of one is a leaf of the other (for an odd number of hosts, with one
// exception). For N bytes each host sends and receives at most about N in each direction, in log2(n) hops. Messages of
// up to kSplit bytes use only the first tree, which saves messages.
//
// Tree 0 has the nodes 1 ... m in order. The parent of v, whose lowest bit is b, is (v - b) | 2b, or v - b if that is
// beyond m; leaves are odd. Tree 1 is its mirror image for an even m, and is shifted by one for an odd m. In an
// operation with a root, the root's host is node 0, above the tops of both trees of the other hosts.
//
// Sanders, Speck, Traeff: Two-tree algorithms for full bandwidth broadcast, reduction and scan. Parallel Computing 35
// (2009).
#include <algorithm>
#include <memory>

#include "collectives/interhost/rail.h"
#include "collectives/reduce.h"

namespace hfreduce::interhost {

namespace {

constexpr int64_t kSplit = 16 << 10;

struct Flow {
  bool up, down;
  int root;  // index in the rail; -1: the operation has no root
};

// Tree `which` over the hosts of a rail.
class Tree {
 public:
  Tree(int which, int hosts, int root) : which_(which), hosts_(hosts), root_(root), m_(root < 0 ? hosts : hosts - 1) {}

  int node(int host) const {
    const int label = root_ < 0 ? host + 1 : (host - root_ + hosts_) % hosts_;  // 0: the root
    if (which_ == 0 || label == 0) return label;
    return m_ % 2 == 0 ? m_ + 1 - label : label == 1 ? m_ : label - 1;
  }
  // The parent; 0: the operation's root, or none.
  int above(int node) const {
    const int bit = node & -node, up = (node ^ bit) | (bit << 1);
    return up > m_ ? node ^ bit : up;
  }
  bool is_top(int host) const { return root_ < 0 ? above(node(host)) == 0 : host == root_; }

 private:
  int which_, hosts_, root_, m_;
};

// The part of the message that one tree carries, as seen from this host.
class Half {
 public:
  Half(const Rail& rail, int which, void* data, int64_t count, const Sum& sum, const Flow& flow);
  // Moves what it can without waiting. Returns whether that was anything.
  bool advance() {
    bool moved = false;
    for (Node& node : nodes_) {
      if (node.from) {
        char* into = is_above(node) ? data_ + node.received : node.piece.get() + node.received - added_;
        const int64_t now = node.from->read(into, may_receive(node));
        node.received += now;
        moved |= now > 0;
      }
      if (node.to) {
        const int64_t now = node.to->write(data_ + node.sent, may_send(node));
        node.sent += now;
        moved |= now > 0;
      }
    }
    return add() || moved;
  }
  bool finished() {
    for (Node& node : nodes_) {
      if (node.to && (!node.to->begun() || node.sent < bytes_)) return false;
      if (node.from && (!node.from->begun() || node.received < bytes_)) return false;
    }
    return true;
  }
  void want(Backoff::Wanted& wanted) {
    for (Node& node : nodes_) {
      const bool full = node.to && (!node.to->begun() || may_send(node) > 0);
      const bool empty = node.from && (!node.from->begun() || may_receive(node) > 0);
      if (full) node.to->want(wanted);
      if (empty) node.from->want(wanted);
    }
  }

 private:
  // A child or the parent.
  struct Node {
    int index;
    std::unique_ptr<Sender> to;
    std::unique_ptr<Receiver> from;
    std::unique_ptr<char[]> piece;
    int64_t sent = 0, received = 0;
  };

  int64_t may_send(const Node& node) const { return (is_above(node) ? added_ : settled()) - node.sent; }
  int64_t may_receive(const Node& node) const { return (is_above(node) ? bytes_ : piece_end()) - node.received; }
  bool is_above(const Node& node) const { return above_ && &node == &nodes_.back(); }
  int64_t piece_end() const { return std::min(bytes_, added_ + kPiece); }
  int64_t settled() const { return above_ ? nodes_.back().received : flow_.up ? added_ : bytes_; }
  bool add() {
    const size_t below = nodes_.size() - (above_ ? 1 : 0);
    const int64_t end = piece_end();
    if (added_ == bytes_) return false;
    for (size_t i = 0; i < below; ++i)
      if (nodes_[i].received < end) return false;
    std::vector<const void*> inputs;
    for (size_t i = 0; i < below; ++i) inputs.push_back(nodes_[i].piece.get());
    inputs.insert(inputs.begin() + before_, data_ + added_);
    reduce(data_ + added_, inputs.data(), nullptr, static_cast<int>(inputs.size()),
           (end - added_) / size_of(sum_.dtype), sum_.dtype, above_ ? sum_.partial() : sum_.last(),
           above_ ? 1 : sum_.divisor);
    added_ = end;
    return true;
  }

  const Rail& rail_;
  const int which_;
  char* const data_;
  const int64_t bytes_;
  const Sum& sum_;
  const Flow flow_;
  std::vector<Node> nodes_;  // the children, in the order of the tree, then the parent
  size_t before_ = 0;        // the number of children that come before this host
  bool above_ = false;       // whether there is a parent
  int64_t added_ = 0;        // bytes for which this host has the sum of its subtree
};

Half::Half(const Rail& rail, int which, void* data, int64_t count, const Sum& sum, const Flow& flow)
    : rail_(rail),
      which_(which),
      data_(static_cast<char*>(data)),
      bytes_(count * size_of(sum.dtype)),
      sum_(sum),
      flow_(flow) {
  const Tree tree(which, rail.size(), flow.root);
  const int me = tree.node(rail.index);
  std::vector<int> by_node(rail.size() + 1, -1);
  for (int host = 0; host < rail.size(); ++host) by_node[tree.node(host)] = host;
  for (int node = 0; node <= rail.size(); ++node) {
    if (by_node[node] < 0 || tree.is_top(by_node[node]) || tree.above(node) != me) continue;
    if (node < me) ++before_;
    nodes_.push_back({by_node[node], nullptr, nullptr, nullptr});
  }
  above_ = !tree.is_top(rail.index);
  if (above_) nodes_.push_back({by_node[tree.above(me)], nullptr, nullptr, nullptr});
  for (Node& node : nodes_) {
    const bool writes = is_above(node) ? flow.up : flow.down;
    const bool reads = is_above(node) ? flow.down : flow.up;
    if (writes) node.to = std::make_unique<Sender>(rail, rail.ranks[node.index], which, bytes_);
    if (reads) node.from = std::make_unique<Receiver>(rail, rail.ranks[node.index], which, bytes_);
    if (!is_above(node) && flow.up) node.piece.reset(new char[std::min(kPiece, bytes_)]);
  }
  if (nodes_.size() == (above_ ? 1 : 0) || !flow.up) added_ = bytes_;
}

void tree(const Rail& rail, void* data, int64_t count, const Sum& sum, const Flow& flow) {
  const int64_t size = size_of(sum.dtype), first = count * size <= kSplit ? count : count / 2;
  std::vector<std::unique_ptr<Half>> halves;
  halves.push_back(std::make_unique<Half>(rail, 0, data, first, sum, flow));
  if (first < count)
    halves.push_back(
        std::make_unique<Half>(rail, 1, static_cast<char*>(data) + first * size, count - first, sum, flow));
  Backoff backoff(rail.watch);
  while (true) {
    bool moved = false, finished = true;
    for (auto& half : halves) {
      moved |= half->advance();
      finished = half->finished() && finished;
    }
    if (finished) return;
    if (moved)
      backoff.moved();
    else
      backoff.rest([&](Backoff::Wanted& wanted) {
        for (auto& half : halves) half->want(wanted);
      });
  }
}

}  // namespace

void tree_all_reduce(const Rail& rail, void* data, int64_t count, const Sum& sum) {
  tree(rail, data, count, sum, {true, true, -1});
}

void tree_reduce(const Rail& rail, void* data, int64_t count, const Sum& sum, int root) {
  tree(rail, data, count, sum, {true, false, root});
}

void tree_broadcast(const Rail& rail, void* data, int64_t bytes, int root) {
  tree(rail, data, bytes, {DType::u8, Op::sum, 1}, {false, true, root});
}

}  // namespace hfreduce::interhost
