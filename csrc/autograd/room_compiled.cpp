// Nodes in compiled autograd.
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include "room.h"

namespace hfnn::node {
namespace ag = torch::autograd;

void Room::compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const {
  static std::atomic<uint64_t> last{0};
  if (number_ == 0) number_ = ++last;
  args.collect(name());
  args.collect(size_t(number_));
}

variable_list Room::apply_with_saved(const variable_list& dys, torch::dynamo::autograd::SwapSavedVariables& saved) {
  namespace compiled = torch::dynamo::autograd;
  using Metadata = compiled::IValuePacker<std::vector<std::optional<ag::InputMetadata>>>;
  auto self = getptr();
  auto call = [self](const variable_list& given, const std::vector<c10::IValue>&) {
    auto* node = static_cast<Room*>(self.get());
    variable_list grads = node->apply(variable_list(given));
    if (node->compiled_.exchange(kNotCompiled) == kReleasedLater) node->release_variables();
    return grads;
  };
  compiled_ = kCompiled;
  const auto& compiler = compiled::getPyCompilerInterface();
  const std::string bound = compiler->bind_function(saved.get_py_compiler(), name(), call, {}, true, false);
  return compiler->call_function(saved.get_py_compiler(), "apply_functional", bound, dys, {},
                                 Metadata::pack(compiled::get_input_metadata(next_edges())));
}

}  // namespace hfnn::node
