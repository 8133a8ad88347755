// The test frame: gtest's words, one header, nothing to install.
//
// TEST(suite, name) { ... }   EXPECT_TRUE EXPECT_EQ EXPECT_NE EXPECT_LT EXPECT_LE EXPECT_NEAR EXPECT_THROW
// EXPECT_THROW(statement, Type) also takes EXPECT_THROW_WITH(statement, Type, "part of the message").
// Checks may run on any thread; a failed check marks the running test and continues. A thread left running also marks
// it.
#pragma once

#include <atomic>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <mutex>
#include <sstream>
#include <string>
#include <vector>

namespace zcomm::test {

/// Under a sanitizer, which needs fewer and smaller values, and makes each 5 to 20 times slower.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

/// The same if compute-sanitizer runs the program, which the compiler cannot know.
inline bool few_values() {
  static const bool few = kSanitized || std::getenv("ZCOMM_TEST_FEW") != nullptr;
  return few;
}

struct Case {
  std::string name;
  std::function<void()> body;
};

inline std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}

inline std::atomic<int>& failures() {
  static std::atomic<int> count{0};
  return count;
}

/// Whether this binary's tests share threads until it ends.
inline bool& threads_may_stay() {
  static bool may = false;
  return may;
}

struct Register {
  Register(std::string name, std::function<void()> body) { cases().push_back({std::move(name), std::move(body)}); }
};

template <class T>
std::string show(const T& value) {
  if constexpr (requires(std::ostream& out) { out << value; }) {
    std::ostringstream out;
    out.precision(17);
    out << value;
    return out.str();
  } else {
    return "<value>";
  }
}

inline void fail(const char* file, int line, const std::string& what) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  if (failures().fetch_add(1) < 50) std::cerr << file << ":" << line << ": " << what << "\n";
}

}  // namespace zcomm::test

#define TEST(suite, name)                                                                                  \
  static void test_##suite##_##name();                                                                     \
  static const ::zcomm::test::Register register_##suite##_##name(#suite "." #name, test_##suite##_##name); \
  static void test_##suite##_##name()

#define EXPECT_TRUE(condition)                                                       \
  do {                                                                               \
    if (!(condition)) ::zcomm::test::fail(__FILE__, __LINE__, "false: " #condition); \
  } while (0)
#define EXPECT_FALSE(condition) EXPECT_TRUE(!(condition))

#define ZC_EXPECT_RELATION(a, relation, b)                                                                     \
  do {                                                                                                         \
    const auto& zc_a = (a);                                                                                    \
    const auto& zc_b = (b);                                                                                    \
    if (!(zc_a relation zc_b))                                                                                 \
      ::zcomm::test::fail(__FILE__, __LINE__,                                                                  \
                          "expected " #a " " #relation " " #b ", got " + ::zcomm::test::show(zc_a) + " and " + \
                              ::zcomm::test::show(zc_b));                                                      \
  } while (0)
#define EXPECT_EQ(a, b) ZC_EXPECT_RELATION(a, ==, b)
#define EXPECT_NE(a, b) ZC_EXPECT_RELATION(a, !=, b)
#define EXPECT_LT(a, b) ZC_EXPECT_RELATION(a, <, b)
#define EXPECT_LE(a, b) ZC_EXPECT_RELATION(a, <=, b)
#define EXPECT_GE(a, b) ZC_EXPECT_RELATION(a, >=, b)
#define EXPECT_GT(a, b) ZC_EXPECT_RELATION(a, >, b)
#define EXPECT_NEAR(a, b, tolerance)                                                                                 \
  do {                                                                                                               \
    if (!(std::abs((a) - (b)) <= (tolerance)))                                                                       \
      ::zcomm::test::fail(__FILE__, __LINE__,                                                                        \
                          "not near: " #a ", " #b ": " + ::zcomm::test::show(a) + " and " + ::zcomm::test::show(b)); \
  } while (0)

#define EXPECT_THROW_WITH(statement, Type, part)                                                                    \
  do {                                                                                                              \
    try {                                                                                                           \
      statement;                                                                                                    \
      ::zcomm::test::fail(__FILE__, __LINE__, "no " #Type " from " #statement);                                     \
    } catch (const Type& zc_error) {                                                                                \
      if (std::string(zc_error.what()).find(part) == std::string::npos)                                             \
        ::zcomm::test::fail(__FILE__, __LINE__, std::string("message lacks '") + (part) + "': " + zc_error.what()); \
    } catch (const std::exception& zc_error) {                                                                      \
      ::zcomm::test::fail(__FILE__, __LINE__, std::string("other than " #Type ": ") + zc_error.what());             \
    }                                                                                                               \
  } while (0)
#define EXPECT_THROW(statement, Type) EXPECT_THROW_WITH(statement, Type, "")
