// What the op files share: checks and their texts, layout, device, stream. They are the only C++ that sees
// torch.
#pragma once
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <functional>
#include <iomanip>
#include <numeric>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "gemm.h"

#ifdef USE_CUDA
#include <cuda_runtime_api.h>
#endif

namespace ops {

using torch::stable::Tensor;

// ---- errors: the argument, what is expected of it, and what it is ----------------------------------------

template <typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw std::runtime_error(text.str());
}

// "(2, 3)", "(2,)".
template <typename Sizes>
std::string listed(const Sizes& sizes) {
  std::ostringstream text;
  text << '(';
  for (size_t i = 0; i < sizes.size(); ++i) text << (i ? ", " : "") << sizes[i];
  text << (sizes.size() == 1 ? ",)" : ")");
  return text.str();
}

inline std::string shape(const Tensor& t) { return listed(t.sizes()); }

inline std::string device(const Tensor& t) {
  if (t.is_cpu()) return "cpu";
  return (t.is_cuda() ? "cuda:" : "device ") + std::to_string(t.get_device_index());
}

// A failing torch call loses its text on its way through the stable ABI (or arrives amid file names and line
// numbers), so what was tried is said here. what(): the text, made where it is wanted.
template <typename What, typename F>
auto attempt(const What& what, const Tensor& on, const F& call) {
  try {
    return call();
  } catch (const std::exception&) {
    fail("could not ", what(), " on ", device(on), ", most likely for lack of memory");
  }
}

inline const Tensor& float32(const char* name, const Tensor& t) {
  if (t.scalar_type() != torch::headeronly::ScalarType::Float)
    fail(name, " must be float32, got ", torch::headeronly::toString(t.scalar_type()));
  return t;
}

inline const Tensor& matrix(const char* name, const Tensor& t) {
  if (!t.defined()) fail(name, " must be a tensor, got None");
  if (t.dim() != 2) fail(name, " must be a matrix, got ", t.dim(), "-D tensor of shape ", shape(t));
  for (int64_t i = 0; i < 2; ++i)
    if (t.sizes()[i] > sgemm::kMaxDim)
      fail(name, " must have at most ", sgemm::kMaxDim, " rows and columns, got shape ", shape(t));
  return float32(name, t);
}

inline const Tensor& same_device(const char* name, const Tensor& t, const Tensor& a) {
  if (device(t) != device(a))
    fail("all tensors must be on the same device, but a is on ", device(a), " and ", name, " is on ",
         device(t));
  return t;
}

// ---- layout -----------------------------------------------------------------------------------------------

// The elements of a matrix, as an arrangement of addresses.
struct Extent {
  const float* data;
  int64_t rows, cols, row_stride, col_stride;

  explicit Extent(const Tensor& t)
      : data(static_cast<const float*>(t.data_ptr())),
        rows(t.sizes()[0]),
        cols(t.sizes()[1]),
        row_stride(rows > 1 ? t.stride(0) : 0),
        col_stride(cols > 1 ? t.stride(1) : 0) {}
  Extent(const float* data, int64_t rows, int64_t cols, int64_t row_stride, int64_t col_stride)
      : data(data), rows(rows), cols(cols), row_stride(row_stride), col_stride(col_stride) {}

  bool operator==(const Extent& e) const {
    return std::tie(data, rows, cols, row_stride, col_stride) ==
           std::tie(e.data, e.rows, e.cols, e.row_stride, e.col_stride);
  }
  bool empty() const { return rows == 0 || cols == 0; }
  const float* end() const { return data + (rows - 1) * row_stride + (cols - 1) * col_stride + 1; }
};

inline int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b != 0 && (a < 0) != (b < 0)); }

// Whether two matrices share an element. Exact where both have the same row stride and adjacent columns
// (slices of one buffer); elsewhere two matrices with interleaved address ranges count as overlapping.
inline bool overlap(Extent p, Extent q) {
  for (Extent* e : {&p, &q}) {  // a stride of 0 repeats an element: once is enough
    if (e->row_stride == 0) e->rows = std::min<int64_t>(e->rows, 1);
    if (e->col_stride == 0) e->cols = std::min<int64_t>(e->cols, 1);
  }
  if (p.empty() || q.empty() || p.end() <= q.data || q.end() <= p.data) return false;
  const auto in_rows = [](const Extent& e) { return e.cols == 1 || e.col_stride == 1; };
  const int64_t ld = p.rows > 1 ? p.row_stride : q.row_stride;
  if (!in_rows(p) || !in_rows(q) || ld == 0 || (q.rows > 1 && q.row_stride != ld)) return true;
  // p's row i meets q's row i + r where  -q.cols < q.data + r * ld - p.data < p.cols.
  const int64_t distance = q.data - p.data;
  const int64_t first = std::max(floor_div(-q.cols - distance, ld) + 1, -(p.rows - 1));
  const int64_t last = std::min(floor_div(p.cols - 1 - distance, ld), q.rows - 1);
  return first <= last;
}

// Whether two indices of t may lead to one address. Exact where at most two dimensions have several elements;
// where more have, each has to step over all that the smaller ones reach.
inline bool overlaps_itself(const Tensor& t) {
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride, size
  for (int64_t i = 0; i < t.dim(); ++i) {
    if (t.sizes()[i] == 0) return false;
    if (t.sizes()[i] > 1) dims.emplace_back(t.stride(i), t.sizes()[i]);
  }
  std::sort(dims.begin(), dims.end());
  bool apart = true;
  int64_t reached = 0;
  for (const auto& [stride, size] : dims) {
    apart = apart && stride > reached;
    reached += stride * (size - 1);
  }
  if (apart || dims.size() != 2) return !apart;
  // Whether i * row == j * col for some 0 < i < rows, 0 < j < cols.
  const auto [row, rows] = dims[0];
  const auto [col, cols] = dims[1];
  const int64_t g = std::gcd(row, col);
  return g == 0 || (col / g < rows && row / g < cols);
}

inline bool adjacent_columns(const Tensor& t) { return t.sizes()[1] <= 1 || t.stride(1) == 1; }

// A kernel reads rows in place, whatever their distance; anything else is copied once.
inline Tensor in_rows(const char* name, const Tensor& t) {
  if (adjacent_columns(t)) return t;
  return attempt([&] { return "copy " + std::string(name) + " of shape " + shape(t) + " row by row"; }, t,
                 [&] { return torch::stable::contiguous(t); });
}

inline Tensor allocate(const Tensor& like, const std::vector<int64_t>& sizes, const char* what) {
  const auto text = [&] {
    const double floats = std::accumulate(sizes.begin(), sizes.end(), 1.0, std::multiplies<>());
    std::ostringstream text;
    text << "allocate the " << listed(sizes) << ' ' << what << ", " << std::fixed << std::setprecision(1)
         << floats * sizeof(float) / (1 << 30) << " GiB,";
    return text.str();
  };
  return attempt(text, like, [&] { return torch::stable::new_empty(like, {sizes.data(), sizes.size()}); });
}

inline float scalar(const char* name, double value) {
  if (std::isfinite(value) && std::abs(value) > FLT_MAX) fail(name, " must fit into float32, got ", value);
  return static_cast<float>(value);
}

// ---- device -----------------------------------------------------------------------------------------------

// Makes a's device the current one, as the allocator, the stream and the launch want it.
class OnDeviceOf {
 public:
  explicit OnDeviceOf(const Tensor& a) {
    if (a.is_cuda()) guard_.emplace(a.get_device_index());
  }

 private:
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
};

#ifdef USE_CUDA

inline cudaStream_t current_stream(const Tensor& on) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(on.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

inline void check_launch(cudaError_t error) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // so that it is not blamed on a later call too
  if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorUnsupportedPtxVersion)
    fail(cudaGetErrorString(error),
         ": this build has kernels for compute capability " SGEMM_ARCHS
         " (see torch.cuda.get_device_capability()); set TORCH_CUDA_ARCH_LIST and build again");
  fail("the launch failed: ", cudaGetErrorString(error));
}

#else

// A CUDA torch, but this library was built without kernels for it.
[[noreturn]] inline void no_cuda() { fail("this build of torch_sgemm has no CUDA kernels: " SGEMM_NO_CUDA); }

#endif

}  // namespace ops
