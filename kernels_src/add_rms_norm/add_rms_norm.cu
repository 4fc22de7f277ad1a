// rms_norm of a sum, and the sum, in the forms of rows.cuh.
#include "../rms_norm/rms_norm.cuh"

template <typename T, typename W, int LANES, int THREADS, int VPT, int MORE, bool EDGES>
__global__ void __launch_bounds__(THREADS)
    add_rms_norm(T *out, T *total, const T *x, const T *residual, const W *weight, double eps, double offset, long long rows, int cols) {
  jitkern::rows_on_chip<LANES, THREADS, VPT, MORE, EDGES>(
      rms_norm_detail::forward<2, EDGES>(out, total, x, residual, weight, eps, offset, cols), rows, cols);
}
template <typename T, typename W, int THREADS, bool EDGES>
__global__ void __launch_bounds__(THREADS)
    add_rms_norm_long(T *out, T *total, const T *x, const T *residual, const W *weight, double eps, double offset, int cols) {
  jitkern::rows_read_twice<THREADS, EDGES>(
      rms_norm_detail::forward<2, EDGES>(out, total, x, residual, weight, eps, offset, cols), cols);
}

template <typename T, typename W, typename Q, int LANES, int THREADS, int VPT, int MORE, bool EDGES>
__global__ void __launch_bounds__(THREADS)
    add_rms_norm_quantized(Q *out, float *units, T *total, const T *x, const T *residual, const W *weight, double eps, double offset,
                           long long rows, int cols) {
  const rms_norm_detail::Quantized<T, W, Q, 2, EDGES> op{
      {x, residual}, {total}, out, units, {weight, cols, 1, offset}, jitkern::widened<T>(eps), jitkern::widened<T>(1) / cols, cols};
  jitkern::rows_on_chip<LANES, THREADS, VPT, MORE, EDGES>(op, rows, cols);
}
template <typename T, typename W, typename Q, int THREADS, bool EDGES>
__global__ void __launch_bounds__(THREADS)
    add_rms_norm_quantized_long(Q *out, float *units, T *total, const T *x, const T *residual, const W *weight, double eps, double offset,
                                int cols) {
  const rms_norm_detail::Quantized<T, W, Q, 2, EDGES> op{
      {x, residual}, {total}, out, units, {weight, cols, 1, offset}, jitkern::widened<T>(eps), jitkern::widened<T>(1) / cols, cols};
  jitkern::rows_read_twice<THREADS, EDGES>(op, cols);
}
