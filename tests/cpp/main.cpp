// Runs all tests, or those whose name contains an argument. Closing line: "N passed, M failed".
#include <chrono>
#include <cstring>
#include <exception>

#include "test.hpp"

int main(int argc, char** argv) {
  using namespace zcomm::test;
  int passed = 0, failed = 0;
  for (const Case& test : cases()) {
    bool chosen = argc < 2;
    for (int i = 1; i < argc; ++i) chosen |= test.name.find(argv[i]) != std::string::npos;
    if (!chosen) continue;
    const int before = failures();
    const auto start = std::chrono::steady_clock::now();
    try {
      test.body();
    } catch (const std::exception& error) {
      fail(test.name.c_str(), 0, std::string("uncaught: ") + error.what());
    }
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    const bool good = failures() == before;
    (good ? passed : failed) += 1;
    std::cout << (good ? "ok   " : "FAIL ") << test.name << " (" << static_cast<int>(seconds * 1000) << " ms)\n"
              << std::flush;
  }
  std::cout << passed << " passed, " << failed << " failed\n";
  if (passed + failed == 0) return 2;
  return failed == 0 ? 0 : 1;
}
