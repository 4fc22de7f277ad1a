// Records calls of ops that have a gradient, as `_RecordedPlainly` of autograd.py does, without Python until the backward.
// The launch runtime calls `record` for a call that no mode and no transform sees.
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/stable/c/shim.h>
#include <torch/csrc/utils/object_ptr.h>

namespace {
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Run = void (*)(int32_t slot, uint64_t *stack, uint64_t given, uint64_t returned);

// The gradient of an op; never freed. Places are those of `Order` in gradient.py.
struct Gradient {
  std::string kinds;  // of the arguments, as in runtime.c
  std::vector<int64_t> tensors, saved, plain;
  bool fills;                  // whether a gradient that is not there becomes zeros
  PyObject *backward, *check;  // methods of `Gradient` in gradient.py
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

std::string text(StringHandle string) {
  const char *data = nullptr;
  size_t length = 0;
  TORCH_CHECK(!torch_string_c_str(string, &data) && !torch_string_length(string, &length), "a string without text");
  return {data, length};
}

// The value of an argument that is no tensor.
c10::IValue value(char kind, uint64_t word) {
  if (std::isupper(kind)) {
    if (!word) return {};
    word = *reinterpret_cast<uint64_t *>(word);
  }
  switch (std::tolower(kind)) {
    case 'i': return static_cast<int64_t>(word);
    case 'f': return *reinterpret_cast<double *>(&word);
    case 'b': return (word & 255) != 0;
    default: return text(reinterpret_cast<StringHandle>(word));
  }
}

PyObject *python(const c10::IValue &value) {
  if (value.isInt()) return PyLong_FromLongLong(value.toInt());
  if (value.isDouble()) return PyFloat_FromDouble(value.toDouble());
  if (value.isBool()) return PyBool_FromLong(value.toBool());
  if (value.isString()) return PyUnicode_FromStringAndSize(value.toStringRef().data(), value.toStringRef().size());
  return Py_NewRef(Py_None);
}

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

struct Recorded : torch::autograd::Function<Recorded> {
  static variable_list forward(AutogradContext *ctx, at::TensorList, const Gradient *gradient, const Call *call) {
    variable_list known(call->given + call->returned), results(call->returned), saved;
    std::vector<c10::IValue> kept{reinterpret_cast<int64_t>(gradient), int64_t{0}};
    int64_t present = 0;
    for (size_t i = 0; i < gradient->tensors.size(); i++) {
      const auto at = gradient->tensors[i];
      const at::Tensor *given = tensor(gradient->kinds[at], call->stack[at]);
      if (given) known[at] = *given, present |= int64_t{1} << i;
    }
    kept[1] = present;
    for (auto at : gradient->plain) kept.push_back(value(gradient->kinds[at], call->stack[at]));
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
    ctx->saved_data["call"] = c10::ivalue::Tuple::create(std::move(kept));
    return results;
  }

  static variable_list backward(AutogradContext *ctx, variable_list grads) {
    const auto &kept = ctx->saved_data.at("call").toTupleRef().elements();
    const auto *gradient = reinterpret_cast<const Gradient *>(kept[0].toInt());
    const auto present = kept[1].toInt();
    const auto saved = ctx->get_saved_variables();
    const auto node = torch::autograd::get_current_node();
    pybind11::gil_scoped_acquire gil;
    const auto count = gradient->tensors.size();
    THPObjectPtr needs(whole(PyTuple_New(count))), by_output(whole(PyTuple_New(grads.size())));
    size_t edge = 0;
    for (size_t i = 0; i < count; i++) {
      const bool needed = present >> i & 1 && ctx->needs_input_grad(edge++);
      PyTuple_SET_ITEM(needs.get(), i, PyBool_FromLong(needed));
    }
    for (size_t i = 0; i < grads.size(); i++) PyTuple_SET_ITEM(by_output.get(), i, THPVariable_Wrap(grads[i]));
    THPObjectPtr args(whole(PyTuple_New(2 + saved.size() + gradient->plain.size())));
    PyTuple_SET_ITEM(args.get(), 0, by_output.release());
    PyTuple_SET_ITEM(args.get(), 1, Py_NewRef(needs.get()));
    for (size_t i = 0; i < saved.size(); i++) PyTuple_SET_ITEM(args.get(), 2 + i, THPVariable_Wrap(saved[i]));
    for (size_t i = 2; i < kept.size(); i++) PyTuple_SET_ITEM(args.get(), saved.size() + i, python(kept[i]));
    THPObjectPtr found(whole(PyObject_CallObject(gradient->backward, args)));
    variable_list results;
    bool odd = false;
    edge = 0;
    for (size_t i = 0; i < count; i++) {
      PyObject *one = PyTuple_GET_ITEM(found.get(), i);
      const bool is_tensor = THPVariable_Check(one);
      odd |= !is_tensor && one != Py_None;
      if (!(present >> i & 1)) continue;
      results.push_back(is_tensor ? THPVariable_Unpack(one) : at::Tensor());
      odd |= is_tensor && node && !fits(results.back(), node->next_edge(edge));
      edge++;
    }
    if (odd) {
      THPObjectPtr wanted(whole(PyTuple_New(count)));
      edge = 0;
      for (size_t i = 0; i < count; i++) {
        at::Tensor like;
        if (present >> i & 1 && node)
          if (const auto &to = node->next_edge(edge++); to.is_valid())
            like = to.function->input_metadata(to.input_nr).zeros_like();
        PyTuple_SET_ITEM(wanted.get(), i, THPVariable_Wrap(like));
      }
      THPObjectPtr(whole(PyObject_CallFunctionObjArgs(gradient->check, found.get(), needs.get(), wanted.get(), nullptr)));
    }
    results.resize(results.size() + 2);  // for `gradient` and `call`
    return results;
  }
};

void record(const Gradient *gradient, uint64_t *stack, uint64_t given, uint64_t returned, Run run, int32_t slot) {
  variable_list inputs;
  for (auto at : gradient->tensors)
    if (const at::Tensor *given = tensor(gradient->kinds[at], stack[at])) inputs.push_back(*given);
  const Call call{stack, given, returned, run, slot};
  const auto results = Recorded::apply(at::TensorList(inputs), gradient, &call);
  for (size_t i = 0; i < results.size(); i++) stack[i] = reinterpret_cast<uint64_t>(new at::Tensor(results[i]));
}
}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("recording", [] { return depth > 0; });
  m.def("gradient", [](std::string kinds, std::vector<int64_t> tensors, std::vector<int64_t> saved,
                       std::vector<int64_t> plain, bool fills, pybind11::object backward, pybind11::object check) {
    return reinterpret_cast<uintptr_t>(new Gradient{std::move(kinds), std::move(tensors), std::move(saved), std::move(plain),
                                                    fills, backward.release().ptr(), check.release().ptr()});
  });
  m.def("functions", [m] {
    return pybind11::make_tuple(reinterpret_cast<uintptr_t>(&record), m.attr("recording"), m.attr("gradient"));
  });
}
