// torch.ops.embcache.*: checks arguments, turns tensors into plain pointers, calls the engine.
//
// Uses torch's stable ABI only, so one build serves every torch from 2.10 on.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <algorithm>
#include <optional>
#include <sstream>
#include <string>
#include "engine.h"

using torch::stable::Tensor;

namespace embcache {
namespace {

enum class Type { kU8, kI32, kI64, kF32, kF64, kBF16, kF16, kOther };

Type type_of(const Tensor& t) {
  static const int32_t u8 = aoti_torch_dtype_uint8(), i32 = aoti_torch_dtype_int32(), i64 = aoti_torch_dtype_int64(),
                       f32 = aoti_torch_dtype_float32(), f64 = aoti_torch_dtype_float64(),
                       bf16 = aoti_torch_dtype_bfloat16(), f16 = aoti_torch_dtype_float16();
  int32_t d = -1;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(t.get(), &d));
  return d == f32    ? Type::kF32
         : d == i64  ? Type::kI64
         : d == u8   ? Type::kU8
         : d == i32  ? Type::kI32
         : d == f64  ? Type::kF64
         : d == bf16 ? Type::kBF16
         : d == f16  ? Type::kF16
                     : Type::kOther;
}

template <class... A>
[[noreturn]] void fail(const A&... parts) {
  std::ostringstream s;
  s << "embcache.";
  ((s << parts), ...);
  throw std::runtime_error(s.str());
}

const char* name_of(Type t) {
  static const char* names[] = {"uint8", "int32", "int64", "float32", "float64", "bfloat16", "float16", "another dtype"};
  return names[(int)t];
}

// Nothing computed from a row's size overflows below this.
constexpr int64_t kMaxRowBytes = (int64_t)1 << 40;

// What every tensor argument must be: on the CPU, contiguous, of one dtype.
void require(const char* op, const char* what, const Tensor& t, Type type) {
  if (!t.is_cpu()) fail(op, ": ", what, " must be on the CPU");
  if (type_of(t) != type) fail(op, ": ", what, " is ", name_of(type_of(t)), ", must be ", name_of(type));
  if (!t.is_contiguous()) fail(op, ": ", what, " must be contiguous");
}

void require_matrix(const char* op, const char* what, const Tensor& t, Type type, int64_t columns) {
  require(op, what, t, type);
  if (t.dim() != 2 || t.size(1) != columns) fail(op, ": ", what, " must have shape [n, ", columns, "]");
}

Parallel threads() {
  Parallel p;
  p.threads = (int)torch::stable::get_num_threads();
  p.run = [](int64_t tasks, void* context, void (*fn)(void*, int64_t, int), int threads) {
    std::atomic<int64_t> next{0};
    const int64_t workers = tasks < threads ? tasks : threads;
    torch::stable::parallel_for(0, workers, 1, [&](int64_t begin, int64_t end) {
      for (int64_t w = begin; w < end; ++w)
        for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) fn(context, i, (int)w);
    });
  };
  return p;
}

int dtype_code(const char* op, const char* what, const Tensor& t) {
  const Type type = type_of(t);
  if (type == Type::kF32) return kFloat32;
  if (type == Type::kBF16) return kBFloat16;
  if (type == Type::kF16) return kFloat16;
  fail(op, ": ", what, " is ", name_of(type), ", must be float32, bfloat16 or float16");
}

int states_of(int rule, int* scalars) {
  static const int wide[kRules] = {0, 1, 0, 2, 1, 2, 1, 2}, scalar[kRules] = {0, 0, 1, 0, 1, 0, 0, 0};
  *scalars = scalar[rule];
  return wide[rule];
}

constexpr int64_t kTableColumns = 8;

// Descriptor columns, as embcache/kernels/native.py documents them.
std::vector<Table> read_tables(const char* op, const std::vector<Tensor>& slabs, const Tensor& tables) {
  require_matrix(op, "tables", tables, Type::kI64, kTableColumns);
  const int64_t n = tables.size(0), *d = (const int64_t*)tables.data_ptr();
  if ((int64_t)slabs.size() != n) fail(op, ": ", slabs.size(), " slabs for ", n, " tables");
  std::vector<Table> out(n);
  for (int64_t i = 0; i < n; ++i, d += kTableColumns) {
    const Tensor& s = slabs[i];
    require(op, "slab", s, Type::kU8);
    if (s.dim() != 2) fail(op, ": slab ", i, " must have shape [capacity, row_bytes]");
    Table& t = out[i];
    t = Table{};
    t.slab = (uint8_t*)s.data_ptr();
    t.capacity = s.size(0);
    t.row_bytes = s.size(1);
    t.dim = d[0];
    t.dtype = (int)d[1];
    t.state_offset = d[2];
    t.rule = (int)d[3];
    t.key = (uint64_t)d[4];
    t.flags = (int)d[5];
    t.first = d[6];
    t.whole = d[7];
    if (t.dim < 1 || t.dim > t.row_bytes || t.row_bytes > kMaxRowBytes)
      fail(op, ": table ", i, " has dim ", t.dim, " in rows of ", t.row_bytes, " bytes");
    if (t.first < 0 || t.whole < t.dim || t.first > t.whole - t.dim)
      fail(op, ": table ", i, " has ", t.dim, " columns from ", t.first, " of ", t.whole);
    if (d[1] < 0 || d[1] > 2) fail(op, ": table ", i, " has weight dtype code ", d[1]);
    if (d[3] < 0 || d[3] >= kRules) fail(op, ": table ", i, " has rule code ", d[3]);
    if (t.row_bytes % 4 || t.state_offset % 4 || (uintptr_t)t.slab % 4)
      fail(op, ": slab ", i, ": address, row_bytes and state_offset must be multiples of 4");
    const int64_t weight_bytes = t.dim * (t.dtype == kFloat32 ? 4 : 2);
    if (t.state_offset < weight_bytes || t.state_offset > t.row_bytes)
      fail(op, ": table ", i, ": row of ", t.row_bytes, " bytes with state at ", t.state_offset, " does not fit dim ", t.dim);
  }
  return out;
}

void read_hyper(const char* op, std::vector<Table>& tables, const Tensor& hyper) {
  require_matrix(op, "hyper", hyper, Type::kF64, 16);
  if (hyper.size(0) != (int64_t)tables.size()) fail(op, ": hyper has ", hyper.size(0), " rows for ", tables.size(), " tables");
  const double* h = (const double*)hyper.data_ptr();
  for (size_t i = 0; i < tables.size(); ++i, h += 16) {
    Table& t = tables[i];
    Hyper& o = t.hyper;
    o.lr = (float)h[0], o.wd = (float)h[1], o.eps = (float)h[2], o.b1 = (float)h[3], o.b2 = (float)h[4];
    o.mom = (float)h[5], o.eta = (float)h[6], o.alpha = (float)h[7], o.beta = (float)h[8], o.l1 = (float)h[9];
    o.l2 = (float)h[10], o.max_norm = (float)h[11], o.c = (float)h[12], o.multiplier = (float)h[14];
    o.one_b1 = (float)(1.0 - h[3]), o.one_b2 = (float)(1.0 - h[4]);
    o.b1_exact = h[3], o.b2_exact = h[4];
    const uint64_t step = h[13] > 0 ? (uint64_t)h[13] : 0;
    o.corr1 = base::bias_correction(h[3], step);
    o.corr2 = base::bias_correction(h[4], step);
    o.decay = t.flags >> 1 & 3;
    o.row_steps = t.flags & kFlagRowSteps ? 1 : 0;
    t.step = (uint32_t)step;
    int scalars = 0;
    const int wide = states_of(t.rule, &scalars);
    const int64_t need = t.state_offset + 4 * (wide * t.dim + scalars + o.row_steps);
    if (need > t.row_bytes) fail(op, ": table ", i, ": its state needs rows of ", need, " bytes, the slab has ", t.row_bytes);
  }
}

Input read_input(const char* op, const Tensor& values, const std::optional<Tensor>& offsets,
                 const std::optional<Tensor>& weights) {
  Input in;
  in.wide_values = type_of(values) == Type::kI64;
  require(op, "values", values, in.wide_values ? Type::kI64 : Type::kI32);
  in.values = values.data_ptr();
  in.n = values.numel();
  if (offsets) {
    in.wide_offsets = type_of(*offsets) == Type::kI64;
    require(op, "offsets", *offsets, in.wide_offsets ? Type::kI64 : Type::kI32);
    if (offsets->numel() < 1) fail(op, ": offsets is empty, must begin with 0");
    in.offsets = offsets->data_ptr();
    const int64_t bad = check_offsets(in.offsets, in.wide_offsets, offsets->numel(), in.n);
    if (bad >= 0) fail(op, ": offsets[", bad, "] = ", in.offset(bad), " where there are ", in.n, " values");
  }
  if (weights) {
    require(op, "weights", *weights, Type::kF32);
    if (weights->numel() != in.n) fail(op, ": ", weights->numel(), " weights for ", in.n, " values");
    in.weights = (const float*)weights->data_ptr();
  }
  return in;
}

// A buffer that feature vectors lie in: an output or a gradient.
struct Space {
  void* base;
  int dtype;
  int64_t numel;
};

// `tables` may be empty where only ids are read (check_ids): then `table_count` bounds the table index.
std::vector<Feature> read_features(const char* op, const Tensor& features, const Input& in, int64_t bags,
                                   int64_t table_count, const std::vector<Table>& tables,
                                   const std::vector<Space>& spaces) {
  require_matrix(op, "features", features, Type::kI64, 7);
  const int64_t n = features.size(0), *d = (const int64_t*)features.data_ptr();
  std::vector<Feature> out(n);
  for (int64_t i = 0; i < n; ++i, d += 7) {
    if (d[0] < 0 || d[0] >= table_count) fail(op, ": feature ", i, " names table ", d[0], " of ", table_count);
    if (d[1] < 0 || d[1] > 2) fail(op, ": feature ", i, " has pooling code ", d[1]);
    if (d[1] == kPoolNone && in.offsets) fail(op, ": feature ", i, " is not pooled, which takes no offsets");
    if (d[2] < 0 || d[3] < 0 || d[2] > bags || d[3] > bags - d[2])
      fail(op, ": feature ", i, " has ", d[3], " bags from ", d[2], " of ", bags);
    Feature& f = out[i];
    f = Feature{(int)d[0], (int)d[1], d[2], d[3], {nullptr, 0, d[2], 0}};
    if (spaces.empty()) continue;
    if (d[4] < 0 || d[4] >= (int64_t)spaces.size()) fail(op, ": feature ", i, " names tensor ", d[4], " of ", spaces.size());
    const Space& s = spaces[d[4]];
    // room for the beginnings of all vectors but the first
    const int64_t room = d[5] < 0 || d[5] > s.numel || d[6] < 0 ? -1 : s.numel - d[5] - tables[d[0]].dim;
    if (d[3] > 0 && (room < 0 || (d[3] > 1 && d[6] > room / (d[3] - 1))))
      fail(op, ": feature ", i, " has ", d[3], " vectors from ", d[5], " by ", d[6], " in a tensor of ", s.numel);
    const int64_t size = s.dtype == kFloat32 ? 4 : 2;
    f.vectors = {(char*)s.base + d[5] * size, s.dtype, d[2], d[6]};
  }
  return out;
}

int64_t bags_in(const Tensor& values, const std::optional<Tensor>& offsets) {
  return offsets ? offsets->numel() - 1 : values.numel();
}

std::vector<Space> spaces_of(const char* op, const std::vector<Tensor>& grads) {
  std::vector<Space> out;
  for (const Tensor& g : grads) {
    const int code = dtype_code(op, "a gradient", g);
    if (!g.is_cpu() || !g.is_contiguous()) fail(op, ": gradients must be contiguous and on the CPU");
    out.push_back({g.data_ptr(), code, g.numel()});
  }
  return out;
}

// Slots outside their slabs must not reach the kernels, whatever has become of the ids since they were checked.
void require_slots(const char* op, const std::vector<Table>& tables, const std::vector<Feature>& features,
                   const Input& in) {
  std::vector<int64_t> rows;
  for (const Table& t : tables) rows.push_back(t.capacity);
  const int64_t bad = check_ids(features, rows.data(), in, threads());
  if (bad >= 0) fail(op, ": values[", bad, "] = ", in.slot(bad), " is outside its slab");
}

Tensor new_vector(int64_t n, int code) {
  using torch::headeronly::ScalarType;
  const ScalarType types[] = {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half};
  return torch::stable::empty({n}, types[code]);
}

Tensor pooled_lookup_op(std::vector<Tensor> slabs, Tensor tables, Tensor features, Tensor values,
                        std::optional<Tensor> offsets, std::optional<Tensor> weights, int64_t out_numel,
                        int64_t out_dtype) {
  const char* op = "pooled_lookup";
  if (out_numel < 0 || out_dtype < 0 || out_dtype > 2) fail(op, ": out_numel ", out_numel, ", out_dtype ", out_dtype);
  const std::vector<Table> t = read_tables(op, slabs, tables);
  const Input in = read_input(op, values, offsets, weights);
  Tensor out = new_vector(out_numel, (int)out_dtype);
  const std::vector<Space> space = {{out.data_ptr(), (int)out_dtype, out_numel}};
  const std::vector<Feature> f = read_features(op, features, in, bags_in(values, offsets), (int64_t)t.size(), t, space);
  require_slots(op, t, f, in);
  pooled_lookup(t, f, in, threads());
  return out;
}

int64_t touch_rows_op(std::vector<Tensor> slabs, Tensor tables, Tensor features, Tensor values,
                      std::optional<Tensor> offsets) {
  const char* op = "touch_rows";
  const std::vector<Table> t = read_tables(op, slabs, tables);
  const Input in = read_input(op, values, offsets, std::nullopt);
  const std::vector<Feature> f = read_features(op, features, in, bags_in(values, offsets), (int64_t)t.size(), t, {});
  require_slots(op, t, f, in);
  return touch_rows(t, f, in, threads());
}

Tensor grad_weights_op(std::vector<Tensor> slabs, Tensor tables, Tensor features, Tensor values,
                       std::optional<Tensor> offsets, std::vector<Tensor> grads) {
  const char* op = "grad_weights";
  const std::vector<Table> t = read_tables(op, slabs, tables);
  const Input in = read_input(op, values, offsets, std::nullopt);
  Tensor out = new_vector(in.n, kFloat32);
  const std::vector<Feature> f =
      read_features(op, features, in, bags_in(values, offsets), (int64_t)t.size(), t, spaces_of(op, grads));
  if (grads.empty() && !f.empty()) fail(op, ": no gradients");
  require_slots(op, t, f, in);
  grad_weights(t, f, in, (float*)out.data_ptr(), threads());
  return out;
}

// What an update needs besides rows: bitmaps to note them in, and their ids; either may be empty.
void read_places(const char* op, std::vector<Table>& t, const std::vector<Tensor>& written,
                 const std::vector<Tensor>& slot_ids) {
  if (written.size() != t.size() || slot_ids.size() != t.size())
    fail(op, ": ", written.size(), " bitmaps and ", slot_ids.size(), " slot_ids for ", t.size(), " tables");
  for (size_t i = 0; i < t.size(); ++i) {
    if (written[i].numel()) {
      require(op, "written", written[i], Type::kU8);
      if (written[i].numel() < (t[i].capacity + 7) / 8) fail(op, ": written[", i, "] is shorter than one bit a slot");
      t[i].written = (uint8_t*)written[i].data_ptr();
    }
    if (slot_ids[i].numel()) {
      require(op, "slot_ids", slot_ids[i], Type::kI64);
      if (slot_ids[i].numel() < t[i].capacity) fail(op, ": slot_ids[", i, "] is shorter than the slab");
      t[i].slot_ids = (const int64_t*)slot_ids[i].data_ptr();
    }
  }
}

int64_t fused_update_op(std::vector<Tensor> slabs, std::vector<Tensor> written, Tensor tables, Tensor hyper,
                        Tensor features, Tensor values, std::optional<Tensor> offsets, std::optional<Tensor> weights,
                        std::vector<Tensor> grads, std::vector<Tensor> slot_ids) {
  const char* op = "fused_update";
  std::vector<Table> t = read_tables(op, slabs, tables);
  read_hyper(op, t, hyper);
  read_places(op, t, written, slot_ids);
  const Input in = read_input(op, values, offsets, weights);
  const std::vector<Feature> f =
      read_features(op, features, in, bags_in(values, offsets), (int64_t)t.size(), t, spaces_of(op, grads));
  if (grads.empty() && !f.empty()) fail(op, ": no gradients");
  require_slots(op, t, f, in);
  return fused_update(t, f, in, threads());
}

// The arguments of row_sums and apply_rows; a slot outside its slab raises.
Summed read_summed(const char* op, const Table& t, const Tensor& slots, const Tensor& grads,
                   const std::optional<Tensor>& given) {
  require(op, "slots", slots, Type::kI64);
  require_matrix(op, "grads", grads, Type::kF32, t.dim);
  const int64_t n = slots.numel();
  if (grads.size(0) != n) fail(op, ": ", grads.size(0), " gradients for ", n, " slots");
  Summed rows = {(const int64_t*)slots.data_ptr(), (const float*)grads.data_ptr(), nullptr, nullptr};
  if (given) {
    require_matrix(op, "given", *given, Type::kF32, kSums);
    if (given->size(0) != n) fail(op, ": ", given->size(0), " sums for ", n, " slots");
    rows.given = (const float*)given->data_ptr();
  }
  for (int64_t i = 0; i < n; ++i)
    if (rows.slots[i] < 0 || rows.slots[i] >= t.capacity) fail(op, ": slots[", i, "] = ", rows.slots[i], " of ", t.capacity);
  return rows;
}

Tensor row_sums_op(Tensor slab, Tensor table, Tensor hyper, Tensor slots, Tensor grads, std::optional<Tensor> given) {
  const char* op = "row_sums";
  std::vector<Table> t = read_tables(op, {slab}, table);
  read_hyper(op, t, hyper);
  Summed rows = read_summed(op, t[0], slots, grads, given);
  Tensor out = torch::stable::empty({slots.numel(), kSums}, torch::headeronly::ScalarType::Float);
  std::fill_n((float*)out.data_ptr(), out.numel(), 0.0f);  // rules without sums leave them
  rows.found = (float*)out.data_ptr();
  apply_rows(t[0], rows, slots.numel(), threads());
  return out;
}

void apply_rows_op(Tensor slab, Tensor written, Tensor table, Tensor hyper, Tensor slots, Tensor grads,
                   std::optional<Tensor> given, Tensor slot_ids) {
  const char* op = "apply_rows";
  std::vector<Table> t = read_tables(op, {slab}, table);
  read_hyper(op, t, hyper);
  read_places(op, t, {written}, {slot_ids});
  apply_rows(t[0], read_summed(op, t[0], slots, grads, given), slots.numel(), threads());
}

bool all_finite_op(std::vector<Tensor> grads) {
  const char* op = "all_finite";
  for (const Tensor& g : grads) {
    const int code = dtype_code(op, "a gradient", g);
    if (!g.is_cpu()) fail(op, ": a gradient is not on the CPU");
    const int64_t n = g.numel();
    bool ok = true;
    if (g.is_contiguous())
      ok = all_finite(g.data_ptr(), code, 1, n, n, threads());
    else if (g.dim() == 2 && g.stride(1) == 1)
      ok = all_finite(g.data_ptr(), code, g.size(0), g.size(1), g.stride(0), threads());
    else
      fail(op, ": a gradient is neither contiguous nor a matrix of contiguous rows");
    if (!ok) return false;
  }
  return true;
}

int64_t check_ids_op(Tensor values, std::optional<Tensor> offsets, Tensor features, Tensor rows) {
  const char* op = "check_ids";
  const Input in = read_input(op, values, offsets, std::nullopt);
  require(op, "rows", rows, Type::kI64);
  const std::vector<Feature> f = read_features(op, features, in, bags_in(values, offsets), rows.numel(), {}, {});
  return check_ids(f, (const int64_t*)rows.data_ptr(), in, threads());
}

int64_t check_offsets_op(Tensor offsets, int64_t n_values) {
  const char* op = "check_offsets";
  const bool wide = type_of(offsets) == Type::kI64;
  require(op, "offsets", offsets, wide ? Type::kI64 : Type::kI32);
  if (offsets.numel() < 1) fail(op, ": offsets is empty, must begin with 0");
  return check_offsets(offsets.data_ptr(), wide, offsets.numel(), n_values);
}

void init_rows_op(Tensor slab, std::optional<Tensor> slots, std::optional<Tensor> ids, int64_t first_id, int64_t dim,
                  int64_t weight_dtype, int64_t state_offset, int64_t init_code, double p0, double p1, int64_t key,
                  Tensor state_init, Tensor normal_table, int64_t first_column) {
  const char* op = "init_rows";
  require(op, "slab", slab, Type::kU8);
  require(op, "state_init", state_init, Type::kF32);
  if (slab.dim() != 2) fail(op, ": slab must have shape [capacity, row_bytes]");
  if (slots) require(op, "slots", *slots, Type::kI64);
  if (ids) require(op, "ids", *ids, Type::kI64);
  require(op, "normal_table", normal_table, Type::kI32);
  if (normal_table.numel() != 1602) fail(op, ": normal_table has ", normal_table.numel(), " knots, must have 1602");
  Init a = {};
  a.normal = (const int32_t*)normal_table.data_ptr();
  a.slab = (uint8_t*)slab.data_ptr();
  a.capacity = slab.size(0);
  a.row_bytes = slab.size(1);
  a.dim = dim;
  a.dtype = (int)weight_dtype;
  a.state_offset = state_offset;
  a.n = slots ? slots->numel() : a.capacity;
  if (ids && ids->numel() != a.n) fail(op, ": ", ids->numel(), " ids for ", a.n, " rows");
  if (dim < 1 || dim > a.row_bytes || a.row_bytes > kMaxRowBytes || state_offset > a.row_bytes || weight_dtype < 0 || weight_dtype > 2 || init_code < 0 || init_code > 3)
    fail(op, ": dim ", dim, ", weight dtype code ", weight_dtype, ", init code ", init_code);
  if (first_column < 0 || first_column > kMaxRowBytes) fail(op, ": first_column ", first_column);
  const int64_t weight_bytes = dim * (weight_dtype == kFloat32 ? 4 : 2);
  if (state_offset < weight_bytes || state_offset + 4 * state_init.numel() > a.row_bytes)
    fail(op, ": a row of ", a.row_bytes, " bytes does not hold dim ", dim, " and ", state_init.numel(), " floats of state");
  if (state_offset % 4 || a.row_bytes % 4 || (uintptr_t)a.slab % 4)
    fail(op, ": address, row_bytes and state_offset must be multiples of 4");
  a.slots = slots ? (const int64_t*)slots->data_ptr() : nullptr;
  for (int64_t i = 0; a.slots && i < a.n; ++i)
    if (a.slots[i] < 0 || a.slots[i] >= a.capacity) fail(op, ": slots[", i, "] = ", a.slots[i], " of ", a.capacity);
  a.ids = ids ? (const int64_t*)ids->data_ptr() : nullptr;
  a.first_id = first_id;
  a.code = (int)init_code;
  a.p0 = (float)p0;
  a.p1 = (float)p1;
  a.key = (uint64_t)key;
  a.state = (const float*)state_init.data_ptr();
  a.state_floats = state_init.numel();
  a.first_column = first_column;
  init_rows(a, threads());
}

std::string isa_op() { return active().name; }

std::string isas_op() {
  std::string all;
  for (const char* name : available()) all += (all.empty() ? "" : ",") + std::string(name);
  return all;
}

void set_isa_op(std::string name) {
  if (!select_kernels(name.c_str())) fail("set_isa: '", name, "' is not one of ", isas_op());
}

}  // namespace
}  // namespace embcache

STABLE_TORCH_LIBRARY(embcache, m) {
  m.def("pooled_lookup(Tensor[] slabs, Tensor tables, Tensor features, Tensor values, Tensor? offsets, Tensor? weights, "
        "int out_numel, int out_dtype) -> Tensor");
  m.def("fused_update(Tensor(a!)[] slabs, Tensor(b!)[] written, Tensor tables, Tensor hyper, Tensor features, "
        "Tensor values, Tensor? offsets, Tensor? weights, Tensor[] grads, Tensor[] slot_ids) -> int");
  m.def("grad_weights(Tensor[] slabs, Tensor tables, Tensor features, Tensor values, Tensor? offsets, Tensor[] grads) "
        "-> Tensor");
  m.def("touch_rows(Tensor[] slabs, Tensor tables, Tensor features, Tensor values, Tensor? offsets) -> int");
  m.def("all_finite(Tensor[] grads) -> bool");
  m.def("check_ids(Tensor values, Tensor? offsets, Tensor features, Tensor rows) -> int");
  m.def("check_offsets(Tensor offsets, int n_values) -> int");
  m.def("init_rows(Tensor(a!) slab, Tensor? slots, Tensor? ids, int first_id, int dim, int weight_dtype, "
        "int state_offset, int init_code, float p0, float p1, int key, Tensor state_init, Tensor normal_table, "
        "int first_column=0) -> ()");
  m.def("row_sums(Tensor slab, Tensor table, Tensor hyper, Tensor slots, Tensor grads, Tensor? given) -> Tensor");
  m.def("apply_rows(Tensor(a!) slab, Tensor(b!) written, Tensor table, Tensor hyper, Tensor slots, Tensor grads, "
        "Tensor? given, Tensor slot_ids) -> ()");
  m.def("isa() -> str");
  m.def("isas() -> str");
  m.def("set_isa(str name) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(embcache, CPU, m) {
  m.impl("pooled_lookup", TORCH_BOX(&embcache::pooled_lookup_op));
  m.impl("fused_update", TORCH_BOX(&embcache::fused_update_op));
  m.impl("touch_rows", TORCH_BOX(&embcache::touch_rows_op));
  m.impl("grad_weights", TORCH_BOX(&embcache::grad_weights_op));
  m.impl("check_ids", TORCH_BOX(&embcache::check_ids_op));
  m.impl("check_offsets", TORCH_BOX(&embcache::check_offsets_op));
  m.impl("init_rows", TORCH_BOX(&embcache::init_rows_op));
  m.impl("row_sums", TORCH_BOX(&embcache::row_sums_op));
  m.impl("apply_rows", TORCH_BOX(&embcache::apply_rows_op));
  m.impl("all_finite", TORCH_BOX(&embcache::all_finite_op));
}

STABLE_TORCH_LIBRARY_IMPL(embcache, CompositeExplicitAutograd, m) {
  m.impl("isa", TORCH_BOX(&embcache::isa_op));
  m.impl("isas", TORCH_BOX(&embcache::isas_op));
  m.impl("set_isa", TORCH_BOX(&embcache::set_isa_op));
}
