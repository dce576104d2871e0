// Dispatch modes of torch.
#pragma once
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <optional>

namespace hfnn::node {
using Modes = c10::impl::TorchDispatchModeTLS;
using FakeMode = std::shared_ptr<c10::impl::PyObject_TorchDispatchMode>;
constexpr auto kFake = c10::impl::TorchDispatchModeKey::FAKE;

// The mode of tensors without values (FakeTensor), or null. Whatever is made in it is fake, and nothing is launched: a
// node keeps what it keeps in a real step.
inline FakeMode fake_mode() { return Modes::any_modes_set() ? Modes::get_mode(kFake).value_or(nullptr) : nullptr; }

inline bool is_fake(const at::Tensor& x) { return x.unsafeGetTensorImpl()->is_python_dispatch(); }

// `hfnn.as_if`: whether steps without values are run as if on a GPU.
extern bool as_if_on_gpu;

// As `on_gpu` of hfnn/core/context.py: whether choices for x are those of a GPU.
inline bool on_gpu(const at::Tensor& x) { return x.is_cuda() || (as_if_on_gpu && (is_fake(x) || fake_mode())); }

// Null for a fake tensor.
inline const void* address(const at::Tensor& x) { return is_fake(x) ? nullptr : x.data_ptr(); }

// A mode of fake tensors, where it is not on.
class InMode {
 public:
  explicit InMode(const FakeMode& mode) : on_(mode && !fake_mode()) {
    if (on_) Modes::set_mode(mode, kFake);
  }
  InMode(const InMode&) = delete;
  InMode& operator=(const InMode&) = delete;
  ~InMode() {
    if (on_) Modes::unset_mode(kFake);
  }

 private:
  const bool on_;
};

// No dispatch mode of a user sees what runs meanwhile.
class WithoutModes {
 public:
  WithoutModes() {
    if (!Modes::any_modes_set(true)) return;
    before_ = Modes::get_state();
    while (Modes::any_modes_set(true)) Modes::pop_stack();
  }
  WithoutModes(const WithoutModes&) = delete;
  WithoutModes& operator=(const WithoutModes&) = delete;
  ~WithoutModes() {
    if (before_) Modes::set_state(std::move(*before_));
  }

 private:
  std::optional<Modes> before_;
};

// Nodes run below autograd. A dispatch mode must see torch's ops as it does in torch, after autograd's keys have taken
// them apart.
class BelowAutograd {
 public:
  BelowAutograd() {
    if (!Modes::any_modes_set()) {
      below_.emplace();
    } else {
      no_graph_.emplace(false);
      no_views_.emplace(c10::DispatchKey::ADInplaceOrView);
    }
  }

 private:
  std::optional<at::AutoDispatchBelowADInplaceOrView> below_;
  std::optional<at::AutoGradMode> no_graph_;
  std::optional<c10::impl::ExcludeDispatchKeyGuard> no_views_;
};

// Restores autograd's dispatch keys as in user code: a hook may run a forward, and views have a base.
struct AboveAutograd {
  c10::impl::LocalDispatchKeySet now = c10::impl::tls_local_dispatch_key_set();
  c10::impl::ForceDispatchKeyGuard guard{now.included_ | c10::DispatchKeySet(c10::DispatchKey::ADInplaceOrView),
                                         now.excluded_ - c10::autograd_dispatch_keyset_with_ADInplaceOrView};
};

}  // namespace hfnn::node
