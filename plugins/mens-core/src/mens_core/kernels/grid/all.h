// Every grid kernel: what a lane that trains compiles, with VOX_CUDA or VOX_METAL defined.
#include "serving.h"
#include "training.h"
