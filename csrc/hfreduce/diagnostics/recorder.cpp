#include "diagnostics/recorder.h"

#include <algorithm>
#include <cstdio>
#include <map>

namespace hfreduce {

namespace {

using Time = Clock::time_point;

bool passed(Time time) { return time != Time(); }

}  // namespace

struct Recorder::Record {
  Call call;
  int64_t bytes_in = 0, bytes_out = 0;
  Time begun, ended;  // the epoch: not yet
  uint64_t id = 0;
  bool well = false;

  bool running() const { return !passed(ended); }
};

namespace {

using Record = Recorder::Record;

bool point_to_point(Kind kind) { return kind == Kind::send || kind == Kind::recv; }

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    if (static_cast<unsigned char>(c) >= 0x20) {
      out += c;
    } else {
      char escape[8];
      std::snprintf(escape, sizeof(escape), "\\u%04x", c);
      out += escape;
    }
  }
  return out + "\"";
}

std::string list(const std::vector<int>& ranks) {
  std::string text;
  for (const int rank : ranks) text += (text.empty() ? "" : ", ") + std::to_string(rank);
  return "[" + text + "]";
}

// A process group, as the analyser sees it. Messages get groups of two ranks, one per pair and direction. There both
// sides number them alike, so the analyser can match them, although it expects every rank of a group in every entry.
struct Group {
  std::string name;
  std::vector<int> ranks;  // global, ascending

  int index(int global_rank) const {
    return static_cast<int>(std::find(ranks.begin(), ranks.end(), global_rank) - ranks.begin());
  }
};

class Dump {
 public:
  Dump(const std::string& group, int rank, const std::vector<int>& global_ranks)
      : group_(group), rank_(rank), global_ranks_(global_ranks) {
    group_of(Call());  // pg_config must not be empty if nothing was called
  }

  void add(const Record& record) {
    const Call& call = record.call;
    const Group& group = group_of(call);
    const bool message = point_to_point(call.kind);
    if (!message) {
      begun_ = std::max(begun_, call.sequence);
      if (record.well) completed_ = std::max(completed_, call.sequence);
    }
    const auto elements = [&](int64_t bytes) { return "[[" + std::to_string(bytes / size_of(call.dtype)) + "]]"; };
    // Only the root of a reduce has an output, but the analyser expects equal sizes on all ranks.
    const int64_t bytes_out = call.kind == Kind::reduce ? record.bytes_in : record.bytes_out;
    const std::string dtypes = std::string("[\"") + name(call.dtype) + "\"]";
    const std::string id = std::to_string(record.id), sequence = std::to_string(call.sequence);
    const char* state = record.well ? "completed" : "started";
    if (!entries_.empty()) entries_ += ",\n";
    entries_ += "{\"record_id\": " + id + ", \"op_id\": " + id + ", \"pg_id\": 0, \"process_group\": [" +
                quoted(group.name) + ", \"hfreduce\"], \"collective_seq_id\": " + sequence +
                ", \"p2p_seq_id\": " + (message ? sequence : "0") + ", \"is_p2p\": " + (message ? "true" : "false") +
                ", \"profiling_name\": " + quoted(profiling_name(call, group)) +
                ", \"input_sizes\": " + elements(record.bytes_in) + ", \"input_dtypes\": " + dtypes +
                ", \"output_sizes\": " + elements(bytes_out) + ", \"output_dtypes\": " + dtypes + ", \"state\": \"" +
                state + "\", \"time_created_ns\": " + wall(record.begun) +
                ", \"time_discovered_started_ns\": " + wall(record.begun) +
                ", \"time_discovered_completed_ns\": " + wall(record.well ? record.ended : Time()) +
                ", \"retired\": " + (passed(record.ended) ? "true" : "false") + ", \"frames\": []}";
  }
  std::string text() const {
    std::string config;
    for (const auto& [name, group] : groups_)
      config += (config.empty() ? "" : ", ") + quoted(name) + ": {\"name\": " + quoted(name) +
                ", \"desc\": \"hfreduce\", \"ranks\": " + quoted(list(group.ranks)) + "}";
    return "{\"version\": \"2.10\", \"comm_lib_version\": \"hfreduce\", \"pg_config\": {" + config +
           "}, \"pg_status\": {\"0\": {\"last_enqueued_collective\": " + std::to_string(begun_) +
           ", \"last_started_collective\": " + std::to_string(begun_) +
           ", \"last_completed_collective\": " + std::to_string(completed_) + "}}, \"entries\": [" + entries_ + "]}";
  }

 private:
  // The sender and the receiver of a message, as group ranks. For a receive from any rank, both are this rank.
  std::pair<int, int> ends(const Call& call) const {
    const int peer = call.root < 0 ? rank_ : call.root;
    return call.kind == Kind::send ? std::pair(rank_, peer) : std::pair(peer, rank_);
  }

  const Group& group_of(const Call& call) {
    Group group{group_, global_ranks_};
    if (point_to_point(call.kind)) {
      const auto [from, to] = ends(call);
      group.name += call.root < 0 ? ": any" : ": " + std::to_string(global_ranks_[from]);
      group.name += " to " + std::to_string(global_ranks_[to]);
      group.ranks = {global_ranks_[from]};
      if (from != to) group.ranks.push_back(global_ranks_[to]);
    }
    std::sort(group.ranks.begin(), group.ranks.end());
    return groups_.emplace(group.name, group).first->second;
  }
  std::string profiling_name(const Call& call, const Group& group) const {
    // The analyser has fixed lists of backends, without hfreduce, and of operations, in which barrier has another name.
    const std::string text =
        std::string("nccl:") + (call.kind == Kind::barrier ? "all_reduce_barrier" : name(call.kind));
    if (!point_to_point(call.kind)) return text;
    const auto [from, to] = ends(call);
    const std::string source = std::to_string(group.index(global_ranks_[from]));
    const std::string target = std::to_string(group.index(global_ranks_[to]));
    return text + (call.kind == Kind::send ? " " + source + "->" + target : " " + target + "<-" + source);
  }
  std::string wall(Time time) const {
    return std::to_string(passed(time) ? (time + to_wall_).time_since_epoch().count() : 0);
  }

  const std::string group_;
  const int rank_;
  const std::vector<int>& global_ranks_;
  const std::chrono::nanoseconds to_wall_ =
      std::chrono::system_clock::now().time_since_epoch() - Clock::now().time_since_epoch();
  std::map<std::string, Group> groups_;
  std::string entries_;
  uint64_t begun_ = 0, completed_ = 0;  // the last collective's number
};

}  // namespace

Recorder::Recorder(size_t capacity) : records_(capacity) {}

Recorder::~Recorder() = default;

uint64_t Recorder::begun(const Call& call, int64_t bytes_in, int64_t bytes_out) {
  const Time now = Clock::now();
  std::lock_guard lock(mutex_);
  const uint64_t id = next_++;
  records_[id % records_.size()] = {call, bytes_in, bytes_out, now, Time(), id, false};
  if (!point_to_point(call.kind)) collective_ = call.sequence;
  return id;
}

void Recorder::ended(uint64_t id, bool well) {
  const Time now = Clock::now();
  std::lock_guard lock(mutex_);
  Record& record = records_[id % records_.size()];
  if (record.id != id) return;
  record.ended = now;
  record.well = well;
}

RankStatus Recorder::status() const {
  const Time now = Clock::now();
  std::lock_guard lock(mutex_);
  const Record* last = nullptr;
  const uint64_t oldest = next_ - std::min<uint64_t>(next_, records_.size());
  for (uint64_t id = next_; id-- > oldest;) {
    const Record& record = records_[id % records_.size()];
    if (record.running()) {
      last = &record;
      break;
    }
    if (passed(record.ended) && (!last || record.ended > last->ended)) last = &record;
  }
  RankStatus status;
  status.collective = collective_;
  if (!last) return status;
  status.last = last->call;
  status.running = last->running();
  const auto age = std::chrono::duration_cast<milliseconds>(now - (last->running() ? last->begun : last->ended));
  status.age_ms = static_cast<int32_t>(std::clamp<int64_t>(age.count(), 0, INT32_MAX));
  return status;
}

std::string Recorder::json(const std::string& group, int rank, const std::vector<int>& global_ranks) const {
  std::vector<Record> records;
  {
    std::lock_guard lock(mutex_);
    const uint64_t oldest = next_ - std::min<uint64_t>(next_, records_.size());
    for (uint64_t id = oldest; id < next_; ++id) records.push_back(records_[id % records_.size()]);
  }
  Dump dump(group, rank, global_ranks);
  for (const Record& record : records) dump.add(record);
  return dump.text();
}

}  // namespace hfreduce
