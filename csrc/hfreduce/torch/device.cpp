// The backend's operations on CUDA tensors: their stream, their path, and how long their tensors are kept alive.
#include <c10/util/Exception.h>

#include "cuda/meeting.h"
#include "torch/backend.h"

namespace hfreduce {

namespace {

// Address ranges of tensors, including gaps between elements.
std::vector<Turns::Range> ranges(const std::vector<at::Tensor>& tensors) {
  std::vector<Turns::Range> ranges;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.layout() != c10::kStrided) continue;  // operations that overlap take dense tensors only
    int64_t last = 0;
    for (int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
    const auto* const begin = static_cast<const char*>(tensor.const_data_ptr());
    if (tensor.numel()) ranges.emplace_back(begin, begin + (last + 1) * tensor.element_size());
  }
  return ranges;
}

}  // namespace

// nullptr for CPU tensors. Only collectives that are fully enqueued at once can be captured into a CUDA graph.
std::unique_ptr<Placed> Backend::place(Line& line, const Start& start, const Tensors& outputs) {
  if (start.device.is_cpu()) return nullptr;
  std::vector<c10::intrusive_ptr<Operation>> done;  // released after the lock
  std::lock_guard lock(mutex_);
  if (!device_) {
    try {
      if (gpu::why_no_cuda().empty()) capture_ = gpu::cuda(start.device.index());
    } catch (const std::runtime_error&) {  // `meet` will fail in the same way and report it
    }
    device_ = start.device;
  }
  TORCH_CHECK_VALUE(start.device == *device_, "hfreduce: ", start.title + sizeof("hfreduce"), " was given a tensor on ",
                    start.device, ", but this group has worked on ", *device_,
                    ": a rank has one device (torch.cuda.set_device)");
  const c10::Stream current = current_stream(start.device);
  const bool captured = capture_ && capture_->capturing(current.native_handle());
  TORCH_CHECK(!captured || (start.path && gpu::Accelerator::captures(*start.path)),
              "hfreduce: ", start.title + sizeof("hfreduce"), " cannot be captured into a CUDA graph",
              start.path ? std::string(": path ") + gpu::name(*start.path) + " counts on the host"
              : met_     ? ": the host has a part in it"
                         : " as the first collective of its group on CUDA tensors: run one before");
  if (!captured) done = sweep();
  std::optional<c10::Stream> own;
  if (start.async_op) {
    const bool overlaps = start.path == gpu::Path::staged && start.type == c10d::OpType::ALLREDUCE;
    const std::pair key(&line, &line == collectives_.get() ? turns_.next(overlaps, ranges(outputs)) : 0);
    auto known = streams_.find(key);
    if (known == streams_.end()) known = streams_.emplace(key, pool_stream(start.device)).first;
    own = known->second;
  }
  return std::make_unique<Placed>(start.device, own, captured, communicator_);
}

// Stops keeping the oldest operations that are waited for or done on the device. Under mutex_.
std::vector<c10::intrusive_ptr<Operation>> Backend::sweep() {
  std::vector<c10::intrusive_ptr<Operation>> done;
  while (!kept_.empty() && kept_.front()->isCompleted()) {
    kept_.front()->release();
    done.push_back(std::move(kept_.front()));
    kept_.pop_front();
  }
  return done;
}

std::optional<gpu::Path> Backend::path(c10::Device device, const gpu::Message& message) const {
  const gpu::Accelerator* const accelerator = device.is_cpu() ? nullptr : met_.load(std::memory_order_acquire);
  if (!accelerator) return std::nullopt;
  const gpu::Path path = accelerator->path(message);
  return path == gpu::Path::host ? std::nullopt : std::optional(path);
}

Way Backend::way(c10::Device device, const gpu::Message& message, std::optional<gpu::Path> path, milliseconds timeout) {
  Way way = by_host(timeout);
  if (device.is_cpu() || size_ == 1) return way;
  if (!asked_) meet(device, timeout);
  if (!path) path = this->path(device, message);
  if (path) way.accelerator = accelerator_.get(), way.path = *path;
  return way;
}

gpu::DeviceMessages* Backend::device_messages(const at::Tensor& tensor) const {
  const gpu::Accelerator* const accelerator = tensor.device().is_cpu() ? nullptr : met_.load(std::memory_order_acquire);
  return accelerator ? accelerator->messages() : nullptr;
}

void Backend::meet(c10::Device device, milliseconds timeout) {
  asked_ = true;
  std::string why = gpu::agree(*communicator_, gpu::why_no_cuda(), timeout);
  std::unique_ptr<gpu::Driver> driver;
  if (why.empty()) why = gpu::attempt(*communicator_, timeout, [&] { driver = gpu::cuda(device.index()); });
  if (why.empty()) {
    try {
      accelerator_ = std::make_unique<gpu::Accelerator>(*communicator_, std::move(driver),
                                                        gpu::rows_of(options_.device_plan), timeout);
    } catch (const Fault&) {
      throw;
    } catch (const std::exception& error) {  // the other ranks must not wait for this one
      communicator_->abort(error.what());
      communicator_->check();
    }
    met_.store(accelerator_.get(), std::memory_order_release);
    return;
  }
  std::lock_guard lock(mutex_);
  no_accelerator_ = why;
}

std::string Backend::describe() const {
  const std::string text = communicator_->describe();
  if (const gpu::Accelerator* const accelerator = met_.load()) return text + "; " + accelerator->describe();
  std::lock_guard lock(mutex_);
  if (!device_) return text;
  return text + "; CUDA tensors go by way of the host" + (no_accelerator_.empty() ? "" : " (" + no_accelerator_ + ")");
}

}  // namespace hfreduce
