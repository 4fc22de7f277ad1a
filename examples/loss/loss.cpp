#include <cmath>
extern "C" void loss(float *total, float *x, const long *target, long rows, long columns) {
  *total = 0;
  for (long r = 0; r < rows; r++, x += columns) {  // each row of logits becomes its gradient
    float most = x[0], sum = 0;
    for (long c = 1; c < columns; c++) most = std::fmax(most, x[c]);
    for (long c = 0; c < columns; c++) sum += std::exp(x[c] - most);
    *total += (std::log(sum) + most - x[target[r]]) / rows;
    for (long c = 0; c < columns; c++) x[c] = (std::exp(x[c] - most) / sum - (c == target[r])) / rows;
  }
}
extern "C" void scale(float *x, const float *by, long n) {
  for (long i = 0; i < n; i++) x[i] *= *by;
}
