// Rows as numbers of 8 bits, in the forms of rows.cuh.
#include "quantized_rows.cuh"

template <typename T, typename Q, int LANES, int THREADS, int VPT, int MORE, bool EDGES>
__global__ void __launch_bounds__(THREADS) quantize_rowwise(Q *q, float *units, const T *x, long long rows, int cols) {
  jitkern::rows_on_chip<LANES, THREADS, VPT, MORE, EDGES>(jitkern::QuantizedRows<T, Q, EDGES>{{x}, {}, q, units, cols}, rows, cols);
}
template <typename T, typename Q, int THREADS, bool EDGES>
__global__ void __launch_bounds__(THREADS) quantize_rowwise_long(Q *q, float *units, const T *x, int cols) {
  jitkern::rows_read_twice<THREADS, EDGES>(jitkern::QuantizedRows<T, Q, EDGES>{{x}, {}, q, units, cols}, cols);
}
