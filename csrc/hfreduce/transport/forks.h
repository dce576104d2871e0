// Whether this process is a child of the one that made something: it has its memory, but none of its threads.
#pragma once

namespace hfreduce {

// How many forks lie between this process and the one in which the program began; costs a load.
int forks();

}  // namespace hfreduce
