// A log of the last operations, always on, for error messages and for torch's flight-recorder analyser.
#pragma once

#include <mutex>
#include <string>
#include <vector>

#include "types.h"

namespace hfreduce {

// Where a rank is, for its peers: a struct of fixed layout, sent as raw bytes.
struct RankStatus {
  enum Answered : uint8_t { silent, here, left, died };  // silent: no answer came
  Call last;                // the operation that it is in, or was in last; sequence 0 before the first
  uint64_t collective = 0;  // the number of the last collective that it has begun
  int32_t rank = -1;
  uint8_t running = 0;  // whether `last` is still running
  uint8_t answered = silent;
  int32_t age_ms = 0;    // since `last` began, or since it ended
  char frame[256] = {};  // "train.py:42 in step"; "" if unknown
};

class Recorder {
 public:
  struct Record;

  explicit Recorder(size_t capacity = 2000);
  ~Recorder();

  // An operation begins, and ends. well: without a fault. bytes: of this rank's input and output. The root of send and
  // recv is the peer's group rank, -1 for any. Returns the record's id.
  uint64_t begun(const Call& call, int64_t bytes_in, int64_t bytes_out);
  void ended(uint64_t id, bool well);

  // The newest running operation, otherwise the one that ended last. The caller fills in rank, answered and frame.
  RankStatus status() const;

  // torch's flight-recorder schema 2.10 as JSON: entries, pg_config, pg_status. The analyser (python -m
  // torch.distributed.flight_recorder.fr_trace) reads a folder of files <prefix><global rank>, each the pickle of this
  // JSON's dictionary. `rank`: this rank in the group.
  std::string json(const std::string& group, int rank, const std::vector<int>& global_ranks) const;

 private:
  mutable std::mutex mutex_;
  std::vector<Record> records_;
  uint64_t next_ = 0, collective_ = 0;
};

}  // namespace hfreduce
