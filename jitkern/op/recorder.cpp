// Records calls of ops that have a gradient, as `_RecordedPlainly` of autograd.py does, without Python until the
// backward. The launch runtime calls `record` for a call that no mode and no transform sees.
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/stable/c/shim.h>
#include <torch/csrc/utils/object_ptr.h>

namespace jitkern {
using torch::autograd::AutogradContext;
using torch::autograd::Node;
using torch::autograd::variable_list;
using Run = void (*)(int32_t slot, uint64_t *stack, uint64_t given, uint64_t returned);

// The gradient of an op; never freed. Places are those of `Order` in gradient.py.
struct Gradient {
  std::string kinds;  // of the arguments, as in runtime.c
  std::vector<int64_t> tensors, saved, plain;
  bool fills;                  // whether a gradient that is not there becomes zeros
  PyObject *backward, *check;  // functions of recorder.py
};

struct Call {
  uint64_t *stack, given, returned;
  Run run;
  int32_t slot;
};

thread_local int32_t depth = 0;

struct Inside {
  at::AutoDispatchBelowAutograd below;
  Inside() { depth++; }
  ~Inside() { depth--; }
};

// The tensor of an argument; null for None.
const at::Tensor *tensor(char kind, uint64_t word) {
  if (kind == 't') return word ? *reinterpret_cast<at::Tensor **>(word) : nullptr;
  return reinterpret_cast<at::Tensor *>(word);
}

// What a call keeps beside tensors, as bytes: the address of the gradient, a bit for each tensor that is not None, and
// each of `plain`: a letter (0: None), and a word or the length and the text. It is kept as a text of two letters a
// byte, which compiled autograd can compare and pass through Python.
struct Kept {
  std::string bytes;
  size_t at = 0;

  Kept() = default;
  explicit Kept(const std::string &text) : bytes(text.size() / 2, 0) {
    for (size_t i = 0; i < bytes.size(); i++) bytes[i] = static_cast<char>((text[2 * i] - 'a') << 4 | (text[2 * i + 1] - 'a'));
  }
  std::string text() const {
    std::string letters;
    for (unsigned char byte : bytes) letters += {static_cast<char>('a' + (byte >> 4)), static_cast<char>('a' + (byte & 15))};
    return letters;
  }

  void put(uint64_t word) { bytes.append(reinterpret_cast<const char *>(&word), sizeof word); }
  uint64_t word() {
    uint64_t word;
    std::memcpy(&word, bytes.data() + at, sizeof word);
    at += sizeof word;
    return word;
  }

  void put(char kind, uint64_t word) {
    if (std::isupper(kind)) {
      if (!word) return bytes.push_back(0);
      word = *reinterpret_cast<uint64_t *>(word);
    }
    kind = std::tolower(kind);
    bytes.push_back(kind);
    if (kind != 's') return put(kind == 'b' ? word & 255 : word);
    const char *text = nullptr;
    size_t length = 0;
    auto string = reinterpret_cast<StringHandle>(word);
    TORCH_CHECK(!torch_string_c_str(string, &text) && !torch_string_length(string, &length), "a string without text");
    put(length);
    bytes.append(text, length);
  }

  PyObject *value() {
    const char kind = bytes[at++];
    if (!kind) return Py_NewRef(Py_None);
    const uint64_t found = word();
    if (kind == 'i') return PyLong_FromLongLong(static_cast<int64_t>(found));
    if (kind == 'b') return PyBool_FromLong(found != 0);
    if (kind == 'f') return PyFloat_FromDouble(*reinterpret_cast<const double *>(&found));
    at += found;
    return PyUnicode_FromStringAndSize(bytes.data() + at - found, found);
  }
};

PyObject *whole(PyObject *result) {
  if (result) return result;
  python_error error;
  error.persist();
  throw std::move(error);
}

// Whether Torch takes this gradient, with no more than a conversion of its dtype.
bool fits(const at::Tensor &gradient, const torch::autograd::Edge &edge) {
  if (!edge.is_valid()) return true;
  const auto &wanted = edge.function->input_metadata(edge.input_nr);
  return gradient.sym_sizes() == wanted.shape_as_dim_vector() && gradient.device() == wanted.device() &&
         gradient.is_complex() == c10::isComplexType(wanted.dtype().toScalarType());
}

// A tensor of one element with the shape, dtype and device of the input at this edge.
at::Tensor like(const torch::autograd::Edge &edge) {
  if (!edge.is_valid()) return {};
  const auto &wanted = edge.function->input_metadata(edge.input_nr);
  return at::zeros({}, wanted.options()).expand_symint(wanted.shape_as_dim_vector());
}

// Run the backward of a call; return the gradients of the tensors that were not None. node: null if it is not known.
template <class Needed>
variable_list gradients(const std::string &text, const variable_list &saved, variable_list &grads, const Needed &needed,
                        const Node *node) {
  Kept kept(text);
  const auto *gradient = reinterpret_cast<const Gradient *>(kept.word());
  const uint64_t present = kept.word();
  const auto count = gradient->tensors.size();
  pybind11::gil_scoped_acquire gil;
  THPObjectPtr needs(whole(PyTuple_New(count))), by_output(whole(PyTuple_New(grads.size())));
  size_t edge = 0;
  for (size_t i = 0; i < count; i++)
    PyTuple_SET_ITEM(needs.get(), i, PyBool_FromLong(present >> i & 1 && needed(edge++)));
  for (size_t i = 0; i < grads.size(); i++) PyTuple_SET_ITEM(by_output.get(), i, whole(THPVariable_Wrap(grads[i])));
  THPObjectPtr args(whole(PyTuple_New(2 + saved.size() + gradient->plain.size())));
  PyTuple_SET_ITEM(args.get(), 0, by_output.release());
  PyTuple_SET_ITEM(args.get(), 1, Py_NewRef(needs.get()));
  size_t at = 2;
  for (const auto &one : saved) PyTuple_SET_ITEM(args.get(), at++, whole(THPVariable_Wrap(one)));
  while (at < 2 + saved.size() + gradient->plain.size()) PyTuple_SET_ITEM(args.get(), at++, whole(kept.value()));
  THPObjectPtr found(whole(PyObject_CallObject(gradient->backward, args)));
  variable_list results;
  bool odd = false;
  for (size_t i = 0; i < count; i++) {
    PyObject *one = PyTuple_GET_ITEM(found.get(), i);
    const bool is_tensor = THPVariable_Check(one);
    odd |= !is_tensor && one != Py_None;
    if (!(present >> i & 1)) continue;
    odd |= is_tensor && node && !fits(THPVariable_Unpack(one), node->next_edge(results.size()));
    results.push_back(is_tensor ? THPVariable_Unpack(one) : at::Tensor());
  }
  if (odd) {
    THPObjectPtr wanted(whole(PyTuple_New(count)));
    edge = 0;
    for (size_t i = 0; i < count; i++) {
      const bool known = present >> i & 1 && node;
      PyTuple_SET_ITEM(wanted.get(), i, whole(THPVariable_Wrap(known ? like(node->next_edge(edge++)) : at::Tensor())));
    }
    THPObjectPtr(whole(PyObject_CallFunctionObjArgs(gradient->check, found.get(), needs.get(), wanted.get(), nullptr)));
  }
  return results;
}

struct Recorded : torch::autograd::Function<Recorded> {
  static variable_list forward(AutogradContext *ctx, at::TensorList, const Gradient *gradient, const Call *call) {
    variable_list known(call->given + call->returned), results(call->returned), saved;
    Kept kept;
    uint64_t present = 0;
    for (size_t i = 0; i < gradient->tensors.size(); i++) {
      const auto at = gradient->tensors[i];
      const at::Tensor *given = tensor(gradient->kinds[at], call->stack[at]);
      if (given) known[at] = *given, present |= uint64_t{1} << i;
    }
    kept.put(reinterpret_cast<uint64_t>(gradient));
    kept.put(present);
    for (auto at : gradient->plain) kept.put(gradient->kinds[at], call->stack[at]);
    {
      Inside inside;
      call->run(call->slot, call->stack, call->given, call->returned);
    }
    for (uint64_t i = 0; i < call->returned; i++) {
      auto *result = reinterpret_cast<at::Tensor *>(call->stack[i]);
      known[call->given + i] = results[i] = std::move(*result);
      delete result;
    }
    for (auto at : gradient->saved) saved.push_back(known[at]);
    ctx->save_for_backward(std::move(saved));
    ctx->set_materialize_grads(gradient->fills);
    ctx->saved_data["call"] = kept.text();
    return results;
  }

  static variable_list backward(AutogradContext *ctx, variable_list grads) {  // for compiled autograd alone
    const auto needed = [ctx](size_t edge) { return ctx->needs_input_grad(edge); };
    const auto &text = ctx->saved_data.at("call").toStringRef();
    auto results = gradients(text, ctx->get_saved_variables(), grads, needed, nullptr);
    results.resize(results.size() + 2);  // for `gradient` and `call`
    return results;
  }
};
}  // namespace jitkern

// Torch's own holds the lock of the node while Python runs, where a backward that comes to its own node would wait for
// itself.
template <>
torch::autograd::variable_list torch::autograd::CppNode<jitkern::Recorded>::apply(variable_list &&grads) {
  variable_list saved;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    saved = ctx_.get_saved_variables();
  }
  at::OptionalDeviceGuard guard;
  for (size_t i = 0; i < grads.size(); i++)
    if (!grads[i].defined() && ctx_.materialize_grads_) grads[i] = output_info_[i].zeros(guard);
  const auto needed = [this](size_t edge) { return task_should_compute_output(edge); };
  return jitkern::gradients(ctx_.saved_data.at("call").toStringRef(), saved, grads, needed, this);
}

namespace jitkern {
void record(const Gradient *gradient, uint64_t *stack, uint64_t given, uint64_t returned, Run run, int32_t slot) {
  variable_list inputs;
  for (auto at : gradient->tensors)
    if (const at::Tensor *one = tensor(gradient->kinds[at], stack[at])) inputs.push_back(*one);
  const Call call{stack, given, returned, run, slot};
  const auto results = Recorded::apply(at::TensorList(inputs), gradient, &call);
  for (size_t i = 0; i < results.size(); i++) stack[i] = reinterpret_cast<uint64_t>(new at::Tensor(results[i]));
}
}  // namespace jitkern

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("recording", [] { return jitkern::depth > 0; });
  m.def("gradient", [](std::string kinds, std::vector<int64_t> tensors, std::vector<int64_t> saved,
                       std::vector<int64_t> plain, bool fills, pybind11::object backward, pybind11::object check) {
    return reinterpret_cast<uintptr_t>(new jitkern::Gradient{std::move(kinds), std::move(tensors), std::move(saved),
                                                             std::move(plain), fills, backward.release().ptr(),
                                                             check.release().ptr()});
  });
  m.def("functions", [m] {
    return pybind11::make_tuple(reinterpret_cast<uintptr_t>(&jitkern::record), m.attr("recording"), m.attr("gradient"));
  });
}
