// Lazily negated and conjugated views. torch's dispatcher gives an op that does not know them copies, in which the sums
// of an in-place collective are lost. Groups of this backend get the views themselves: `Memory` reads and writes them.
#include <ATen/core/dispatch/Dispatcher.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "torch/backend.h"

namespace hfreduce {

namespace {

// The kernel of an op of c10d, for one of the two keys. stock: what torch has there, for groups of other backends.
class Lazy : public c10::OperatorKernel {
 public:
  Lazy(c10::DispatchKey key, int group, c10::SafeKernelFunction stock)
      : key_(key), group_(group), stock_(std::move(stock)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) const {
    const auto device = keys.has_backend(c10::BackendComponent::CUDABit) ? c10::kCUDA : c10::kCPU;
    const int given = static_cast<int>(op.schema().arguments().size());
    const auto group = torch::jit::peek(*stack, group_, given).toCustomClass<c10d::ProcessGroup>();
    if (group->getBackend(device)->getBackendName() == "hfreduce")
      op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, key_), stack);
    else
      stock_.callBoxed(op, keys, stack);
  }

 private:
  const c10::DispatchKey key_;
  const int group_;  // which argument
  const c10::SafeKernelFunction stock_;
};

}  // namespace

void take_lazy_views() {
  auto& dispatcher = c10::Dispatcher::singleton();
  static auto* const held = new std::vector<c10::RegistrationHandleRAII>;  // outlives every thread
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    if (name.getNamespace() != "c10d") continue;
    const auto op = dispatcher.findSchema(name);
    const auto group = op ? op->schema().argumentIndexWithName("process_group") : std::nullopt;
    if (!group) continue;
    for (const auto key : {c10::DispatchKey::Negative, c10::DispatchKey::Conjugate}) {
      auto kernel = std::make_unique<Lazy>(key, *group, op->getComputedKernelForDispatchKey(key));
      held->push_back(dispatcher.registerImpl(name, key, c10::KernelFunction::makeFromBoxedFunctor(std::move(kernel)),
                                              std::nullopt, nullptr, "hfreduce: lazily negated and conjugated views"));
    }
  }
}

}  // namespace hfreduce
