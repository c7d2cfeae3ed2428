// Drivers of everything but the update: cuts bags into tasks of about equal work.
#include <algorithm>
#include <type_traits>
#include "engine.h"

namespace embcache {
namespace {

struct Run {
  int feature;
  int64_t begin, end;  // bags
};

// Bags of a feature cut where its work, positions plus bags, passes multiples of `grain`.
void cut(const Feature& f, int index, const Input& in, int64_t grain, std::vector<Run>& runs) {
  const int64_t last = f.first_bag + f.bags, base = in.offset(f.first_bag) + f.first_bag;
  int64_t begin = f.first_bag;
  while (begin < last) {
    const int64_t goal = in.offset(begin) + begin - base + grain;
    int64_t low = begin + 1, high = last;  // smallest end with work(end) >= goal
    while (low < high) {
      const int64_t mid = low + (high - low) / 2;
      in.offset(mid) + mid - base >= goal ? high = mid : low = mid + 1;
    }
    runs.push_back({index, begin, low});
    begin = low;
  }
}

std::vector<Run> cut_all(const std::vector<Table>& tables, const std::vector<Feature>& features, const Input& in,
                         Parallel& par) {
  constexpr int64_t least = 512;
  int64_t work = 0, floats = 0;
  for (const Feature& f : features)
    if (f.bags) {
      const int64_t w = in.offset(f.first_bag + f.bags) - in.offset(f.first_bag) + f.bags;
      work += w;
      floats += w * tables[f.table].dim;
    }
  par = par.sized(floats);
  const int64_t grain = std::max(least, work / (16 * (int64_t)par.threads) + 1);
  std::vector<Run> runs;
  for (size_t i = 0; i < features.size(); ++i)
    if (features[i].bags) cut(features[i], (int)i, in, grain, runs);
  return runs;
}

Bags bags_of(const Table& t, const Feature& f, const Input& in, const Run& r) {
  return {&t,           in.values,       in.offsets,
          in.weights,   in.wide_values,  in.wide_offsets,
          f.pooling == kPoolMean, r.begin, r.end};
}

}  // namespace

void pooled_lookup(const std::vector<Table>& tables, const std::vector<Feature>& features, const Input& in,
                   Parallel par) {
  const Kernels& k = active();
  const std::vector<Run> runs = cut_all(tables, features, in, par);
  par.each((int64_t)runs.size(), [&](int64_t i, int) {
    const Feature& f = features[runs[i].feature];
    k.pool(bags_of(tables[f.table], f, in, runs[i]), f.vectors);
  });
}

// Reads one word of each line of the rows that a lookup reads, with its prefetch, and does nothing else: the memory's
// limit, which benchmarks hold the lookup against.
int64_t touch_rows(const std::vector<Table>& tables, const std::vector<Feature>& features, const Input& in,
                   Parallel par) {
  const std::vector<Run> runs = cut_all(tables, features, in, par);
  std::atomic<int64_t> total{0};
  par.each((int64_t)runs.size(), [&](int64_t i, int) {
    const Table& t = tables[features[runs[i].feature].table];
    const int64_t bytes = t.dim * (t.dtype == kFloat32 ? 4 : 2), end = in.offset(runs[i].end);
    const int64_t ahead = std::min<int64_t>(16, std::max<int64_t>(4, 4096 / bytes));
    int64_t sum = 0;
    for (int64_t p = in.offset(runs[i].begin); p < end; ++p) {
      const uint8_t* next = t.slab + in.slot(std::min(p + ahead, end - 1)) * t.row_bytes;
      for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(next + b, 0, 3);
      const uint8_t* row = t.slab + in.slot(p) * t.row_bytes;
      for (int64_t b = 0; b < bytes; b += 64) sum += row[b];
    }
    total += sum;
  });
  return total.load();
}

void grad_weights(const std::vector<Table>& tables, const std::vector<Feature>& features, const Input& in, float* out,
                  Parallel par) {
  const Kernels& k = active();
  const std::vector<Run> runs = cut_all(tables, features, in, par);
  par.each((int64_t)runs.size(), [&](int64_t i, int) {
    const Feature& f = features[runs[i].feature];
    k.dot(bags_of(tables[f.table], f, in, runs[i]), f.vectors, out);
  });
}

bool all_finite(const void* data, int dtype, int64_t rows, int64_t columns, int64_t stride, const Parallel& par) {
  const Kernels& k = active();
  if (stride == columns) columns *= rows, rows = 1;
  const int64_t size = dtype == kFloat32 ? 4 : 2, grain = 65536;
  std::atomic<bool> good{true};
  const int64_t tasks = rows == 1 ? (columns + grain - 1) / grain : (rows * columns + grain - 1) / grain;
  par.sized(rows * columns / 4).each(tasks, [&](int64_t i, int) {
    if (!good.load(std::memory_order_relaxed)) return;
    bool ok = true;
    if (rows == 1) {
      ok = k.finite((const char*)data + i * grain * size, dtype, std::min(grain, columns - i * grain));
    } else {
      for (int64_t r = rows * i / tasks; r < rows * (i + 1) / tasks && ok; ++r)
        ok = k.finite((const char*)data + r * stride * size, dtype, columns);
    }
    if (!ok) good.store(false, std::memory_order_relaxed);
  });
  return good.load();
}

int64_t check_ids(const std::vector<Feature>& features, const int64_t* rows, const Input& in, const Parallel& par) {
  const Kernels& k = active();
  const int64_t grain = 131072;
  struct Piece {
    int64_t begin, end, rows;
  };
  std::vector<Piece> pieces;
  for (const Feature& f : features)
    if (rows[f.table] >= 0)
      for (int64_t p = in.offset(f.first_bag), e = in.offset(f.first_bag + f.bags); p < e; p += grain)
        pieces.push_back({p, std::min(e, p + grain), rows[f.table]});
  std::atomic<bool> bad{false};
  const int64_t size = in.wide_values ? 8 : 4;
  par.sized(in.n).each((int64_t)pieces.size(), [&](int64_t i, int) {
    const Piece& p = pieces[i];
    if (k.ids_outside((const char*)in.values + p.begin * size, in.wide_values, p.end - p.begin, p.rows))
      bad.store(true, std::memory_order_relaxed);
  });
  if (!bad.load()) return -1;
  int64_t first = -1;
  for (const Piece& p : pieces)
    for (int64_t i = p.begin; i < p.end; ++i)
      if (in.slot(i) < 0 || in.slot(i) >= p.rows) {
        if (first < 0 || i < first) first = i;
        break;
      }
  return first;
}

template <class I>
static int64_t check_offsets_of(const I* o, int64_t count, int64_t values) {
  using U = std::make_unsigned_t<I>;
  if (o[0] != 0) return 0;
  U bad = 0;  // its sign: set where an offset is negative or less than the one before it
  for (int64_t i = 1; i < count; ++i) bad |= (U)o[i] | ((U)o[i] - (U)o[i - 1]);
  if (bad >> (8 * sizeof(I) - 1))
    for (int64_t i = 1; i < count; ++i)
      if (o[i] < o[i - 1]) return i;
  return o[count - 1] == values ? -1 : count - 1;
}

int64_t check_offsets(const void* offsets, bool wide, int64_t count, int64_t values) {
  return wide ? check_offsets_of((const int64_t*)offsets, count, values)
              : check_offsets_of((const int32_t*)offsets, count, values);
}

void init_rows(const Init& a, const Parallel& par) {
  const Kernels& k = active();
  const int64_t grain = std::max<int64_t>(1, 65536 / std::max<int64_t>(1, a.dim));
  par.sized(a.n * a.dim).each((a.n + grain - 1) / grain,
           [&](int64_t i, int) { k.init_rows(a, i * grain, std::min(a.n, (i + 1) * grain)); });
}

}  // namespace embcache
