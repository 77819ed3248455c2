// SPDX-License-Identifier: Apache-2.0
//
// The baseline on record: what CUTLASS 2.x itself offers for a strided 3D transposed convolution, which is its data
// gradient with the analytic, strided iterator. It checks every tap of every output, stride^3 times the multiplies that
// reach an output. The convolution alone (no bias, add or activation), channels-last, in tf32, 3xTF32 and fp16.
//
//   stock_dgrad [batch cin cout size kernel stride padding output_padding [runs]]      default: 128 32 64 16 3 2 1 1
//
// Outputs are compared with float64 at sampled positions; times are medians of single runs between CUDA events.
// Exit status: 0, 1 (a wrong result or a CUDA error), 2 (bad arguments, no GPU).
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

// The device adapter uses the problem sizes without including them.
#include "cutlass/conv/conv3d_problem_size.h"
#include "cutlass/conv/device/implicit_gemm_convolution.h"
#include "cutlass/conv/kernel/default_conv3d_dgrad.h"
#include "cutlass/cutlass.h"
#include "cutlass/epilogue/thread/linear_combination.h"
#include "cutlass/half.h"
#include "cutlass/tfloat32.h"
#include "cutlass/version.h"

namespace {

struct Sizes {
  int batch = 128, cin = 32, cout = 64, size = 16, kernel = 3, stride = 2, padding = 1, output_padding = 1, runs = 20;

  int out() const { return (size - 1) * stride - 2 * padding + kernel + output_padding; }
  int64_t x_elements() const { return int64_t(batch) * size * size * size * cin; }
  int64_t w_elements() const { return int64_t(cin) * kernel * kernel * kernel * cout; }
  int64_t y_elements() const { return int64_t(batch) * out() * out() * out() * cout; }
  /// FLOPs of the (output, tap) pairs that the stride leaves live; along each dimension alike.
  double live_flops() const {
    int64_t pairs = 0;
    for (int o = 0; o < out(); ++o) {
      for (int k = 0; k < kernel; ++k) pairs += (o + padding - k) % stride == 0;
    }
    return 2.0 * batch * cin * cout * double(pairs) * double(pairs) * double(pairs);
  }
};

void check(cudaError_t error, char const* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "stock_dgrad: %s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}

template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(int64_t count) : bytes_(size_t(count) * sizeof(T)) {
    check(cudaMalloc(&data_, bytes_), "cudaMalloc");
  }
  ~DeviceArray() { cudaFree(data_); }
  DeviceArray(DeviceArray const&) = delete;
  DeviceArray& operator=(DeviceArray const&) = delete;

  T* data() const { return static_cast<T*>(data_); }
  void upload(std::vector<T> const& host) {
    check(cudaMemcpy(data_, host.data(), bytes_, cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  void download(std::vector<T>& host) const {
    check(cudaMemcpy(host.data(), data_, bytes_, cudaMemcpyDeviceToHost), "cudaMemcpy");
  }
  void poison() { check(cudaMemset(data_, 0xff, bytes_), "cudaMemset"); }  // all ones is a nan in fp32 and fp16

 private:
  void* data_ = nullptr;
  size_t bytes_;
};

/// Values that T holds exactly, so that the reference needs no rounding rule of its own.
template <class T>
std::vector<T> random_values(int64_t count, float scale, unsigned seed) {
  std::mt19937 generator(seed);
  std::uniform_real_distribution<float> uniform(-scale, scale);
  std::vector<T> values(static_cast<size_t>(count));
  for (T& value : values) value = T(uniform(generator));
  return values;
}

/// Largest |y - float64| over sampled outputs; nan where one was not written.
template <class Operand, class Element>
double max_error(Sizes const& s, std::vector<Operand> const& x, std::vector<Operand> const& w,
                 std::vector<Element> const& y) {
  std::mt19937_64 generator(7);
  double worst = 0;
  for (int sample = 0; sample < 4000; ++sample) {
    int64_t const index = int64_t(generator() % uint64_t(s.y_elements()));
    int const c = int(index % s.cout);
    int64_t voxel = index / s.cout;
    int o[3];
    for (int axis = 2; axis >= 0; --axis, voxel /= s.out()) o[axis] = int(voxel % s.out());
    int64_t const n = voxel;
    double sum = 0;
    for (int tap = 0; tap < s.kernel * s.kernel * s.kernel; ++tap) {
      int const k[3] = {tap / (s.kernel * s.kernel), tap / s.kernel % s.kernel, tap % s.kernel};
      int64_t position = n;
      bool live = true;
      for (int axis = 0; axis < 3; ++axis) {
        int const at = o[axis] + s.padding - k[axis];
        live = live && at >= 0 && at % s.stride == 0 && at / s.stride < s.size;
        position = position * s.size + at / s.stride;
      }
      if (!live) continue;
      for (int channel = 0; channel < s.cin; ++channel) {
        sum += double(float(x[size_t(position * s.cin + channel)])) *
               double(float(w[(size_t(channel) * s.kernel * s.kernel * s.kernel + tap) * s.cout + c]));
      }
    }
    double const error = std::abs(double(float(y[size_t(index)])) - sum);
    if (!(error <= worst)) worst = error;
    if (std::isnan(worst)) return worst;
  }
  return worst;
}

/// Tile shapes: the same as the project's sm80 family where the iterator permits, so that iterators are compared.
template <class Operand_, class Element_, class Math, int kTileM, int kWarpM, int kWarpN, int kTileK, int kInstructionK>
struct Stock {
  using Operand = Operand_;
  using Element = Element_;
  using Layout = cutlass::layout::TensorNDHWC;
  static constexpr int kAccess = 16 / int(sizeof(Element));
  using Kernel = typename cutlass::conv::kernel::DefaultConv3dDgrad<
      Operand, Layout, Operand, Layout, Element, Layout, float, cutlass::arch::OpClassTensorOp, cutlass::arch::Sm80,
      cutlass::gemm::GemmShape<kTileM, 64, kTileK>, cutlass::gemm::GemmShape<kWarpM, kWarpN, kTileK>,
      cutlass::gemm::GemmShape<16, 8, kInstructionK>,
      cutlass::epilogue::thread::LinearCombination<Element, kAccess, float, float>,
      cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<>, 3, Math,
      cutlass::conv::IteratorAlgorithm::kAnalytic, cutlass::conv::StrideSupport::kStrided>::Kernel;
  using Device = cutlass::conv::device::ImplicitGemmConvolution<Kernel>;
};

// clang-format off
using Tf32 = Stock<cutlass::tfloat32_t, float, cutlass::arch::OpMultiplyAdd, 128, 64, 32, 16, 8>;
using Tf32x3 = Stock<float, float, cutlass::arch::OpMultiplyAddFastF32, 64, 32, 32, 16, 8>;
using Fp16 = Stock<cutlass::half_t, cutlass::half_t, cutlass::arch::OpMultiplyAdd, 128, 32, 64, 32, 16>;
// clang-format on

void check(cutlass::Status status, char const* what) {
  if (status == cutlass::Status::kSuccess) return;
  std::fprintf(stderr, "stock_dgrad: %s: %s\n", what, cutlassGetStatusString(status));
  std::exit(1);
}

/// One line of the table; false where the result is wrong.
template <class Config>
bool measure(char const* name, Sizes const& s, double tolerance) {
  using Operand = typename Config::Operand;
  using Element = typename Config::Element;
  using Layout = typename Config::Layout;
  int const out = s.out();

  // A transposed convolution is dgrad: its input is dgrad's dY (N, Z, P, Q, K), its output dX (N, D, H, W, C).
  auto const x = random_values<Operand>(s.x_elements(), 1.0f, 1);
  auto const w = random_values<Operand>(s.w_elements(), 1.0f / std::sqrt(float(s.cin)), 2);
  DeviceArray<Operand> device_x(s.x_elements()), device_w(s.w_elements());
  DeviceArray<Element> device_y(s.y_elements());
  device_x.upload(x);
  device_w.upload(w);
  device_y.poison();

  cutlass::conv::Conv3dProblemSize const problem(s.batch, out, out, out, s.cout, s.cin, s.kernel, s.kernel, s.kernel,
                                                 s.size, s.size, s.size, s.padding, s.padding, s.padding, s.stride,
                                                 s.stride, s.stride, 1, 1, 1, cutlass::conv::Mode::kCrossCorrelation);
  Layout const x_layout = Layout::packed({s.batch, s.size, s.size, s.size, s.cin});
  Layout const w_layout = Layout::packed({s.cin, s.kernel, s.kernel, s.kernel, s.cout});
  Layout const y_layout = Layout::packed({s.batch, out, out, out, s.cout});
  typename Config::Device::Arguments const arguments{problem,
                                                     {device_x.data(), x_layout},
                                                     {device_w.data(), w_layout},
                                                     {device_y.data(), y_layout},
                                                     {device_y.data(), y_layout},
                                                     {1.0f, 0.0f}};
  check(Config::Device::can_implement(arguments), name);
  typename Config::Device convolution;
  check(convolution.initialize(arguments), name);

  check(convolution.run(), name);
  check(cudaDeviceSynchronize(), name);
  std::vector<Element> y(static_cast<size_t>(s.y_elements()));
  device_y.download(y);
  double const error = max_error(s, x, w, y);

  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin), "cudaEventCreate");
  check(cudaEventCreate(&end), "cudaEventCreate");
  for (int run = 0; run < 3; ++run) check(convolution.run(), name);
  std::vector<float> times;
  for (int run = 0; run < s.runs; ++run) {
    check(cudaEventRecord(begin), "cudaEventRecord");
    check(convolution.run(), name);
    check(cudaEventRecord(end), "cudaEventRecord");
    check(cudaEventSynchronize(end), name);
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, begin, end), "cudaEventElapsedTime");
    times.push_back(milliseconds);
  }
  check(cudaEventDestroy(begin), "cudaEventDestroy");
  check(cudaEventDestroy(end), "cudaEventDestroy");
  std::sort(times.begin(), times.end());
  double const median = times[times.size() / 2];

  bool const right = error <= tolerance;
  std::printf("%-8s %10.3f %10.3f %10.3f %14.1f %12.2e   %s\n", name, median, double(times.front()),
              double(times.back()), s.live_flops() / (median * 1e-3) * 1e-12, error, right ? "ok" : "WRONG");
  return right;
}

bool parse(int argc, char** argv, Sizes& s) {
  int* const fields[] = {&s.batch,  &s.cin,     &s.cout,           &s.size, &s.kernel,
                         &s.stride, &s.padding, &s.output_padding, &s.runs};
  if (argc != 1 && argc != 9 && argc != 10) return false;
  for (int i = 1; i < argc; ++i) {
    char* rest = nullptr;
    long const value = std::strtol(argv[i], &rest, 10);
    bool const may_be_zero = fields[i - 1] == &s.padding || fields[i - 1] == &s.output_padding;
    if (rest == argv[i] || *rest || value < (may_be_zero ? 0 : 1) || value > (1 << 20)) return false;
    *fields[i - 1] = int(value);
  }
  return s.out() > 0 && s.output_padding < s.stride;
}

}  // namespace

int main(int argc, char** argv) {
  Sizes s;
  if (!parse(argc, argv, s)) {
    std::fprintf(stderr,
                 "usage: %s [batch cin cout size kernel stride padding output_padding [runs]]\n"
                 "default: 128 32 64 16 3 2 1 1 20; size, kernel and the rest are the same in all three dimensions\n",
                 argv[0]);
    return 2;
  }
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::fprintf(stderr, "stock_dgrad: this measures an NVIDIA GPU (SM80 or newer), and there is none here\n");
    return 2;
  }
  cudaDeviceProp properties;
  check(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
  std::printf("Stock CUTLASS %d.%d.%d strided 3D dgrad (2.x, analytic iterator), conv alone, NDHWC, on %s\n",
              CUTLASS_MAJOR, CUTLASS_MINOR, CUTLASS_PATCH, properties.name);
  std::printf("x (%d, %d, %d^3), kernel %d, stride %d, padding %d, output_padding %d -> y (%d, %d, %d^3)\n", s.batch,
              s.cin, s.size, s.kernel, s.stride, s.padding, s.output_padding, s.batch, s.cout, s.out());
  std::printf("%.1f GFLOP in live taps; times in ms over %d runs; error against float64 at 4000 outputs\n\n",
              s.live_flops() * 1e-9, s.runs);
  std::printf("%-8s %10s %10s %10s %14s %12s\n", "type", "median", "least", "most", "live TFLOP/s", "max error");
  // Operands are of order 1 and outputs too: fp32 sums err by some 1e-6, fp16 outputs by half a unit in the last place.
  bool right = measure<Tf32>("tf32", s, 2e-5);
  right = measure<Tf32x3>("3xTF32", s, 2e-5) && right;
  right = measure<Fp16>("fp16", s, 4e-3) && right;
  return right ? 0 : 1;
}
