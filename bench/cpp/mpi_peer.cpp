// The MPI that CMake found (bench/cpp/mpi_peer.hpp).
#include "mpi_peer.hpp"

#include <mpi.h>

#include <cstdlib>
#include <cstring>

#include "zcomm/error.hpp"

namespace zcomm::bench {
namespace {

class Mpi final : public MpiPeer {
 public:
  Mpi() {
    int provided = 0;
    MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED,
                    &provided);  // one thread calls: the fastest level that is enough
    MPI_Comm_rank(MPI_COMM_WORLD, &rank_);
    MPI_Comm_size(MPI_COMM_WORLD, &world_size_);
  }
  ~Mpi() override { MPI_Finalize(); }

  int rank() const override { return rank_; }
  int world_size() const override { return world_size_; }

  std::string version() const override {
    char text[MPI_MAX_LIBRARY_VERSION_STRING] = {};
    int length = 0;
    MPI_Get_library_version(text, &length);
    const std::string whole = text;
    return whole.substr(0, whole.find_first_of(",\n"));
  }

  std::vector<std::string> all_gather(const std::string& mine) override {
    constexpr int kRoom = 256;
    if (mine.size() >= kRoom) throw InvalidArgument("all_gather: a text of " + std::to_string(mine.size()) + " bytes");
    char own[kRoom] = {};
    std::memcpy(own, mine.data(), mine.size());
    std::vector<char> all(static_cast<std::size_t>(world_size_) * kRoom);
    MPI_Allgather(own, kRoom, MPI_CHAR, all.data(), kRoom, MPI_CHAR, MPI_COMM_WORLD);
    std::vector<std::string> texts;
    for (int r = 0; r < world_size_; ++r) texts.emplace_back(all.data() + static_cast<std::size_t>(r) * kRoom);
    return texts;
  }

  void all_reduce(float* values, int count) override {
    MPI_Allreduce(MPI_IN_PLACE, values, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  }
  void barrier() override { MPI_Barrier(MPI_COMM_WORLD); }

 private:
  int rank_ = 0, world_size_ = 1;
};

}  // namespace

bool under_mpirun() { return std::getenv("OMPI_COMM_WORLD_RANK") != nullptr || std::getenv("PMI_RANK") != nullptr; }

std::unique_ptr<MpiPeer> MpiPeer::start() { return under_mpirun() ? std::make_unique<Mpi>() : nullptr; }

}  // namespace zcomm::bench
