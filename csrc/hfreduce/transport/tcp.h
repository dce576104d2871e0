// Between hosts: one byte stream over several TCP connections side by side. A single connection is held to one core,
// one queue of the network card and one window; several are not.
//
// Bytes go in pieces of kPiece round and round the connections, so both ends know where each byte travels, and no byte
// is added to them. While one connection's window is full the next piece waits too, with up to a window of bytes of
// every other one under way.
#pragma once

#include <memory>
#include <vector>

#include "transport/stream.h"

namespace hfreduce {

// The connections of a stream, and where in them it stands.
class Lanes {
 public:
  Lanes(std::vector<Socket> sockets, const Peer& peer) : sockets_(std::move(sockets)), peer_(peer) {}

  int fd() const { return sockets_[at_ / kPiece % sockets_.size()].fd(); }  // of the next byte
  size_t left() const { return kPiece - at_ % kPiece; }                     // of this piece
  void advance(size_t bytes) { at_ += bytes; }
  const std::vector<Socket>& sockets() const { return sockets_; }
  // Throws Fault::broken.
  [[noreturn]] void broken(const char* doing, const char* why) const;

 private:
  static constexpr size_t kPiece = 64 << 10;
  std::vector<Socket> sockets_;
  const Peer peer_;
  size_t at_ = 0;
};

class TcpOutgoing : public Outgoing {
 public:
  TcpOutgoing(std::vector<Socket> sockets, const Peer& peer) : lanes_(std::move(sockets), peer) {}
  bool descriptors(std::vector<pollfd>& fds) const override;
  size_t write(const void* data, size_t bytes) override;
  // Returns when the peer's kernel has all of it; at the deadline whatever has become of it, for then this host's
  // kernel goes on by itself.
  void drain(Deadline deadline) override;

 private:
  Lanes lanes_;
};

class Delay;

class TcpIncoming : public Incoming {
 public:
  // With HFREDUCE_TEST_DELAY_US in the environment bytes come out only so many microseconds after they have arrived, as
  // if the peer were far away.
  TcpIncoming(std::vector<Socket> sockets, const Peer& peer);
  ~TcpIncoming() override;
  bool descriptors(std::vector<pollfd>& fds) const override;
  size_t read(void* data, size_t bytes) override;

 private:
  std::unique_ptr<Delay> delay_;  // of the test
  Lanes lanes_;
};

}  // namespace hfreduce
