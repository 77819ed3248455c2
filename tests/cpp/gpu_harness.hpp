// SPDX-License-Identifier: Apache-2.0
//
// Runs one case on the GPU through the C interface and judges every output against float64.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "cases.hpp"
#include "convt3d/convt3d.h"
#include "convt3d/numerics.hpp"
#include "reference.hpp"
#include "sm80/columns/geometry.hpp"

namespace convt3d::test {

/// The arithmetic of a test: fp32 in either precision, and the two 16-bit types.
struct Mode {
  char const* name;
  int32_t dtype;
  int32_t precision;
};

inline constexpr Mode kModes[] = {{"ieee", CONVT3D_F32, CONVT3D_IEEE},
                                  {"tf32", CONVT3D_F32, CONVT3D_TF32},
                                  {"fp16", CONVT3D_F16, CONVT3D_IEEE},
                                  {"bf16", CONVT3D_BF16, CONVT3D_IEEE}};

inline void PrintTo(Mode const& mode, std::ostream* out) { *out << mode.name; }

// ---- accuracy -----------------------------------------------------------------------------------------------------
//
//   |y - y64| <= 1/2 ulp_out(y64) + u ulp_32(act) + L * c * 2^-22 * (sum |x| |w| + |bias| + |add|)
//
// y64: float64 on the operands as stored (tf32: rounded to TF32, nearest even). L: largest |act'| nearby. The second
// term is what an accurate fp32 exp, erfc or tanh may be off where act is flat (sigmoid near 1) and L is 0; it is
// absent where act is none. One c per mode, fixed from the measurements in docs/numerics.md, never to be raised.
constexpr double kErrorFactorIeee = 4;
constexpr double kErrorFactorTf32 = 8;
constexpr double kErrorFactorHalf = 4;

inline double error_factor(Problem const& p) {
  if (p.dtype != CONVT3D_F32) return kErrorFactorHalf;
  return uses_tf32(p) ? kErrorFactorTf32 : kErrorFactorIeee;
}

/// u: what the fp32 function itself may be off beyond what the last term allows. gelu is off by 3.5 ulp on a host
/// (test_activation.cpp), and by up to twice that by the bounds of a GPU's expf (2 ulp) and reciprocal (1), where its
/// slope lets the last term through; tanhf by 2, by the CUDA C++ Programming Guide; sigmoid near zero, where a
/// sum of little lets nothing through, by 1 for expf's 2, and half of one each for its sum and quotient. gelu_tanh has
/// eight roundings, five of them in its argument: at its minimum they make 3.6 ulp.
inline double function_ulps(int32_t activation) {
  return activation == CONVT3D_ACT_GELU || activation == CONVT3D_ACT_GELU_TANH ? 6 : 2;
}

/// Distance of neighbouring values of the type at |value|.
inline double unit_in_last_place(int32_t dtype, double value) {
  int const mantissa = dtype == CONVT3D_F32 ? 23 : dtype == CONVT3D_F16 ? 10 : 7;
  int const smallest = dtype == CONVT3D_F16 ? -14 : -126;
  int exponent = smallest;
  if (value != 0) exponent = std::max(std::ilogb(value), smallest);
  return std::ldexp(1.0, exponent - mantissa);
}

/// From here on a value rounds to infinity: the type's largest value and half a unit of it.
inline double overflow_threshold(int32_t dtype) {
  double const power = dtype == CONVT3D_F16 ? 0x1p16 : 0x1p128;
  return power - 0.25 * unit_in_last_place(dtype, power);
}

// ---- storage --------------------------------------------------------------------------------------------------------

inline void check_cuda(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

/// Device memory, filled with 0xff bytes: nan in every type, so that what a kernel forgets to write shows.
class DeviceBuffer {
 public:
  explicit DeviceBuffer(size_t bytes) : bytes_(bytes) {
    check_cuda(cudaMalloc(&pointer_, std::max<size_t>(bytes, 1)));
    check_cuda(cudaMemset(pointer_, 0xff, bytes));
  }
  DeviceBuffer(DeviceBuffer const&) = delete;
  DeviceBuffer& operator=(DeviceBuffer const&) = delete;
  ~DeviceBuffer() { cudaFree(pointer_); }

  char* data() const { return static_cast<char*>(pointer_); }
  void upload(std::vector<char> const& host, size_t at) {
    check_cuda(cudaMemcpy(data() + at, host.data(), host.size(), cudaMemcpyHostToDevice));
  }
  std::vector<char> download() const {
    std::vector<char> host(bytes_);
    check_cuda(cudaMemcpy(host.data(), pointer_, bytes_, cudaMemcpyDeviceToHost));
    return host;
  }

 private:
  void* pointer_ = nullptr;
  size_t bytes_;
};

/// Stores a float in the type, rounded to nearest even.
inline void encode(int32_t dtype, float value, char* to) {
  if (dtype == CONVT3D_F32) {
    std::memcpy(to, &value, 4);
  } else if (dtype == CONVT3D_F16) {
    __half const half = __float2half_rn(value);
    std::memcpy(to, &half, 2);
  } else {
    __nv_bfloat16 const bfloat = __float2bfloat16_rn(value);
    std::memcpy(to, &bfloat, 2);
  }
}

inline double decode(int32_t dtype, char const* from) {
  if (dtype == CONVT3D_F32) {
    float value;
    std::memcpy(&value, from, 4);
    return value;
  }
  if (dtype == CONVT3D_F16) {
    __half half;
    std::memcpy(&half, from, 2);
    return __half2float(half);
  }
  __nv_bfloat16 bfloat;
  std::memcpy(&bfloat, from, 2);
  return __bfloat162float(bfloat);
}

/// A strided tensor in device memory. `skew` bytes precede the first element, so that offset views can be made.
class DeviceTensor {
 public:
  DeviceTensor(Size5 const& shape, int64_t const* stride, int32_t dtype, int skew)
      : shape_(shape),
        dtype_(dtype),
        element_(dtype == CONVT3D_F32 ? 4 : 2),
        skew_(static_cast<size_t>(skew)),
        span_(static_cast<size_t>(span_of(shape, stride)) * static_cast<size_t>(element_)),
        buffer_(skew_ + span_ + kGuard) {
    std::copy(stride, stride + 5, stride_);
  }

  void* pointer() const { return buffer_.data() + skew_; }
  std::vector<char> bytes() const { return buffer_.download(); }

  /// Fills it from `draw` and returns what is stored, in logical order. A broadcast element is drawn once.
  template <class Draw>
  Tensor fill(Draw&& draw) {
    std::vector<char> host(span_, static_cast<char>(0xff));
    Tensor stored;
    for_each_index(shape_, [&](int64_t const* index) {
      bool first = true;
      for (int axis = 0; axis < 5; ++axis) first = first && (index[axis] == 0 || stride_[axis] != 0);
      char* const at = host.data() + offset_of(index, stride_) * element_;
      if (first) encode(dtype_, draw(), at);
      stored.push_back(decode(dtype_, at));
    });
    buffer_.upload(host, skew_);
    return stored;
  }

  /// The elements of `bytes()`, in logical order.
  Tensor read(std::vector<char> const& host) const {
    Tensor values;
    for_each_index(shape_, [&](int64_t const* index) {
      values.push_back(decode(dtype_, host.data() + skew_ + static_cast<size_t>(offset_of(index, stride_) * element_)));
    });
    return values;
  }

  /// Whether every byte of `host` outside the elements still holds the poison.
  bool gaps_are_untouched(std::vector<char> host) const {
    for_each_index(shape_, [&](int64_t const* index) {
      std::memset(host.data() + skew_ + offset_of(index, stride_) * element_, 0xff, static_cast<size_t>(element_));
    });
    return std::all_of(host.begin(), host.end(), [](char byte) { return byte == static_cast<char>(0xff); });
  }

 private:
  static constexpr size_t kGuard = 256;  // poisoned bytes behind the last element

  Size5 shape_;
  int64_t stride_[5];
  int32_t dtype_;
  int element_;
  size_t skew_;
  size_t span_;
  DeviceBuffer buffer_;
};

// ---- one case -------------------------------------------------------------------------------------------------------

enum class Outcome { kRan, kNotSupported, kFailed };

/// Bytes in front of the first element that give it the alignment a problem states, and no more.
inline int skew_for(int alignment) { return alignment >= 16 ? 0 : alignment; }

/// Uniform [-1, 1) everywhere.
inline float uniform_draw(Random& random) { return random.uniform(); }

/// Of one sign: every sum only grows, so errors of one direction add up instead of cancelling.
inline float one_sign_draw(Random& random) { return std::abs(random.uniform()); }

/// Mostly uniform, with an infinity or a nan now and then.
inline float nonfinite_draw(Random& random) {
  int64_t const kind = random.integer(0, 999);
  if (kind == 0) return std::numeric_limits<float>::infinity();
  if (kind == 1) return -std::numeric_limits<float>::infinity();
  if (kind == 2) return std::numeric_limits<float>::quiet_NaN();
  return random.uniform();
}

/// Mostly uniform, with a value far below the others now and then.
inline float few_small_draw(Random& random) {
  float const value = random.uniform();
  return random.integer(0, 1999) == 0 ? value * 1e-12f : value;
}

/// Magnitudes from 1e-15 to 1e15: one product makes nearly all of a sum.
inline float decades_draw(Random& random) {
  return random.uniform() * std::pow(10.f, static_cast<float>(random.integer(-15, 15)));
}

/// Mostly uniform, with one of the values next to infinity now and then; and weights that keep their products finite.
inline float near_infinity_draw(Random& random) {
  float const value = random.uniform();
  if (random.integer(0, 199) != 0) return value;
  return std::copysign(bits_to_float(0x7f7fffffu - static_cast<uint32_t>(random.integer(0, 0x1fff))), value);
}
inline float small_draw(Random& random) { return random.uniform() * 1e-3f; }

/// The sm80 family by name means its usual kernels, which for small problems are not its fastest, but where a test
/// wants the columns kernel.
struct UsualKernels {
  explicit UsualKernels(convt3d_kernel kernel) {
    sm80::columns::nowhere = kernel == CONVT3D_KERNEL_SM80 && !sm80::columns::wherever_possible;
  }
  ~UsualKernels() { sm80::columns::nowhere = false; }
  UsualKernels(UsualKernels const&) = delete;
  UsualKernels& operator=(UsualKernels const&) = delete;
};

/// Runs `p` on `kernel` twice with seeded data: x, bias and add from `draw`, the weight from `draw_weight` (the same if
/// null). Expects, by EXPECT_*: every output within the bound, nothing written
/// outside of y, inputs unchanged, both runs bitwise equal. Where the exact result is infinite or nan, y must be the
/// same. `worst` receives the largest error / bound. The weight starts `weight_skew` bytes behind an aligned address: a
/// problem does not state its alignment.
[[nodiscard]] inline Outcome run_case(Problem const& p, convt3d_kernel kernel, uint64_t seed, double* worst = nullptr,
                                      float (*draw)(Random&) = uniform_draw, float (*draw_weight)(Random&) = nullptr,
                                      int weight_skew = 0) {
  SCOPED_TRACE(describe(p) + " seed " + std::to_string(seed));
  UsualKernels const usual(kernel);
  char text[512] = "";
  convt3d_device device{};
  convt3d_plan plan{};
  Status status = convt3d_current_device(&device, text, sizeof text);
  if (status == CONVT3D_OK) status = convt3d_make_plan(&p, kernel, &device, &plan, text, sizeof text);
  if (status == CONVT3D_NOT_SUPPORTED) return Outcome::kNotSupported;
  if (status != CONVT3D_OK) {
    ADD_FAILURE() << text;
    return Outcome::kFailed;
  }

  Random random(seed);
  auto const next = [&] { return draw(random); };
  auto const next_weight = [&] { return (draw_weight != nullptr ? draw_weight : draw)(random); };
  Size5 const ys = y_shape(p);
  Size5 const bias_shape{{1, p.out_channels, 1, 1, 1}};
  int64_t const bias_stride[5] = {0, p.bias_stride, 0, 0, 0};
  DeviceTensor x(x_shape(p), p.x_stride, p.dtype, skew_for(p.x_alignment));
  DeviceTensor weight(weight_shape(p), p.weight_stride, p.dtype, weight_skew);
  DeviceTensor bias(bias_shape, bias_stride, p.dtype, 0);
  DeviceTensor add(ys, p.add_stride, p.dtype, skew_for(p.add_alignment));
  DeviceTensor y(ys, p.y_stride, p.dtype, skew_for(p.y_alignment));
  DeviceTensor y_again(ys, p.y_stride, p.dtype, skew_for(p.y_alignment));
  DeviceBuffer workspace(plan.workspace_bytes);

  Tensor x_values = x.fill(next), weight_values = weight.fill(next_weight);
  Tensor const bias_values = bias.fill(next), add_values = add.fill(next);
  DeviceTensor const* const inputs[] = {&x, &weight, &bias, &add};
  std::vector<std::vector<char>> before;
  for (DeviceTensor const* input : inputs) before.push_back(input->bytes());

  for (DeviceTensor const* output : {&y, &y_again}) {
    convt3d_tensors const tensors{x.pointer(),
                                  weight.pointer(),
                                  p.has_bias ? bias.pointer() : nullptr,
                                  p.has_add ? add.pointer() : nullptr,
                                  output->pointer(),
                                  plan.workspace_bytes > 0 ? workspace.data() : nullptr,
                                  plan.workspace_bytes};
    status = convt3d_forward(&p, &plan, &tensors, nullptr, text, sizeof text);
    if (status != CONVT3D_OK) {
      ADD_FAILURE() << "status " << status << ": " << text;
      return Outcome::kFailed;
    }
    check_cuda(cudaDeviceSynchronize());
  }

  std::vector<char> const y_bytes = y.bytes();
  EXPECT_TRUE(y_bytes == y_again.bytes()) << "two runs differ";  // nans too: every kernel writes the canonical one
  EXPECT_TRUE(y.gaps_are_untouched(y_bytes)) << "wrote outside of y";
  for (int i = 0; i < 4; ++i) EXPECT_TRUE(inputs[i]->bytes() == before[static_cast<size_t>(i)]) << "input " << i;

  if (uses_tf32(p)) {
    for (Tensor* operand : {&x_values, &weight_values}) {
      for (double& value : *operand) value = round_to_tf32(static_cast<float>(value));
    }
  }
  Tensor magnitude;
  Tensor const conv = scatter_reference(p, x_values, weight_values, &magnitude);
  Tensor const actual = y.read(y_bytes);
  double const factor = error_factor(p) * 0x1p-22;
  double largest_ratio = 0;
  int64_t bad = 0;
  size_t at = 0;
  for_each_index(ys, [&](int64_t const* index) {
    double const b = p.has_bias ? bias_values[static_cast<size_t>(index[1])] : 0;
    double const a = p.has_add ? add_values[at] : 0;
    bool const before_act = p.add_order == CONVT3D_ADD_BEFORE;
    double const t = conv[at] + b + (before_act ? a : 0);
    double const act = reference_activation(p.activation, t, p.negative_slope);
    double const exact = act + (before_act ? 0 : a);
    double const scale = magnitude[at] + std::abs(b) + std::abs(a);
    double const spread = std::max(factor * scale, 0x1p-100);
    double slope = p.activation == CONVT3D_ACT_NONE ? 1 : activation_slope(p.activation, t, p.negative_slope, spread);
    if (!before_act) slope = std::max(slope, 1.0);  // an add that follows is summed whatever the activation does
    // An activation that is flat at infinity makes a finite number of it, whatever the sums were.
    double const of_sums = !std::isinf(t) ? slope * factor * scale : before_act ? 0 : factor * std::abs(a);
    double bound = 0.5 * unit_in_last_place(p.dtype, exact) + of_sums;
    if (p.activation != CONVT3D_ACT_NONE) {
      // exp(-103) is the smallest denormal: what it loses comes back magnified by t.
      bound += function_ulps(p.activation) * unit_in_last_place(CONVT3D_F32, act);
      if (!std::isinf(t)) bound += std::abs(t) * 0x1p-149;
    }
    double const error = std::abs(actual[at] - exact);
    bool const may_overflow = std::abs(exact) + bound >= overflow_threshold(p.dtype);
    bool const overflowed = may_overflow && std::isinf(actual[at]) && std::signbit(actual[at]) == std::signbit(exact);
    bool const right = std::isnan(exact)   ? std::isnan(actual[at])
                       : std::isinf(exact) ? actual[at] == exact
                                           : error <= bound || overflowed;
    if (!right) {
      if (++bad == 1) {
        ADD_FAILURE() << "y[" << index[0] << "," << index[1] << "," << index[2] << "," << index[3] << "," << index[4]
                      << "] is " << actual[at] << ", but " << exact << " is right; bound " << bound;
      }
    } else if (std::isfinite(exact) && !overflowed) {
      largest_ratio = std::max(largest_ratio, error / bound);
    }
    ++at;
  });
  if (bad > 0) ADD_FAILURE() << bad << " of " << actual.size() << " outputs are wrong";
  if (worst != nullptr) *worst = std::max(*worst, largest_ratio);
  return bad > 0 ? Outcome::kFailed : Outcome::kRan;
}

// ---- one program's cases
// ----------------------------------------------------------------------------------------------

/// Cases in one mode: skipped without a GPU, counted, with the largest share of the bound printed.
class GpuCases : public testing::TestWithParam<Mode> {
 protected:
  void SetUp() override {
    char text[256] = "";
    if (convt3d_current_device(&device, text, sizeof text) != CONVT3D_OK) GTEST_SKIP() << text;
    if (device.compute_capability < 80) GTEST_SKIP() << "the GPU is older than SM80";
  }

  void TearDown() override {
    if (IsSkipped()) return;
    EXPECT_GT(ran, 0) << "no case ran";
    std::printf("%d cases ran, largest error / bound %.3f\n", ran, worst);
  }

  static Problem typed(Problem p) {
    p.dtype = GetParam().dtype;
    p.precision = GetParam().precision;
    return p;
  }

  /// Runs a problem of this mode, as run_case() does. It must be supported.
  void run_typed(Problem const& p, convt3d_kernel kernel, uint64_t seed, float (*draw)(Random&),
                 float (*draw_weight)(Random&)) {
    EXPECT_EQ(run_case(p, kernel, seed, &worst, draw, draw_weight), Outcome::kRan);
    ++ran;
  }

  convt3d_device device{};
  int ran = 0;
  double worst = 0;
};

/// Cases of one of a family's kernels, which computes all that it takes while `kWhereverPossible` is set.
template <std::atomic<bool>& kWhereverPossible, convt3d_kernel kFamily = CONVT3D_KERNEL_SM80>
class KernelCases : public GpuCases {
 protected:
  void SetUp() override {
    GpuCases::SetUp();
    kWhereverPossible = true;
  }

  void TearDown() override {
    kWhereverPossible = false;
    GpuCases::TearDown();
  }

  virtual bool takes(Problem const& p) const = 0;

  void run(Problem const& problem, uint64_t seed, float (*draw)(Random&) = uniform_draw,
           float (*draw_weight)(Random&) = nullptr) {
    Problem const p = typed(problem);
    ASSERT_TRUE(takes(p)) << describe(p);
    run_typed(p, kFamily, seed, draw, draw_weight);
  }
};

/// Calls run(problem, seed) for every activation, before and after add, in both layouts, of make(layout).
template <class Make, class Run>
void for_each_activation(Make&& make, Run&& run) {
  for (int32_t activation = 0; activation < CONVT3D_ACT_COUNT; ++activation) {
    for (int32_t order : {CONVT3D_ADD_BEFORE, CONVT3D_ADD_AFTER}) {
      for (Layout layout : {Layout::kNcdhw, Layout::kNdhwc}) {
        Problem p = make(layout);
        p.has_bias = p.has_add = 1;
        p.activation = activation;
        p.add_order = order;
        p.negative_slope = 0.1f;
        run(p, static_cast<uint64_t>(activation));
      }
    }
  }
}

}  // namespace convt3d::test
