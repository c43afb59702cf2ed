// The grid kernels that serve; all.h has those of training too.
#include "attention.h"
#include "choose.h"
#include "elementwise.h"
#include "float_weights.h"
#include "norm.h"
#include "quantised.h"
#include "rope.h"
#include "tall_linear.h"
