// The grid kernels of training.
#include "attention_backward.h"
#include "backward.h"
#include "loss.h"
#include "products.h"
#include "update.h"
