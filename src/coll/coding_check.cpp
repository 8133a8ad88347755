// Arguments of calls with a codec (coll/operation.hpp).
#include <vector>

#include "base/error.hpp"
#include "coll/operation.hpp"
#include "coll/overlap.hpp"

namespace zcomm::coll {
namespace {

void check_kind(const Request& request, const std::string& what) {
  const OpKind kind = request.kind;
  if (kind != OpKind::all_reduce && kind != OpKind::reduce_scatter && kind != OpKind::all_gather)
    throw InvalidArgument(text(what, ": only all_reduce, reduce_scatter and all_gather have codecs"));
  if (reduces(kind) && request.op != ReduceOp::sum && request.op != ReduceOp::avg)
    throw InvalidArgument(text(what, ": op ", name_of(request.op),
                               ": decoded values differ from the elements, so only sum and avg are defined"));
  if (request.dtype != DType::float32 && request.dtype != DType::bfloat16 && request.dtype != DType::float16)
    throw InvalidArgument(
        text(what, ": elements are ", name_of(request.dtype), "; codecs encode float32, bfloat16 and float16"));
}

void check_options(const Request& request, const std::string& what) {
  const Coding& coding = *request.coding;
  if (!(coding.keep >= 0.0f && coding.keep < 1.0f))
    throw InvalidArgument(text(what, ": keep ", coding.keep, " is not in [0, 1)"));
  if (coding.keep != 0.0f && coding.errors.empty())
    throw InvalidArgument(text(what, ": keep ", coding.keep, " without error buffers; pass error="));
  if (coding.error_dtype != DType::float32 && coding.error_dtype != DType::bfloat16 &&
      coding.error_dtype != DType::int8)
    throw InvalidArgument(
        text(what, ": errors are ", name_of(coding.error_dtype), "; expected float32, bfloat16 or int8"));
  if (!coding.masks.empty() && (coding.codec.kind != CodecKind::sign || request.kind != OpKind::all_reduce))
    throw InvalidArgument(text(what, ": masks are for all_reduce with codec sign"));
  if (!coding.server_errors.empty() && request.kind != OpKind::all_reduce)
    throw InvalidArgument(text(what, ": server errors are for all_reduce; this call encodes once"));
  if (coding.server_errors.size() != coding.errors.size() && request.kind == OpKind::all_reduce)
    throw InvalidArgument(text(what, ": ", coding.errors.size(), " worker error(s) and ", coding.server_errors.size(),
                               " server error(s): expected one of each for each tensor, or none"));
  if (coding.differences && request.kind != OpKind::all_gather)
    throw InvalidArgument(text(what, ": differences are for all_gather"));
}

template <class Buffers>
void check_length(const std::string& what, const char* name, const Buffers& buffers, std::size_t tensors) {
  if (!buffers.empty() && buffers.size() != tensors)
    throw InvalidArgument(text(what, ": ", buffers.size(), " ", name, "(s) for ", tensors, " tensor(s)"));
}

/// encoded: elements that this rank encodes, in parts of `step`.
void check_error(const std::string& what, const char* name, const Coding& coding, const Buffer& error, std::size_t i,
                 std::size_t encoded, std::size_t step) {
  const bool coded = coding.error_dtype == DType::int8;
  const std::size_t count = error_count(coding.error_dtype, encoded, step);
  if (error.count != count)
    throw InvalidArgument(text(what, ": ", name, " ", i, " has ", error.count, coded ? " bytes" : " elements",
                               ", expected ", count, coded ? ", an encoded error of elements" : "",
                               ", which this rank encodes"));
  if (coded && reinterpret_cast<std::uintptr_t>(error.data) % kEncodedAlign != 0)
    throw InvalidArgument(
        text(what, ": ", name, " ", i, " at ", error.data, " is not aligned to ", kEncodedAlign, " bytes"));
  if (error.data == nullptr && count != 0) throw InvalidArgument(text(what, ": ", name, " ", i, " is a null pointer"));
}

/// Errors share no memory with tensors or other errors.
void check_apart(const Request& request, const std::string& what) {
  const Coding& coding = *request.coding;
  std::vector<Buffer> errors;
  for (const auto list : {coding.errors, coding.server_errors})
    for (const Buffer& error : list) errors.push_back({error.data, error.count * size_of(coding.error_dtype)});
  std::vector<ConstBuffer> tensors;
  for (const ConstBuffer& in : request.in) tensors.push_back({in.data, in.count * size_of(request.dtype)});
  for (const Buffer& out : request.out) tensors.push_back({out.data, out.count * size_of(request.out_dtype)});
  check_overlap({.what = what.c_str(),
                 .kind = OpKind::barrier,
                 .in = tensors,
                 .out = errors,
                 .in_size = 1,
                 .out_size = 1,
                 .rank = 0});
  if (!coding.differences) return;
  check_overlap({.what = what.c_str(),
                 .kind = OpKind::barrier,
                 .in = request.in,
                 .out = request.out,
                 .in_size = size_of(request.dtype),
                 .out_size = size_of(request.dtype),
                 .rank = 0});
}

}  // namespace

void check_coding(const Request& request, int rank, int world_size, int coded_parts) {
  const Coding& coding = *request.coding;
  check_codec(coding.codec);
  const std::string what = text(name_of(request.kind), ", codec ", name_of(coding.codec));
  check_kind(request, what);
  check_options(request, what);
  const std::size_t tensors = request.out.size();
  check_length(what, "error", coding.errors, tensors);
  check_length(what, "server error", coding.server_errors, tensors);
  check_length(what, "mask", coding.masks, tensors);
  for (std::size_t i = 0; i < tensors; ++i) {
    const std::size_t count = request.out[i].count;
    const bool reduces = request.kind == OpKind::all_reduce, gathers = request.kind == OpKind::all_gather;
    const std::size_t step = reduces   ? all_reduce_part(count, 0, world_size).count
                             : gathers ? request.in[i].count
                                       : count;
    const std::size_t encoded =
        reduces || gathers ? (reduces ? count : step) : step * static_cast<std::size_t>(coded_parts);
    if (!coding.errors.empty()) check_error(what, "error", coding, coding.errors[i], i, encoded, step);
    if (!coding.server_errors.empty())
      check_error(what, "server error", coding, coding.server_errors[i], i,
                  all_reduce_part(count, rank, world_size).count, step);
    if (!coding.masks.empty() && coding.masks[i] == nullptr && count != 0)
      throw InvalidArgument(text(what, ": mask ", i, " is a null pointer"));
  }
  check_apart(request, what);
}

}  // namespace zcomm::coll
