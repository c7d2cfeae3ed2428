// Driver of the fused update: pairs (slot, gradient) of each table are sorted, equal slots summed, the rule applied.
//
// Work is cut by positions, not by tables. A table of ordinary size is one task. A table that holds more than its share
// of the batch is first split by a hash of the slot into parts, all of them tasks of equal standing, and a slot that is
// most of the batch by itself is summed in chunks by all threads. Only who computes changes, never what: the sum of a
// slot's gradients is defined by its positions alone (kernels.h).
#include <algorithm>
#include <mutex>
#include <stdexcept>
#include "engine.h"
#include "group.h"
#include "scratch.h"

namespace embcache {
namespace {

constexpr int64_t kLeastPart = 8192;  // positions; below this a table is not split
constexpr int kMaxParts = 256;

// One table and its bags of all features, numbered through: local bag, local position.
struct Job {
  const Table* table = nullptr;
  std::vector<const Feature*> features;
  std::vector<int64_t> bag_base, position_base;  // of each feature
  int64_t n = 0, bags = 0;
  int payload_bits = 0, slot_bits = 0, parts = 1;
  bool gather = false;  // copy the gradients to fp32 rows side by side first
  // arrays of a split table
  uint64_t *keys = nullptr, *spare = nullptr;
  float *grads = nullptr, *weights = nullptr;
  uint32_t* rows = nullptr;
  std::vector<int64_t> part_begin;
};

// A run of positions of one feature of a split table.
struct Piece {
  Job* job;
  size_t feature;
  int64_t begin, end;
  std::vector<int64_t> count;  // by part, then where its next key goes
};

struct Task {
  Job* job;
  int part;
  int64_t n;
};

// A group left out of its part because it is too large for one thread.
struct Hot {
  Job* job;
  Groups groups;
  uint32_t limit;  // end of the part's pairs
  int64_t from, n, first_chunk;
};

struct WorkerMemory {
  Buffer keys, spare, starts, grads, weights, rows, sums, scale;
};
WorkerMemory& worker_memory() {
  static thread_local WorkerMemory memory;
  return memory;
}

struct CallMemory {
  Buffer keys, spare, grads, weights, rows, chunks;
};
CallMemory& call_memory() {
  static thread_local CallMemory memory;
  return memory;
}

int part_of(uint64_t slot, int parts) {
  return (int)((((slot * 0x9E3779B97F4A7C15ull) >> 40) * (uint64_t)parts) >> 24);
}

// Calls f(position, local position, local bag) over positions [begin, end) of a feature of a job, ascending.
template <class F>
void walk(const Job& job, size_t feature, const Input& in, int64_t begin, int64_t end, F&& f) {
  const Feature& ft = *job.features[feature];
  const int64_t first = in.offset(ft.first_bag), shift = job.position_base[feature] - first;
  int64_t low = ft.first_bag, high = ft.first_bag + ft.bags;  // first bag that ends behind `begin`
  while (low < high) {
    const int64_t mid = low + (high - low) / 2;
    in.offset(mid + 1) > begin ? high = mid : low = mid + 1;
  }
  const int64_t bag_shift = job.bag_base[feature] - ft.first_bag;
  for (int64_t bag = low, p = begin; p < end; ++bag)
    for (const int64_t e = std::min(end, in.offset(bag + 1)); p < e; ++p) f(p, p + shift, bag + bag_shift);
}

// Writes the keys of a run of positions through put(slot, key), and, with weights, what their payloads point to.
template <class Put>
void make_keys(const Job& job, size_t feature, const Input& in, int64_t begin, int64_t end, float* weights,
               uint32_t* rows, Put&& put) {
  const int bits = job.payload_bits;
  if (in.weights) {
    walk(job, feature, in, begin, end, [&](int64_t p, int64_t local, int64_t bag) {
      weights[local] = in.weights[p];
      rows[local] = (uint32_t)bag;
      const uint64_t slot = (uint64_t)in.slot(p);
      put(slot, slot << bits | (uint64_t)local);
    });
  } else {
    walk(job, feature, in, begin, end, [&](int64_t p, int64_t, int64_t bag) {
      const uint64_t slot = (uint64_t)in.slot(p);
      put(slot, slot << bits | (uint64_t)bag);
    });
  }
}

void gather_bags(const Job& job, size_t feature, const Input& in, int64_t begin, int64_t end, float* grads) {
  const Feature& f = *job.features[feature];
  const Vectors& v = f.vectors;
  const int64_t size = v.dtype == kFloat32 ? 4 : 2, dim = job.table->dim;
  float* scale = nullptr;
  if (f.pooling == kPoolMean) {
    scale = worker_memory().scale.get<float>(end - begin);
    for (int64_t b = begin; b < end; ++b) scale[b - begin] = 1.0f / (float)(in.offset(b + 1) - in.offset(b));
  }
  active().gather_grads(grads + (job.bag_base[feature] + begin - f.first_bag) * dim,
                        (const char*)v.base + (begin - v.first) * v.stride * size, v.dtype, v.stride, dim, end - begin,
                        scale);
}

// Where a job's gradients lie once `gathered` (or null) is filled.
Groups groups_of(const Job& job, const float* gathered, const float* weights, const uint32_t* rows) {
  Groups g = {};
  g.payload_bits = job.payload_bits;
  g.weights = weights;
  g.rows = rows;
  if (gathered) {
    g.grads = gathered;
    g.stride = job.table->dim;
  } else {
    const Feature& f = *job.features[0];
    g.grads = (const float*)f.vectors.base + (f.first_bag - f.vectors.first) * f.vectors.stride;
    g.stride = f.vectors.stride;
  }
  return g;
}

// Sorts n keys and applies the rule to each slot; groups of more than `largest` positions are left to leave(groups,
// from, n). Returns the number of slots.
template <class Leave>
int64_t update_keys(const Job& job, uint64_t* keys, uint64_t* spare, int64_t n, Groups g, int64_t largest,
                    Leave&& leave) {
  WorkerMemory& m = worker_memory();
  g.pairs = radix_sort(keys, spare, n, job.payload_bits, job.slot_bits);
  uint32_t* starts = m.starts.get<uint32_t>(n + 1);
  g.count = find_groups(g.pairs, n, job.payload_bits, starts);
  g.starts = starts;
  active().update(*job.table, g, 0, g.count, largest, m.sums.get<float>(3 * padded(job.table->dim)));
  if (largest < n)
    for (int64_t i = 0; i < g.count; ++i)
      if ((int64_t)starts[i + 1] - starts[i] > largest) leave(g, (int64_t)starts[i], (int64_t)starts[i + 1] - starts[i]);
  return g.count;
}

int64_t update_whole(const Job& job, const Input& in) {
  WorkerMemory& m = worker_memory();
  uint64_t *keys = m.keys.get<uint64_t>(job.n), *spare = m.spare.get<uint64_t>(job.n);
  float* weights = in.weights ? m.weights.get<float>(job.n) : nullptr;
  uint32_t* rows = in.weights ? m.rows.get<uint32_t>(job.n) : nullptr;
  float* grads = job.gather ? m.grads.get<float>(job.bags * job.table->dim) : nullptr;
  uint64_t* next = keys;
  for (size_t i = 0; i < job.features.size(); ++i) {
    const Feature& f = *job.features[i];
    const int64_t end = f.first_bag + f.bags;
    make_keys(job, i, in, in.offset(f.first_bag), in.offset(end), weights, rows,
              [&](uint64_t, uint64_t key) { *next++ = key; });
    if (grads) gather_bags(job, i, in, f.first_bag, end, grads);
  }
  return update_keys(job, keys, spare, job.n, groups_of(job, grads, weights, rows), job.n,
                     [](const Groups&, int64_t, int64_t) {});
}

std::vector<Job> make_jobs(const std::vector<Table>& tables, const std::vector<Feature>& features, const Input& in) {
  std::vector<Job> jobs(tables.size());
  for (const Feature& f : features) {
    const int64_t n = in.offset(f.first_bag + f.bags) - in.offset(f.first_bag);
    if (n <= 0) continue;
    Job& j = jobs[f.table];
    j.table = &tables[f.table];
    j.features.push_back(&f);
    j.bag_base.push_back(j.bags);
    j.position_base.push_back(j.n);
    j.bags += f.bags;
    j.n += n;
    const bool one = j.features.size() == 1;
    j.gather |= !one || f.vectors.dtype != kFloat32 || f.pooling == kPoolMean;
  }
  jobs.erase(std::remove_if(jobs.begin(), jobs.end(), [](const Job& j) { return j.n == 0; }), jobs.end());
  for (Job& j : jobs) {
    // a gradient read several times is worth copying out of a wide row, where its lines share few cache sets
    j.gather |= j.features[0]->vectors.stride != j.table->dim && j.n > 4 * j.bags;
    j.payload_bits = std::max(1, bit_length((uint64_t)(in.weights ? j.n : j.bags) - 1));
    j.slot_bits = std::max(1, bit_length((uint64_t)j.table->capacity - 1));
    if (j.n >= (int64_t)1 << 32 || j.bags >= (int64_t)1 << 32 || j.slot_bits + j.payload_bits > 64)
      throw std::runtime_error("fused_update: too many positions for one table in one call");
  }
  return jobs;
}

// Splits the large jobs: counts, then scatters their keys by part, and gathers their gradients. Keys of a part keep
// their order.
void split_jobs(std::vector<Job*>& large, const Input& in, const Parallel& par) {
  CallMemory& m = call_memory();
  int64_t keys = 0, grads = 0;
  for (Job* j : large) keys += j->n, grads += j->gather ? j->bags * j->table->dim : 0;
  uint64_t *key = m.keys.get<uint64_t>(keys), *spare = m.spare.get<uint64_t>(keys);
  float* grad = m.grads.get<float>(grads);
  float* weight = in.weights ? m.weights.get<float>(keys) : nullptr;
  uint32_t* row = in.weights ? m.rows.get<uint32_t>(keys) : nullptr;
  std::vector<Piece> pieces;
  struct Copy {
    Job* job;
    size_t feature;
    int64_t begin, end;
  };
  std::vector<Copy> copies;
  for (Job* j : large) {
    j->keys = key, j->spare = spare;
    key += j->n, spare += j->n;
    if (weight) j->weights = weight, j->rows = row, weight += j->n, row += j->n;
    if (j->gather) j->grads = grad, grad += j->bags * j->table->dim;
    for (size_t i = 0; i < j->features.size(); ++i) {
      const Feature& f = *j->features[i];
      const int64_t last = f.first_bag + f.bags, end = in.offset(last);
      for (int64_t p = in.offset(f.first_bag); p < end; p += kLeastPart)
        pieces.push_back({j, i, p, std::min(end, p + kLeastPart), std::vector<int64_t>(j->parts)});
      if (j->gather)
        for (int64_t b = f.first_bag; b < last; b += 1024) copies.push_back({j, i, b, std::min(last, b + 1024)});
    }
  }
  const int64_t count = (int64_t)pieces.size();
  par.each(count + (int64_t)copies.size(), [&](int64_t i, int) {
    if (i >= count) {
      const Copy& c = copies[i - count];
      gather_bags(*c.job, c.feature, in, c.begin, c.end, c.job->grads);
      return;
    }
    Piece& p = pieces[i];
    for (int64_t at = p.begin; at < p.end; ++at) ++p.count[part_of((uint64_t)in.slot(at), p.job->parts)];
  });
  for (Job* j : large) {
    j->part_begin.assign(j->parts + 1, j->n);
    int64_t at = 0;
    for (int part = 0; part < j->parts; ++part) {
      j->part_begin[part] = at;
      for (Piece& p : pieces)
        if (p.job == j) {
          const int64_t c = p.count[part];
          p.count[part] = at;
          at += c;
        }
    }
  }
  par.each(count, [&](int64_t i, int) {
    Piece& p = pieces[i];
    const Job& j = *p.job;
    int64_t* next = p.count.data();
    make_keys(j, p.feature, in, p.begin, p.end, j.weights, j.rows,
              [&](uint64_t slot, uint64_t k) { j.keys[next[part_of(slot, j.parts)]++] = k; });
  });
}

// Sums each hot group in its chunks over all threads, then applies the rule.
void update_hot(std::vector<Hot>& hot, const Parallel& par) {
  int64_t chunks = 0, width = 0;
  for (Hot& h : hot) {
    h.first_chunk = chunks;
    h.groups.starts = &h.limit;
    h.groups.count = 0;
    chunks += (h.n + kChunk - 1) / kChunk;
    width = std::max(width, padded(h.job->table->dim));
  }
  float* sums = call_memory().chunks.get<float>(chunks * width);
  const Kernels& k = active();
  std::vector<const Hot*> owner(chunks);
  for (const Hot& h : hot)
    for (int64_t c = 0; c * kChunk < h.n; ++c) owner[h.first_chunk + c] = &h;
  par.each(chunks, [&](int64_t c, int) {
    const Hot& h = *owner[c];
    const int64_t done = (c - h.first_chunk) * kChunk;
    k.sum_range(*h.job->table, h.groups, h.from + done, std::min(kChunk, h.n - done), sums + c * width);
  });
  par.each((int64_t)hot.size(), [&](int64_t i, int) {
    const Hot& h = hot[i];
    const Table& t = *h.job->table;
    float* sum = sums + h.first_chunk * width;
    for (int64_t c = 1; c * kChunk < h.n; ++c)
      for (int64_t d = 0; d < t.dim; ++d) sum[d] = sum[d] + sum[c * width + d];
    if (t.hyper.multiplier != 1.0f)
      for (int64_t d = 0; d < t.dim; ++d) sum[d] = sum[d] * t.hyper.multiplier;
    const int64_t slot = (int64_t)(h.groups.pairs[h.from] >> h.groups.payload_bits);
    k.apply(t, slot, sum, worker_memory().sums.get<float>(3 * padded(t.dim)));
  });
}

}  // namespace

int64_t fused_update(const std::vector<Table>& tables, const std::vector<Feature>& features, const Input& in,
                     Parallel par) {
  std::vector<Job> jobs = make_jobs(tables, features, in);
  int64_t total = 0, floats = 0;
  for (const Job& j : jobs) total += j.n, floats += j.n * j.table->dim;
  if (!total) return 0;
  par = par.sized(floats);
  const int64_t share = std::max(kLeastPart, total / (4 * (int64_t)par.threads) + 1);
  std::vector<Job*> large;
  std::vector<Task> tasks;
  for (Job& j : jobs) {
    if (par.threads > 1 && j.n > share) j.parts = (int)std::min<int64_t>(kMaxParts, (j.n + share - 1) / share);
    if (j.parts > 1) large.push_back(&j);
  }
  if (!large.empty()) split_jobs(large, in, par);
  for (Job& j : jobs)
    for (int part = 0; part < j.parts; ++part)
      tasks.push_back({&j, part, j.parts > 1 ? j.part_begin[part + 1] - j.part_begin[part] : j.n});
  std::stable_sort(tasks.begin(), tasks.end(), [](const Task& a, const Task& b) { return a.n > b.n; });

  std::atomic<int64_t> rows{0};
  std::vector<Hot> hot;
  std::mutex mutex;
  const int64_t largest = std::max<int64_t>(2 * kChunk, share / 2);
  par.each((int64_t)tasks.size(), [&](int64_t i, int) {
    const Task& t = tasks[i];
    Job& j = *t.job;
    if (j.parts == 1) {
      rows += update_whole(j, in);
    } else if (t.n) {
      const int64_t at = j.part_begin[t.part];
      rows += update_keys(j, j.keys + at, j.spare + at, t.n, groups_of(j, j.grads, j.weights, j.rows), largest,
                          [&](const Groups& g, int64_t from, int64_t n) {
                            const std::lock_guard<std::mutex> lock(mutex);
                            hot.push_back({&j, g, (uint32_t)t.n, from, n, 0});
                          });
    }
  });
  if (!hot.empty()) update_hot(hot, par);
  return rows.load();
}

void apply_rows(const Table& t, const Summed& rows, int64_t n, const Parallel& par) {
  constexpr int64_t kGrain = 256;
  par.sized(n * t.dim).each((n + kGrain - 1) / kGrain, [&](int64_t i, int) {
    float* scratch = worker_memory().sums.get<float>(padded(t.dim) + t.row_bytes / 4);
    active().apply_rows(t, rows, i * kGrain, std::min(n, (i + 1) * kGrain), scratch);
  });
}

}  // namespace embcache
