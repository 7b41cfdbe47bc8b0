// Runs one stage file on the CPU, without torch: `executor_stage M N K` computes a @ b of small integers with
// the file STAGE_FILE and says whether every element is right. For test_executor.py, which breaks the file.
#define SGEMM_HOST
#include STAGE_FILE

#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <vector>

struct CallingThread : simt::Stream {
  void parallel(const std::function<void()>& work) override { work(); }
};

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  const int M = std::atoi(argv[1]), N = std::atoi(argv[2]), K = std::atoi(argv[3]);
  std::vector<float> a(M * K), b(K * N), out(M * N, -1.0f);
  for (int i = 0; i < M * K; ++i) a[i] = i % 7 + 1;
  for (int i = 0; i < K * N; ++i) b[i] = i % 5 + 1;
  const sgemm::Problem problem{.M = M,
                               .N = N,
                               .K = K,
                               .A = a.data(),
                               .B = b.data(),
                               .c = nullptr,
                               .out = out.data(),
                               .lda = K,
                               .ldb = N,
                               .ldo = N,
                               .c_row = 0,
                               .c_col = 0,
                               .alpha = 1.0f,
                               .beta = 0.0f};
  CallingThread stream;
  try {
    sgemm::STAGE::launch(problem, &stream);
  } catch (const std::runtime_error& e) {
    std::printf("error: %s\n", e.what());
    return 0;
  }
  int wrong = 0;
  for (int i = 0; i < M; ++i)
    for (int j = 0; j < N; ++j) {
      float sum = 0.0f;
      for (int k = 0; k < K; ++k) sum += a[i * K + k] * b[k * N + j];
      wrong += !(out[i * N + j] == sum);
    }
  std::printf(wrong ? "wrong\n" : "right\n");
}
