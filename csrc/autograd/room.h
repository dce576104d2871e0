// Autograd nodes that are their own recipes.
//
// In eager mode a producer keeps its input and its consumer keeps the producer's output. So a cheap op between two
// matrix products costs a full tensor. A room is a node with one output y. It can rebuild y, bit for bit, from what it
// keeps for its own backward. A consumer that would save y keeps its producer's node instead, and asks it for y in
// backward. Consumers share the result; the last one, or the end of the backward, frees it.
#pragma once
#include <c10/core/SafePyObject.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/python_headers.h>

#include <atomic>
#include <mutex>
#include <optional>
#include <span>

#include "modes.h"

namespace hfnn::node {
using at::ScalarType;
using at::Tensor;
using torch::autograd::Node;
using torch::autograd::variable_list;
using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
using NodePtr = decltype(torch::autograd::Edge::function);  // shared_ptr before torch 2.13, then intrusive_ptr

template <class N>
auto make_node() {
  if constexpr (std::is_same_v<NodePtr, std::shared_ptr<Node>>) {
    return std::shared_ptr<N>(new N, [](N* node) { deleteNode(node); });
  } else {
    return c10::make_intrusive<N>();
  }
}

class Room;

// A tensor's current version. Tells later whether the tensor was written to, without keeping its memory.
struct Mark {
  c10::VariableVersion counter;
  uint32_t version = 0;

  Mark() = default;
  explicit Mark(const Tensor& x);
  bool holds() const { return counter.current_version() == version; }
};

// Raises torch's error for a saved tensor that was written to. made_by: the edge of its gradient.
[[noreturn]] void throw_written_to(const at::TensorOptions& options, at::IntArrayRef sizes,
                                   const torch::autograd::Edge& made_by, const Mark& mark);

// Nodes that building a tensor may run, at most. A result that would take more is
// kept, as torch keeps it: so a check or a build of a recipe takes bounded time and stack, however long a chain of
// cheap ops is.
constexpr int kLongest = 16;

// An input that a room keeps for backward: the tensor as torch saves it, or its producer's node.
class Kept {
 public:
  Kept() = default;
  Kept(const Kept&) = delete;
  Kept& operator=(const Kept&) = delete;
  ~Kept() { release(); }

  // Keeps the node that made x, or of which x is a view. False, and keeps nothing, if x must be saved. Needs the GIL.
  bool take(const Tensor& x);
  // Keeps what another one keeps, which is not released.
  void share(const Kept& other);
  // x was taken, then its node wrote to it: whoever writes to it from now on writes to the node's result.
  void written(const Tensor& x) { mark_ = Mark(x); }
  // Whether `take` may succeed, checked in a fraction of its time.
  static bool takes(const Tensor& x);
  // Saves x. source: whether y may be rebuilt from it although it is not in the graph (a parameter, or the room's own).
  void save(const Tensor& x, bool source = false);
  // Saves a weight that lives without this node, past hooks of saved tensors: a copy that they made would take memory.
  // A checkpoint's hooks make none, and must see as many tensors in its second forward.
  void refer(const Tensor& weight);
  // Keeps a tensor that only rebuilding y reads: no hook sees it, and it may be written to before the room's own
  // backward.
  void hold(const Tensor& x, bool source = false);
  // What it keeps is a copy of x. Then `own` raises torch's error if x was written to; `get` does not, because while x
  // is resharded, its version may be another one.
  void copy_of(const Tensor& x);
  // `get`, for the room's own backward.
  Tensor own();
  void take_or_save(const Tensor& x) {
    if (!x.defined() || !take(x)) save(x);
  }

  // The tensor for the room's own backward, which asks once. dtype: that of the cast that the room worked on. Raises
  // torch's error if the tensor itself was kept and was written to.
  Tensor get(ScalarType dtype);
  Tensor get() { return get(dtype_); }
  // Raises like `get` if the tensor was written to, without making it. False if only `get` can tell.
  bool checked(ScalarType dtype) const;
  // The tensor as a source for building y. last: the room's own backward will not ask for it.
  Tensor part(bool last = false) { return part(dtype_, last); }
  Tensor part(ScalarType dtype, bool last = false);

  void release();
  // The tensor that it holds, if no hook packed it and nobody wrote to it: for counts of bytes.
  Tensor stored() const;
  // What hooks of saved tensors packed it into.
  std::optional<PyObject*> packed() const;
  bool taken() const { return producer_; }
  bool held() const { return held_.defined(); }
  // How many nodes run to build it: 0 if it was saved.
  int steps() const { return steps_; }
  bool defined() const { return defined_; }
  // Whether y may be rebuilt from it (in the graph, a parameter or the room's own), and whether it is unchanged.
  bool source() const { return !defined_ || source_; }
  bool intact() const;

 private:
  friend class Room;
  Tensor unpack();
  void forget();
  Tensor found(ScalarType dtype);
  Tensor rebuilt(ScalarType dtype, bool last);

  // Where a view is in the memory of the producer's result, and the edge of its gradient.
  struct View {
    c10::SmallVector<int64_t, 5> sizes, strides;
    int64_t offset;
    torch::autograd::Edge edge;
  };

  torch::autograd::SavedVariable saved_;
  std::unique_ptr<View> view_;  // null: what was taken is the producer's result itself
  Tensor held_;
  Room* producer_ = nullptr;
  Mark mark_, original_;                   // original_: of the tensor that was copied
  const c10::TensorImpl* impl_ = nullptr;  // the saved tensor, whose memory `x.data = ...` may exchange
  const void* data_ = nullptr;
  Tensor unpacked_;  // made by hooks, which run once per backward
  int unpacked_in_ = -1, served_in_ = -1, steps_ = 0;
  ScalarType dtype_ = ScalarType::Undefined;
  bool defined_ = false, source_ = false, hooked_ = false, released_ = false, copied_ = false;
};

class Room : public Node {
 public:
  PyObject* module = nullptr;  // of the kernel that ran, or the kernel, for reports
  ~Room() override = default;

  // Rebuilds y, in its own dtype or as cast to `dtype`. Runs below autograd.
  virtual Tensor build(ScalarType dtype) = 0;
  // The gradients of dy, one per edge. Runs below autograd.
  virtual variable_list gradients(const Tensor& dy) = 0;
  // The same for one of several dy that the engine gives at once.
  virtual variable_list one_of_many(const Tensor& dy) { return gradients(dy); }
  // The same with differentiable ops, under create_graph.
  virtual variable_list differentiable(const Tensor& dy) = 0;
  virtual std::span<Kept> kept() = 0;

  variable_list apply(variable_list&& dys) override;
  void release_variables() override;
  // Compiled autograd: the node is called as it is. Every node means another graph, because a node keeps its own
  // tensors.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override;
  variable_list apply_with_saved(const variable_list& dys, torch::dynamo::autograd::SwapSavedVariables& saved) override;
  void release_resources();  // since torch 2.13; before, the destructor did this

  // Makes y this room's output, with edges to the inputs. carries: whether consumers may keep this node instead of y.
  // writes: y is an input that was written to.
  void finish(const NodePtr& self, Tensor& y, torch::autograd::edge_list&& edges, bool carries, bool writes = false);
  // Its sources are kept by nothing else, so they are released again if another tensor than y is the next that a node
  // of this thread would keep: then y's reader is an op of torch, which keeps y itself. At once if y cannot be rebuilt.
  void offer(const NodePtr& self);
  static void decide(at::ArrayRef<Tensor> read);
  // Whether y is still what this room returned, and can be rebuilt.
  bool gives(const Tensor& y);
  bool intact();
  // y for a consumer's backward.
  Tensor rebuild(Kept& consumer, ScalarType dtype, bool last);

 protected:
  // The dtype of a kernel's result that will become `dtype`. Kernels write the dtype of their input or a wider one, not
  // one 16-bit dtype for another.
  ScalarType into(const Tensor& x, ScalarType dtype) const {
    return x.scalar_type() == dtype || x.scalar_type() == ScalarType::Float ? dtype : dtype_;
  }
  bool wanted(size_t i) const { return next_edge(i).is_valid() && task_should_compute_output(i); }

 private:
  friend class Kept;
  variable_list one(const Tensor& dy);
  variable_list batched(const Tensor& dy);
  variable_list with_tangents(const Tensor& dy);
  void clear_at_the_end();
  void forget();
  void let_go();
  Tensor built(ScalarType dtype);

  uint32_t version_ = 0;
  const void* data_ = nullptr;
  c10::SmallVector<int64_t, 5> sizes_, strides_;
  ScalarType dtype_ = ScalarType::Undefined;
  std::optional<c10::Stream> made_on_;
  std::optional<c10::SafePyObject> hooks_;  // hooks of saved tensors during forward
  FakeMode fake_mode_;                      // of forward: backward may run outside of it
  bool carries_ = false, offered_ = false;
  int steps_ = 1;                // nodes that building y runs, this one included
  mutable uint64_t number_ = 0;  // unique id for compiled autograd
  enum { kNotCompiled, kCompiled, kReleasedLater };
  std::atomic<int> compiled_{kNotCompiled};
  std::atomic<bool> released_{false};

  std::atomic<int> tokens_{0};  // tokens alive
  std::atomic<int> callback_{-1};
  // Guards the members below. Not held while a hook runs or a tensor is freed, because either may wait for the GIL.
  std::mutex sharing_;
  int task_ = -1, served_ = 0;
  Tensor shared_, left_;               // for the consumers of this backward; for those of later ones
  std::optional<c10::Stream> stream_;  // of shared_
};

// Defects that tests plant, one at a time: tests/fuzz/convert_faults.py. Builds for users have none.
enum Fault {
  kNoFault,
  kSourcesNotCompared,
  kNoBound,
  kHooksNotCompared,
  kRecipesKept,
  kFirstSource,
  kNotWidened,
  kStaleCast,
  kWrongInput,
  kWritesToDy,
  kMemoryKept,
  kGraphCleared,
  kFlagsTurned,
  kKeptBeside,
  kCutOff,
  kKeptForEver,
  kWrongCopy,
  kGradientLost,
  kFaults
};
#ifdef HFNN_FAULTS
inline std::atomic<int> planted{kNoFault};
inline bool fault(Fault f) { return planted == f; }
#else
constexpr bool fault(Fault) { return false; }
#endif

// Switches and counters for tests and reports.
struct State {
  std::atomic<bool> recipes{true};
  std::atomic<bool> wide_on_cpu{false};                 // for tests: wide gradients as on a GPU
  std::atomic<int64_t> taken{0}, rebuilt{0}, alive{0};  // alive: tensors that consumers did not keep
};
State& state();

inline Tensor as(const Tensor& x, ScalarType dtype) {
  return !x.defined() || x.scalar_type() == dtype ? x : x.to(dtype);
}

// The part of x that knows its graph; null outside of one, and for a view.
inline torch::autograd::AutogradMeta* graph_of(const Tensor& x) {
  auto* meta = torch::autograd::impl::get_autograd_meta(x);
  return meta && meta->grad_fn_ && !meta->is_view_ ? meta : nullptr;
}

// The result of which x is a view, with its graph; x itself if it is none. Undefined if there is no graph, or no result
// of the same dtype.
Tensor viewed(const Tensor& x);

// A consumer keeps x as it is. If the node that made x keeps bits of it, it no longer needs them (hfnn/core/bits.py).
void keeps_whole(const Tensor& x);

// The id of the backward that runs in this thread, or -1.
int task();
// Whether hooks of saved tensors are on.
bool hooked();

// Gradients of many dy at once. They ask for each kept tensor once, as in torch. One batch per thread at a time.
struct Batch {
  explicit Batch(std::span<Kept> of) : of(of), tensors(of.size()), outer(now) { now = this; }
  ~Batch() { now = outer; }
  Tensor* asked(const Kept* kept) {
    return kept >= of.data() && kept < of.data() + of.size() ? &tensors[size_t(kept - of.data())] : nullptr;
  }

  static thread_local Batch* now;
  std::span<Kept> of;
  variable_list tensors;
  Batch* outer;
};

// Python functions for rare cases; see hfnn/core/node.py.
struct Python {
  PyObject *batched = nullptr, *keeps_whole = nullptr, *watched = nullptr;
  PyTypeObject* fake = nullptr;  // FakeTensor
  PyObject* watch = nullptr;     // for tests: called with what is built
};
Python& python();

}  // namespace hfnn::node
