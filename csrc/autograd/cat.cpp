// torch.cat, whose result its consumer can rebuild from the parts.
//
// torch keeps nothing for backward, and neither does this node for its own. But the consumer keeps the whole. Where a
// part is kept anyway, or can be rebuilt, the parts take less: the skips of a U-Net, all features of a dense block. A
// part that is itself such a result stands for its parts, so a chain of them keeps each once.
#include <ATen/ops/cat.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_variable.h>

#include <unordered_map>
#include <unordered_set>

#include "rooms.h"

namespace hfnn::node {
namespace ag = torch::autograd;
namespace {

struct CatNode : Room {
  std::vector<int64_t> sizes;  // of the inputs along dim
  std::unique_ptr<Kept[]> parts;
  size_t count = 0;  // of parts
  int64_t dim = 0;

  std::span<Kept> kept() override { return {parts.get(), count}; }
  std::string name() const override { return "_CatBackward"; }

  Tensor build(ScalarType) override {
    variable_list given;
    for (Kept& part : kept()) given.push_back(part.part(true));
    return at::cat(given, dim);
  }
  variable_list gradients(const Tensor& dy) override {
    const AboveAutograd above;  // views with a base, as torch's: nothing is added to them in place
    variable_list found(sizes.size());
    for (int64_t i = 0, from = 0; i < int64_t(sizes.size()); from += sizes[size_t(i++)])
      if (should_compute_output(size_t(i))) found[size_t(i)] = dy.narrow(dim, from, sizes[size_t(i)]);
    return found;
  }
  variable_list differentiable(const Tensor& dy) override { return gradients(dy); }
};

// The node of a cat along the same dimension that made x, if its parts can stand for x.
CatNode* cat_of(const Tensor& x, int64_t dim) {
  auto* meta = graph_of(x);
  auto* node = meta ? dynamic_cast<CatNode*>(meta->grad_fn_.get()) : nullptr;
  return node && node->dim == dim && node->gives(x) ? node : nullptr;
}

// Tensors that were parts before, and may be kept for another whole.
bool seen_before(const Tensor& x) {
  static auto& seen = *new std::unordered_map<c10::TensorImpl*, WeakTensor>;  // guarded by the GIL
  if (seen.size() > 256) std::erase_if(seen, [](const auto& each) { return each.second.expired(); });
  if (seen.size() > 256) seen.clear();
  auto [at, fresh] = seen.try_emplace(x.unsafeGetTensorImpl(), x.getIntrusivePtr());
  if (fresh || !at->second.expired()) return !fresh;
  at->second = WeakTensor(x.getIntrusivePtr());
  return false;
}

// Whether x takes no more memory than anyway if it is kept: something else keeps its memory, or may do so.
bool kept_anyway(const Tensor& x) {
  const bool before = seen_before(x);
  return before || Kept::takes(x) || (x.has_storage() && x.storage().use_count() > 1);
}

// Whether the memory in which the parts are is no larger than the result's. That of a view may be.
bool fits(const variable_list& tensors) {
  std::unordered_set<const void*> seen;
  int64_t held = 0;
  for (const Tensor& x : tensors) {
    held -= int64_t(x.nbytes());
    if (!x.is_view() || Kept::takes(x) || is_fake(x)) {
      held += int64_t(x.nbytes());
    } else if (seen.insert(x.storage().unsafeGetStorageImpl()).second) {
      held += int64_t(x.storage().nbytes());
    }
  }
  return held <= 0;
}

// (tensors, dim >= 0): tensors of one dtype and device. None: torch's own op must run, because no part is kept anyway.
PyObject* cat(PyObject*, PyObject* const* args, Py_ssize_t) {
  HANDLE_TH_ERRORS
  const auto tensors = py::cast<variable_list>(py::handle(args[0]));
  const int64_t dim = PyLong_AsLongLong(args[1]);
  bool gains = false;
  for (const Tensor& x : tensors) gains |= kept_anyway(x);
  if (!gains || !fits(tensors)) Py_RETURN_NONE;
  Room::decide(tensors);

  auto node = make_node<CatNode>();
  node->dim = dim;
  // Hooks of saved tensors see each part once, so it is not shared.
  const bool apart = hooked();
  std::vector<const CatNode*> inner;
  for (const Tensor& x : tensors) {
    inner.push_back(apart ? nullptr : cat_of(x, dim));
    node->count += inner.back() ? inner.back()->count : 1;
    node->sizes.push_back(x.size(dim));
  }
  node->parts = std::make_unique<Kept[]>(node->count);
  Kept* part = node->parts.get();
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (inner[i]) {
      for (Kept& of_inner : std::span(inner[i]->parts.get(), inner[i]->count)) (part++)->share(of_inner);
    } else if (Kept& own = *part++; !own.take(tensors[i])) {
      apart ? own.save(tensors[i]) : own.hold(tensors[i]);
    }
  }
  Tensor y;
  {
    pybind11::gil_scoped_release no_gil;
    const BelowAutograd below;
    y = at::cat(tensors, dim);
  }
  node->finish(node, y, ag::collect_next_edges(tensors), true);
  node->offer(node);
  return THPVariable_Wrap(y);
  END_HANDLE_TH_ERRORS
}

}  // namespace

void bind_cat(py::module_& m) {
  static PyMethodDef function = fast_method("cat", cat);
  m.add_object("cat", py::reinterpret_steal<py::object>(PyCFunction_NewEx(&function, nullptr, nullptr)));
}

}  // namespace hfnn::node
