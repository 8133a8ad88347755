// The memory touched by each kernel (doubles/recorded/kernels.hpp).
#include "doubles/recorded/kernels.hpp"

namespace zcomm::device {

void RecordedKernels::reduce(const Reduce& args) {
  Footprint footprint;
  for (const void* src : args.src) footprint.reads.push_back(Footprint::range(src, args.count * size_of(args.in)));
  for (void* dst : args.dst) {
    footprint.writes.push_back(Footprint::range(dst, args.count * size_of(args.out)));
    if (args.accumulate) footprint.reads.push_back(footprint.writes.back());
  }
  on_access_("reduce", footprint);
  inner_.reduce(args);
}

void RecordedKernels::cast(void* dst, DType dst_dtype, const void* src, DType src_dtype, std::size_t count) {
  on_access_("cast", {{Footprint::range(src, count * size_of(src_dtype))},
                      {Footprint::range(dst, count * size_of(dst_dtype))}});
  inner_.cast(dst, dst_dtype, src, src_dtype, count);
}

void RecordedKernels::run(const KernelTask& task) {
  Footprint footprint;
  task.touch([&](const Touched& each) {
    (each.written ? footprint.writes : footprint.reads).push_back(Footprint::range(each.data, each.nbytes));
  });
  on_access_(task.name(), footprint);
  inner_.run(task);
}

}  // namespace zcomm::device
