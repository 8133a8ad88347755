// Runs all tests, or the tests with an argument in their names; "1/3": of these the first, the fourth, the seventh, ...
// Last line: "N passed, M failed".
// A test that leaves a thread running fails, because later tests fork, and destroyed objects must have ended their
// threads.
#include <chrono>
#include <cstdio>
#include <cstring>
#include <exception>
#include <filesystem>
#include <iterator>
#include <thread>

#include "test.hpp"

namespace {

long threads() {
  std::error_code unread;
  return std::distance(std::filesystem::directory_iterator("/proc/self/task", unread), {});
}

/// A joined thread may be listed for a moment yet.
long threads_left(long before) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(2);
  while (threads() > before && std::chrono::steady_clock::now() < end)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return threads() - before;
}

/// The K-th of N parts of the tests, "K/N".
struct Part {
  int number = 1, count = 1;
  bool has(int index) const { return index % count == number - 1; }
  /// Whether `text` is one.
  bool read(const char* text) {
    int k = 0, n = 0;
    if (std::sscanf(text, "%d/%d", &k, &n) != 2 || k < 1 || k > n) return false;
    number = k, count = n;
    return true;
  }
};

}  // namespace

int main(int argc, char** argv) {
  using namespace zcomm::test;
  int passed = 0, failed = 0, index = 0;
  Part part;
  std::vector<const char*> names;
  for (int i = 1; i < argc; ++i)
    if (!part.read(argv[i])) names.push_back(argv[i]);
  std::thread([] {}).join();  // with the first thread the thread sanitizer starts one of its own
  for (const Case& test : cases()) {
    bool chosen = names.empty();
    for (const char* name : names) chosen |= test.name.find(name) != std::string::npos;
    if (!chosen || !part.has(index++)) continue;
    const int before = failures();
    const long threads_before = threads();
    const auto start = std::chrono::steady_clock::now();
    try {
      test.body();
    } catch (const std::exception& error) {
      fail(test.name.c_str(), 0, std::string("uncaught: ") + error.what());
    }
    if (const long left = threads_may_stay() ? 0 : threads_left(threads_before); left > 0)
      fail(test.name.c_str(), 0, "leaves " + std::to_string(left) + " threads behind");
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
