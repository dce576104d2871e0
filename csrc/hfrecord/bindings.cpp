// hfrecord._C: reading records and checking them, without Python's lock.
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "crc32.h"
#include "file.h"

namespace py = pybind11;
using namespace hfrecord;

namespace {

constexpr uint64_t AT_ONCE = 4 << 20;      // bytes whose checksums are compared before more memory is taken
constexpr size_t MOST_AT_ONCE = 1024;      // records
constexpr size_t WITHOUT_LOCK = 16 << 10;  // bytes from which another thread's work is worth a lock

// A buffer of bytes, for as long as this lives.
class Bytes {
 public:
  explicit Bytes(const py::handle& object) {
    if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_SIMPLE) != 0) throw py::error_already_set();
  }
  Bytes(const Bytes&) = delete;
  Bytes& operator=(const Bytes&) = delete;
  ~Bytes() { PyBuffer_Release(&view_); }
  const unsigned char* data() const { return static_cast<const unsigned char*>(view_.buf); }
  size_t size() const { return static_cast<size_t>(view_.len); }

 private:
  Py_buffer view_;
};

// Entries and numbers, copied: what a caller changes meanwhile is not looked at twice.
struct Batch {
  std::vector<Entry> entries;
  std::vector<int64_t> numbers;

  Batch(const py::handle& given, const py::handle& given_numbers) {
    const Bytes bytes(given), number_bytes(given_numbers);
    entries.resize(bytes.size() / sizeof(Entry));
    numbers.resize(number_bytes.size() / sizeof(int64_t));
    if (bytes.size() != entries.size() * sizeof(Entry) || number_bytes.size() != entries.size() * sizeof(int64_t)) {
      throw std::invalid_argument("entries of 24 bytes and as many numbers of 8 are expected, got " +
                                  std::to_string(bytes.size()) + " and " + std::to_string(number_bytes.size()));
    }
    if (!entries.empty()) {
      std::memcpy(entries.data(), bytes.data(), bytes.size());
      std::memcpy(numbers.data(), number_bytes.data(), number_bytes.size());
    }
  }
};

// Records from `begin` on, some MB of them, behind `found`. False where one is not there or is not what was written.
bool read_some(File& file, const Batch& batch, size_t* begin, bool check, py::list& found) {
  std::vector<py::bytes> records;
  std::vector<unsigned char*> places;
  const size_t first = *begin;
  size_t end = first;
  for (uint64_t bytes = 0; end < batch.entries.size() && end - first < MOST_AT_ONCE; ++end) {
    const uint64_t length = batch.entries[end].length;
    if (end > first && bytes + length > AT_ONCE) break;
    PyObject* made = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(length));
    if (made == nullptr) throw py::error_already_set();
    records.push_back(py::reinterpret_steal<py::bytes>(made));
    places.push_back(reinterpret_cast<unsigned char*>(PyBytes_AS_STRING(made)));
    bytes += length;
  }
  size_t whole = 0;
  {
    const py::gil_scoped_release release;
    whole = file.read(&batch.entries[first], &batch.numbers[first], end - first, places.data(), check);
  }
  for (size_t k = 0; k < whole; ++k) found.append(records[k]);
  *begin = end;
  return whole == end - first;
}

py::tuple read_batch(File& file, const py::object& entries, const py::object& numbers, bool check) {
  const Batch batch(entries, numbers);
  py::list found;
  const bool holds = file.holds(batch.entries.data(), batch.entries.size());
  for (size_t begin = 0; holds && begin < batch.entries.size();) {
    if (!read_some(file, batch, &begin, check, found)) break;
  }
  const bool compressed =
      std::any_of(batch.entries.begin(), batch.entries.end(), [](const Entry& entry) { return entry.codec != 0; });
  return py::make_tuple(found, compressed);
}

bool advise_batch(File& file, const py::object& entries, const py::object& numbers) {
  const Batch batch(entries, numbers);
  if (!file.holds(batch.entries.data(), batch.entries.size())) return false;
  const py::gil_scoped_release release;
  file.advise(batch.entries.data(), batch.entries.size());
  return true;
}

uint32_t crc32_of(const py::object& data, uint32_t before) {
  const Bytes bytes(data);
  if (bytes.size() < WITHOUT_LOCK) return crc32(before, bytes.data(), bytes.size());
  const py::gil_scoped_release release;
  return crc32(before, bytes.data(), bytes.size());
}

py::dict crc32_by_each(const py::object& data, uint32_t before) {
  const Bytes bytes(data);
  size_t count = 0;
  const Way* known = ways(&count);
  py::dict found;
  for (size_t k = 0; k < count; ++k) {
    std::vector<unsigned char> copy(bytes.size() + 1);
    const uint32_t plain = ~known[k].state(~before, bytes.data(), bytes.size(), nullptr);
    const uint32_t copied = ~known[k].copied(~before, bytes.data(), bytes.size(), copy.data());
    if (copied != plain || !std::equal(copy.begin(), copy.end() - 1, bytes.data()) || copy.back() != 0) {
      throw std::logic_error(std::string(known[k].name) + ": not the same with a copy");
    }
    found[known[k].name] = plain;
  }
  return found;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.def("crc32", &crc32_of, py::arg("data"), py::arg("before") = 0, py::pos_only(), "As zlib.crc32.");
  m.def("crc32_by_each", &crc32_by_each, py::arg("data"), py::arg("before") = 0,
        "The same by all ways that this processor has: {name: checksum}.");
  py::class_<File>(m, "File", "An open file: its descriptor, its size in bytes, and whether it is of the own format.")
      .def(py::init<int, uint64_t, bool>())
      .def(
          "read", &read_batch, py::arg("entries"), py::arg("numbers"), py::arg("check"),
          "The bytes of records, up to the first that is not there or has another checksum; whether any is compressed.")
      .def("advise", &advise_batch, py::arg("entries"), py::arg("numbers"),
           "Starts to read records, and returns; False where they do not lie in the file.")
      .def_property_readonly("warm", &File::warm,
                             "Whether what was read lately was in memory before it was asked for.");
}
