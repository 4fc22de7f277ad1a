// Adds one loss to state = {sum, rounded away, finite losses, other losses, minimum, maximum}.
#include <cmath>

#include "float16.h"

extern "C" void loss_meter(double* state, const T* loss) {
  const double value = double(*loss);
  if (!std::isfinite(value)) {
    state[3] += 1;
    return;
  }
  const double total = state[0], sum = total + value;
  state[1] += std::fabs(total) >= std::fabs(value) ? total - sum + value : value - sum + total;
  state[0] = sum;
  const bool first = state[2] == 0;
  if (first || value < state[4]) state[4] = value;
  if (first || value > state[5]) state[5] = value;
  state[2] += 1;
}
