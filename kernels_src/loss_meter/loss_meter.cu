// Adds one loss to state = {sum, rounded away, finite losses, other losses, minimum, maximum}.
// One thread: a step has one loss, and launches of a stream follow each other.
static __device__ double wide(double value) { return value; }  // 16-bit types become float first
static __device__ double wide(float value) { return value; }

template <typename T>
__global__ void loss_meter(double* state, const T* loss) {
  const double value = wide(loss[0]);
  if (!isfinite(value)) {
    state[3] += 1;
    return;
  }
  const double total = state[0], sum = total + value;
  state[1] += fabs(total) >= fabs(value) ? total - sum + value : value - sum + total;
  state[0] = sum;
  const bool first = state[2] == 0;
  if (first || value < state[4]) state[4] = value;
  if (first || value > state[5]) state[5] = value;
  state[2] += 1;
}
