// rms_norm in the forms of rows.cuh, its backward in those of column_sums.cuh.
#include "rms_norm.cuh"

template <typename T, typename W, int LANES, int THREADS, int VPT, int MORE, bool EDGES>
__global__ void __launch_bounds__(THREADS)
    rms_norm(T *out, const T *x, const W *weight, double eps, double offset, long long rows, int cols) {
  jitkern::rows_on_chip<LANES, THREADS, VPT, MORE, EDGES>(
      rms_norm_detail::forward<1, EDGES>(out, (T *)nullptr, x, (const T *)nullptr, weight, eps, offset, cols), rows, cols);
}
template <typename T, typename W, int THREADS, bool EDGES>
__global__ void __launch_bounds__(THREADS)
    rms_norm_long(T *out, const T *x, const W *weight, double eps, double offset, int cols) {
  jitkern::rows_read_twice<THREADS, EDGES>(
      rms_norm_detail::forward<1, EDGES>(out, (T *)nullptr, x, (const T *)nullptr, weight, eps, offset, cols), cols);
}

template <typename T, typename W, typename Q, int LANES, int THREADS, int VPT, int MORE, bool EDGES>
__global__ void __launch_bounds__(THREADS)
    rms_norm_quantized(Q *out, float *units, const T *x, const W *weight, double eps, double offset, long long rows, int cols) {
  const rms_norm_detail::Quantized<T, W, Q, 1, EDGES> op{{x}, {}, out, units, {weight, cols, 1, offset}, jitkern::widened<T>(eps), jitkern::widened<T>(1) / cols, cols};
  jitkern::rows_on_chip<LANES, THREADS, VPT, MORE, EDGES>(op, rows, cols);
}
template <typename T, typename W, typename Q, int THREADS, bool EDGES>
__global__ void __launch_bounds__(THREADS)
    rms_norm_quantized_long(Q *out, float *units, const T *x, const W *weight, double eps, double offset, int cols) {
  const rms_norm_detail::Quantized<T, W, Q, 1, EDGES> op{{x}, {}, out, units, {weight, cols, 1, offset}, jitkern::widened<T>(eps), jitkern::widened<T>(1) / cols, cols};
  jitkern::rows_read_twice<THREADS, EDGES>(op, cols);
}

// Of dx alone, or also of what the sums over the rows need.
template <typename T, typename W, int INPUTS, bool DX, bool EDGES>
__device__ auto backward(T *dx, jitkern::widened<T> *scales, const T *grad, const T *x, const T *more, const W *weight, double eps,
                         double offset, int cols) {
  using A = jitkern::widened<T>;
  using Op = rms_norm_detail::Backward<T, W, INPUTS, DX, EDGES>;
  if constexpr (INPUTS == 2)
    return Op{{grad, x}, {dx}, scales, {weight, cols, 1, offset}, A(eps), A(1) / cols, cols};
  else
    return Op{{grad, x, more}, {dx}, scales, {weight, cols, 1, offset}, A(eps), A(1) / cols, cols};
}

template <typename T, typename W, typename A, int INPUTS, bool DX, bool EDGES, int LANES, int THREADS, int VPT, int MORE>
__global__ void __launch_bounds__(THREADS)
    rms_norm_backward(T *dx, A *scales, const T *grad, const T *x, const T *more, const W *weight, double eps, double offset,
                      long long rows, int cols) {
  jitkern::rows_on_chip<LANES, THREADS, VPT, MORE, EDGES>(
      backward<T, W, INPUTS, DX, EDGES>(dx, scales, grad, x, more, weight, eps, offset, cols), rows, cols);
}
template <typename T, typename W, typename A, int INPUTS, bool DX, bool EDGES, int THREADS>
__global__ void __launch_bounds__(THREADS)
    rms_norm_backward_long(T *dx, A *scales, const T *grad, const T *x, const T *more, const W *weight, double eps, double offset,
                           int cols) {
  jitkern::rows_read_twice<THREADS, EDGES>(
      backward<T, W, INPUTS, DX, EDGES>(dx, scales, grad, x, more, weight, eps, offset, cols), cols);
}
template <typename T, typename W, typename A, int INPUTS, bool DX, int LANES, int THREADS, int VPT, int STAGES>
__global__ void __launch_bounds__(THREADS, 1)
    rms_norm_backward_sums(T *dx, A *partial, const T *grad, const T *x, const T *more, const W *weight, double eps, double offset,
                           long long rows, int cols) {
  jitkern::rows_and_sums<LANES, THREADS, VPT, STAGES>(
      backward<T, W, INPUTS, DX, false>(dx, nullptr, grad, x, more, weight, eps, offset, cols), partial, rows, cols);
}
template <typename T, typename A, int THREADS, bool EDGES>
__global__ void __launch_bounds__(THREADS)
    rms_norm_backward_columns(A *partial, const T *grad, const T *x, A *scales, long long rows, int cols) {
  jitkern::column_sums<THREADS, EDGES>(
      backward<T, T, 2, false, EDGES>((T *)nullptr, scales, grad, x, (const T *)nullptr, (const T *)nullptr, 0, 0, cols), partial, rows, cols);
}
template <typename W, typename A, int DEPTH>
__global__ void __launch_bounds__(32 * DEPTH) rms_norm_backward_total(W *dweight, const A *partial, int count, int cols) {
  jitkern::add_partials<DEPTH>(dweight, (W *)nullptr, partial, count, cols);
}
