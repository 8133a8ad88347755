// zcomm_bench: small-message latency and the guard's cost, through the C++ API. See options.cpp for its flags.
#include <exception>
#include <iostream>

#include "latency.hpp"
#include "options.hpp"
#include "world.hpp"

int main(int argc, char** argv) {
  try {
    const zcomm::bench::Options options = zcomm::bench::parse(argc, argv);
    return zcomm::bench::run_ranks(options, [&](zcomm::bench::Rank& self) {
      return options.what == "guard" ? guard(options, self) : latency(options, self);
    });
  } catch (const std::exception& error) {
    std::cerr << "zcomm_bench: " << error.what() << std::endl;
    return 2;
  }
}
