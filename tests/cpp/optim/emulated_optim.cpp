#include "optim/emulated_optim.hpp"

#define cuda emulated
#include "optim/cuda/adam.cu"
#include "optim/cuda/shard.cu"
#include "optim/cuda/squares.cu"
#undef cuda
