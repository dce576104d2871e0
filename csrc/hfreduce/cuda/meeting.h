// How the ranks of a host find out what their devices can do together, over the communicator's CPU collectives. Each
// function is a collective, returns the same on all ranks, and keeps the ranks in step even if one of them fails.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "communicator.h"
#include "cuda/accelerator.h"
#include "cuda/p2p/copies.h"
#include "cuda/p2p/device_messages.h"
#include "cuda/p2p/peers.h"

namespace hfreduce::gpu {

// "" if all ranks pass ""; otherwise the first objection, with its rank.
std::string agree(Communicator&, const std::string& objection, milliseconds timeout);

// Like agree, on what `attempt` throws.
std::string attempt(Communicator&, milliseconds timeout, const std::function<void()>& attempt);

std::vector<DeviceRow> agree(Communicator&, std::vector<DeviceRow> rows, milliseconds timeout);

// Why ranks may not use each other's memory, according to CUDA and HFREDUCE_P2P; "" if they may.
std::string forbidden(Communicator&, const Driver&, milliseconds timeout);

// Whether streams can write flags in pinned host memory and wait for them, which HostStaged needs.
std::string ordered(Communicator&, Driver&, milliseconds timeout);

// The memory of all ranks, proven by copies and a kernel; or the reason why there is none.
std::string connect(Communicator&, Driver&, milliseconds timeout, std::unique_ptr<Peers>& peers);

// On all ranks, or the reason why on none. For devices that `connect` has proven to reach each other.
std::string connect(Communicator&, Driver&, milliseconds timeout, std::unique_ptr<Copies>& copies);
std::string connect(Communicator&, Driver&, milliseconds timeout, std::unique_ptr<DeviceMessages>& messages);

// Host memory that is mapped into the GPUs, proven by a kernel.
std::string map(Communicator&, Driver&, milliseconds timeout, std::unique_ptr<Peers>& mapped);

}  // namespace hfreduce::gpu
