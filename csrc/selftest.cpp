// Runs every kernel of every instruction set over fixed pseudo-random inputs and prints checksums; needs no torch.
// Equal sets print equal lines, so "the last column is the same" is the whole test. Static, it runs in an emulator:
//   embcache/kernels/build.py: build_selftest(); or by hand, for x86-64:
//   for each set: g++ -std=c++17 -O3 -ffp-contract=off -fno-math-errno -DEC_ISA=1 -DEC_NS=avx2 -mavx2 -mfma -mf16c -c kernels_isa.cpp
//   g++ -static -pthread selftest.cpp dispatch.cpp lookup.cpp update.cpp *.o
#include <stdio.h>
#include <string.h>
#include <string>
#include <thread>
#include "engine.h"

using namespace embcache;

namespace {

uint64_t state;
uint64_t next() {
  state += 0x9E3779B97F4A7C15ull;
  uint64_t z = state;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}
float real() { return (float)((int64_t)(next() >> 40) - (1 << 23)) * 0x1p-23f; }

uint64_t checksum(const void* data, size_t bytes, uint64_t h = 0xcbf29ce484222325ull) {
  const uint8_t* p = (const uint8_t*)data;
  for (size_t i = 0; i < bytes; ++i) h = (h ^ p[i]) * 0x100000001b3ull;
  return h;
}

void run_threads(int64_t tasks, void* context, void (*fn)(void*, int64_t, int), int threads) {
  std::atomic<int64_t> at{0};
  std::vector<std::thread> pool;
  for (int w = 0; w < threads; ++w)
    pool.emplace_back([&, w] {
      for (int64_t i; (i = at.fetch_add(1)) < tasks;) fn(context, i, w);
    });
  for (std::thread& t : pool) t.join();
}

struct Problem {
  int64_t dim, capacity = 97, bags = 300;
  int dtype, rule;
  bool weighted, mean, round;
};

uint64_t run(const Problem& p, const Parallel& par) {
  state = (uint64_t)p.dim * 1000003 + p.rule * 31 + p.dtype;
  Table t = {};
  const int64_t size = p.dtype == kFloat32 ? 4 : 2;
  t.dim = p.dim, t.capacity = p.capacity, t.dtype = p.dtype, t.rule = p.rule;
  t.first = p.rule, t.whole = p.dim + 2 * p.rule;  // from rule 1 on, some columns of wider rows
  t.state_offset = (p.dim * size + 3) / 4 * 4;
  t.row_bytes = t.state_offset + 4 * (2 * p.dim + 2);
  t.flags = p.round ? kFlagRound : 0;
  t.key = 0x0123456789abcdefull, t.step = 3;
  Hyper& h = t.hyper;
  h.lr = 0.05f, h.wd = 0.01f, h.eps = 1e-8f, h.b1 = 0.9f, h.b2 = 0.999f, h.mom = 0.9f, h.eta = 0.001f, h.alpha = 0.05f;
  h.beta = 1.0f, h.l1 = 0.01f, h.l2 = 0.02f, h.max_norm = p.round ? 1.5f : 0.0f, h.c = 1.0f, h.one_b1 = 0.1f;
  h.one_b2 = 0.001f, h.corr1 = 0.271f, h.corr2 = 0.003f, h.multiplier = 0.5f, h.b1_exact = 0.9, h.b2_exact = 0.999;
  std::vector<uint8_t> slab((size_t)(t.capacity * t.row_bytes) + 64), written((size_t)t.capacity / 8 + 1);
  t.slab = slab.data() + (64 - (uintptr_t)slab.data() % 64) % 64;
  t.written = written.data();

  std::vector<int32_t> normal(1602);
  for (int i = 0; i < 1602; ++i) normal[i] = (int32_t)((801 - i) * 1000003);
  std::vector<float> initial((size_t)(2 * p.dim + 2), 0.25f);
  Init a = {};
  a.slab = t.slab, a.capacity = t.capacity, a.row_bytes = t.row_bytes, a.dim = p.dim, a.state_offset = t.state_offset;
  a.dtype = p.dtype, a.first_id = -5, a.n = t.capacity, a.code = 1 + p.rule % 3, a.p0 = 0.7f, a.p1 = 0.1f, a.key = 99;
  a.first_column = t.first;
  a.normal = normal.data(), a.state = initial.data(), a.state_floats = 2 * p.dim + 2;
  init_rows(a, par);

  std::vector<int64_t> offsets = {0}, values;
  for (int64_t b = 0; b < p.bags; ++b) {
    const int64_t n = b == 7 ? 6000 : (int64_t)(next() % 9);  // one slot beyond the chunk, in one bag
    for (int64_t i = 0; i < n; ++i) values.push_back(b == 7 && i % 3 ? 5 : (int64_t)(next() % (uint64_t)t.capacity));
    offsets.push_back((int64_t)values.size());
  }
  std::vector<float> weights(values.size()), grads((size_t)(p.bags * p.dim)), out(grads.size()), dots(values.size());
  for (float& w : weights) w = real();
  for (float& g : grads) g = real();
  Input in;
  in.values = values.data(), in.offsets = offsets.data(), in.n = (int64_t)values.size();
  in.weights = p.weighted ? weights.data() : nullptr;
  const std::vector<Table> tables = {t};
  std::vector<Feature> features = {{0, p.mean ? kPoolMean : kPoolSum, 0, p.bags, {out.data(), kFloat32, 0, p.dim}}};
  pooled_lookup(tables, features, in, par);
  uint64_t sum = checksum(out.data(), out.size() * 4);
  features[0].vectors.base = grads.data();
  grad_weights(tables, features, in, dots.data(), par);
  sum = checksum(dots.data(), dots.size() * 4, sum);
  const bool finite = all_finite(grads.data(), kFloat32, p.bags, p.dim, p.dim, par);
  const int64_t bad = check_ids(features, &t.capacity, in, par);
  const int64_t rows = fused_update(tables, features, in, par);
  const int64_t slots[] = {3, 96, 5, 0};
  std::vector<float> sums(4 * kSums), total(4 * kSums, 1.5f);
  Summed summed = {slots, grads.data(), nullptr, sums.data()};
  for (int pass = 0; pass < 2; ++pass) {
    apply_rows(t, summed, 4, par);
    sum = checksum(sums.data(), sums.size() * 4, sum);
    summed.given = total.data();
  }
  summed.found = nullptr;
  apply_rows(t, summed, 4, par);
  sum = checksum(t.slab, (size_t)(t.capacity * t.row_bytes), sum);
  sum = checksum(written.data(), written.size(), sum);
  const int64_t facts[] = {finite, bad, rows};
  return checksum(facts, sizeof facts, sum);
}

}  // namespace

int main() {
  Parallel serial, parallel;
  parallel.threads = 3;
  parallel.run = run_threads;
  std::vector<uint64_t> first;
  bool equal = true;
  for (const char* name : available()) {
    select_kernels(name);
    for (const Parallel* par : {&serial, &parallel}) {
      std::vector<uint64_t> sums;
      uint64_t all = 0xcbf29ce484222325ull;
      for (int64_t dim : {1, 3, 8, 16, 33, 64, 100, 128, 200})
        for (int rule = 0; rule < kRules; ++rule)
          for (int dtype = 0; dtype < 3; ++dtype) {
            const int v = rule + dtype;
            sums.push_back(run({dim, 97, 300, dtype, rule, v % 2 == 1, v % 3 == 1, dtype && rule % 2}, *par));
            all = checksum(&sums.back(), 8, all);
          }
      if (first.empty()) first = sums;
      equal &= sums == first;
      printf("%-10s %d threads  %016llx\n", name, par->threads, (unsigned long long)all);
    }
  }
  printf(equal ? "equal\n" : "DIFFERENT\n");
  return equal ? 0 : 1;
}
