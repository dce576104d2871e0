// hfrecord._C: reads and checks records without the GIL.
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

constexpr uint64_t AT_ONCE = 4 << 20;  // after this many bytes, checksums are compared before more memory is allocated
constexpr size_t MOST_AT_ONCE = 1024;  // records
constexpr size_t WITHOUT_LOCK = 16 << 10;  // bytes from which releasing the GIL pays

// A Python buffer, held for the lifetime of this object.
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

// A file and its memory-mapped index.
class Opened {
 public:
  Opened(int fd, uint64_t size, bool own, const py::object& index, uint64_t records)
      : index_(index), file_(fd, size, own, index_.data(), records) {
    const uint64_t entry = own ? sizeof(Entry) : 12;
    if (records > index_.size() / entry) {
      throw std::invalid_argument("an index of " + std::to_string(index_.size()) + " bytes is too short for " +
                                  std::to_string(records) + " records");
    }
  }
  File& file() { return file_; }

 private:
  Bytes index_;
  File file_;
};

// Records `numbers` of files[which]. Both arrays are copied, because the caller may change them meanwhile.
class Batch {
 public:
  Batch(const py::sequence& files, const py::handle& which, const py::handle& numbers) {
    for (const py::handle file : files) {
      held_.push_back(py::reinterpret_borrow<py::object>(file));
      files_.push_back(&file.cast<Opened&>().file());
    }
    which_ = copied(which);
    numbers_ = copied(numbers);
    if (which_.size() != numbers_.size()) {
      throw std::invalid_argument("as many files as numbers are expected, got " + std::to_string(which_.size()) +
                                  " and " + std::to_string(numbers_.size()));
    }
    for (const int64_t file : which_) {
      if (file < 0 || static_cast<size_t>(file) >= files_.size()) throw py::index_error("no such file");
    }
  }

  // Reads the indices, up to the first record that does not lie in its file. Runs without the GIL.
  void find() {
    std::vector<signed char> whole(files_.size(), -1);
    for (size_t k = 0; k < numbers_.size(); ++k) {
      const auto at = static_cast<size_t>(which_[k]);
      if (whole[at] < 0) whole[at] = files_[at]->whole() ? 1 : 0;
      Entry entry;
      if (whole[at] == 0 || !files_[at]->find(numbers_[k], &entry)) return;
      entries.push_back(entry);
    }
  }

  // The end of the run of records that starts at `begin` and lies in one file.
  size_t run(size_t begin, size_t end) const {
    size_t last = begin + 1;
    while (last < end && which_[last] == which_[begin]) ++last;
    return last;
  }

  size_t size() const { return numbers_.size(); }
  File& file(size_t k) const { return *files_[static_cast<size_t>(which_[k])]; }
  const int64_t* number(size_t k) const { return &numbers_[k]; }

  std::vector<Entry> entries;

 private:
  static std::vector<int64_t> copied(const py::handle& given) {
    const Bytes bytes(given);
    std::vector<int64_t> numbers(bytes.size() / sizeof(int64_t));
    if (bytes.size() % sizeof(int64_t) != 0) throw std::invalid_argument("numbers of 8 bytes are expected");
    if (!numbers.empty()) std::memcpy(numbers.data(), bytes.data(), bytes.size());
    return numbers;
  }

  std::vector<py::object> held_;
  std::vector<File*> files_;
  std::vector<int64_t> which_, numbers_;
};

// Reads records from `begin` on, about 4 MiB, and appends them to `found`. False if one is missing or its checksum
// differs.
bool read_some(const Batch& batch, size_t* begin, bool check, bool warm, py::list& found) {
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
  size_t right = first;
  {
    const py::gil_scoped_release release;
    for (size_t at = first; at < end && at == right;) {
      const size_t last = batch.run(at, end);
      right += batch.file(at).read(&batch.entries[at], batch.number(at), last - at, &places[at - first], check, warm);
      at = last;
    }
  }
  for (size_t k = 0; k < right - first; ++k) found.append(records[k]);
  *begin = end;
  return right == end;
}

py::tuple read_batch(const Looks& looks, const py::sequence& files, const py::object& which, const py::object& numbers,
                     bool check) {
  Batch batch(files, which, numbers);
  {
    const py::gil_scoped_release release;
    batch.find();
  }
  py::list found, compressed;
  for (size_t begin = 0; begin < batch.entries.size();) {
    if (!read_some(batch, &begin, check, looks.warm(), found)) break;
  }
  for (size_t k = 0; k < found.size(); ++k) {
    const Entry& entry = batch.entries[k];
    if (entry.codec != 0) compressed.append(py::make_tuple(k, entry.codec, entry.offset));
  }
  return py::make_tuple(found, compressed);
}

bool advise_batch(Looks& looks, const py::sequence& files, const py::object& which, const py::object& numbers) {
  Batch batch(files, which, numbers);
  const py::gil_scoped_release release;
  batch.find();
  const size_t count = batch.entries.size();
  uint64_t bytes = 0;
  for (const Entry& entry : batch.entries) bytes += entry.length;
  const size_t step = bytes > Looks::LARGE * count ? 1 : std::max<size_t>(1, count / Looks::OF_BATCH);
  for (size_t k = step / 2; k < count; k += step) batch.file(k).look(batch.entries[k], looks);
  for (size_t at = 0; at < count && !looks.warm();) {
    const size_t last = batch.run(at, count);
    batch.file(at).advise(&batch.entries[at], last - at);
    at = last;
  }
  return count == batch.size();
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
  py::class_<Looks>(m, "Looks", "Whether files are in memory, by looks at what is about to be advised.")
      .def(py::init<>())
      .def_property_readonly("warm", &Looks::warm, "Whether all that was looked at lately was there.");
  py::class_<Opened>(m, "File", "An open file: descriptor, bytes, whether of the own format, its index and records.")
      .def(py::init<int, uint64_t, bool, py::object, uint64_t>());
  m.def(
      "read", &read_batch, py::arg("looks"), py::arg("files"), py::arg("which"), py::arg("numbers"), py::arg("check"),
      "The bytes of records, int64 `numbers` of files[which], as they are stored, up to the first that is not there or "
      "has another checksum; and of those that are compressed (place in the list, codec, offset in the file).");
  m.def("advise", &advise_batch, py::arg("looks"), py::arg("files"), py::arg("which"), py::arg("numbers"),
        "Starts to read records, and returns; False where one does not lie in its file.");
}
