// q, k and v that are views of one product: attention's three gradients become the product's gradient in one copy.
//
// For `q, k, v = qkv.view(...).permute(...).unbind()`, torch stacks the three gradients and copies them once more into
// the order of the product. The node here stands between the views and attention, and has edges to both product and
// views.
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/generated/Functions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <typeinfo>

#include "rooms.h"

namespace hfnn::node {
namespace ag = torch::autograd;

// The location of q, k or v in the product.
struct Part {
  std::vector<int64_t> sizes, strides;
  int64_t offset;
};

using Between = std::vector<std::pair<Node*, int>>;

struct JointRoom : Room {
  std::array<Part, 3> parts;
  std::array<int, 3> order{0, 1, 2};  // by their offsets
  std::vector<int64_t> sizes;         // of the product
  bool in_rows;                       // whether each part is a range of columns of the product
  // The nodes of the product and of the views, and how many edges of this node and of the views lead to each.
  Between between;

  std::span<Kept> kept() override { return {}; }
  std::string name() const override { return "_JointBackward"; }
  Tensor build(ScalarType) override { TORCH_INTERNAL_ASSERT(false, "has no recipe"); }
  variable_list gradients(const Tensor&) override { TORCH_INTERNAL_ASSERT(false, "has three outputs"); }
  variable_list differentiable(const Tensor&) override { TORCH_INTERNAL_ASSERT(false, "has three outputs"); }

  // Gradients of the product and the views: either the joint one, past the views, or one for each view.
  variable_list apply(variable_list&& dys) override {
    if (!may_pass(dys)) return {Tensor(), dys[0], dys[1], dys[2]};
    const BelowAutograd below;
    return {joined(dys), Tensor(), Tensor(), Tensor()};
  }

 private:
  bool may_pass(const variable_list& dys) const {
    if (at::GradMode::is_enabled() || !wanted(0)) return false;
    for (const Tensor& dy : dys)
      if (!dy.defined() || !dy.unsafeGetTensorImpl()->has_storage() || dy._is_zerotensor() || dy.is_neg() ||
          dy._fw_grad(0).defined())
        return false;
    // If anybody else holds a view or a node, they might ask for its gradient, or add to it in another order than
    // torch.
    for (const auto& [node, edges] : between) {
      if (size_t(node->getptr().use_count()) != size_t(edges) + 1) return false;
      const bool hooked =
          !node->tensor_pre_hooks().empty() || !node->pre_hooks().empty() || !node->post_hooks().empty();
      if (hooked && node != next_edge(0).function.get()) return false;
    }
    return true;
  }

  Tensor joined(const variable_list& dys) const {
    Tensor dy = at::empty(sizes, dys[0].options());
    Tensor columns[3];
    bool dense = in_rows;
    for (int i = 0; i < 3 && dense; ++i) {
      const Tensor rows = dys[i].transpose(1, 2);
      dense = rows.is_contiguous();
      if (dense) columns[i] = rows.view({rows.size(0) * rows.size(1), -1});
    }
    if (dense) {
      Tensor all = dy.view({columns[0].size(0), -1});
      at::cat_out(all, {columns[order[0]], columns[order[1]], columns[order[2]]}, 1);
    } else {
      for (int i = 0; i < 3; ++i) dy.as_strided(parts[i].sizes, parts[i].strides, parts[i].offset).copy_(dys[i]);
    }
    return dy;
  }
};

template <class... Views>
static bool one_of(const Node& node) {
  return (... || (typeid(node) == typeid(Views)));
}

// The number of elements of the product from which saving one copy is worth a node.
constexpr int64_t kFloor = 1 << 16;

// Whether a view's gradient reaches `end` through view nodes only. Counts these nodes. Also false if the product itself
// is split: torch then copies only once.
static bool leads(ag::Edge from, const ag::Edge& end, Between& between) {
  using namespace ag::generated;
  bool splits = true;
  for (int steps = 0; steps < 8 && from.function; ++steps) {
    Node* node = from.function.get();
    const auto found = std::find_if(between.begin(), between.end(), [&](auto& each) { return each.first == node; });
    const bool known = found != between.end();
    if (known) {
      ++found->second;
    } else {
      between.emplace_back(node, 1);
    }
    if (node == end.function.get()) return !splits && from.input_nr == end.input_nr;
    if (known) return true;  // another view continues from here
    splits = one_of<UnbindBackward0, SplitBackward0, SplitWithSizesBackward0>(*node);
    if ((!splits && !one_of<ViewBackward0, PermuteBackward0, TransposeBackward0, SelectBackward0>(*node)) ||
        node->num_outputs() != 1)
      return false;
    from = node->next_edge(0);
  }
  return false;
}

// Whether q, k and v, each (B, H, T, D), are disjoint parts of the rows of a contiguous product and cover all of it.
static bool covers(const Tensor& product, const Tensor (&views)[3], bool& in_rows) {
  const int64_t width = product.size(-1), heads = views[0].size(-1);
  if (heads == 0 || width % heads || width / heads > 64 * 16) return false;
  std::array<uint64_t, 16> taken{};
  int64_t found = 0;
  in_rows = true;
  for (const Tensor& view : views) {
    const int64_t B = view.size(0), H = view.size(1), T = view.size(2);
    const int64_t offset = view.storage_offset() - product.storage_offset();
    if (view.size(3) != heads || (heads > 1 && view.stride(3) != 1) || B * T * width != product.numel()) return false;
    const bool batch_first = (T == 1 || view.stride(2) == width) && (B == 1 || view.stride(0) == T * width);
    const bool batch_second = (B == 1 || view.stride(0) == width) && (T == 1 || view.stride(2) == B * width);
    if (!batch_first && !batch_second) return false;
    const int64_t step = H == 1 ? heads : view.stride(1);
    in_rows = in_rows && batch_first && step == heads;
    for (int64_t h = 0; h < H; ++h) {
      const int64_t at = offset + h * step;
      if (at < 0 || at + heads > width || at % heads) return false;
      uint64_t& word = taken[at / heads / 64];
      const uint64_t bit = uint64_t(1) << (at / heads % 64);
      if (word & bit) return false;
      word |= bit;
      ++found;
    }
  }
  return found * heads == width;
}

static const Tensor* base_of(const Tensor& view) {
  auto* meta = ag::impl::get_view_autograd_meta(view);
  return meta && meta->has_bw_view() ? &meta->get_backward_view().base_ : nullptr;
}

// (q, k, v): the same tensors with the node added, or None if there is nothing to join.
static PyObject* joint(PyObject*, PyObject* const* args, Py_ssize_t) {
  HANDLE_TH_ERRORS
  if (!at::GradMode::is_enabled() || fake_mode()) Py_RETURN_NONE;
  Tensor views[3];
  const Tensor* base = nullptr;
  for (int i = 0; i < 3; ++i) {
    const Tensor* given = plain(args[i]);
    if (!given || given->dim() != 4 || !given->requires_grad()) Py_RETURN_NONE;
    const Tensor* of = base_of(*given);
    if (!of || of->numel() < kFloor || (base && !of->is_same(*base))) Py_RETURN_NONE;
    base = of;
    views[i] = *given;
  }
  bool in_rows;
  if (base->is_leaf() || base->dim() < 2 || !base->is_contiguous() || base->scalar_type() != views[0].scalar_type() ||
      !plain_context() || !covers(*base, views, in_rows))
    Py_RETURN_NONE;
  ag::edge_list edges{ag::impl::gradient_edge(*base)};
  Between between{{edges[0].function.get(), 1}};
  for (const Tensor& view : views) {
    edges.push_back(ag::impl::gradient_edge(view));
    if (!leads(edges.back(), edges[0], between)) Py_RETURN_NONE;
  }
  auto node = make_node<JointRoom>();
  node->between = std::move(between);
  node->sizes = base->sizes().vec();
  node->in_rows = in_rows;
  std::sort(node->order.begin(), node->order.end(),
            [&](int a, int b) { return views[a].storage_offset() < views[b].storage_offset(); });
  node->set_next_edges(std::move(edges));
  py::tuple found(3);
  for (int i = 0; i < 3; ++i) {
    const Tensor& view = views[i];
    node->parts[i] = {view.sizes().vec(), view.strides().vec(), view.storage_offset() - base->storage_offset()};
    Tensor same;
    {
      const BelowAutograd below;
      same = view.alias();
    }
    ag::impl::set_version_counter(same, ag::impl::version_counter(view));  // a write to either is seen by both
    ag::set_history(same, node);
    found[i] = py::reinterpret_steal<py::object>(THPVariable_Wrap(same));
  }
  return found.release().ptr();
  END_HANDLE_TH_ERRORS
}

void bind_joint(py::module_& m) {
  static PyMethodDef method = fast_method("joint", joint);
  m.def("joint", [] { return bound(&method, &method); });
}

}  // namespace hfnn::node
