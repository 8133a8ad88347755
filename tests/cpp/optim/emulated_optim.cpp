#include "optim/emulated_optim.hpp"

#define cuda emulated
#include "optim/cuda_adam.cu"
#include "optim/cuda_shard.cu"
#include "optim/cuda_squares.cu"
#undef cuda
