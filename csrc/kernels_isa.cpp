// Compiled once per instruction set (EC_ISA, EC_NS); see lanes.h. Ends in one table of function pointers.
#ifndef EC_ISA
#define EC_ISA 0
#endif
#ifndef EC_NS
#define EC_NS portable
#endif
#include "lanes.h"
#include "kernels.h"
#include "pool_isa.h"
#include "update_isa.h"
#include "misc_isa.h"

namespace embcache {
namespace EC_NS {

#define EC_STRING2(x) #x
#define EC_STRING(x) EC_STRING2(x)

extern const Kernels kernels;
const Kernels kernels = {EC_STRING(EC_NS), pool,   dot,         gather_grads, update, sum_range, apply_one,
                         apply_rows,        finite, ids_outside, init_rows};

}  // namespace EC_NS
}  // namespace embcache
