// Every kernel, on the vectors (and tiles, if there are any) that were included before. Included inside an instruction set's unit.
#include "vector_math.h"
#include "matmul.h"
#include "linear.h"
#include "experts.h"
#include "attention.h"
#include "rows.h"
#include "delta.h"
