// The optimizer rules: one small struct each, the same source for every instruction set and device.
//
// A rule works on lanes `L`: 16 floats on the CPU, one float in CUDA or a scalar loop. It needs only + - * / and
// ec_sqrt, ec_abs, ec_gt, ec_eq, ec_select on L. For each row, with g the summed gradient of its id:
//   begin(h, scalars, c)             per row, before the first pass (step counts)
//   reduce(h, c, g, w, s, r0, r1)    first pass over the columns, where kReduce: adds to two sums; changes the states s
//                                    where kReduceWrites
//   finish(h, c, r0, r1, dim, scalars)   turns the two sums into the row's coefficients c
//   apply(h, c, g, w, s)             second pass: the new w; changes the states s
// States in a row: kWide arrays of dim floats, kScalar floats, then the row's own step count where h.row_steps.
// Formulas: torch.optim where torch has the rule; row-wise Adagrad as in FBGEMM (exact_rowwise_adagrad).
#pragma once
#include <stdint.h>
#ifndef EC_NS
#define EC_NS base
#endif
#ifdef __CUDACC__
#define EC_HD __host__ __device__ __forceinline__
#else
#define EC_HD inline __attribute__((always_inline))
#endif

namespace embcache {

struct Hyper {
  float lr, wd, eps, b1, b2, mom, eta, alpha, beta, l1, l2, max_norm, c, one_b1, one_b2, corr1, corr2, multiplier;
  double b1_exact, b2_exact;
  int decay;      // 0 none, 1 L2, 2 decoupled
  int row_steps;  // the last scalar of a row counts its updates
};

// Coefficients of one row.
struct Coef {
  float k, mul, corr1, corr2;
};

namespace EC_NS {

static EC_HD float ec_sqrt(float x) { return __builtin_sqrtf(x); }
static EC_HD float ec_abs(float x) { return __builtin_fabsf(x); }
static EC_HD bool ec_gt(float a, float b) { return a > b; }
static EC_HD bool ec_eq(float a, float b) { return a == b; }
static EC_HD float ec_select(bool m, float yes, float no) { return m ? yes : no; }

template <class L>
struct Lift;  // Lift<L>::of(float) broadcasts a float over the lanes
template <>
struct Lift<float> {
  static EC_HD float of(float x) { return x; }
};

// a / b, and 0 where b is 0: with eps = 0 a gradient of zero leaves the row alone instead of making it NaN.
template <class L>
static EC_HD L safe_div(L a, L b) {
  const L zero = Lift<L>::of(0.0f);
  return ec_select(ec_eq(b, zero), zero, a / b);
}

// 1 - b^t by repeated squaring in double: the same on every machine, without a math library.
static EC_HD float bias_correction(double b, uint64_t t) {
  double p = 1.0;
  for (double q = b; t; t >>= 1, q *= q)
    if (t & 1) p *= q;
  return (float)(1.0 - p);
}

struct NoReduce {
  static constexpr bool kReduce = false, kReduceWrites = false;
  static EC_HD void begin(const Hyper&, float*, Coef&) {}
  template <class L>
  static EC_HD void reduce(const Hyper&, const Coef&, L, L, L*, L&, L&) {}
  static EC_HD void finish(const Hyper&, Coef&, float, float, int64_t, float*) {}
};

struct SGD : NoReduce {
  static constexpr int kWide = 0, kScalar = 0;
  template <class L>
  static EC_HD L apply(const Hyper& h, const Coef&, L g, L w, L*) {
    return w - Lift<L>::of(h.lr) * (g + Lift<L>::of(h.wd) * w);
  }
};

struct Adagrad : NoReduce {
  static constexpr int kWide = 1, kScalar = 0;
  template <class L>
  static EC_HD L apply(const Hyper& h, const Coef&, L g, L w, L* s) {
    s[0] = s[0] + g * g;
    return w - safe_div(Lift<L>::of(h.lr) * g, ec_sqrt(s[0]) + Lift<L>::of(h.eps));
  }
};

struct RowWiseAdagrad {
  static constexpr int kWide = 0, kScalar = 1;
  static constexpr bool kReduce = true, kReduceWrites = false;
  static EC_HD void begin(const Hyper&, float*, Coef&) {}
  template <class L>
  static EC_HD void reduce(const Hyper& h, const Coef&, L g, L w, L*, L& r0, L&) {
    if (h.decay == 1) g = g + Lift<L>::of(h.wd) * w;
    r0 = r0 + g * g;
  }
  static EC_HD void finish(const Hyper& h, Coef& c, float r0, float, int64_t dim, float* scalars) {
    scalars[0] = scalars[0] + r0 / (float)dim;
    c.mul = safe_div(h.lr, ec_sqrt(scalars[0] / h.c) + h.eps);
    c.k = h.decay == 1 ? 1.0f - c.mul * h.wd : h.decay == 2 ? 1.0f - h.lr * h.wd : 1.0f;
  }
  template <class L>
  static EC_HD L apply(const Hyper&, const Coef& c, L g, L w, L*) {
    return Lift<L>::of(c.k) * w - Lift<L>::of(c.mul) * g;
  }
};

// What the Adam family shares: bias corrections, from the table's step or from the row's own count.
template <int kScalars>
struct StepCount {
  static EC_HD void begin(const Hyper& h, float* scalars, Coef& c) {
    c.corr1 = h.corr1;
    c.corr2 = h.corr2;
    if (h.row_steps) {
      const float t = scalars[kScalars] + 1.0f;
      scalars[kScalars] = t;
      c.corr1 = bias_correction(h.b1_exact, (uint64_t)t);
      c.corr2 = bias_correction(h.b2_exact, (uint64_t)t);
    }
  }
  static EC_HD void finish(const Hyper&, Coef&, float, float, int64_t, float*) {}
};

template <class L>
static EC_HD L adam_direction(const Hyper& h, const Coef& c, L w, L m, L v) {
  const L root = ec_sqrt(v / Lift<L>::of(c.corr2)) + Lift<L>::of(h.eps);
  return safe_div(m / Lift<L>::of(c.corr1), root) + Lift<L>::of(h.wd) * w;
}

template <class L>
static EC_HD void adam_moments(const Hyper& h, L g, L* s) {
  s[0] = Lift<L>::of(h.b1) * s[0] + Lift<L>::of(h.one_b1) * g;
  s[1] = Lift<L>::of(h.b2) * s[1] + Lift<L>::of(h.one_b2) * (g * g);
}

struct Adam : StepCount<0> {
  static constexpr int kWide = 2, kScalar = 0;
  static constexpr bool kReduce = false, kReduceWrites = false;
  template <class L>
  static EC_HD void reduce(const Hyper&, const Coef&, L, L, L*, L&, L&) {}
  template <class L>
  static EC_HD L apply(const Hyper& h, const Coef& c, L g, L w, L* s) {
    adam_moments(h, g, s);
    return w - Lift<L>::of(h.lr) * adam_direction(h, c, w, s[0], s[1]);
  }
};

struct RowWiseAdam : StepCount<1> {
  static constexpr int kWide = 1, kScalar = 1;
  static constexpr bool kReduce = true, kReduceWrites = false;
  template <class L>
  static EC_HD void reduce(const Hyper&, const Coef&, L g, L, L*, L& r0, L&) {
    r0 = r0 + g * g;
  }
  static EC_HD void finish(const Hyper& h, Coef& c, float r0, float, int64_t dim, float* scalars) {
    scalars[0] = h.b2 * scalars[0] + h.one_b2 * (r0 / (float)dim);
    c.mul = ec_sqrt(scalars[0] / c.corr2) + h.eps;
  }
  template <class L>
  static EC_HD L apply(const Hyper& h, const Coef& c, L g, L w, L* s) {
    s[0] = Lift<L>::of(h.b1) * s[0] + Lift<L>::of(h.one_b1) * g;
    const L step = safe_div(s[0] / Lift<L>::of(c.corr1), Lift<L>::of(c.mul));
    return w - Lift<L>::of(h.lr) * (step + Lift<L>::of(h.wd) * w);
  }
};

struct LAMB : StepCount<0> {
  static constexpr int kWide = 2, kScalar = 0;
  static constexpr bool kReduce = true, kReduceWrites = true;
  template <class L>
  static EC_HD void reduce(const Hyper& h, const Coef& c, L g, L w, L* s, L& r0, L& r1) {
    adam_moments(h, g, s);
    const L r = adam_direction(h, c, w, s[0], s[1]);
    r0 = r0 + w * w;
    r1 = r1 + r * r;
  }
  static EC_HD void finish(const Hyper& h, Coef& c, float r0, float r1, int64_t, float*) {
    const float ratio = r0 == 0.0f || r1 == 0.0f ? 1.0f : ec_sqrt(r0) / ec_sqrt(r1);
    c.mul = h.lr * ratio;
  }
  template <class L>
  static EC_HD L apply(const Hyper& h, const Coef& c, L, L w, L* s) {
    return w - Lift<L>::of(c.mul) * adam_direction(h, c, w, s[0], s[1]);
  }
};

struct LARS {
  static constexpr int kWide = 1, kScalar = 0;
  static constexpr bool kReduce = true, kReduceWrites = false;
  static EC_HD void begin(const Hyper&, float*, Coef&) {}
  template <class L>
  static EC_HD void reduce(const Hyper&, const Coef&, L g, L w, L*, L& r0, L& r1) {
    r0 = r0 + w * w;
    r1 = r1 + g * g;
  }
  static EC_HD void finish(const Hyper& h, Coef& c, float r0, float r1, int64_t, float*) {
    const float norm = ec_sqrt(r0), below = ec_sqrt(r1) + h.wd * norm;
    c.mul = norm == 0.0f || below == 0.0f ? h.lr : h.lr * h.eta * norm / below;
  }
  template <class L>
  static EC_HD L apply(const Hyper& h, const Coef& c, L g, L w, L* s) {
    s[0] = Lift<L>::of(h.mom) * s[0] + Lift<L>::of(c.mul) * (g + Lift<L>::of(h.wd) * w);
    return w - s[0];
  }
};

struct FTRL : NoReduce {
  static constexpr int kWide = 2, kScalar = 0;
  template <class L>
  static EC_HD L apply(const Hyper& h, const Coef&, L g, L w, L* s) {
    const L zero = Lift<L>::of(0.0f), alpha = Lift<L>::of(h.alpha), l1 = Lift<L>::of(h.l1);
    const L n = s[1] + g * g, root = ec_sqrt(n);
    const L z = s[0] + g - (root - ec_sqrt(s[1])) / alpha * w;
    s[0] = z;
    s[1] = n;
    const L shrunk = z - ec_select(ec_gt(zero, z), zero - l1, l1);
    const L step = safe_div(zero - shrunk, (Lift<L>::of(h.beta) + root) / alpha + Lift<L>::of(h.l2));
    return ec_select(ec_gt(ec_abs(z), l1), step, ec_select(ec_eq(z, z), zero, z));
  }
};

}  // namespace EC_NS
}  // namespace embcache
