// Every grid kernel: what a lane compiles, with VOX_CUDA or VOX_METAL defined.
#include "attention.h"
#include "choose.h"
#include "elementwise.h"
#include "float_weights.h"
#include "norm.h"
#include "quantised.h"
#include "rope.h"
