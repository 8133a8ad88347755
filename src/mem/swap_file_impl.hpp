// Opens a SwapFile on an engine of the caller's choice (tests pass one that fails on purpose).
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "mem/io/io_engine.hpp"
#include "zcomm/swap_file.hpp"

namespace zcomm::mem {

std::unique_ptr<SwapFile> open_swap_file(const std::vector<std::string>& directories, const SwapFile::Options& options,
                                         std::unique_ptr<IoEngine> engine, std::vector<std::string> notes = {});

}  // namespace zcomm::mem
