// Chooses algorithm, number of connections and chunk size, by kind, message size and shape of the job. `python -m
// hfreduce.tune` measures rows and writes them to a file; without rows there are defaults.
#pragma once

#include <cstdint>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include "types.h"

namespace hfreduce {

enum class Inside : uint8_t { one_shot, two_shot };   // inside a host
enum class Between : uint8_t { direct, ring, tree };  // between hosts

struct Choice {
  Inside inside = Inside::two_shot;
  Between between = Between::ring;
  int64_t chunk = 0;  // bytes of a rank's slot that one step fills
  int streams = 1;    // TCP connections to each neighbour
};

// What a choice depends on, apart from the message.
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

static_assert(std::is_trivially_copyable_v<Row>);  // sent to other ranks as raw bytes

class Plan {
 public:
  // The defaults are appended to `rows`, for messages that no row covers. Throws std::invalid_argument for an invalid
  // row, or one whose chunk does not fit into a slot.
  Plan(const Shape& shape, size_t slot_bytes, std::vector<Row> rows = {});
  // The first row of this kind with max_bytes >= bytes. If the message consists of blocks, `bytes` counts the blocks of
  // all ranks. All ranks must have the same rows.
  Choice choose(Kind kind, int64_t bytes) const;
  Choice choose(const Call& call, int ranks) const;  // 8-bit floats, which lose too much per hop: direct
  const std::vector<Row>& rows() const { return rows_; }

 private:
  std::vector<Row> rows_;
};

// Rows as Python passes them: kind, max_bytes, inside, between, chunk, streams. Plan rejects invalid values.
using RowTuple = std::tuple<int, int64_t, int, int, int64_t, int>;
std::vector<Row> rows_of(const std::vector<RowTuple>& tuples);

const char* name(Inside);
const char* name(Between);

}  // namespace hfreduce
