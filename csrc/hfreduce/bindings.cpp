// hfreduce._C: the communicator on raw memory, for Python without torch. Memory is passed as integer addresses
// (Tensor.data_ptr()); dtypes, operations and kinds as their numbers in types.h; times in seconds.
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <tuple>

#include "collectives/reduce.h"
#include "communicator.h"
#include "cuda/paths.h"

namespace py = pybind11;
using namespace hfreduce;

namespace {

using Address = uintptr_t;

void* memory(Address address) { return reinterpret_cast<void*>(address); }
DType dtype_of(int number) { return static_cast<DType>(number); }
Reduction reduction_of(int op, double factor) { return {static_cast<Op>(op), factor}; }
milliseconds ms(double seconds) { return milliseconds(static_cast<int64_t>(seconds * 1000)); }

RowTuple tuple_of(Kind kind, int64_t max_bytes, const Choice& choice) {
  return {static_cast<int>(kind),           max_bytes,    static_cast<int>(choice.inside),
          static_cast<int>(choice.between), choice.chunk, choice.streams};
}

std::vector<RowTuple> tuples_of(const Plan& plan) {
  std::vector<RowTuple> tuples;
  for (const Row& row : plan.rows()) tuples.push_back(tuple_of(row.kind, row.max_bytes, row.choice));
  return tuples;
}

// A store made of two Python functions: set(key, value), and find(key), which returns bytes or None, without waiting.
class PythonStore : public Store {
 public:
  PythonStore(py::function set, py::function find) : set_(std::move(set)), find_(std::move(find)) {}
  void set(const std::string& key, const std::string& value) override {
    py::gil_scoped_acquire locked;
    set_(key, py::bytes(value));
  }
  std::optional<std::string> find(const std::string& key) override {
    py::gil_scoped_acquire locked;
    const py::object value = find_(key);
    return value.is_none() ? std::nullopt : std::optional<std::string>(value.cast<std::string>());
  }

 private:
  py::function set_, find_;
};

// Destroys a communicator with the GIL released: one of its threads may be waiting for the GIL.
struct Unlocked {
  void operator()(Communicator* communicator) const {
    py::gil_scoped_release unlocked;
    delete communicator;
  }
};

std::unique_ptr<Communicator, Unlocked> connect(py::function set, py::function find, int rank, int size,
                                                const std::vector<int>& global_ranks, const std::string& name,
                                                double timeout, const std::string& host_id,
                                                const std::string& interface, size_t slot_bytes,
                                                const std::vector<RowTuple>& plan, py::object where,
                                                py::object sorted) {
  Config config;
  config.rank = rank, config.size = size, config.global_ranks = global_ranks, config.name = name;
  config.timeout = ms(timeout), config.host_id = host_id, config.interface = interface;
  config.slot_bytes = slot_bytes, config.plan = rows_of(plan);
  // They may be released by a thread without the GIL.
  const auto shared = [](py::object object) {
    return std::shared_ptr<py::object>(new py::object(std::move(object)), [](py::object* held) {
      py::gil_scoped_acquire locked;
      delete held;
    });
  };
  if (!where.is_none())
    config.where = [function = shared(std::move(where))] {
      py::gil_scoped_acquire locked;
      return (*function)().cast<std::string>();
    };
  if (!sorted.is_none())
    config.sorted = [function = shared(std::move(sorted))](const auto& hosts) {
      py::gil_scoped_acquire locked;
      const auto [order, source] = (*function)(hosts).template cast<std::pair<std::vector<int>, std::string>>();
      return HostOrder{order, source};
    };
  PythonStore store(std::move(set), std::move(find));
  py::gil_scoped_release unlocked;
  return std::unique_ptr<Communicator, Unlocked>(new Communicator(store, config));
}

const char* name(Fault::Cause cause) {
  constexpr const char* names[] = {"died", "timeout", "mismatch", "aborted", "left", "broken"};
  return names[static_cast<int>(cause)];
}

// Fault in Python: a RuntimeError with `cause`, a word, and `ranks`, the group ranks at fault.
void bind_fault(py::module_& m) {
  static py::handle type = py::exception<Fault>(m, "Fault", PyExc_RuntimeError).release();
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const Fault& fault) {
      py::object error = type(fault.what());
      error.attr("cause") = name(fault.cause);
      error.attr("ranks") = fault.ranks;
      PyErr_SetObject(type.ptr(), error.ptr());
    }
  });
}

void bind_communicator(py::module_& m) {
  using C = Communicator;
  const auto unlocked = py::call_guard<py::gil_scoped_release>();
  py::class_<C, std::unique_ptr<C, Unlocked>>(m, "Communicator")
      .def(py::init(&connect), py::arg("set"), py::arg("find"), py::arg("rank"), py::arg("size"), py::kw_only(),
           py::arg("global_ranks") = std::vector<int>(), py::arg("name") = "default", py::arg("timeout") = 300.0,
           py::arg("host_id") = "", py::arg("interface") = "", py::arg("slot_bytes") = Config().slot_bytes,
           py::arg("plan") = std::vector<RowTuple>(), py::arg("where") = py::none(), py::arg("sorted") = py::none())
      .def_property_readonly("rank", &C::rank)
      .def_property_readonly("size", &C::size)
      .def_property_readonly("failed", &C::failed)
      .def_property_readonly("operations", &C::operations)
      .def_property_readonly("plan", [](const C& c) { return tuples_of(c.plan()); })
      .def("describe", &C::describe)
      .def("record", &C::record)
      .def("abort", &C::abort, unlocked, py::arg("reason"))
      .def("shutdown", &C::shutdown, unlocked, py::arg("why") = "")
      .def(
          "all_reduce",
          [](C& c, Address in, Address out, int64_t count, int dtype, int op, double factor, double timeout) {
            c.all_reduce(memory(in), memory(out), count, dtype_of(dtype), reduction_of(op, factor), ms(timeout));
          },
          unlocked, py::arg("input"), py::arg("output"), py::arg("count"), py::arg("dtype"), py::arg("op") = 0,
          py::arg("factor") = 1.0, py::arg("timeout") = -1.0)
      .def(
          "reduce",
          [](C& c, Address in, Address out, int64_t count, int dtype, int root, int op, double factor, double timeout) {
            c.reduce(memory(in), memory(out), count, dtype_of(dtype), reduction_of(op, factor), root, ms(timeout));
          },
          unlocked, py::arg("input"), py::arg("output"), py::arg("count"), py::arg("dtype"), py::arg("root"),
          py::arg("op") = 0, py::arg("factor") = 1.0, py::arg("timeout") = -1.0)
      .def(
          "reduce_scatter",
          [](C& c, Address in, Address out, int64_t count, int dtype, int op, double factor, double timeout) {
            c.reduce_scatter(memory(in), memory(out), count, dtype_of(dtype), reduction_of(op, factor), ms(timeout));
          },
          unlocked, py::arg("input"), py::arg("output"), py::arg("count"), py::arg("dtype"), py::arg("op") = 0,
          py::arg("factor") = 1.0, py::arg("timeout") = -1.0)
      .def(
          "all_gather",
          [](C& c, Address in, Address out, int64_t count, int dtype, double timeout) {
            c.all_gather(memory(in), memory(out), count, dtype_of(dtype), ms(timeout));
          },
          unlocked, py::arg("input"), py::arg("output"), py::arg("count"), py::arg("dtype"), py::arg("timeout") = -1.0)
      .def(
          "broadcast",
          [](C& c, Address data, int64_t count, int dtype, int root, double timeout) {
            c.broadcast(memory(data), count, dtype_of(dtype), root, ms(timeout));
          },
          unlocked, py::arg("data"), py::arg("count"), py::arg("dtype"), py::arg("root"), py::arg("timeout") = -1.0)
      .def(
          "gather",
          [](C& c, Address in, Address out, int64_t count, int dtype, int root, double timeout) {
            c.gather(memory(in), memory(out), count, dtype_of(dtype), root, ms(timeout));
          },
          unlocked, py::arg("input"), py::arg("output"), py::arg("count"), py::arg("dtype"), py::arg("root"),
          py::arg("timeout") = -1.0)
      .def(
          "scatter",
          [](C& c, Address in, Address out, int64_t count, int dtype, int root, double timeout) {
            c.scatter(memory(in), memory(out), count, dtype_of(dtype), root, ms(timeout));
          },
          unlocked, py::arg("input"), py::arg("output"), py::arg("count"), py::arg("dtype"), py::arg("root"),
          py::arg("timeout") = -1.0)
      .def(
          "all_to_all",
          [](C& c, Address in, const std::vector<int64_t>& in_offsets, const std::vector<int64_t>& in_counts,
             Address out, const std::vector<int64_t>& out_offsets, const std::vector<int64_t>& out_counts, int dtype,
             double timeout) {
            c.all_to_all(memory(in), in_offsets, in_counts, memory(out), out_offsets, out_counts, dtype_of(dtype),
                         ms(timeout));
          },
          unlocked, py::arg("input"), py::arg("input_offsets"), py::arg("input_counts"), py::arg("output"),
          py::arg("output_offsets"), py::arg("output_counts"), py::arg("dtype"), py::arg("timeout") = -1.0)
      .def(
          "barrier", [](C& c, double timeout) { c.barrier(ms(timeout)); }, unlocked, py::arg("timeout") = -1.0)
      .def(
          "send",
          [](C& c, Address data, int64_t count, int dtype, int to, int tag, double timeout) {
            c.send(memory(data), count, dtype_of(dtype), to, tag, ms(timeout));
          },
          unlocked, py::arg("data"), py::arg("count"), py::arg("dtype"), py::arg("to"), py::arg("tag") = 0,
          py::arg("timeout") = -1.0)
      .def(
          "recv",
          [](C& c, Address data, int64_t count, int dtype, int from, int tag, double timeout) {
            c.recv(memory(data), count, dtype_of(dtype), from, tag, ms(timeout));
          },
          unlocked, py::arg("data"), py::arg("count"), py::arg("dtype"), py::arg("from_"), py::arg("tag") = 0,
          py::arg("timeout") = -1.0)
      .def(
          "recv_any",
          [](C& c, Address data, int64_t count, int dtype, int tag, double timeout) {
            return c.recv_any(memory(data), count, dtype_of(dtype), tag, ms(timeout));
          },
          unlocked, py::arg("data"), py::arg("count"), py::arg("dtype"), py::arg("tag") = 0, py::arg("timeout") = -1.0);
}

// Parts for tests and the tuner.
void bind_parts(py::module_& m) {
  m.def(
      "reduce",
      [](Address out, const std::vector<Address>& inputs, const std::optional<std::vector<double>>& factors,
         int64_t count, int dtype, int op, int64_t divisor, bool stream) {
        std::vector<const void*> pointers;
        for (Address input : inputs) pointers.push_back(memory(input));
        reduce(memory(out), pointers.data(), factors ? factors->data() : nullptr, static_cast<int>(pointers.size()),
               count, dtype_of(dtype), static_cast<Op>(op), divisor, stream);
      },
      py::call_guard<py::gil_scoped_release>(), py::arg("out"), py::arg("inputs"), py::arg("factors"), py::arg("count"),
      py::arg("dtype"), py::arg("op"), py::arg("divisor") = 1, py::arg("stream") = false);
  m.def("supported", [](int dtype, int op) { return supported(dtype_of(dtype), static_cast<Op>(op)); });
  m.def(
      "choose",
      [](int local_size, int hosts, int cores, size_t slot_bytes, const std::vector<RowTuple>& rows, int kind,
         int64_t bytes) {
        const Plan plan(Shape{local_size, hosts, cores}, slot_bytes, rows_of(rows));
        return tuple_of(static_cast<Kind>(kind), bytes, plan.choose(static_cast<Kind>(kind), bytes));
      },
      "The row that a group of this shape takes for a message of so many bytes.");
  m.def(
      "choose_device",
      [](int ranks, int hosts, bool peers, const std::vector<gpu::DeviceRowTuple>& rows, int kind, int64_t bytes) {
        const std::vector<gpu::DeviceRow> found = gpu::rows_of(rows);
        const gpu::Means means{ranks, peers && hosts == 1, !peers && hosts == 1, true, peers && hosts == 1};
        const gpu::Message message{static_cast<Kind>(kind), bytes};
        const gpu::Path path = gpu::path_of(found, means, message);
        const gpu::Extent extent = gpu::extent_of(found, means, message, path);
        return std::tuple(static_cast<int>(path), extent.blocks, extent.threads, extent.slot,
                          gpu::row_of(found, means, message) != nullptr);
      },
      "(path, blocks, threads, slot, whether a row says so) of a message on GPUs.");
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  bind_fault(m);
  bind_communicator(m);
  bind_parts(m);
}
