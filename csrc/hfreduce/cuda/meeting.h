// How the ranks of a host find out what their devices can do together: over the communicator's collectives on the CPU.
// Each function is a collective, returns the same on all ranks, and leaves them in step whatever fails on one of them.
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

// "" where all ranks say "", otherwise the first one's words, with its rank.
std::string agree(Communicator&, const std::string& objection, milliseconds timeout);

// As agree, on what `attempt` throws.
std::string attempt(Communicator&, milliseconds timeout, const std::function<void()>& attempt);

std::vector<DeviceRow> agree(Communicator&, std::vector<DeviceRow> rows, milliseconds timeout);

// Why ranks may not reach each other's memory, as far as CUDA and HFREDUCE_P2P say; "" where they may.
std::string forbidden(Communicator&, const Driver&, milliseconds timeout);

// Whether streams write and wait for flags in the host's memory, which pins it: what HostStaged is made of.
std::string ordered(Communicator&, Driver&, milliseconds timeout);

// The memory of all ranks, each proven by copies and by a kernel; or why there is none.
std::string connect(Communicator&, Driver&, milliseconds timeout, std::unique_ptr<Peers>& peers);

// Of all ranks, or why of none: between devices that `connect` has proven to reach each other.
std::string connect(Communicator&, Driver&, milliseconds timeout, std::unique_ptr<Copies>& copies);
std::string connect(Communicator&, Driver&, milliseconds timeout, std::unique_ptr<DeviceMessages>& messages);

// Memory of the host that is mapped into the GPUs, proven by a kernel.
std::string map(Communicator&, Driver&, milliseconds timeout, std::unique_ptr<Peers>& mapped);

}  // namespace hfreduce::gpu
