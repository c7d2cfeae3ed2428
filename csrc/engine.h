// The kernels' drivers: plain pointers in, work cut into tasks, tasks run by whatever `Parallel` the caller brings.
// Results never depend on the number of threads nor on which thread ran what.
#pragma once
#include <stdint.h>
#include <atomic>
#include <vector>
#include "kernels.h"

namespace embcache {

// Runs fn(context, task, worker) for every task in [0, tasks), worker in [0, threads).
struct Parallel {
  static constexpr int64_t kLeastWork = 32768;  // floats a thread is worth waking for
  int threads = 1;
  void (*run)(int64_t tasks, void* context, void (*fn)(void*, int64_t, int), int threads) = nullptr;

  // The same with fewer threads where there is little to do.
  Parallel sized(int64_t floats) const {
    Parallel p = *this;
    if (floats / kLeastWork < p.threads) p.threads = floats < 2 * kLeastWork ? 1 : (int)(floats / kLeastWork);
    return p;
  }

  template <class F>
  void each(int64_t tasks, F&& f) const {
    if (threads <= 1 || tasks <= 1 || !run) {
      for (int64_t i = 0; i < tasks; ++i) f(i, 0);
      return;
    }
    run(tasks, &f, [](void* c, int64_t task, int worker) { (*(std::remove_reference_t<F>*)c)(task, worker); }, threads);
  }
};

// A feature: bags [first_bag, first_bag + bags) of `table`. `vectors` is its pooled output or its gradient.
struct Feature {
  int table, pooling;
  int64_t first_bag, bags;
  Vectors vectors;
};

struct Input {
  const void *values = nullptr, *offsets = nullptr;
  const float* weights = nullptr;
  bool wide_values = true, wide_offsets = true;
  int64_t n = 0;

  int64_t slot(int64_t i) const { return wide_values ? ((const int64_t*)values)[i] : ((const int32_t*)values)[i]; }
  int64_t offset(int64_t bag) const {
    if (!offsets) return bag;
    return wide_offsets ? ((const int64_t*)offsets)[bag] : ((const int32_t*)offsets)[bag];
  }
};

const Kernels& active();
bool select_kernels(const char* name);  // false: unknown, or this processor lacks it
std::vector<const char*> available();

void pooled_lookup(const std::vector<Table>& tables, const std::vector<Feature>& features, const Input& in,
                   Parallel par);
int64_t touch_rows(const std::vector<Table>& tables, const std::vector<Feature>& features, const Input& in,
                   Parallel par);
void grad_weights(const std::vector<Table>& tables, const std::vector<Feature>& features, const Input& in, float* out,
                  Parallel par);
// Returns the number of rows updated.
int64_t fused_update(const std::vector<Table>& tables, const std::vector<Feature>& features, const Input& in,
                     Parallel par);
// The rule on n rows whose gradients are summed, or, where rows.found is not null, what it sums over each of them.
void apply_rows(const Table& table, const Summed& rows, int64_t n, const Parallel& par);
bool all_finite(const void* data, int dtype, int64_t rows, int64_t columns, int64_t stride, const Parallel& par);
// First position of a feature whose id is outside [0, rows[table]), or -1; rows[table] < 0: every id is inside.
int64_t check_ids(const std::vector<Feature>& features, const int64_t* rows, const Input& in, const Parallel& par);
int64_t check_offsets(const void* offsets, bool wide, int64_t count, int64_t values);

void init_rows(const Init& a, const Parallel& par);

}  // namespace embcache
