// Inputs of small integers (their reductions are exact in every dtype and order), and the expected results.
#pragma once

#include <algorithm>

#include "coll/support/comm_world.hpp"

namespace zcomm::test {

inline constexpr DType kDTypes[] = {DType::float32, DType::float64, DType::bfloat16,
                                    DType::float16, DType::int32,   DType::int64};
inline constexpr std::size_t kCounts[] = {0, 1, 77, 1000, 100003};
enum class Place { symmetric, private_, mixed };
inline constexpr Place kPlaces[] = {Place::symmetric, Place::private_, Place::mixed};

inline bool symmetric_on(Place place, int rank) {
  return place == Place::symmetric || (place == Place::mixed && rank % 2 == 0);
}

inline double value_of(int rank, std::size_t i) {
  return static_cast<double>((i * 7 + static_cast<std::size_t>(rank) * 3) % 5) - 1;
}

inline std::vector<double> values_of(int rank, std::size_t count, std::size_t begin = 0) {
  std::vector<double> values(count);
  for (std::size_t i = 0; i < count; ++i) values[i] = value_of(rank, begin + i);
  return values;
}

inline std::vector<double> reduced(int world, std::size_t count, ReduceOp op, std::size_t begin = 0) {
  std::vector<double> values = values_of(0, count, begin);
  for (std::size_t i = 0; i < count; ++i) {
    for (int r = 1; r < world; ++r) {
      const double next = value_of(r, begin + i);
      switch (op) {
        case ReduceOp::sum:
        case ReduceOp::avg:
          values[i] += next;
          break;
        case ReduceOp::min:
          values[i] = std::min(values[i], next);
          break;
        case ReduceOp::max:
          values[i] = std::max(values[i], next);
          break;
        case ReduceOp::prod:
          values[i] *= next;
          break;
      }
    }
    if (op == ReduceOp::avg) values[i] = static_cast<double>(static_cast<float>(values[i]) / static_cast<float>(world));
  }
  return values;
}

inline std::string label(const char* what, const Rank& self, DType dtype, std::size_t count, Place place) {
  return std::string(what) + " rank " + std::to_string(self.rank) + "/" + std::to_string(self.world) + " " +
         std::string(name_of(dtype)) + " count " + std::to_string(count) + " place " +
         std::to_string(static_cast<int>(place));
}

#define CHECK_EQUAL(dtype, got, wanted, what)                                                         \
  do {                                                                                                \
    if (!equal(dtype, got, wanted)) fail(__FILE__, __LINE__, label(what, self, dtype, count, place)); \
  } while (0)

template <class Body>
void for_each_case(Rank& self, const Body& body) {
  for (const DType dtype : kDTypes)
    for (const std::size_t count : kCounts)
      for (const Place place : kPlaces) {
        // Cases of many steps behave equally for every dtype: run each element size once.
        const bool common = dtype == DType::float32 || dtype == DType::bfloat16;
        if (count > 1000 && !(self.world == 3 && common) && !(self.world == 2 && dtype == DType::int64)) continue;
        if (kSanitized && count > 1000 && (dtype == DType::bfloat16 || place != Place::mixed)) continue;
        body(self, dtype, count, place);
      }
}

}  // namespace zcomm::test
