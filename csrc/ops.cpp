// The ops of the ladder: schemas, argument checks, allocation.
#include "ops.h"

#include "gemm.h"
#include "host/interrupt.h"
#include "host/stages.h"
#include "peaks.h"
#include "stages.h"

#ifdef USE_CUDA
#include <cublas_v2.h>

SGEMM_STAGES(SGEMM_DECLARE)
#endif

namespace {

using namespace ops;
using sgemm::Problem;

// ---- an op ------------------------------------------------------------------------------------------------

struct Operands {
  Tensor a, b;
  std::optional<Tensor> c;
  float alpha, beta;

  int64_t M() const { return a.sizes()[0]; }
  int64_t N() const { return b.sizes()[1]; }
  bool reads_c() const { return c.has_value() && beta != 0; }
};

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
  if (overlaps_itself(out))
    fail("out must not overlap itself: its strides (", out.stride(0), ", ", out.stride(1),
         ") give several elements one memory location; pass out.clone() or a new tensor");
  const Extent written(out);
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

Tensor allocate(const Operands& o) { return ops::allocate(o.a, {o.M(), o.N()}, "result"); }

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
                 : attempt([&] { return "copy " + std::string(operand); }, t,
                           [&] { return torch::stable::clone(t); });
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
