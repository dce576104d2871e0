// Which algorithm, how many connections, what chunk: by kind, size and shape of the job. Rows are measured by
// `python -m hfreduce.tune` and come from a file; without one there are defaults.
#pragma once

#include <cstdint>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include "types.h"

namespace hfreduce {

enum class Inside : uint8_t { one_shot, two_shot };   // a host
enum class Between : uint8_t { direct, ring, tree };  // hosts

struct Choice {
  Inside inside = Inside::two_shot;
  Between between = Between::ring;
  int64_t chunk = 0;  // bytes of a rank's slot that one step fills
  int streams = 1;    // TCP connections to each neighbour
};

// What a choice depends on besides the message.
struct Shape {
  int local_size = 1;  // ranks on this host
  int hosts = 1;
  int cores = 1;
};

struct Row {
  Kind kind;
  int64_t max_bytes;  // this row is for messages up to this size
  Choice choice;
};

static_assert(std::is_trivially_copyable_v<Row>);  // it is sent to other ranks as it is

class Plan {
 public:
  // The defaults stand behind the rows given, for what these do not reach. Throws std::invalid_argument for a row that
  // makes no sense, or whose chunk does not fit into a slot.
  Plan(const Shape& shape, size_t slot_bytes, std::vector<Row> rows = {});
  // The first row of this kind whose max_bytes is not below the message's bytes: those of the blocks of all ranks,
  // where it is made of blocks. All ranks must have the same rows.
  Choice choose(Kind kind, int64_t bytes) const;
  Choice choose(const Call& call, int ranks) const;  // floats of 8 bits, which lose too much at every hop, go directly
  const std::vector<Row>& rows() const { return rows_; }

 private:
  std::vector<Row> rows_;
};

// As they cross from Python: kind, max_bytes, inside, between, chunk, streams. What is none, Plan refuses.
using RowTuple = std::tuple<int, int64_t, int, int, int64_t, int>;
std::vector<Row> rows_of(const std::vector<RowTuple>& tuples);

const char* name(Inside);
const char* name(Between);

}  // namespace hfreduce
