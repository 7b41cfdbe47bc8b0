// The product ops: mm, addmm, bmm, baddbmm and linear on CUDA tensors. Their names, their arguments and the
// words of their errors are torch's. On the CPU, torch_sgemm/products.py calls aten.
#include <array>
#include <cmath>
#include <mutex>
#include <sstream>
#include <utility>
#include <vector>

#include "matmul/select.h"
#include "ops.h"

#ifdef USE_CUDA
#include "matmul/launch.h"
#endif

namespace {

using namespace ops;
using sgemm::matmul::Device;
using sgemm::matmul::Operand;
using sgemm::matmul::Plan;
using sgemm::matmul::Problem;

// For the CPU's ops, too.
void check_apart(Tensor out) {
  if (overlaps_itself(out))
    fail(
        "unsupported operation: more than one element of the written-to tensor refers to a single memory "
        "location; pass out.clone() or a new tensor as out");
}

#define SGEMM_PRECISION "str precision=\"auto\""
#define SGEMM_SCALARS "float beta=1.0, float alpha=1.0, " SGEMM_PRECISION
#define SGEMM_DEFINE(name, arguments, options)             \
  m.def(name "(" arguments ", *, " options ") -> Tensor"); \
  m.def(name ".out(" arguments ", *, " options ", Tensor(a!) out) -> ()");

#ifdef USE_CUDA

// ---- checks -----------------------------------------------------------------------------------------------

void check_precision(const std::string& precision) {
  if (precision == "auto" || precision == "ieee") return;
  fail("precision must be \"auto\" or \"ieee\", got \"", precision, "\"");
}

std::string by(const Tensor& t) { return std::to_string(t.sizes()[0]) + "x" + std::to_string(t.sizes()[1]); }

// How the op calls its arguments.
struct Names {
  const char *a, *b, *c;
};

// a @ b, of matrices or of batches of them, and where the result goes. The shapes are checked here; `sizes`
// are the result's.
struct Operands {
  Tensor a, b;
  std::optional<Tensor> c;
  float alpha, beta;
  Names names;
  std::vector<int64_t> sizes;

  int64_t dim() const { return a.dim(); }
  bool reads_c() const { return c.has_value() && beta != 0; }
};

// What can be said of a tensor before the others are seen.
const Tensor& operand(const char* name, const Tensor& t, int64_t dim) {
  if (!t.defined()) fail(name, " must be a tensor, got None");
  if (t.dim() != dim)
    fail(name, dim == 2 ? " must be a matrix" : " must be a 3D tensor", ", got ", t.dim(),
         "-D tensor of shape ", shape(t));
  for (int64_t i = 0; i < dim; ++i)
    if (t.sizes()[i] > sgemm::kMaxDim)
      fail(name, " must have sizes of at most ", sgemm::kMaxDim, ", got shape ", shape(t));
  return float32(name, t);
}

void same_device_as(const char* name, const Tensor& t, const char* first, const Tensor& a) {
  if (device(t) != device(a))
    fail("Expected all tensors to be on the same device, but ", first, " is on ", device(a), " and ", name,
         " is on ", device(t));
}

Operands checked(const Names& names, const Tensor& a, const Tensor& b, const std::optional<Tensor>& c,
                 double beta, double alpha, const std::string& precision, int64_t dim) {
  check_precision(precision);
  operand(names.a, a, dim);
  operand(names.b, b, dim);
  same_device_as(names.b, b, names.a, a);
  const auto as = a.sizes(), bs = b.sizes();
  if (dim == 2 && as[1] != bs[0])
    fail("mat1 and mat2 shapes cannot be multiplied (", by(a), " and ", by(b), "): ", names.a, " has ", as[1],
         " columns and ", names.b, " has ", bs[0], " rows");
  if (dim == 3 && (as[0] != bs[0] || as[2] != bs[1]))
    fail("Expected size for first two dimensions of batch2 tensor to be: [", as[0], ", ", as[2],
         "] but got: [", bs[0], ", ", bs[1], "] (", names.a, " has shape ", shape(a), " and ", names.b, " ",
         shape(b), ")");
  Operands o{a, b, c, scalar("alpha", alpha), scalar("beta", beta), names, {}};
  if (dim == 3) o.sizes.push_back(as[0]);
  o.sizes.insert(o.sizes.end(), {as[dim - 2], bs[dim - 1]});
  if (!c.has_value()) return o;
  same_device_as(names.c, float32(names.c, *c), names.a, a);
  bool fits = c->dim() <= dim;
  for (int64_t i = 0; fits && i < c->dim(); ++i)
    fits = c->sizes()[i] == 1 || c->sizes()[i] == o.sizes[dim - c->dim() + i];
  if (!fits) fail(names.c, " must be expandable to ", listed(o.sizes), ", got shape ", shape(*c));
  return o;
}

// ---- the problem ------------------------------------------------------------------------------------------

// A stride, of which nothing depends where there is one element or none.
int64_t stride(const Tensor& t, int64_t i) { return i >= 0 && t.sizes()[i] > 1 ? t.stride(i) : 0; }

template <typename T>
sgemm::matmul::Strided<T> strided(const Tensor& t) {
  const int64_t n = t.dim();
  return {static_cast<T*>(t.data_ptr()), stride(t, n - 3), stride(t, n - 2), stride(t, n - 1)};
}

// A stride of a dimension of one element may be anything: the one that makes its neighbours adjacent is best.
Operand operand_of(const Tensor& t) {
  Operand o = strided<const float>(t);
  const int64_t rows = t.sizes()[t.dim() - 2], cols = t.sizes()[t.dim() - 1];
  if (cols == 1 && o.row != 1) o.col = 1;
  if (rows == 1 && o.col != 1) o.row = 1;
  return o;
}

Problem problem_of(const Operands& o, const Tensor& out) {
  const int64_t n = o.dim();
  Problem p{.batch = n == 3 ? o.sizes[0] : 1,
            .M = o.sizes[n - 2],
            .N = o.sizes[n - 1],
            .K = o.alpha == 0 ? 0 : o.a.sizes()[n - 1],
            .A = operand_of(o.a),
            .B = operand_of(o.b),
            .C = {},
            .out = strided<float>(out),
            .alpha = o.alpha,
            .beta = o.beta};
  if (p.K == 0) p.alpha = 0;  // an empty sum is 0, whatever alpha is
  if (p.N == 1) p.out.col = 1;
  if (o.reads_c()) p.C = strided<const float>(*o.c);
  return p;
}

// ---- the device -------------------------------------------------------------------------------------------

Device device_of(const Tensor& on) {
  static std::mutex mutex;
  static std::array<std::optional<Device>, 64> known;
  const std::lock_guard<std::mutex> lock(mutex);
  auto& found = known.at(on.get_device_index());
  if (!found) {
    int sms = 0;
    size_t free = 0, total = 0;
    check_launch(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, on.get_device_index()));
    check_launch(cudaMemGetInfo(&free, &total));
    int major = 0, minor = 0;
    check_launch(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, on.get_device_index()));
    check_launch(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, on.get_device_index()));
    found = Device{
        .sms = sms,
        .max_workspace = std::max<int64_t>(int64_t{1} << 30, total / 16) / int64_t{sizeof(float)},
        .hopper = major == 9 && minor == 0 && std::string(SGEMM_ARCHS).find("9.0a") != std::string::npos};
  }
  return *found;
}

void compute(const char* op, const Problem& p, const Tensor& on, std::optional<Plan> given = {}) {
  if (p.batch == 0 || p.M == 0 || p.N == 0) return;
  const Plan plan = given ? *given : sgemm::matmul::select(p, device_of(on));
  std::optional<Tensor> workspace;
  if (plan.workspace > 0) workspace = allocate(on, {plan.workspace}, "workspace");
  auto* parts = workspace ? static_cast<float*>(workspace->data_ptr()) : nullptr;
  try {
    check_launch(sgemm::matmul::launch(plan, p, parts, current_stream(on)));
  } catch (const std::exception& e) {
    fail(op, ": ", e.what());
  }
}

Tensor run(const char* op, const Operands& o) {
  const OnDeviceOf guard(o.a);
  const Tensor out = allocate(o.a, o.sizes, "result");
  compute(op, problem_of(o, out), o.a);
  return out;
}

// ---- a given out ------------------------------------------------------------------------------------------

// The addresses between the first and the last element.
struct Range {
  const float *first, *last;

  explicit Range(const Tensor& t) : first(static_cast<const float*>(t.data_ptr())), last(first) {
    for (int64_t i = 0; i < t.dim(); ++i) last += (t.sizes()[i] - 1) * t.stride(i);
  }
  bool meets(const Range& r) const { return first <= r.last && r.first <= last; }
};

bool same_elements(const Tensor& a, const Tensor& b) {
  if (a.dim() != b.dim() || a.data_ptr() != b.data_ptr()) return false;
  for (int64_t i = 0; i < a.dim(); ++i)
    if (a.sizes()[i] != b.sizes()[i] || stride(a, i) != stride(b, i)) return false;
  return true;
}

void check_out(const Operands& o, const Tensor& out) {
  if (!out.defined()) fail("out must be a tensor, got None");
  same_device_as("out", float32("out", out), o.names.a, o.a);
  bool fits = out.dim() == static_cast<int64_t>(o.sizes.size());
  for (int64_t i = 0; fits && i < out.dim(); ++i) fits = out.sizes()[i] == o.sizes[i];
  if (!fits) fail("out must have shape ", listed(o.sizes), ", got ", shape(out));
  check_apart(out);
}

// Whether out may share elements with what is read while it is written. c itself is read where it is written.
bool shared_with_inputs(const Operands& o, const Tensor& out) {
  if (out.numel() == 0) return false;
  const auto meets = [&](const Tensor& t) { return t.numel() > 0 && Range(out).meets(Range(t)); };
  const auto shares = [&](const Tensor& t) {
    return meets(t) && (t.dim() != 2 || out.dim() != 2 || overlap(Extent(out), Extent(t)));
  };
  return shares(o.a) || shares(o.b) || (o.reads_c() && !same_elements(*o.c, out) && meets(*o.c));
}

void run_out(const char* op, const Operands& o, Tensor out) {
  check_out(o, out);
  const OnDeviceOf guard(o.a);
  if (!shared_with_inputs(o, out)) return compute(op, problem_of(o, out), o.a);
  const Tensor apart = allocate(o.a, o.sizes, "result");
  compute(op, problem_of(o, apart), o.a);
  torch::stable::copy_(out, apart);
}

// ---- the ops ----------------------------------------------------------------------------------------------

constexpr Names MM{"input", "mat2", ""}, ADDMM{"mat1", "mat2", "input"}, BADDBMM{"batch1", "batch2", "input"};

Tensor mm(Tensor input, Tensor mat2, std::string precision) {
  return run("mm", checked(MM, input, mat2, {}, 0, 1, precision, 2));
}
void mm_out(Tensor input, Tensor mat2, std::string precision, Tensor out) {
  run_out("mm", checked(MM, input, mat2, {}, 0, 1, precision, 2), out);
}
Tensor addmm(Tensor input, Tensor mat1, Tensor mat2, double beta, double alpha, std::string precision) {
  return run("addmm", checked(ADDMM, mat1, mat2, input, beta, alpha, precision, 2));
}
void addmm_out(Tensor input, Tensor mat1, Tensor mat2, double beta, double alpha, std::string precision,
               Tensor out) {
  run_out("addmm", checked(ADDMM, mat1, mat2, input, beta, alpha, precision, 2), out);
}
Tensor bmm(Tensor input, Tensor mat2, std::string precision) {
  return run("bmm", checked(MM, input, mat2, {}, 0, 1, precision, 3));
}
void bmm_out(Tensor input, Tensor mat2, std::string precision, Tensor out) {
  run_out("bmm", checked(MM, input, mat2, {}, 0, 1, precision, 3), out);
}
Tensor baddbmm(Tensor input, Tensor batch1, Tensor batch2, double beta, double alpha, std::string precision) {
  return run("baddbmm", checked(BADDBMM, batch1, batch2, input, beta, alpha, precision, 3));
}
void baddbmm_out(Tensor input, Tensor batch1, Tensor batch2, double beta, double alpha, std::string precision,
                 Tensor out) {
  run_out("baddbmm", checked(BADDBMM, batch1, batch2, input, beta, alpha, precision, 3), out);
}

// For callers that know that no gradient is wanted: two or three dimensions.
Tensor gemm(Tensor a, Tensor b, std::optional<Tensor> c, double beta, double alpha, std::string precision) {
  return run("gemm",
             checked({"input", "mat2", "input"}, a, b, c, beta, alpha, precision, a.dim() == 3 ? 3 : 2));
}

// For tests and tuning: by one kernel ("64x128", "dot"), K in so many parts.
Tensor gemm_by(Tensor a, Tensor b, std::optional<Tensor> c, double beta, double alpha, std::string kernel,
               int64_t parts) {
  const Operands o = checked({"a", "b", "c"}, a, b, c, beta, alpha, "ieee", a.dim() == 3 ? 3 : 2);
  const OnDeviceOf guard(a);
  const Tensor out = allocate(a, o.sizes, "result");
  if (out.numel() == 0) return out;
  if (parts < 1 || parts > 65535) fail("parts must be from 1 to 65535, got ", parts);
  const Problem p = problem_of(o, out);
  const auto plan = sgemm::matmul::plan_with(kernel, static_cast<int>(parts), p, device_of(a));
  if (!plan) fail("kernel \"", kernel, "\" cannot compute a of shape ", shape(a), " by b of ", shape(b));
  compute("gemm", p, a, plan);
  return out;
}

// The leading dimensions of a tensor as those of a batch of matrices, if they are one or two runs of equal
// steps.
struct Leading {
  int64_t batch = 1, batch_stride = 0, rows = 1, row_stride = 0;
  bool fits = true;

  explicit Leading(const Tensor& t) {
    for (int64_t i = t.dim() - 2; i >= 0; --i) {
      const int64_t size = t.sizes()[i], step = t.stride(i);
      if (size == 1) continue;
      if (batch == 1 && (rows == 1 || step == row_stride * rows))
        row_stride = rows == 1 ? step : row_stride, rows *= size;
      else if (batch == 1 || step == batch_stride * batch)
        batch_stride = batch == 1 ? step : batch_stride, batch *= size;
      else
        fits = false;
    }
  }
};

// input (..., K) and weight (N, K); sizes of the result (..., N).
struct Linear {
  Tensor input, weight;
  std::optional<Tensor> bias;
  std::vector<int64_t> sizes;
  int64_t K, N;

  Linear(Tensor in, Tensor w, std::optional<Tensor> b, const std::string& precision)
      : input(in), weight(w), bias(b) {
    check_precision(precision);
    if (!input.defined()) fail("input must be a tensor, got None");
    if (input.dim() < 1) fail("input must have at least one dimension, got a 0-D tensor");
    float32("input", input);
    operand("weight", weight, 2);
    same_device_as("weight", weight, "input", input);
    const int64_t n = input.dim();
    K = input.sizes()[n - 1], N = weight.sizes()[0];
    int64_t rows = 1;
    for (int64_t i = 0; i + 1 < n; ++i) {
      sizes.push_back(input.sizes()[i]);
      rows *= input.sizes()[i];
    }
    sizes.push_back(N);
    if (K != weight.sizes()[1])
      fail("mat1 and mat2 shapes cannot be multiplied (", rows, "x", K, " and ", weight.sizes()[1], "x", N,
           "): input has ", K, " features and weight takes ", weight.sizes()[1]);
    if (rows > sgemm::kMaxDim || K > sgemm::kMaxDim)
      fail("input must have at most ", sgemm::kMaxDim, " rows and features, got shape ", shape(input));
    if (!bias.has_value()) return;
    same_device_as("bias", float32("bias", *bias), "input", input);
    if (bias->dim() > 1 || (bias->dim() == 1 && bias->sizes()[0] != N && bias->sizes()[0] != 1))
      fail("bias must have shape (", N, ",), got ", shape(*bias));
  }

  // Into a contiguous out.
  void compute(const Tensor& out) const {
    if (out.numel() == 0) return;
    // Leading dimensions of more kinds of steps than a batch of matrices has are copied.
    const Tensor x = Leading(input).fits ? input
                                         : attempt([&] { return "copy input of shape " + shape(input); },
                                                   input, [&] { return torch::stable::contiguous(input); });
    const Leading l(x);
    Problem p{
        .batch = l.batch,
        .M = l.rows,
        .N = N,
        .K = K,
        .A = {static_cast<const float*>(x.data_ptr()), l.batch_stride, l.row_stride, stride(x, x.dim() - 1)},
        .B = operand_of(weight).transposed(),
        .C = {},
        .out = {static_cast<float*>(out.data_ptr()), l.rows * N, N, 1},
        .alpha = K == 0 ? 0.0f : 1.0f,
        .beta = 1};
    if (K == 1) p.A.col = 1;
    if (l.rows == 1 && K > 1 && p.A.col != 1) p.A.row = 1;
    if (bias.has_value())
      p.C = {static_cast<const float*>(bias->data_ptr()), 0, 0, stride(*bias, bias->dim() - 1)};
    ::compute("linear", p, input);
  }
};

Tensor linear(Tensor input, Tensor weight, std::optional<Tensor> bias, std::string precision) {
  const Linear l(input, weight, bias, precision);
  const OnDeviceOf guard(input);
  const Tensor out = allocate(input, l.sizes, "result");
  l.compute(out);
  return out;
}

void linear_out(Tensor input, Tensor weight, std::optional<Tensor> bias, std::string precision, Tensor out) {
  const Linear l(input, weight, bias, precision);
  const Operands o{input, weight, bias, 1, 1, {"input", "weight", "bias"}, l.sizes};
  check_out(o, out);
  const OnDeviceOf guard(input);
  if (out.is_contiguous() && !shared_with_inputs(o, out)) return l.compute(out);
  const Tensor apart = allocate(input, l.sizes, "result");
  l.compute(apart);
  torch::stable::copy_(out, apart);
}

#else

using Addend = std::optional<Tensor>;
using Text = std::string;
Tensor mm(Tensor, Tensor, Text) { no_cuda(); }
void mm_out(Tensor, Tensor, Text, Tensor) { no_cuda(); }
Tensor bmm(Tensor, Tensor, Text) { no_cuda(); }
void bmm_out(Tensor, Tensor, Text, Tensor) { no_cuda(); }
Tensor addmm(Tensor, Tensor, Tensor, double, double, Text) { no_cuda(); }
void addmm_out(Tensor, Tensor, Tensor, double, double, Text, Tensor) { no_cuda(); }
Tensor baddbmm(Tensor, Tensor, Tensor, double, double, Text) { no_cuda(); }
void baddbmm_out(Tensor, Tensor, Tensor, double, double, Text, Tensor) { no_cuda(); }
Tensor linear(Tensor, Tensor, Addend, Text) { no_cuda(); }
void linear_out(Tensor, Tensor, Addend, Text, Tensor) { no_cuda(); }
Tensor gemm(Tensor, Tensor, Addend, double, double, Text) { no_cuda(); }
Tensor gemm_by(Tensor, Tensor, Addend, double, double, Text, int64_t) { no_cuda(); }

#endif

}  // namespace

// ---- explain ----------------------------------------------------------------------------------------------

// What select() would do, as JSON: every candidate, the best first. Layouts: an operand's batch, row and
// column stride; `aligned`: whether A, B and out begin at multiples of 16 bytes, as bits 0, 1 and 2.
extern "C" __attribute__((visibility("default"))) const char* torch_sgemm_plans(
    int64_t batch, int64_t M, int64_t N, int64_t K, const int64_t* a, const int64_t* b, const int64_t* out,
    int aligned, int sms, int64_t max_workspace, int hopper) {
  const auto address = [&](int bit) { return reinterpret_cast<float*>(aligned >> bit & 1 ? 16 : 20); };
  const sgemm::matmul::Problem p{.batch = batch,
                                 .M = M,
                                 .N = N,
                                 .K = K,
                                 .A = {address(0), a[0], a[1], a[2]},
                                 .B = {address(1), b[0], b[1], b[2]},
                                 .C = {},
                                 .out = {address(2), out[0], out[1], out[2]},
                                 .alpha = 1,
                                 .beta = 0};
  const sgemm::matmul::Device device{sms, max_workspace, hopper != 0};
  const sgemm::matmul::Plan best = sgemm::matmul::select(p, device);
  std::ostringstream text;
  const auto add = [&](const sgemm::matmul::Plan& plan) {
    text << "{\"kernel\": \"" << sgemm::matmul::kernel_name(plan)
         << "\", \"parts\": " << (plan.streamed ? 2 : plan.splits)
         << ", \"streamed\": " << (plan.streamed ? "true" : "false")
         << ", \"transposed\": " << (plan.transposed ? "true" : "false")
         << ", \"vector\": " << (plan.access == sgemm::matmul::Access::kVector ? "true" : "false")
         << ", \"workspace_bytes\": " << plan.workspace * int64_t{sizeof(float)}
         << ", \"seconds\": " << plan.seconds << ", \"reason\": \"" << sgemm::matmul::explain(plan, p, device)
         << "\"}";
  };
  text << '[';
  add(best);
  std::vector<sgemm::matmul::Plan> all = sgemm::matmul::candidates(p, device);
  std::stable_sort(all.begin(), all.end(),
                   [](const auto& x, const auto& y) { return x.seconds < y.seconds; });
  for (size_t i = 1; i < all.size(); ++i) text << ", ", add(all[i]);
  text << ']';
  static thread_local std::string kept;
  kept = text.str();
  return kept.c_str();
}

// For benchmarks/fit_select.py: a constant of the prediction is `value` from now on. Its value until then, or
// NaN if it has none of that name.
extern "C" __attribute__((visibility("default"))) double torch_sgemm_model(const char* name, double value) {
  double* constant = sgemm::matmul::model_constant(name);
  return constant == nullptr ? std::nan("") : std::exchange(*constant, value);
}

// ---- registration -----------------------------------------------------------------------------------------

STABLE_TORCH_LIBRARY_FRAGMENT(sgemm, m) {
  SGEMM_DEFINE("mm", "Tensor input, Tensor mat2", SGEMM_PRECISION)
  SGEMM_DEFINE("addmm", "Tensor input, Tensor mat1, Tensor mat2", SGEMM_SCALARS)
  SGEMM_DEFINE("bmm", "Tensor input, Tensor mat2", SGEMM_PRECISION)
  SGEMM_DEFINE("baddbmm", "Tensor input, Tensor batch1, Tensor batch2", SGEMM_SCALARS)
  SGEMM_DEFINE("linear", "Tensor input, Tensor weight, Tensor? bias=None", SGEMM_PRECISION)
  m.def("_gemm(Tensor a, Tensor b, Tensor? c, float beta, float alpha, str precision) -> Tensor");
  m.def("_gemm_by(Tensor a, Tensor b, Tensor? c, float beta, float alpha, str kernel, int parts) -> Tensor");
  m.def("_check_apart(Tensor out) -> ()");
  m.def("_linear(Tensor input, Tensor weight, Tensor? bias, str precision) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(sgemm, CompositeExplicitAutograd, m) {
  m.impl("_check_apart", TORCH_BOX(&check_apart));
}

#define SGEMM_IMPLEMENT(op)    \
  m.impl(#op, TORCH_BOX(&op)); \
  m.impl(#op ".out", TORCH_BOX(&op##_out));

STABLE_TORCH_LIBRARY_IMPL(sgemm, CUDA, m) {
  SGEMM_IMPLEMENT(mm)
  SGEMM_IMPLEMENT(addmm)
  SGEMM_IMPLEMENT(bmm)
  SGEMM_IMPLEMENT(baddbmm)
  SGEMM_IMPLEMENT(linear)
  m.impl("_gemm", TORCH_BOX(&gemm));
  m.impl("_gemm_by", TORCH_BOX(&gemm_by));
  m.impl("_linear", TORCH_BOX(&linear));
}
