// The op layer, and the only C++ that sees torch: schemas, argument checks, allocation, device, stream.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <iomanip>
#include <numeric>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <tuple>

#include "gemm.h"
#include "host/interrupt.h"
#include "host/stages.h"
#include "peaks.h"
#include "stages.h"

#ifdef USE_CUDA
#include <cublas_v2.h>
#include <cuda_runtime_api.h>

SGEMM_STAGES(SGEMM_DECLARE)
#endif

namespace {

using sgemm::Problem;
using torch::stable::Tensor;

// ---- errors: the argument, what is expected of it, and what it is ----------------------------------------

template <typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw std::runtime_error(text.str());
}

std::string shape(const Tensor& t) {
  std::ostringstream text;
  text << '(';
  for (int64_t i = 0; i < t.dim(); ++i) text << (i ? ", " : "") << t.sizes()[i];
  text << (t.dim() == 1 ? ",)" : ")");
  return text.str();
}

std::string device(const Tensor& t) {
  if (t.is_cpu()) return "cpu";
  return (t.is_cuda() ? "cuda:" : "device ") + std::to_string(t.get_device_index());
}

// A failing torch call loses its text on its way through the stable ABI (or arrives amid file names and line
// numbers), so what was tried is said here.
template <typename F>
auto attempt(const std::string& what, const Tensor& on, const F& call) {
  try {
    return call();
  } catch (const std::exception&) {
    fail("could not ", what, " on ", device(on), ", most likely for lack of memory");
  }
}

const Tensor& float32(const char* name, const Tensor& t) {
  if (t.scalar_type() != torch::headeronly::ScalarType::Float)
    fail(name, " must be float32, got ", torch::headeronly::toString(t.scalar_type()));
  return t;
}

const Tensor& matrix(const char* name, const Tensor& t) {
  if (!t.defined()) fail(name, " must be a tensor, got None");
  if (t.dim() != 2) fail(name, " must be a matrix, got ", t.dim(), "-D tensor of shape ", shape(t));
  for (int64_t i = 0; i < 2; ++i)
    if (t.sizes()[i] > sgemm::kMaxDim)
      fail(name, " must have at most ", sgemm::kMaxDim, " rows and columns, got shape ", shape(t));
  return float32(name, t);
}

const Tensor& same_device(const char* name, const Tensor& t, const Tensor& a) {
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

int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b != 0 && (a < 0) != (b < 0)); }

// Whether two matrices share an element. Exact where both have the same row stride and adjacent columns
// (slices of one buffer); elsewhere two matrices with interleaved address ranges count as overlapping.
bool overlap(Extent p, Extent q) {
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

// Whether two indices lead to one address: i * s == j * t for some 0 < i < rows, 0 < j < cols.
bool overlaps_itself(const Extent& e) {
  if (e.empty()) return false;
  if ((e.rows > 1 && e.row_stride == 0) || (e.cols > 1 && e.col_stride == 0)) return true;
  if (e.rows == 1 || e.cols == 1) return false;
  const int64_t g = std::gcd(e.row_stride, e.col_stride);
  return e.col_stride / g < e.rows && e.row_stride / g < e.cols;
}

bool adjacent_columns(const Tensor& t) { return t.sizes()[1] <= 1 || t.stride(1) == 1; }

// A kernel reads rows in place, whatever their distance; anything else is copied once.
Tensor in_rows(const char* name, const Tensor& t) {
  if (adjacent_columns(t)) return t;
  return attempt("copy " + std::string(name) + " of shape " + shape(t) + " row by row", t,
                 [&] { return torch::stable::contiguous(t); });
}

// ---- an op ------------------------------------------------------------------------------------------------

struct Operands {
  Tensor a, b;
  std::optional<Tensor> c;
  float alpha, beta;

  int64_t M() const { return a.sizes()[0]; }
  int64_t N() const { return b.sizes()[1]; }
  bool reads_c() const { return c.has_value() && beta != 0; }
};

float scalar(const char* name, double value) {
  if (std::isfinite(value) && std::abs(value) > FLT_MAX) fail(name, " must fit into float32, got ", value);
  return static_cast<float>(value);
}

void check(const Operands& o) {
  matrix("a", o.a);
  same_device("b", matrix("b", o.b), o.a);
  if (o.a.sizes()[1] != o.b.sizes()[0])
    fail("a and b shapes cannot be multiplied: a is ", shape(o.a), " and b is ", shape(o.b), ", but a has ",
         o.a.sizes()[1], " columns and b has ", o.b.sizes()[0], " rows");
  if (!o.c.has_value()) return;
  const Tensor& c = same_device("c", float32("c", *o.c), o.a);
  const int64_t wanted[] = {o.M(), o.N()};
  bool fits = c.dim() <= 2;
  for (int64_t i = 0; fits && i < c.dim(); ++i) {
    const int64_t size = c.sizes()[i];
    fits = size == 1 || size == wanted[2 - c.dim() + i];
  }
  if (!fits) fail("c must broadcast to (", o.M(), ", ", o.N(), "), got shape ", shape(c));
}

// c as an M x N matrix; stride 0 where it broadcasts.
Extent broadcast(const Tensor& c, int64_t M, int64_t N) {
  const int64_t dim = c.dim();
  const auto stride = [&](int64_t i) { return i >= 0 && c.sizes()[i] > 1 ? c.stride(i) : 0; };
  return {static_cast<const float*>(c.data_ptr()), M, N, stride(dim - 2), stride(dim - 1)};
}

void check_out(const Tensor& out, const Operands& o) {
  same_device("out", matrix("out", out), o.a);
  if (out.sizes()[0] != o.M() || out.sizes()[1] != o.N())
    fail("out must have shape (", o.M(), ", ", o.N(), "), got ", shape(out));
  const Extent written(out);
  if (overlaps_itself(written))
    fail("out must not overlap itself: its strides (", out.stride(0), ", ", out.stride(1),
         ") give several elements one memory location; pass out.clone() or a new tensor");
  const auto apart = [&](const char* name, const Extent& read) {
    if (overlap(written, read))
      fail("out must not share memory with ", name,
           ": it is written while it is still read; pass a new tensor or a clone");
  };
  apart("a", Extent(o.a));
  apart("b", Extent(o.b));
  if (!o.reads_c()) return;
  const Extent c = broadcast(*o.c, o.M(), o.N());
  if (!(c == written)) apart("c, unless it is c itself", c);
}

// Fills out (M x N, adjacent columns) on a Backend: `struct { static const char* name; static void
// launch(const Problem&, const Operands&, const Tensor& out); }`.
template <class Backend>
void compute(const Operands& o, const Tensor& out) {
  if (out.numel() == 0) return;
  // An empty sum is 0 whatever alpha is; and alpha == 0 reads neither a nor b, like BLAS.
  const int64_t K = o.alpha == 0 ? 0 : o.a.sizes()[1];
  Operands rows = o;
  if (K > 0) {
    rows.a = in_rows("a", o.a);
    rows.b = in_rows("b", o.b);
  }
  Problem p{.M = o.M(),
            .N = o.N(),
            .K = K,
            .A = static_cast<const float*>(rows.a.data_ptr()),
            .B = static_cast<const float*>(rows.b.data_ptr()),
            .c = nullptr,
            .out = static_cast<float*>(out.data_ptr()),
            .lda = rows.a.stride(0),
            .ldb = rows.b.stride(0),
            .ldo = out.stride(0),
            .c_row = 0,
            .c_col = 0,
            .alpha = K > 0 ? o.alpha : 0.0f,
            .beta = o.beta};
  if (o.reads_c()) {
    const Extent c = broadcast(*o.c, p.M, p.N);
    p.c = c.data, p.c_row = c.row_stride, p.c_col = c.col_stride;
  }
  try {
    Backend::launch(p, rows, out);
  } catch (const std::exception& e) {
    fail(Backend::name, ": ", e.what());
  }
}

Tensor allocate(const Operands& o) {
  const int64_t size[] = {o.M(), o.N()};
  std::ostringstream what;
  what << std::fixed << std::setprecision(1) << "allocate the (" << size[0] << ", " << size[1] << ") result, "
       << static_cast<double>(size[0]) * size[1] * sizeof(float) / (1 << 30) << " GiB,";
  return attempt(what.str(), o.a, [&] { return torch::stable::new_empty(o.a, {size, 2}); });
}

// Makes a's device the current one, as the allocator, the stream and the launch want it.
class OnDeviceOf {
 public:
  explicit OnDeviceOf(const Tensor& a) {
    if (a.is_cuda()) guard_.emplace(a.get_device_index());
  }

 private:
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
};

template <class Backend>
Tensor run(Tensor a, Tensor b, std::optional<Tensor> c, double alpha, double beta) {
  const Operands o{a, b, c, scalar("alpha", alpha), scalar("beta", beta)};
  check(o);
  const OnDeviceOf guard(a);
  const Tensor out = allocate(o);
  compute<Backend>(o, out);
  return out;
}

template <class Backend>
void run_out(Tensor a, Tensor b, std::optional<Tensor> c, double alpha, double beta, Tensor out) {
  const Operands o{a, b, c, scalar("alpha", alpha), scalar("beta", beta)};
  check(o);
  check_out(out, o);
  const OnDeviceOf guard(a);
  if (adjacent_columns(out)) return compute<Backend>(o, out);
  const Tensor rows = allocate(o);
  compute<Backend>(o, rows);
  torch::stable::copy_(out, rows);
}

// ---- CPU --------------------------------------------------------------------------------------------------

// Torch's own threads, for the CPU executor.
class TorchThreads final : public simt::Stream {
 public:
  void parallel(const std::function<void()>& work) override {
    torch::stable::parallel_for(0, torch::stable::get_num_threads(), 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) work();
    });
  }
  bool interrupted() override { return guard_.interrupted(); }

 private:
  InterruptGuard guard_;
};

#define SGEMM_ON_CPU(stage)                                                \
  struct stage##_on_cpu {                                                  \
    static constexpr const char* name = #stage;                            \
    static void launch(const Problem& p, const Operands&, const Tensor&) { \
      TorchThreads threads;                                                \
      sgemm_cpu::launch(#stage, p, threads);                               \
    }                                                                      \
  };
SGEMM_STAGES(SGEMM_ON_CPU)

struct cublas_on_cpu {
  static constexpr const char* name = "cublas";
  static void launch(const Problem&, const Operands&, const Tensor&) {
    fail("a must be on a CUDA device, got one on the CPU; use torch.mm or a stage there");
  }
};

const Tensor& check_sink(const Tensor& sink, int64_t iterations) {
  if (!float32("sink", sink).is_contiguous()) fail("sink must be contiguous");
  if (iterations < 1 || iterations > INT32_MAX)
    fail("iterations must be from 1 to ", INT32_MAX, ", got ", iterations);
  return sink;
}

void ffma_peak_on_cpu(Tensor sink, int64_t iterations) {
  check_sink(sink, iterations);
  TorchThreads threads;
  peaks::ffma_on_cpu(static_cast<float*>(sink.data_ptr()), sink.numel(), iterations, threads);
}

// ---- CUDA -------------------------------------------------------------------------------------------------

#ifdef USE_CUDA

cudaStream_t current_stream(const Tensor& on) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(on.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

void check_launch(cudaError_t error) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // so that it is not blamed on a later call too
  if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorUnsupportedPtxVersion)
    fail(cudaGetErrorString(error),
         ": this build has kernels for compute capability " SGEMM_ARCHS
         " (see torch.cuda.get_device_capability()); set TORCH_CUDA_ARCH_LIST and build again");
  fail("the launch failed: ", cudaGetErrorString(error));
}

#define SGEMM_ON_CUDA(stage)                                                 \
  struct stage##_on_cuda {                                                   \
    static constexpr const char* name = #stage;                              \
    static void launch(const Problem& p, const Operands& o, const Tensor&) { \
      check_launch(sgemm::stage::launch(p, current_stream(o.a)));            \
    }                                                                        \
  };
SGEMM_STAGES(SGEMM_ON_CUDA)

void check_cublas(cublasStatus_t status) {
  if (status != CUBLAS_STATUS_SUCCESS) fail(cublasGetStatusString(status));
}

// cuBLAS is column-major, and a row-major matrix is its own transpose there: out^T = B^T @ A^T.
struct cublas_on_cuda {
  static constexpr const char* name = "cublas";
  static void launch(const Problem& p, const Operands& o, Tensor out) {
    void* raw = nullptr;
    TORCH_ERROR_CODE_CHECK(torch_get_current_cuda_blas_handle(&raw));
    const auto handle = static_cast<cublasHandle_t>(raw);
    // It wants a leading dimension no smaller than a row; rows that overlap are copied, and c goes into out.
    const auto apart = [](const char* operand, const Tensor& t) {
      return t.sizes()[0] <= 1 || t.stride(0) >= t.sizes()[1]
                 ? t
                 : attempt("copy " + std::string(operand), t, [&] { return torch::stable::clone(t); });
    };
    const Tensor a = p.K > 0 ? apart("a", o.a) : o.a, b = p.K > 0 ? apart("b", o.b) : o.b;
    const auto ld = [](const Tensor& t) {
      return std::max<int64_t>({1, t.sizes()[1], t.sizes()[0] > 1 ? t.stride(0) : 1});
    };
    if (p.c != nullptr && p.c != p.out) torch::stable::copy_(out, *o.c);
    const float beta = p.c != nullptr ? p.beta : 0.0f;

    cublasMath_t mode;
    check_cublas(cublasGetMathMode(handle, &mode));
    check_cublas(cublasSetMathMode(handle, CUBLAS_DEFAULT_MATH));
    const cublasStatus_t status = cublasSgemm_64(
        handle, CUBLAS_OP_N, CUBLAS_OP_N, p.N, p.M, p.K, &p.alpha, static_cast<const float*>(b.data_ptr()),
        ld(b), static_cast<const float*>(a.data_ptr()), ld(a), &beta, p.out, ld(out));
    check_cublas(cublasSetMathMode(handle, mode));
    check_cublas(status);
  }
};

void ffma_peak_on_cuda(Tensor sink, int64_t iterations) {
  const OnDeviceOf guard(check_sink(sink, iterations));
  check_launch(peaks::ffma_on_cuda(static_cast<float*>(sink.data_ptr()), sink.numel(),
                                   static_cast<int>(iterations), current_stream(sink)));
}

void shared_peak_on_cuda(Tensor sink, int64_t iterations) {
  const OnDeviceOf guard(check_sink(sink, iterations));
  check_launch(peaks::shared_on_cuda(static_cast<float*>(sink.data_ptr()), sink.numel(),
                                     static_cast<int>(iterations), current_stream(sink)));
}

void l2_peak_on_cuda(Tensor data, Tensor sink, int64_t iterations) {
  const OnDeviceOf guard(check_sink(sink, iterations));
  same_device("data", float32("data", data), sink);
  const auto* first = static_cast<const float*>(data.data_ptr());
  if (!data.is_contiguous() || data.numel() % 4 != 0 || reinterpret_cast<uintptr_t>(first) % 16 != 0)
    fail("data must be contiguous, aligned to 16 bytes and a multiple of 4 elements, got shape ",
         shape(data));
  check_launch(peaks::l2_on_cuda(first, data.numel(), static_cast<float*>(sink.data_ptr()), sink.numel(),
                                 static_cast<int>(iterations), current_stream(sink)));
}

#else

// A CUDA torch, but this library was built without kernels for it.
[[noreturn]] void no_cuda() { fail("this build of torch_sgemm has no CUDA kernels: " SGEMM_NO_CUDA); }
Tensor run_no_cuda(Tensor, Tensor, std::optional<Tensor>, double, double) { no_cuda(); }
void run_out_no_cuda(Tensor, Tensor, std::optional<Tensor>, double, double, Tensor) { no_cuda(); }
void peak_no_cuda(Tensor, int64_t) { no_cuda(); }
void l2_peak_no_cuda(Tensor, Tensor, int64_t) { no_cuda(); }

#endif

}  // namespace

// ---- registration -----------------------------------------------------------------------------------------

#define SGEMM_ARGUMENTS "Tensor a, Tensor b, Tensor? c=None, *, float alpha=1.0, float beta=0.0"
#define SGEMM_DEFINE(op)                        \
  m.def(#op "(" SGEMM_ARGUMENTS ") -> Tensor"); \
  m.def(#op ".out(" SGEMM_ARGUMENTS ", Tensor(a!) out) -> ()");

STABLE_TORCH_LIBRARY(sgemm, m) {
  SGEMM_STAGES(SGEMM_DEFINE)
  SGEMM_DEFINE(cublas)
  m.def("ffma_peak(Tensor(a!) sink, int iterations) -> ()");
  m.def("shared_peak(Tensor(a!) sink, int iterations) -> ()");
  m.def("l2_peak(Tensor data, Tensor(a!) sink, int iterations) -> ()");
}

#define SGEMM_IMPLEMENT(op, backend)     \
  m.impl(#op, TORCH_BOX(&run<backend>)); \
  m.impl(#op ".out", TORCH_BOX(&run_out<backend>));

STABLE_TORCH_LIBRARY_IMPL(sgemm, CPU, m) {
#define SGEMM_CPU(stage) SGEMM_IMPLEMENT(stage, stage##_on_cpu)
  SGEMM_STAGES(SGEMM_CPU)
  SGEMM_IMPLEMENT(cublas, cublas_on_cpu)
  m.impl("ffma_peak", TORCH_BOX(&ffma_peak_on_cpu));
}

STABLE_TORCH_LIBRARY_IMPL(sgemm, CUDA, m) {
#ifdef USE_CUDA
#define SGEMM_CUDA(stage) SGEMM_IMPLEMENT(stage, stage##_on_cuda)
  SGEMM_STAGES(SGEMM_CUDA)
  SGEMM_IMPLEMENT(cublas, cublas_on_cuda)
  m.impl("ffma_peak", TORCH_BOX(&ffma_peak_on_cuda));
  m.impl("shared_peak", TORCH_BOX(&shared_peak_on_cuda));
  m.impl("l2_peak", TORCH_BOX(&l2_peak_on_cuda));
#else
#define SGEMM_CUDA(op)                  \
  m.impl(#op, TORCH_BOX(&run_no_cuda)); \
  m.impl(#op ".out", TORCH_BOX(&run_out_no_cuda));
  SGEMM_STAGES(SGEMM_CUDA)
  SGEMM_CUDA(cublas)
  m.impl("ffma_peak", TORCH_BOX(&peak_no_cuda));
  m.impl("shared_peak", TORCH_BOX(&peak_no_cuda));
  m.impl("l2_peak", TORCH_BOX(&l2_peak_no_cuda));
#endif
}

// The names of the stages, for Python.
extern "C" __attribute__((visibility("default"))) const char* torch_sgemm_stages() {
#define SGEMM_NAME(stage) #stage " "
  return SGEMM_STAGES(SGEMM_NAME);
}
